"""Rules that follow an answer: what they allow at every place, with drafts told and forgotten, and after preemption."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deltaserve.core.plan import Admission
from deltaserve.core.types import GrammarRule, SamplingParams, Thinking
from deltaserve.engine.tokenizer import Tokenizer, grammar_vocabulary
from deltaserve.grammar.compiler import Grammars, choice_text, json_schema_text
from deltaserve.runner.processors import Processor, make_processors

VOCAB = 4096
TINY = Path(__file__).parents[2] / "models" / "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: grammar_vocabulary(tokenizer, VOCAB))


def mark(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    assert found is not None
    return found


def thinking_of(tokenizer: Tokenizer, is_open: bool = True, budget: int | None = None) -> Thinking:
    return Thinking(mark(tokenizer, "</think>"), mark(tokenizer, "<think>"), is_open, budget)


def rules(
    params: SamplingParams, tokenizer: Tokenizer, grammars: Grammars, output_ids: Sequence[int] = ()
) -> tuple[Processor, ...]:
    admission = Admission(1, 0, (5, 6, 7), tuple(output_ids), params, tokenizer.eos_ids)
    return make_processors(admission, VOCAB, grammars)


def allowed(processors: Sequence[Processor]) -> list[int]:
    """Ids that are not forbidden, of equally likely ones."""
    logits_V = np.zeros(VOCAB, np.float32)
    for processor in processors:
        processor.apply(logits_V)
    return [int(token_id) for token_id in np.flatnonzero(np.isfinite(logits_V))]


def accept(processors: Sequence[Processor], token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        for processor in processors:
            processor.accept(token_id)


def every_rule(tokenizer: Tokenizer, is_open: bool) -> SamplingParams:
    bad_words = tuple(tuple(tokenizer.encode(word)) for word in ("1", "ab", " the", "xyz"))
    rule = GrammarRule(json_schema_text(SCHEMA), (mark(tokenizer, "<tool_call>"),))
    return SamplingParams(bad_words=bad_words, thinking=thinking_of(tokenizer, is_open, 5), grammar=rule)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_rolling_back_leaves_no_trace(tokenizer: Tokenizer, grammars: Grammars, seed: int, is_open: bool) -> None:
    """At random, along what the rules allow, marks often; against rules of a request preempted just there."""
    rng, params = random.Random(seed), every_rule(tokenizer, is_open)
    marks = [mark(tokenizer, text) for text in ("</think>", "<think>", "<tool_call>", "}", '"', "]")]
    processors, output = rules(params, tokenizer, grammars), list[int]()
    for _ in range(25):
        drafts: list[int] = []
        for _ in range(rng.randrange(5)):
            open_ids = allowed(processors)
            assert open_ids == allowed(rules(params, tokenizer, grammars, output + drafts))
            liked = [token_id for token_id in marks if token_id in open_ids]
            drafts.append(rng.choice(liked) if liked and rng.random() < 0.5 else rng.choice(open_ids))
            accept(processors, drafts[-1:])
        num_kept = rng.randrange(len(drafts) + 1)
        for processor in processors:
            if drafts[num_kept:]:
                processor.rollback(drafts[num_kept:])
        output += drafts[:num_kept]
        assert allowed(processors) == allowed(rules(params, tokenizer, grammars, output))


def test_a_grammar_from_the_first_token_on(tokenizer: Tokenizer, grammars: Grammars) -> None:
    params = SamplingParams(grammar=GrammarRule(choice_text(["yes", "no"])))
    processors = rules(params, tokenizer, grammars)
    first = {tokenizer.token_bytes(token_id)[:1] for token_id in allowed(processors)}
    assert first == {b"y", b"n"}
    accept(processors, tokenizer.encode("no"))
    assert allowed(processors) == sorted(tokenizer.eos_ids)
    accept(processors, tokenizer.eos_ids[:1])
    assert len(allowed(processors)) == VOCAB  # nobody reads on
    for processor in processors:
        processor.rollback(tokenizer.eos_ids[:1])
    assert allowed(processors) == sorted(tokenizer.eos_ids)


def test_a_grammar_after_open_thinking(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Thinking is free but for its end by an end of sequence; after its mark come one gap and the answer."""
    params = SamplingParams(grammar=GrammarRule(choice_text(["yes"])), thinking=thinking_of(tokenizer))
    processors = rules(params, tokenizer, grammars)
    accept(processors, tokenizer.encode("Well, yes or no"))
    assert set(range(VOCAB)) - set(allowed(processors)) == set(tokenizer.eos_ids)
    accept(processors, [mark(tokenizer, "</think>")])
    gaps = {tokenizer.encode("\n")[0], tokenizer.encode("\n\n")[0]}
    answers = set(allowed(processors)) - gaps
    assert gaps < set(allowed(processors)) and {tokenizer.token_bytes(i)[:1] for i in answers} == {b"y"}
    accept(processors, tokenizer.encode("\n\n"))
    assert set(allowed(processors)) == answers
    accept(processors, tokenizer.encode("yes"))
    assert allowed(processors) == sorted(tokenizer.eos_ids)


