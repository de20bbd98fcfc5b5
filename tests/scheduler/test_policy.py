"""The scheduler's pure decisions, by table."""

from __future__ import annotations

import pytest

from deltaserve.core.errors import ContextLengthError, RequestError
from deltaserve.core.request import Request
from deltaserve.core.types import FinishReason, SamplingParams
from deltaserve.scheduler.policy import (
    PREFILL_PATIENCE,
    choose_decodes,
    choose_victim,
    chunk_end,
    finish_reason,
    prefill_turn_budget,
    refuse_impossible,
)


class Row:
    def __init__(self, ticket: int) -> None:
        self.ticket = ticket


def request(num_prompt: int, max_tokens: int, output: tuple[int, ...] = (), min_tokens: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    made = Request(1, (1,) * num_prompt, params, stop_ids=frozenset({9, 8}))
    made.output_ids.extend(output)
    return made


@pytest.mark.parametrize(
    ("start", "known", "budget", "end"),
    [
        (0, 1, 1, 1),
        (0, 64, 63, None),
        (0, 63, 63, 63),
        (0, 65, 64, 64),
        (0, 65, 65, 65),
        (0, 130, 127, 64),
        (0, 130, 129, 128),
        (0, 130, 130, 130),
        (64, 130, 65, 128),
        (64, 130, 66, 130),
        (128, 130, 1, None),
        (128, 130, 2, 130),
        (0, 10, 0, None),
        (0, 10, -5, None),
        (64, 1000, 200, 256),
    ],
)
def test_chunk_end(start: int, known: int, budget: int, end: int | None) -> None:
    assert chunk_end(start, known, budget) == end


def test_chunks_end_on_the_grid_or_at_the_end() -> None:
    for start in (0, 64, 128):
        for known in range(start + 1, start + 200):
            for budget in range(64, 200):
                end = chunk_end(start, known, budget)
                assert end is not None
                assert start < end <= min(known, start + budget)
                assert end == known or (end % 64 == 0 and end + 64 > start + budget)


def test_prefill_turn_comes_after_patience() -> None:
    assert [prefill_turn_budget(64, 64, n) for n in range(PREFILL_PATIENCE)] == [0] * PREFILL_PATIENCE
    assert prefill_turn_budget(64, 64, PREFILL_PATIENCE) == 64
    assert prefill_turn_budget(100, 60, PREFILL_PATIENCE) == 64
    assert prefill_turn_budget(2048, 48, PREFILL_PATIENCE) == 2000


@pytest.mark.parametrize(
    ("tickets", "budget", "chosen"),
    [([7, 8, 3], 3, [0, 1, 2]), ([7, 8, 3], 2, [2, 0]), ([-1, 9, 4, 1], 3, [0, 3, 2]), ([1], 0, []), ([1], -3, [])],
)
def test_choose_decodes(tickets: list[int], budget: int, chosen: list[int]) -> None:
    rows = [Row(ticket) for ticket in tickets]
    assert list(choose_decodes(rows, budget)) == [rows[i] for i in chosen]


def test_victim_is_the_latest_arrival() -> None:
    params = SamplingParams(max_tokens=1)
    arrivals = [(4, 1.0), (2, 3.0), (3, 3.0), (1, 2.0)]
    requests = [Request(i, (1,), params, arrival_s=arrival_s) for i, arrival_s in arrivals]
    assert choose_victim(requests).id == 3
    assert choose_victim(requests[:1]).id == 4


@pytest.mark.parametrize(
    ("output", "max_tokens", "min_tokens", "max_model_len", "reason"),
    [
        ((1,), 3, 0, 100, None),
        ((1, 2, 3), 3, 0, 100, FinishReason.LENGTH),
        ((1, 9), 3, 0, 100, FinishReason.STOP),
        ((1, 2, 8), 3, 0, 100, FinishReason.STOP),
        ((9, 1), 3, 0, 100, None),
        ((9,), 5, 1, 100, None),
        ((1, 9), 5, 1, 100, FinishReason.STOP),
        ((1, 9), 5, 2, 100, None),
        ((1, 9), 2, 2, 100, FinishReason.LENGTH),
        ((1, 2), 50, 0, 12, FinishReason.LENGTH),
        ((1, 2), 50, 0, 13, None),
    ],
)
def test_finish_reason(
    output: tuple[int, ...], max_tokens: int, min_tokens: int, max_model_len: int, reason: FinishReason | None
) -> None:
    assert finish_reason(request(10, max_tokens, output, min_tokens), max_model_len) == reason


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "max_model_len", "num_page_tokens"),
    [(99, 1, 100, 128), (1, 99, 100, 128), (128, 1, 1000, 128), (64, 65, 1000, 128), (1, 128, 129, 128)],
)
def test_what_just_fits_is_not_refused(
    num_prompt: int, max_tokens: int, max_model_len: int, num_page_tokens: int
) -> None:
    refuse_impossible(request(num_prompt, max_tokens), max_model_len, num_page_tokens)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "max_model_len", "num_page_tokens", "param", "sentence"),
    [
        (100, 1, 100, 128, "prompt", "the prompt has 100 tokens, but the context length is 100 tokens"),
        (99, 2, 100, 128, "max_tokens", "lower max_tokens to at most 1"),
        (129, 1, 1000, 128, "prompt", "what the KV pages hold is 129 tokens"),
        (64, 66, 1000, 128, "max_tokens", "lower max_tokens to at most 65"),
    ],
)
def test_what_can_never_fit_names_the_field(
    num_prompt: int, max_tokens: int, max_model_len: int, num_page_tokens: int, param: str, sentence: str
) -> None:
    with pytest.raises(ContextLengthError) as error:
        refuse_impossible(request(num_prompt, max_tokens), max_model_len, num_page_tokens)
    assert error.value.param == param
    assert sentence in error.value.message


@pytest.mark.parametrize(("num_prompt", "max_tokens", "param"), [(0, 5, "prompt"), (5, 0, "max_tokens")])
def test_empty_requests_name_the_field(num_prompt: int, max_tokens: int, param: str) -> None:
    with pytest.raises(RequestError) as error:
        refuse_impossible(request(num_prompt, max_tokens), 100, 100)
    assert error.value.param == param
