"""Answers of the shipped model under grammars, budgets and bad words: they obey, and nothing else decides on them.

Drafts, neighbours and a preemption in the middle change no token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deltaserve.core.errors import RequestError
from deltaserve.core.types import FinishReason, GrammarRule, SamplingParams, Thinking
from deltaserve.engine.llm import LLM, Completion
from deltaserve.grammar.compiler import choice_text, json_schema_text, regex_text

TINY = Path(__file__).parents[2] / "models" / "tiny"
SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "num_pages": 64, "num_threads": 1}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FITTING = GrammarRule(json_schema_text(SCHEMA))
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
THINKING = TURN + "<think>\n"
SAMPLED = SamplingParams(temperature=1.0, max_tokens=160)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(TINY, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with LLM(TINY, num_drafts=3, **SETTINGS) as llm:
        yield llm


def mark(llm: LLM, text: str) -> int:
    found = llm.tokenizer.token_to_id(text)
    assert found is not None
    return found


def mixed(llm: LLM) -> tuple[list[str], list[SamplingParams]]:
    """Prompts and params that use every rule, beside some that use none."""
    thinking = Thinking(mark(llm, "</think>"), mark(llm, "<think>"), is_open=True, budget=6)
    bad_words = tuple(tuple(llm.tokenizer.encode(word)) for word in ("the", " the", " is"))
    changes: list[tuple[str, dict[str, Any]]] = [
        (TURN, {"grammar": FITTING}),
        (THINKING, {"grammar": FITTING, "thinking": thinking}),
        (TURN, {}),
        (THINKING, {"thinking": thinking, "bad_words": bad_words}),
        (TURN, {"grammar": GrammarRule(regex_text("[a-z ]{5,30}[.]")), "temperature": 0.0}),
        (TURN, {"bad_words": bad_words, "repetition_penalty": 1.2}),
        (TURN, {"grammar": replace(FITTING, exit_ids=(mark(llm, "<tool_call>"),))}),
    ]
    prompts = [prompt.format(f"Who is number {place}?") for place, (prompt, _) in enumerate(changes)]
    return prompts, [replace(SAMPLED, seed=place, max_tokens=90, **fields) for place, (_, fields) in enumerate(changes)]


def values(completions: Sequence[Completion]) -> list[Any]:
    """Of the answers that were not cut off, which must be most."""
    whole = [each for each in completions if each.finish_reason is FinishReason.STOP]
    assert len(whole) >= 0.9 * len(completions)
    return [json.loads(each.text) for each in whole]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_twenty_answers_fit_their_schema(plain: LLM, temperature: float) -> None:
    prompts = [TURN.format(f"Tell me of person {n}.") for n in range(20)]
    params = [replace(SAMPLED, temperature=temperature, seed=n, grammar=FITTING) for n in range(20)]
    for value in values(plain.generate(prompts, params)):
        jsonschema.validate(value, SCHEMA)


def test_answers_after_thinking_fit_too(plain: LLM) -> None:
    """The budget ends the thinking; what stands behind its mark is the value, and the thinking was free."""
    thinking = Thinking(mark(plain, "</think>"), mark(plain, "<think>"), budget=8)
    params = [replace(SAMPLED, seed=n, grammar=FITTING, thinking=thinking) for n in range(8)]
    completions = plain.generate([THINKING.format("Who is Ann?")] * 8, params)
    for completion in completions:
        assert completion.token_ids.index(thinking.end_id) <= 8
        thought, _, completion.text = completion.text.partition("</think>")
        assert not thought.lstrip().startswith("{")
    for value in values(completions):
        jsonschema.validate(value, SCHEMA)


def test_a_choice_ends_as_soon_as_it_is_made(plain: LLM) -> None:
    params = [replace(SAMPLED, seed=n, grammar=GrammarRule(choice_text(["yes", "no"]))) for n in range(6)]
    for completion in plain.generate([TURN.format("Is it?")] * 6, params):
        assert completion.text in ("yes", "no") and completion.finish_reason is FinishReason.STOP
        assert completion.token_ids[-1] in plain.tokenizer.eos_ids


def test_bad_words_do_not_come(plain: LLM) -> None:
    prompts, params = [TURN.format("What is the sun?")] * 6, [replace(SAMPLED, seed=n, max_tokens=40) for n in range(6)]
    words = sorted({word for each in plain.generate(prompts, params) for word in each.text.split() if word.isalpha()})
    assert len(words) > 5
    bad_words = tuple(tuple(plain.tokenizer.encode(text)) for word in words for text in (word, f" {word}"))
    for completion in plain.generate(prompts, [replace(each, bad_words=bad_words) for each in params]):
        said = completion.token_ids
        assert not any(tuple(said[n : n + len(bad)]) == bad for bad in bad_words for n in range(len(said)))


def test_only_allowed_tokens_come(plain: LLM) -> None:
    ids = (*plain.tokenizer.encode("one two three"), plain.tokenizer.eos_ids[0])
    (completion,) = plain.generate(TURN.format("Count."), replace(SAMPLED, seed=1, allowed_token_ids=ids))
    assert set(completion.token_ids) <= set(ids)


def test_drafts_change_no_token(plain: LLM, drafting: LLM) -> None:
    prompts, params = mixed(plain)
    assert drafting.generate(prompts, params) == plain.generate(prompts, params)


@pytest.mark.parametrize("name", ["plain", "drafting"])
def test_neighbours_change_no_token(name: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(name)
    prompts, params = mixed(llm)
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert llm.generate(prompts, params) == alone


@pytest.mark.parametrize(("name", "num_steps"), [("plain", 3), ("plain", 9), ("drafting", 1), ("drafting", 4)])
def test_a_preemption_changes_no_token(name: str, num_steps: int, request: pytest.FixtureRequest) -> None:
    """All requests give up what they hold after so many steps, and come again."""
    llm: LLM = request.getfixturevalue(name)
    prompts, params = mixed(llm)
    right = [tuple(each.token_ids) for each in llm.generate(prompts, params)]
    ids = [llm.engine.submit(llm.tokenizer.encode(prompt), own) for prompt, own in zip(prompts, params, strict=True)]
    tokens: dict[int, tuple[int, ...]] = dict.fromkeys(ids, ())
    num_preempted, step = 0, 0
    while llm.engine.has_work:
        if step == num_steps:
            num_preempted = sum(llm.engine.preempt(request_id) for request_id in ids)
        for chunk in llm.engine.step():
            tokens[chunk.request_id] += chunk.token_ids
        step += 1
    assert num_preempted >= 4
    assert list(tokens.values()) == right


def test_a_grammar_that_cannot_be_used_is_refused_at_submit(plain: LLM) -> None:
    with pytest.raises(RequestError, match="unclosed group") as caught:
        plain.engine.submit([1, 2], SamplingParams(grammar=GrammarRule(regex_text("(a"))))
    assert caught.value.param == "grammar"
    assert not plain.engine.has_work


def test_rules_that_leave_nothing_end_their_request_alone(plain: LLM) -> None:
    yes = GrammarRule(choice_text(["yes"]))
    first_ids = tuple((plain.tokenizer.encode(text)[0],) for text in ("y", "ye", "yes"))
    params = [replace(SAMPLED, seed=1, grammar=yes), replace(SAMPLED, seed=1, grammar=yes, bad_words=first_ids)]
    fine, broken = plain.generate([TURN.format("Is it?")] * 2, params)
    assert (fine.text, fine.finish_reason) == ("yes", FinishReason.STOP)
    assert broken.finish_reason is FinishReason.ERROR and "forbid the whole vocabulary" in (broken.error or "")
