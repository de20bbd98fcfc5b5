"""What the cache's books cost per request as they grow: prompts that share nothing, until a number of blocks is known.

The pools hold exactly that many, so that the last requests evict for each block they add. Time is that inside the
books, hashing included; making up the prompts is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltaserve.bench import cache_replay
from deltaserve.bench.conversation import MARKERS, Message, Part, Role, Text, prompt_parts, reply_parts
from deltaserve.bench.make_trace import Turn
from deltaserve.cache.layout import PoolSizes
from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import CacheSpec
from deltaserve.core.types import BLOCK

PROMPT_TOKENS = 8192
_FULL_SHARE = 0.1  # so many requests more, when all is full


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds a request at three fillings of the pools."""

    num_blocks: int
    blocks_per_request: float
    empty_ms: float
    nearly_full_ms: float
    evicting_ms: float


def measure(spec: CacheSpec, num_blocks: int) -> Cost:
    turn_blocks = -(-_turn(0).num_tokens // BLOCK)
    num_fill = max(num_blocks // turn_blocks, 20)
    part = max(int(num_fill * _FULL_SHARE), 1)
    sizes = PoolSizes(
        spec=spec,
        num_pages=1 + num_fill * turn_blocks,
        num_slots=1 + 2 + 4 * num_fill,
        num_rows=1,
        max_model_len=turn_blocks * BLOCK,
        num_snapshots=4 * num_fill,
    )
    manager = CacheManager(sizes, markers=MARKERS)

    def spent_ms(start: int, stop: int) -> float:
        arrivals = cache_replay.from_turns([_turn(number) for number in range(start, stop)])
        return 1e3 * cache_replay.replay(arrivals, manager, num_rows=1).books_s / (stop - start)

    empty_ms = spent_ms(0, part)
    spent_ms(part, num_fill - part)
    return Cost(
        num_blocks=num_fill * turn_blocks,
        blocks_per_request=turn_blocks,
        empty_ms=empty_ms,
        nearly_full_ms=spent_ms(num_fill - part, num_fill),
        evicting_ms=spent_ms(num_fill, num_fill + part),
    )


def _turn(number: int) -> Turn:
    """A system message, a question and an answer that nobody else has; one a second."""
    texts = [Text(4 * number + at, Part.BASE, length) for at, length in enumerate((PROMPT_TOKENS - 200, 186, 40, 80))]
    system, question, thinking, answer = texts
    prompt = prompt_parts((Message(Role.SYSTEM, (system,)), Message(Role.USER, (question,))))
    reply = reply_parts(Message(Role.ASSISTANT, (answer,), thinking))
    return Turn("", float(number), number + 0.5, tuple(prompt), tuple(reply))
