"""A request as the scheduler sees it: tokens known, tokens computed, and where it stands.

There is no prefill or decode phase. A request has `num_known` tokens (prompt, then accepted output) and
`num_computed` of them have been through the model; each step closes part of the gap. The last known token is
computed only to get the next one, so a running request always has num_computed < num_known.

    |<------------ known ------------------->|
    |<-- prompt ----------->|<-- output ---->|
    |<-- computed ------------------>|<-gap->|
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from deltaserve.core.types import CacheRecord, RequestOptions, SamplingParams, TokenLogprob


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # owns nothing in the cache: new, or preempted
    RUNNING = "running"  # owns pages, slots and a row
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request. Only the scheduler changes it.

    `block_hashes` is the cache manager's: the chain of hashes of the known full blocks, as far as it has been needed.
    `id` is unique for the engine's lifetime. `params.max_tokens` and `params.seed` are never None here: the engine
    resolves them at admission. `stop_ids` joins the request's stop ids with the checkpoint's end-of-sequence ids.
    """

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    arrival_s: float = 0.0
    options: RequestOptions = RequestOptions()  # noqa: RUF009 frozen
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    row: int | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    cache_record: CacheRecord | None = None

    @property
    def num_known(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def known_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Token ids of absolute positions [start, stop)."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        head = self.prompt_ids[start:num_prompt]
        return head + tuple(self.output_ids[max(start - num_prompt, 0) : stop - num_prompt])
