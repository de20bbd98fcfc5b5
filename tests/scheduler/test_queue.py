"""The order in which requests wait, and that they leave from anywhere."""

from __future__ import annotations

import random

from deltaserve.core.request import Request
from deltaserve.core.types import RequestOptions, SamplingParams
from deltaserve.scheduler.queue import WaitingQueue, place_of


def request(request_id: int, priority: int = 0, arrival_s: float = 0.0, num_preemptions: int = 0) -> Request:
    options = RequestOptions(priority=priority)
    made = Request(request_id, (1,), SamplingParams(max_tokens=1), arrival_s=arrival_s, options=options)
    made.num_preemptions = num_preemptions
    return made


def ids(requests: list[Request]) -> list[int]:
    return [one.id for one in requests]


def test_priority_then_preempted_then_arrival() -> None:
    queue = WaitingQueue()
    for one in (
        request(1, priority=1, arrival_s=1),
        request(2, priority=0, arrival_s=9),
        request(3, priority=0, arrival_s=4),
        request(4, priority=0, arrival_s=8, num_preemptions=2),
        request(5, priority=-1, arrival_s=10),
        request(6, priority=0, arrival_s=4),
    ):
        queue.push(one, is_long=False)
    assert ids(list(queue)) == ids(queue.head(is_long=False, limit=99)) == [5, 4, 3, 6, 2, 1]
    assert ids(queue.head(is_long=False, limit=2)) == [5, 4]
    assert (len(queue), queue.num_new) == (6, 5)


def test_long_ones_stand_apart_in_the_same_order() -> None:
    queue = WaitingQueue()
    requests = [request(i, arrival_s=i) for i in range(6)]
    for one in requests:
        queue.push(one, is_long=one.id % 2 == 0)
    assert ids(queue.head(is_long=True, limit=9)) == [0, 2, 4]
    queue.move(requests[2], is_long=False)
    queue.move(requests[3], is_long=False)
    assert ids(queue.head(is_long=True, limit=9)) == [0, 4]
    assert ids(queue.head(is_long=False, limit=9)) == [1, 2, 3, 5]
    assert ids(list(queue)) == [0, 1, 2, 3, 4, 5]
    assert queue.pop(4) is requests[4]
    assert queue.pop(4) is None
    assert (4 in queue, queue.get(4), queue.get(0)) == (False, None, requests[0])


def test_any_order_of_joining_and_leaving_keeps_the_order() -> None:
    rng = random.Random(3)
    queue, expected = WaitingQueue(), dict[int, Request]()
    for request_id in range(2_000):
        if expected and rng.random() < 0.48:
            gone = rng.choice(list(expected))
            assert queue.pop(gone) is expected.pop(gone)
        else:
            one = request(request_id, rng.randint(-2, 2), rng.random(), rng.choice((0, 0, 1)))
            queue.push(one, is_long=rng.random() < 0.3)
            expected[request_id] = one
        assert list(queue) == sorted(expected.values(), key=place_of)
        assert queue.num_new == sum(one.num_preemptions == 0 for one in expected.values())
        assert queue.has_long == bool(queue.head(is_long=True, limit=1))
