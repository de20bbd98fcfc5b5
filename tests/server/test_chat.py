"""POST /v1/chat/completions over a fake engine: shapes, streams, thinking, choices, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.engine.tokenizer import Tokenizer
from tests.server.fakes import FakeClient, Http, fake_logprob

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def ask(http: Http, **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, {"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a stream's deltas of one choice add up to."""
    message: dict[str, Any] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                for name, value in choice["delta"].items():
                    message[name] = message.get(name, "") + value
    return message


def test_answer_has_openais_shape(http: Http, engine: FakeClient) -> None:
    answer = ask(http, **NO_THINKING)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"] == "deltaserve-9.9"
    assert answer["service_tier"] is None
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Answer 0.",
        "reasoning_content": None,
        "reasoning": None,
        "refusal": None,
        "tool_calls": None,
    }
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    num_prompt, num_output = len(engine.requests[0][0]), len(engine.tokenizer.encode("Answer 0.")) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_alias_is_answered_with_the_name_asked_for(http: Http) -> None:
    assert ask(http, model="tiny-alias")["model"] == "tiny-alias"


@pytest.mark.parametrize(
    ("reply", "content", "reasoning"),
    [
        ("I think.\n</think>\n\nYes.", "Yes.", "I think."),
        ("<think>\nAgain.\n</think>\n\n</think>\nYes.", "Yes.", "Again."),
        ("never ends \U0001f60a", None, "never ends \U0001f60a"),
        ("</think>Only an answer < / > </thi", "Only an answer < / > </thi", None),
        ("a\n\n</think>", "", "a"),
    ],
)
def test_thinking_is_separated_alike_streamed_and_whole(
    http: Http, engine: FakeClient, reply: str, content: str | None, reasoning: str | None
) -> None:
    engine.reply = lambda k: reply
    message = ask(http)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (content, reasoning)
    streamed = joined(http.events(PATH, {"messages": HELLO}))
    assert streamed == {"role": "assistant", "content": content or ""} | (
        {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    )


def test_thinking_switched_off_leaves_marks_alone(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "a</think>b"
    assert ask(http, **NO_THINKING)["choices"][0]["message"]["content"] == "a</think>b"


def test_reasoning_can_be_left_out(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "hidden</think>shown"
    message = ask(http, include_reasoning=False)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("shown", None)
    assert joined(http.events(PATH, {"messages": HELLO, "include_reasoning": False}))["content"] == "shown"


def test_effort_none_turns_thinking_off(http: Http) -> None:
    assert ask(http, reasoning_effort="none")["choices"][0]["message"]["content"] == "Answer 0."
    assert ask(http, reasoning_effort="low")["choices"][0]["message"]["content"] is None


def test_stream_adds_up_to_the_whole_answer_with_the_same_usage(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "think</think>naïve \U0001f680 text END tail"
    engine.num_cached = 64
    options = {"stop": ["END"], "logprobs": True, "top_logprobs": 2}
    whole = ask(http, **options)
    events = http.events(PATH, {"messages": HELLO, "stream_options": {"include_usage": True}, **options})
    message = whole["choices"][0]["message"]
    assert joined(events) == {
        "role": "assistant",
        "content": message["content"],
        "reasoning_content": message["reasoning_content"],
        "reasoning": message["reasoning_content"],
    }
    assert message["content"] == "naïve \U0001f680 text "
    *chunks, closing = events
    assert closing["choices"] == []
    assert closing["usage"] == whole["usage"]
    assert closing["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    assert all(chunk["usage"] is None for chunk in chunks)
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    assert whole["choices"][0]["stop_reason"] == "END"
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert len({chunk["id"] for chunk in events}) == 1
    assert {chunk["object"] for chunk in events} == {"chat.completion.chunk"}


def test_running_usage_counts_up(http: Http) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = http.events(PATH, {"messages": HELLO, "stream_options": options, **NO_THINKING})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > counts[1] > 0


def test_several_choices_keep_their_texts_apart(http: Http, engine: FakeClient) -> None:
    fields = {"n": 3, "seed": 2**63 - 2, **NO_THINKING}
    answer = ask(http, **fields)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Answer 0.", "Answer 1.", "Answer 2."]
    assert [params.seed for _, params in engine.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    num_prompt = len(engine.requests[0][0])
    assert answer["usage"]["prompt_tokens"] == num_prompt
    num_output = sum(len(engine.tokenizer.encode(f"Answer {k}.")) + 1 for k in range(3))
    assert answer["usage"]["completion_tokens"] == num_output
    events = http.events(PATH, {"messages": HELLO, **fields})
    texts = [joined(events, index)["content"] for index in range(3)]
    assert texts == ["Answer 3.", "Answer 4.", "Answer 5."]


def test_logprobs_name_tokens_bytes_and_alternatives(http: Http, engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.reply = lambda k: "é"
    content = ask(http, logprobs=True, top_logprobs=2, **NO_THINKING)["choices"][0]["logprobs"]["content"]
    ids = [*tokenizer.encode("é"), tokenizer.eos_ids[0]]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == "é"
    for token_id, entry in zip(ids, content, strict=True):
        assert entry["logprob"] == -0.5
        expected = [pair[0] for pair in fake_logprob(token_id, 2).top]
        assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == [tokenizer.token_bytes(i) for i in expected]
    named = ask(http, logprobs=True, return_tokens_as_token_ids=True, **NO_THINKING)["choices"][0]["logprobs"]
    assert [entry["token"] for entry in named["content"]] == [f"token_id:{token_id}" for token_id in ids]
    assert named["content"][0]["top_logprobs"] == []


def test_prompt_logprobs_stand_beside_the_choices(http: Http, engine: FakeClient) -> None:
    entries = ask(http, prompt_logprobs=1)["prompt_logprobs"]
    prompt_ids = engine.requests[0][0]
    assert len(entries) == len(prompt_ids)
    assert entries[0] is None
    assert entries[1][str(prompt_ids[1])]["logprob"] == -0.5
    assert entries[1][str(prompt_ids[1])]["rank"] == 1


def test_token_ids_are_returned_on_request(http: Http, engine: FakeClient) -> None:
    answer = ask(http, return_token_ids=True, **NO_THINKING)
    ids = [*engine.tokenizer.encode("Answer 0."), engine.tokenizer.eos_ids[0]]
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == list(engine.requests[0][0])
    events = http.events(PATH, {"messages": HELLO, "return_token_ids": True, **NO_THINKING})
    streamed = [i for event in events for i in event["choices"][0].get("token_ids", [])]
    assert streamed == [*engine.tokenizer.encode("Answer 1."), engine.tokenizer.eos_ids[0]]


def test_fields_and_defaults_reach_the_engine(http: Http, engine: FakeClient) -> None:
    ask(http)
    default = engine.requests[0][1]
    assert (default.temperature, default.top_k, default.top_p, default.min_p) == (0.7, 20, 0.95, 0.0)
    assert default.max_tokens == 512 - len(engine.requests[0][0])
    ask(
        http,
        temperature=0,
        top_k=-1,
        top_p=0.5,
        min_p=0.1,
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": 200, "6": -3},
        stop="x",
        stop_token_ids=[9],
        min_tokens=2,
        max_tokens=9,
        max_completion_tokens=8,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    params = engine.requests[1][1]
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0, 0, 0.5, 0.1, 7)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({5: 100, 6: -3}, ("x",), (9,))
    assert (params.min_tokens, params.max_tokens, params.ignore_eos) == (2, 8, True)
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)


def test_unknown_fields_and_fields_that_ask_for_nothing_are_ignored(http: Http) -> None:
    ask(
        http,
        no_such_field={"a": 1},
        user="me",
        best_of=1,
        suffix=None,
        response_format={"type": "text"},
        tool_choice="auto",
        parallel_tool_calls=True,
        use_beam_search=False,
        metadata={},
        store=False,
    )


def test_developer_is_system_and_parts_are_joined(http: Http, engine: FakeClient) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    ask(http, messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    ask(http, messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    assert engine.requests[0][0] == engine.requests[1][0]


def test_a_message_is_continued_where_it_ends(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "</think>not a mark"
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    answer = ask(http, messages=messages, continue_final_message=True)
    assert engine.tokenizer.decode(engine.requests[0][0]).endswith("Well, ")
    assert answer["choices"][0]["message"]["content"] == "</think>not a mark"


def test_prompt_without_generation_prompt_ends_after_the_turn(http: Http, engine: FakeClient) -> None:
    ask(http, add_generation_prompt=False)
    text = engine.tokenizer.decode(engine.requests[0][0], skip_special_tokens=False)
    assert text.endswith("Hello<|im_end|>\n")
