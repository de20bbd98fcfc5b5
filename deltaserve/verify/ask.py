"""What a gate asks of a target, and what comes back: the same for an engine in this process and for a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from deltaserve.core.types import SamplingParams

NUM_TOP = 2  # alternatives that come with every token: the gap between them says how near a tie was
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Asks with different `salt` share nothing; `use_drafts` False: without speculation."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    use_drafts: bool = True

    def salted(self, salt: str) -> Ask:
        return replace(self, salt=salt)

    def with_params(self, **changes: Any) -> Ask:
        return replace(self, params=replace(self.params, **changes))

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for asks that must get one answer."""
        return self.prompt_ids, repr(self.params)


@dataclass(frozen=True, slots=True)
class Answer:
    """`tops` is parallel to `token_ids`: the likeliest tokens with their logprobs, likeliest first.

    `num_cached` prompt tokens were not computed. `error` is a sentence where the request failed; the rest is then what
    came before.
    """

    token_ids: tuple[int, ...] = ()
    tops: tuple[Top, ...] = ()
    text: str = ""
    finish_reason: str = ""
    num_cached: int = 0
    num_prompt_logprobs: int = 0
    error: str | None = None


def greedy(prompt_ids: tuple[int, ...], num_tokens: int, **changes: Any) -> Ask:
    """The likeliest tokens, exactly so many."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=NUM_TOP)
    return Ask(prompt_ids, params).with_params(**changes)


def sampled(prompt_ids: tuple[int, ...], num_tokens: int, seed: int) -> Ask:
    """With every rule that draws on history or on chance."""
    rules = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": seed, "repetition_penalty": 1.1}
    return greedy(prompt_ids, num_tokens, **rules)
