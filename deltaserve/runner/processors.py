"""Rules that change the logits of one request: what may come, what must not, what is liked less.

A processor belongs to one row and never sees another. It is built from the admission alone, so a request that was
preempted continues as if nothing had happened. The order: allowed tokens, bad words, min_tokens, logit_bias,
repetition, frequency and presence penalty (so far vLLM's), grammar, thinking budget. Cost per step is that of the
tokens a rule names; only the rows with allowed tokens, a grammar or a spent budget pay for the whole vocabulary.

How drafts are verified under rules (`Sampler.sample`): a rule is told the drafts one by one, as though they were
accepted, and then to forget those that were not:

    apply(logits 0), accept(draft 1), apply(logits 1), ... accept(draft d), apply(logits d)
    rollback(drafts that were not accepted), accept(the token that was chosen instead)

So each position is judged in the state that it would have without drafts, and tokens do not depend on drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from deltaserve.core.plan import Admission
from deltaserve.grammar.compiler import Grammars
from deltaserve.runner.answer_rules import BadWords, Grammar, ThinkingBudget, Values


class Processor(Protocol):
    """One rule of one request.

    `apply` is called at most once between two tokens. A token that some rule of the request has just set to -inf is
    never accepted (but in synthetic acceptance, whose text means nothing), so a grammar meets no token outside its
    language. Rolling back reaches at most as far as the latest choice: a grammar undoes that many steps, a thinking
    budget looks for its end marker among the ids, a rule on the last few tokens drops so many from its list.
    """

    def apply(self, logits_V: Values) -> None:
        """Change the logits of the request's next token, in place; float32 [vocabulary]."""

    def accept(self, token_id: int) -> None:
        """The request's next token is this, or is for now taken to be."""

    def rollback(self, token_ids: Sequence[int]) -> None:
        """Forget these, the tokens accepted last, oldest first; at least one."""


def make_processors(admission: Admission, vocab_size: int, grammars: Grammars | None = None) -> tuple[Processor, ...]:
    """The rules that this request uses, in order; empty for most."""
    params, processors = admission.params, list[Processor]()
    if params.allowed_token_ids:
        processors.append(AllowedTokens(params.allowed_token_ids, vocab_size))
    if params.bad_words:
        processors.append(told(BadWords(params.bad_words), admission))
    if len(admission.output_ids) < params.min_tokens:
        stop_ids = [token_id for token_id in admission.stop_ids if token_id < vocab_size]
        processors.append(MinTokens(params.min_tokens - len(admission.output_ids), stop_ids))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0:
        processors.append(Penalties(admission))
    if params.grammar is not None:
        assert grammars is not None, "the engine refuses grammars that it has no tokenizer for"
        rule = Grammar(params.grammar, params.thinking, grammars.matcher(params.grammar.text))
        processors.append(told(rule, admission))
    if params.thinking is not None and params.thinking.budget is not None:
        processors.append(told(ThinkingBudget(params.thinking, params.thinking.budget), admission))
    return tuple(processors)


def told(processor: Processor, admission: Admission) -> Processor:
    """The processor, once it has heard what the request said before it was preempted."""
    for token_id in admission.output_ids:
        processor.accept(token_id)
    return processor


class AllowedTokens:
    """No token but these."""

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._is_forbidden_V = np.ones(vocab_size, np.bool_)
        self._is_forbidden_V[list(token_ids)] = False

    def apply(self, logits_V: Values) -> None:
        np.putmask(logits_V, self._is_forbidden_V, -np.inf)

    def accept(self, token_id: int) -> None:
        pass

    def rollback(self, token_ids: Sequence[int]) -> None:
        pass


class MinTokens:
    """No stop id before `num_missing` tokens are accepted."""

    def __init__(self, num_missing: int, stop_ids: Sequence[int]) -> None:
        self._num_missing = num_missing
        self._stop_ids = np.array(stop_ids, np.int64)

    def apply(self, logits_V: Values) -> None:
        if self._num_missing > 0:
            logits_V[self._stop_ids] = -np.inf

    def accept(self, token_id: int) -> None:
        self._num_missing -= 1

    def rollback(self, token_ids: Sequence[int]) -> None:
        self._num_missing += len(token_ids)


class LogitBias:
    """Adds a number to the logits of some ids."""

    def __init__(self, logit_bias: dict[int, float]) -> None:
        self._ids = np.array(list(logit_bias), np.int64)
        self._values = np.array(list(logit_bias.values()), np.float32)

    def apply(self, logits_V: Values) -> None:
        logits_V[self._ids] += self._values

    def accept(self, token_id: int) -> None:
        pass

    def rollback(self, token_ids: Sequence[int]) -> None:
        pass


class Penalties:
    """What has been said is less likely again.

    Repetition counts prompt and output alike: a positive logit is divided by the penalty, another multiplied. Then the
    output alone: the logit loses `frequency` times the count, and `presence` if the count is not 0. (The rules of
    vLLM's `apply_penalties`; repetition is that of CTRL, Keskar et al. 2019, section 4.1, with the sign repaired.)
    """

    def __init__(self, admission: Admission) -> None:
        params = admission.params
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        counts = Counter(admission.output_ids)
        seen = dict.fromkeys((*admission.prompt_ids, *counts)) if self._repetition != 1 else dict(counts)
        self._place = {token_id: place for place, token_id in enumerate(seen)}
        self._num_given = len(seen)  # places of the admission's own tokens, which stay
        self._ids = np.array(list(seen), np.int64)
        self._counts = np.array([counts[token_id] for token_id in seen], np.float32)

    def apply(self, logits_V: Values) -> None:
        num_seen = len(self._place)
        ids, counts = self._ids[:num_seen], self._counts[:num_seen]
        logits = logits_V[ids]
        logits = np.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits_V[ids] = logits - self._frequency * counts - self._presence * (counts > 0)

    def accept(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._append(token_id)
        self._counts[place] += 1

    def rollback(self, token_ids: Sequence[int]) -> None:
        """A token that was new goes from the table altogether: repetition would hold it against the request."""
        for token_id in reversed(token_ids):
            place = self._place[token_id]
            self._counts[place] -= 1
            if self._counts[place] == 0 and place >= self._num_given:
                assert place == len(self._place) - 1, "the newest place belongs to the newest of the new tokens"
                del self._place[token_id]

    def _append(self, token_id: int) -> int:
        place = self._place[token_id] = len(self._place)
        if place == len(self._ids):
            self._ids = np.resize(self._ids, 2 * place + 16)
            self._counts = np.resize(self._counts, 2 * place + 16)
        self._ids[place], self._counts[place] = token_id, 0
        return place
