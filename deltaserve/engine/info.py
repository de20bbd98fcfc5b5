"""What an engine tells about itself: once, when it is ready, and whenever it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltaserve.cache.manager import CacheStats
from deltaserve.core.types import CacheRecord
from deltaserve.engine.admission import Limits
from deltaserve.scheduler.speculation import DraftCounts


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What stays as it is from the start on.

    `num_pages` and `num_slots` count what requests and cache can hold, the reserved ones apart; `num_snapshots` of the
    slots are the cache's even when all rows are busy, and the second tier comes on top. `pools` and `notes` (on the
    checkpoint) are sentences for people. `eos_ids` end a request unless it ignores them. `timings_s` says where the
    start went, in order. `synthetic_acceptance` (tokens a step) means that texts are not the model's.
    """

    model_type: str
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    num_pages: int
    num_slots: int
    num_rows: int
    num_ranks: int = 1
    num_threads: int = 1
    pools: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timings_s: dict[str, float] = field(default_factory=dict)
    has_prefix_cache: bool = True
    num_snapshots: int = 0
    num_host_pages: int = 0
    num_host_slots: int = 0
    num_drafts: int = 0
    synthetic_acceptance: float | None = None

    @property
    def limits(self) -> Limits:
        return Limits(self.max_model_len, self.vocab_size)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """How one request met the prefix cache."""

    request_id: int
    cache: CacheRecord


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How things stand between two steps; what follows `num_slots` counts from the start of the engine.

    `num_prompt_tokens` and `num_cached_tokens` count the prompts of requests whose first token is out;
    `num_computed_tokens` counts every token that went through the model, a recomputed one each time. Free pages hold
    nothing; available ones are free, or hold only what the cache may drop. `num_refused` requests met a full queue.
    Long prompts took `long_prefill_s` of the `contended_s` seconds in which others had rows too.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_free_slots: int
    num_slots: int
    num_preemptions: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_steps: int
    steps_s: float
    num_available_pages: int = 0
    num_available_slots: int = 0
    num_snapshots: int = 0
    num_host_pages: int = 0
    num_host_slots: int = 0
    num_refused: int = 0
    long_prefill_s: float = 0.0
    contended_s: float = 0.0
    cache: CacheStats = field(default_factory=CacheStats)
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @classmethod
    def empty(cls) -> EngineStats:
        """Of an engine that has done nothing yet."""
        return cls(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0)
