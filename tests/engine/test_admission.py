"""Which requests are refused, by which field, and what open settings become."""

from __future__ import annotations

import math

import pytest

from deltaserve.core.errors import ContextLengthError, RequestError
from deltaserve.core.types import GrammarRule, RequestOptions, SamplingParams, Thinking
from deltaserve.engine.admission import Limits, admit, check_options

LIMITS = Limits(max_model_len=100, vocab_size=50)
PROMPT = (1, 2, 3)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(temperature=1e39), "temperature"),
        (SamplingParams(temperature=10**400), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=1.01), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(min_p=-0.01), "min_p"),
        (SamplingParams(min_p=1.01), "min_p"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=1e-40), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.inf), "repetition_penalty"),
        (SamplingParams(presence_penalty=2.01), "presence_penalty"),
        (SamplingParams(frequency_penalty=-2.01), "frequency_penalty"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(max_tokens=1 << 40), "max_tokens"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(min_tokens=6, max_tokens=5), "min_tokens"),
        (SamplingParams(min_tokens=98), "min_tokens"),
        (SamplingParams(seed=1 << 64), "seed"),
        (SamplingParams(seed=1.5), "seed"),  # type: ignore[arg-type]
        (SamplingParams(top_k=True), "top_k"),
        (SamplingParams(logprobs=-1), "logprobs"),
        (SamplingParams(logprobs=51), "logprobs"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs"),
        (SamplingParams(stop=("a", "")), "stop"),
        (SamplingParams(stop="ab"), "stop"),  # type: ignore[arg-type]
        (SamplingParams(stop_token_ids=(50,)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
        (SamplingParams(logit_bias={50: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={3: math.nan}), "logit_bias"),
        (SamplingParams(allowed_token_ids=(3, 50)), "allowed_token_ids"),
        (SamplingParams(bad_words=((1,), ())), "bad_words"),
        (SamplingParams(bad_words=((1, 50),)), "bad_words"),
        (SamplingParams(bad_words=((1,),) * 3000), "bad_words"),
        (SamplingParams(thinking=Thinking(50)), "thinking"),
        (SamplingParams(thinking=Thinking(3, -1)), "thinking"),
        (SamplingParams(thinking=Thinking(3, budget=-1)), "thinking_token_budget"),
        (SamplingParams(grammar=GrammarRule("", (50,))), "grammar"),
        (SamplingParams(grammar=GrammarRule(""), min_tokens=1), "min_tokens"),
        (SamplingParams(grammar=GrammarRule(""), ignore_eos=True), "ignore_eos"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(params: SamplingParams, field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        admit(PROMPT, params, LIMITS)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, top_k=1 << 30, min_p=1.0, top_p=1.0, repetition_penalty=1e-3),
        SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, seed=-(1 << 63)),
        SamplingParams(min_tokens=97, logprobs=50, prompt_logprobs=0, stop_token_ids=(0, 49), logit_bias={49: -100.0}),
    ],
)
def test_the_ends_of_each_range_are_allowed(params: SamplingParams) -> None:
    admit(PROMPT, params, LIMITS)


def test_a_number_too_long_to_print_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"priority must be .* not a huge number"):
        check_options(RequestOptions(priority=10**5000))
    with pytest.raises(RequestError, match=r"top_k must be .* not a huge number"):
        admit((1,), SamplingParams(top_k=10**5000), Limits(100, 50))


@pytest.mark.parametrize("prompt_ids", [(0, 50), (-1, 4), (1 << 40,)])
def test_prompt_ids_must_be_in_the_vocabulary(prompt_ids: tuple[int, ...]) -> None:
    wrong = next(i for i in prompt_ids if not 0 <= i < 50)
    with pytest.raises(RequestError, match=f"token id {wrong} is outside the vocabulary, 0 to 49") as caught:
        admit(prompt_ids, SamplingParams(), LIMITS)
    assert caught.value.param == "prompt"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        admit((), SamplingParams(), LIMITS)


def test_open_max_tokens_takes_what_is_left() -> None:
    assert admit((0,) * 99, SamplingParams(), LIMITS).max_tokens == 1
    assert admit((0,), SamplingParams(), LIMITS).max_tokens == 99
    assert admit((0,), SamplingParams(max_tokens=7), LIMITS).max_tokens == 7


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "field", "remedy"),
    [(100, None, "prompt", "at most 99"), (500, 1, "prompt", "at most 99"), (60, 41, "max_tokens", "at most 40")],
)
def test_context_overflow_says_what_would_fit(num_prompt: int, max_tokens: int | None, field: str, remedy: str) -> None:
    with pytest.raises(ContextLengthError, match=remedy) as caught:
        admit((0,) * num_prompt, SamplingParams(max_tokens=max_tokens), LIMITS)
    assert caught.value.param == field
    admit((0,) * min(num_prompt, 60), SamplingParams(max_tokens=40), LIMITS)
