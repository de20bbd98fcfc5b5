"""The scheduler's decisions as pure functions: what a chunk may be, who goes first, who gives way, when to stop.

The rules:

1. A prefill chunk ends on an absolute multiple of 64 or at the end of the known tokens, never elsewhere, so that a
   prefill row always starts on a boundary. A chunk that can reach neither within its budget waits.
2. Decode rows go first, one token each, the least recently served ahead if the budget does not hold all of them. Of
   what is left, prefill gets 64 tokens if anybody can take them, then drafts get theirs, then prefill the rest, first
   come first served: the first that must wait ends the step's prefills. Long prompts come last (`scheduler.share`).
3. Where decode rows leave too little for the first prefill, it waits PREFILL_PATIENCE steps; then comes a prefill
   turn: prefill goes first with at least 64 tokens, and decode rows get what is left. So the oldest prefill advances
   by 64 tokens or to its end in every PREFILL_PATIENCE + 1 steps, whatever the decode rows do, and the token budget
   is never exceeded.
4. A new request is admitted only if its known tokens fit into free pages and one page for each running row stays
   free; otherwise rows about to grow would push the newcomer out again. With nothing running, all pages count. What
   only the cache holds counts as free. Without eviction (`no_eviction`) everything that the running ones and the
   newcomer may ever come to need must be free, and so no row is ever pushed out.
5. Who needs a page and finds none takes those of the request with the highest priority number that arrived last,
   which may be itself. So the oldest request of the lowest number always advances.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol, TypeVar

from deltaserve.cache.layout import num_pages_for
from deltaserve.core.errors import ContextLengthError, OverloadedError, RequestError
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK, FinishReason

PREFILL_PATIENCE = 3


class Served(Protocol):
    """Anything that drew a number when it was last served; numbers grow."""

    ticket: int


S = TypeVar("S", bound=Served)


def refuse_impossible(request: Request, max_model_len: int, num_page_tokens: int) -> None:
    """Raise RequestError or ContextLengthError, naming the field, for a request that could never run to its end.

    `num_page_tokens` is what all pages hold together. The last output token is never computed and needs no page.
    """
    num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
    assert max_tokens is not None, "the engine resolves max_tokens"
    if num_prompt == 0:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    if max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {max_tokens}", "max_tokens")
    limit, what = max_model_len, "the context length"
    if num_page_tokens + 1 < limit:
        limit, what = num_page_tokens + 1, "what the KV pages hold"
    if num_prompt >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but {what} is {limit} tokens for prompt and output together; "
            f"shorten the prompt to at most {limit - 1}",
            "prompt",
        )
    if num_prompt + max_tokens > limit:
        raise ContextLengthError(
            f"max_tokens is {max_tokens} and the prompt has {num_prompt} tokens, but {what} is {limit} tokens for "
            f"prompt and output together; lower max_tokens to at most {limit - num_prompt}",
            "max_tokens",
        )


def chunk_end(start: int, known: int, budget: int) -> int | None:
    """Where a prefill chunk from boundary `start` ends: `known`, or the last boundary within `budget`; None: wait."""
    if known - start <= budget:
        return known
    end = start + budget // BLOCK * BLOCK
    return end if end > start else None


def prefill_turn_budget(budget: int, num_decodes: int, num_passed_over: int) -> int:
    """Tokens that prefill may take ahead of `num_decodes` decode rows: 0 unless this is a prefill turn."""
    if num_passed_over < PREFILL_PATIENCE:
        return 0
    return max(BLOCK, budget - num_decodes)


def choose_decodes(candidates: Sequence[S], budget: int) -> Sequence[S]:
    """All candidates, or the `budget` served longest ago, which then queue up again in that order."""
    if len(candidates) <= budget:
        return candidates
    return sorted(candidates, key=attrgetter("ticket"))[: max(budget, 0)]


def choose_victim(running: Sequence[Request]) -> Request:
    """Who gives up its pages: of the least urgent ones the latest arrival."""
    return max(running, key=lambda request: (request.options.priority, request.arrival_s, request.id))


def num_tokens_at_most(request: Request) -> int:
    """Known tokens at the request's end, if it says all it may. `refuse_impossible` keeps it within the context."""
    assert request.params.max_tokens is not None, "the engine resolves max_tokens"
    return len(request.prompt_ids) + request.params.max_tokens


def num_pages_at_most(request: Request) -> int:
    """The last output token is never computed and needs no page."""
    return num_pages_for(num_tokens_at_most(request) - 1)


def refuse_overload(num_queued: int, num_free_rows: int, max_queued: int | None) -> None:
    """Raise OverloadedError if one more would have to wait where `max_queued` do.

    Those for which a row is free only wait for the next step and do not count.
    """
    num_waiting = max(num_queued - num_free_rows, 0)
    if max_queued is not None and num_queued >= num_free_rows + max_queued:
        raise OverloadedError(
            f"{num_waiting} requests wait for a place already, and at most {max_queued} may (--max-queued-requests); "
            "try again later"
        )


def finish_reason(request: Request, max_model_len: int) -> FinishReason | None:
    """Whether the request ends with its newest output token.

    A stop id counts only after `min_tokens` other tokens; the sampler does not choose one earlier.
    """
    num_output = len(request.output_ids)
    max_tokens = request.params.max_tokens
    assert num_output > 0 and max_tokens is not None
    if request.output_ids[-1] in request.stop_ids and num_output > request.params.min_tokens:
        return FinishReason.STOP
    if num_output >= max_tokens or request.num_known >= max_model_len:
        return FinishReason.LENGTH
    return None


def take_output(
    request: Request, token_ids: Sequence[int], max_model_len: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append a row's new tokens to the request up to the one that ends it; those taken, and why it ends if it does."""
    reason = None
    for num_taken, token_id in enumerate(token_ids, 1):
        request.output_ids.append(token_id)
        reason = finish_reason(request, max_model_len)
        if reason is not None:
            return tuple(token_ids[:num_taken]), reason
    return tuple(token_ids), reason
