"""Who waits for a row, in which order: lower priority numbers first, then those that were preempted, then by arrival.

Short prompts and long ones (`scheduler.share` says what long is) stand in two lists of one common order, so that the
first of either is found at once: short ones may overtake long ones that their share holds back. A request's place is a
function of the request, so one that comes back after a preemption stands at the head of its priority again.

Finding the head is O(1), joining and leaving O(log n) and a move of memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from deltaserve.core.request import Request

Place = tuple[int, bool, float, int]


def place_of(request: Request) -> Place:
    """Sorts requests into the order of service. It does not change while the request waits."""
    return (request.options.priority, request.num_preemptions == 0, request.arrival_s, request.id)


class WaitingQueue:
    """Each request is in it at most once. `num_new` counts those that never ran, which alone can be too many."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._long_ids: set[int] = set()
        self._short: list[Place] = []
        self._long: list[Place] = []
        self.num_new = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[place[-1]] for place in sorted(self._short + self._long))

    @property
    def has_long(self) -> bool:
        return bool(self._long)

    def push(self, request: Request, is_long: bool) -> None:
        assert request.id not in self._requests, request
        self._requests[request.id] = request
        self.num_new += request.num_preemptions == 0
        self._join(request, is_long)

    def pop(self, request_id: int) -> Request | None:
        """Take a request out, wherever it stands; None if it does not wait."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.num_new -= request.num_preemptions == 0
            self._leave(request)
        return request

    def get(self, request_id: int) -> Request | None:
        return self._requests.get(request_id)

    def head(self, is_long: bool, limit: int) -> list[Request]:
        """The first `limit` short or long ones, in order. The list is the caller's."""
        places = self._long if is_long else self._short
        return [self._requests[place[-1]] for place in places[:limit]]

    def move(self, request: Request, is_long: bool) -> None:
        """What is left of the prompt to compute changed from short to long or back."""
        if is_long != (request.id in self._long_ids):
            self._leave(request)
            self._join(request, is_long)

    def _join(self, request: Request, is_long: bool) -> None:
        insort(self._long if is_long else self._short, place_of(request))
        if is_long:
            self._long_ids.add(request.id)

    def _leave(self, request: Request) -> None:
        places = self._long if request.id in self._long_ids else self._short
        index = bisect_left(places, place_of(request))
        assert places[index][-1] == request.id, request
        del places[index]
        self._long_ids.discard(request.id)
