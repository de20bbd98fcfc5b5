"""A trace replayed over the books of the prefix cache: which tokens would have been hits. No model, no scheduler.

Each request does what the engine would make it do: match, take its hit and pages for all it will come to need, cut its
prompt where the books want snapshots, commit boundary after boundary, and give everything back when its answer is
complete. Requests overlap as their times say; where rows or pages are short, the answer that would be complete first is
completed at once, and the newcomer tries again. A prompt is computed the moment it arrives.

The same trace gives the same events under every policy; only hits and evictions differ. Hashes do not depend on the
policy, so a second replay of a trace takes them from the first.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deltaserve.bench.conversation import Ids, Words
from deltaserve.bench.make_trace import FIRST_TOKEN_S, TOKEN_S, Turn
from deltaserve.bench.traces import RowTexts, TraceRow
from deltaserve.cache.manager import CacheManager
from deltaserve.core.errors import ConfigError
from deltaserve.core.request import Request, RequestStatus
from deltaserve.core.types import BLOCK, RequestOptions, SamplingParams

CHUNK_TOKENS = 8192
_WORDS = (1000, 100_000)  # ids for texts of a trace file: none is markup
_PARAMS = SamplingParams(max_tokens=1)


@dataclass(slots=True, eq=False)
class Arrival:
    """One request of any kind of trace. `ids` gives prompt and answer.

    The first replay fills in `hashes`, of all its blocks, and how many of them a hit can cover.
    """

    arrival_s: float
    finish_s: float
    session_id: str | None
    ids: Callable[[], tuple[Ids, Ids]]
    hashes: list[bytes] = field(default_factory=list)
    num_resumable_blocks: int = 0


def from_turns(turns: Sequence[Turn]) -> list[Arrival]:
    """`turns` in order of arrival. Sessions are left for the cache to find out, as most clients do not name them."""
    words = Words()

    def arrival(turn: Turn) -> Arrival:
        return Arrival(turn.arrival_s, turn.finish_s, None, lambda: (words.ids(turn.prompt), words.ids(turn.reply)))

    return [arrival(turn) for turn in turns]


def from_rows(rows: Sequence[TraceRow]) -> list[Arrival]:
    """Rows of a file, at their timestamps where all have one, else one a second."""
    texts = RowTexts(*_WORDS)
    is_timed = all(row.timestamp_ms is not None for row in rows)

    def arrival(number: int, row: TraceRow) -> Arrival:
        start_s = (row.timestamp_ms or 0.0) / 1000 if is_timed else float(number)
        finish_s = start_s + FIRST_TOKEN_S + TOKEN_S * row.output_length
        return Arrival(
            start_s, finish_s, row.session_id, lambda: (texts.token_ids(row, number), texts.answer_ids(row, number))
        )

    return sorted((arrival(number, row) for number, row in enumerate(rows)), key=lambda item: item.arrival_s)


@dataclass(slots=True)
class Outcome:
    """What a replay gave. `hits` has (prompt tokens, tokens of them not computed) for each request, in order."""

    hits: list[tuple[int, int]] = field(default_factory=list)
    num_hurried: int = 0  # answers completed early because the next request found no room
    books_s: float = 0.0  # time inside the cache's books, hashing included where it was new

    @property
    def num_tokens(self) -> int:
        return sum(num_prompt for num_prompt, _ in self.hits)

    @property
    def num_hit(self) -> int:
        return sum(num_cached for _, num_cached in self.hits)

    @property
    def hit_share(self) -> float:
        return self.num_hit / self.num_tokens


def replay(
    arrivals: Sequence[Arrival], manager: CacheManager, num_rows: int, on_start: Callable[[int], None] | None = None
) -> Outcome:
    """Run all of the trace through `manager`. `on_start` hears the number of each request before it is matched.

    Raises ConfigError if a request does not fit the pools even alone.
    """
    outcome = Outcome()
    running: list[tuple[float, int, Request, Ids, Arrival]] = []
    for number, arrival in enumerate(arrivals):
        while running and running[0][0] <= arrival.arrival_s:
            _complete(running, manager, outcome)
        if on_start is not None:
            on_start(number)
        if len(running) >= num_rows:
            _hurry(running, manager, outcome)
        prompt, answer = arrival.ids()
        options = RequestOptions(session_id=arrival.session_id)
        request = Request(number, prompt, _PARAMS, options=options, block_hashes=arrival.hashes[: len(prompt) // BLOCK])
        while not _start(request, len(answer), manager, outcome):
            if not running:
                raise ConfigError(
                    f"request {number} of {len(prompt)} + {len(answer)} tokens does not fit {manager.num_usable_pages} "
                    f"pages of {BLOCK} tokens even alone; give more memory"
                )
            _hurry(running, manager, outcome)
        heapq.heappush(running, (arrival.finish_s, number, request, answer, arrival))
    while running:
        _complete(running, manager, outcome)
    return outcome


def _start(request: Request, num_output: int, manager: CacheManager, outcome: Outcome) -> bool:
    """Match, take pages for prompt and answer, and compute the prompt; False if there was no room."""
    start_s = time.perf_counter()
    hit = manager.match(request)
    holding = manager.open(request, hit, request.num_known + num_output)
    if holding is not None:
        request.status = RequestStatus.RUNNING
        for start, end in _chunks(hit.num_tokens, request.num_known):
            cuts = manager.cuts(request, start, end)
            request.num_computed = end
            if cuts:
                manager.commit(request, cuts[-1].position)
                assert manager.reserve(request, request.num_known + num_output) is not None
        manager.take_block_ops()
        manager.take_events()
        outcome.hits.append((request.num_known, hit.num_tokens))
    outcome.books_s += time.perf_counter() - start_s
    return holding is not None


def _chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Prefill chunks: each ends on a multiple of CHUNK_TOKENS, but for the last."""
    while start < end:
        stop = min(end, (start // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        yield start, stop
        start = stop


def _hurry(running: list[tuple[float, int, Request, Ids, Arrival]], manager: CacheManager, outcome: Outcome) -> None:
    _complete(running, manager, outcome)
    outcome.num_hurried += 1


def _complete(running: list[tuple[float, int, Request, Ids, Arrival]], manager: CacheManager, outcome: Outcome) -> None:
    """The answer of the request that ends first: its tokens are accepted block by block, the last is never computed."""
    _, _, request, answer, arrival = heapq.heappop(running)
    start_s = time.perf_counter()
    num_prompt, end = request.num_known, request.num_known + len(answer) - 1
    request.output_ids.extend(answer)
    request.block_hashes += arrival.hashes[len(request.block_hashes) :]
    for boundary in range((num_prompt // BLOCK + 1) * BLOCK, end, BLOCK):  # a row that ends does not fold
        request.num_computed = boundary
        manager.commit(request, boundary)
        assert manager.reserve(request, end + 1) is not None
    request.num_computed = end
    request.status = RequestStatus.FINISHED
    manager.release(request)
    manager.take_block_ops()
    manager.take_events()
    outcome.books_s += time.perf_counter() - start_s
    arrival.hashes, arrival.num_resumable_blocks = request.block_hashes, (num_prompt - 1) // BLOCK