@pytest.mark.parametrize("thinks", [True, False])
def test_a_grammar_where_the_model_may_think_first(tokenizer: Tokenizer, grammars: Grammars, thinks: bool) -> None:
    params = SamplingParams(grammar=GrammarRule(choice_text(["yes"])), thinking=thinking_of(tokenizer, is_open=False))
    processors = rules(params, tokenizer, grammars)
    start = mark(tokenizer, "<think>")
    assert {tokenizer.token_bytes(i)[:1] for i in allowed(processors) if i != start} == {b"y"}
    assert start in allowed(processors)
    if thinks:
        accept(processors, [start, *tokenizer.encode("hm"), mark(tokenizer, "</think>")])
    accept(processors, tokenizer.encode("yes"))
    assert allowed(processors) == sorted(tokenizer.eos_ids)


def test_a_tool_call_leaves_the_grammar_at_its_start_only(tokenizer: Tokenizer, grammars: Grammars) -> None:
    call = mark(tokenizer, "<tool_call>")
    params = SamplingParams(grammar=GrammarRule(choice_text(["yes"]), (call,)), thinking=thinking_of(tokenizer))
    processors = rules(params, tokenizer, grammars)
    accept(processors, [mark(tokenizer, "</think>")])
    assert call in allowed(processors)
    accept(processors, [call])
    assert len(allowed(processors)) == VOCAB
    processors = rules(params, tokenizer, grammars)
    accept(processors, [mark(tokenizer, "</think>"), *tokenizer.encode("yes")])
    assert allowed(processors) == sorted(tokenizer.eos_ids)


def test_a_tool_call_inside_thinking_may_end_the_answer(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """It was the answer; or, where thinking goes on and ends, the grammar holds after all."""
    call = mark(tokenizer, "<tool_call>")
    params = SamplingParams(grammar=GrammarRule(choice_text(["yes"]), (call,)), thinking=thinking_of(tokenizer))
    processors = rules(params, tokenizer, grammars)
    accept(processors, [*tokenizer.encode("so"), call])
    assert set(tokenizer.eos_ids) < set(allowed(processors))
    accept(processors, [*tokenizer.encode("no"), mark(tokenizer, "</think>"), *tokenizer.encode("yes")])
    assert allowed(processors) == sorted(tokenizer.eos_ids)


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_thinking_budget(tokenizer: Tokenizer, grammars: Grammars, budget: int) -> None:
    params = SamplingParams(thinking=thinking_of(tokenizer, budget=budget))
    processors, end = rules(params, tokenizer, grammars), mark(tokenizer, "</think>")
    for _ in range(budget):
        assert len(allowed(processors)) == VOCAB
        accept(processors, [7])
    assert allowed(processors) == [end]
    accept(processors, [end])
    assert len(allowed(processors)) == VOCAB
    accept(processors, [mark(tokenizer, "<think>"), 7, 7, 7, 7, 7])
    assert len(allowed(processors)) == VOCAB


@pytest.mark.parametrize(("first", "is_bound"), [("<think>", True), ("Hello", False)])
def test_a_thinking_budget_counts_once_thinking_begins(
    tokenizer: Tokenizer, grammars: Grammars, first: str, is_bound: bool
) -> None:
    params = SamplingParams(thinking=thinking_of(tokenizer, is_open=False, budget=2))
    processors = rules(params, tokenizer, grammars)
    accept(processors, [tokenizer.encode(first)[0], 7, 7])
    assert (allowed(processors) == [mark(tokenizer, "</think>")]) == is_bound


def test_the_forced_end_beats_every_other_rule(tokenizer: Tokenizer, grammars: Grammars) -> None:
    end = mark(tokenizer, "</think>")
    params = SamplingParams(thinking=thinking_of(tokenizer, budget=0), bad_words=((end,),), allowed_token_ids=(4, 5))
    assert allowed(rules(params, tokenizer, grammars)) == [end]


def test_bad_words(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """The last token of a sequence goes where the others stand before it, and only there."""
    processors = rules(SamplingParams(bad_words=((3,), (4, 5), (4, 4, 6))), tokenizer, grammars)
    everything = set(range(VOCAB))
    for said, forbidden in (((), {3}), ((4,), {3, 5}), ((4,), {3, 5, 6}), ((7,), {3}), ((4,), {3, 5})):
        accept(processors, said)
        assert everything - set(allowed(processors)) == forbidden


def test_allowed_tokens(tokenizer: Tokenizer, grammars: Grammars) -> None:
    processors = rules(SamplingParams(allowed_token_ids=(9, 4)), tokenizer, grammars)
    assert allowed(processors) == [4, 9]
    accept(processors, [4])
    assert allowed(processors) == [4, 9]


def test_a_token_that_no_rule_allowed_ends_the_grammar_without_an_error(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """Synthetic acceptance keeps drafts whatever they are."""
    params = SamplingParams(grammar=GrammarRule(choice_text(["yes"])))
    processors = rules(params, tokenizer, grammars)
    accept(processors, tokenizer.encode("zebra"))
    assert len(allowed(processors)) == VOCAB
    assert allowed(rules(replace(params, bad_words=()), tokenizer, grammars))
