"""What an engine tells about itself: once, when it is ready, and whenever it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltaserve.engine.admission import Limits


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What stays as it is from the start on.

    `num_pages` and `num_slots` count what requests can hold, the reserved ones apart. `pools` and `notes` (on the
    checkpoint) are sentences for people. `eos_ids` end a request unless it ignores them. `timings_s` says where the
    start went, in order.
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

    @property
    def limits(self) -> Limits:
        return Limits(self.max_model_len, self.vocab_size)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How things stand between two steps; the second half counts from the start of the engine.

    `num_prompt_tokens` and `num_cached_tokens` count the prompts of requests whose first token is out;
    `num_computed_tokens` counts every token that went through the model, a recomputed one each time.
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

    @property
    def mean_step_s(self) -> float:
        return self.steps_s / self.num_steps if self.num_steps else 0.0
