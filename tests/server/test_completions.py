"""POST /v1/completions over a fake engine: kinds of prompt, echo, log-probabilities, several choices."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.engine.tokenizer import Tokenizer
from tests.server.fakes import FakeClient, Http

PATH = "/v1/completions"


def complete(http: Http, **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_answer_has_openais_shape(http: Http) -> None:
    answer = complete(http, prompt="Say")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Answer 0.",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
    ]


def test_sixteen_tokens_unless_asked_for(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "word " * 40
    answer = complete(http, prompt="Say")
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["a", "b"], ["a", "b"]),
        (["a", [5, 6]], ["a", [5, 6]]),
        ("a", ["a"]),
    ],
)
def test_kinds_of_prompt(
    http: Http, engine: FakeClient, tokenizer: Tokenizer, prompt: Any, expected: list[Any]
) -> None:
    answer = complete(http, prompt=prompt, n=2)
    ids = [tuple(tokenizer.encode(item)) if isinstance(item, str) else tuple(item) for item in expected]
    assert [request[0] for request in engine.requests] == [i for i in ids for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(len(i) for i in ids)


def test_stream_adds_up_to_the_whole_answer(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: f"choice {k % 2} \U0001f680 STOP more"
    fields = {"prompt": ["a", "b"], "stop": "STOP", "max_tokens": 60, "logprobs": 1}
    whole = complete(http, **fields)
    events = http.events(PATH, {**fields, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"] == f"choice {choice['index']} \U0001f680 "
        assert parts[-1]["finish_reason"] == "stop"
        assert parts[-1]["stop_reason"] == "STOP"
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values, name


def test_logprobs_and_offsets_are_parallel_to_the_tokens(http: Http, tokenizer: Tokenizer) -> None:
    choice = complete(http, prompt="Say", logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"][:-1]) == choice["text"]
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    for offset, token in zip(logprobs["text_offset"][:-1], logprobs["tokens"][:-1], strict=True):
        assert choice["text"][offset:].startswith(token)
    token_id = tokenizer.encode("Answer 0.")[0]
    names = [tokenizer.token_bytes(i).decode(errors="replace") for i in (token_id, token_id + 1)]
    assert list(logprobs["top_logprobs"][0]) == names


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(http: Http, tokenizer: Tokenizer, stream: bool) -> None:
    fields = {"prompt": "Say é", "echo": True, "logprobs": 1, "max_tokens": 3}
    if stream:
        parts = [event["choices"][0] for event in http.events(PATH, fields)]
        text = "".join(part["text"] for part in parts)
        logprobs = {name: [v for p in parts for v in p["logprobs"][name]] for name in parts[0]["logprobs"]}
    else:
        choice = complete(http, **fields)["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    prompt_ids = tokenizer.encode("Say é")
    assert text == "Say é" + tokenizer.decode(tokenizer.encode("Answer 0.")[:3])
    assert len(logprobs["tokens"]) == len(prompt_ids) + 3
    assert {len(values) for values in logprobs.values()} == {len(prompt_ids) + 3}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert logprobs["text_offset"][len(prompt_ids)] == len("Say é")


def test_echo_without_logprobs(http: Http) -> None:
    assert complete(http, prompt="Say ", echo=True)["choices"][0]["text"] == "Say Answer 0."
    events = http.events(PATH, {"prompt": "Say ", "echo": True})
    assert "".join(event["choices"][0]["text"] for event in events) == "Say Answer 1."


def test_prompt_logprobs_and_ids_stand_in_each_choice(http: Http, engine: FakeClient) -> None:
    choice = complete(http, prompt="Say this", prompt_logprobs=0, return_token_ids=True)["choices"][0]
    ids = engine.requests[0][0]
    assert choice["prompt_token_ids"] == list(ids)
    assert choice["prompt_logprobs"][0] is None
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [[str(i)] for i in ids[1:]]
    assert engine.tokenizer.decode(choice["token_ids"]) == choice["text"]


@pytest.mark.parametrize("bad_id", [1024, -1, 1 << 40])
@pytest.mark.parametrize("is_stream", [False, True])
def test_s3_f12_an_id_without_a_token_does_not_stop_the_server(
    http: Http, engine: FakeClient, bad_id: int, is_stream: bool
) -> None:
    """Row S3-F12: an id outside the vocabulary has no text; its logprobs carry a placeholder."""
    engine.reply_ids = (5, bad_id, 6)
    body = {"prompt": "a", "logprobs": 2, "temperature": 0}
    if is_stream:
        choices = [event["choices"][0] for event in http.events(PATH, body)]
    else:
        choices = http.post(PATH, body).json()["choices"]
    tokens = [token for choice in choices for token in (choice["logprobs"] or {}).get("tokens", [])]
    assert len(tokens) == 4 and all(isinstance(token, str) for token in tokens)
    assert choices[-1]["finish_reason"] == "stop"
    assert http.get("/health").status_code == 200
