"""Streams: failures before and after the first event, and clients that leave."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltaserve.server.served import Served
from tests.server.fakes import FakeClient, Http

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_a_failure_before_the_first_token_is_an_ordinary_error(http: Http, engine: FakeClient) -> None:
    engine.error_after = 0
    response = http.post(TEXT, {"prompt": "a", "stream": True})
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "no page was free",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }


def test_a_failure_after_it_is_one_more_event(http: Http, engine: FakeClient) -> None:
    engine.error_after = 2
    *events, failure = http.events(TEXT, {"prompt": "a"})
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None]
    assert failure["error"]["message"] == "no page was free"


def test_one_failed_choice_ends_the_others(http: Http, engine: FakeClient) -> None:
    engine.error_after = 2
    assert "error" in http.events(TEXT, {"prompt": "a", "n": 3})[-1]
    assert engine.num_running == 0
    assert http.post(TEXT, {"prompt": "a", "n": 3}).status_code == 500
    assert engine.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": [{"role": "user", "content": "x"}]}), (TEXT, {"prompt": "x"})]
)
def test_a_client_that_leaves_aborts_everything(
    http: Http, engine: FakeClient, path: str, body: dict[str, Any], num_choices: int, stream: bool
) -> None:
    engine.stall_after = 2
    sent = http.leave(path, {**body, "n": num_choices, "stream": stream}, num_parts=2 if stream else 0)
    assert len(engine.requests) == num_choices
    assert (engine.num_running, engine.num_aborted) == (0, num_choices)
    if stream:
        assert json.loads(sent[1]["body"].split(b"\n\n")[0].removeprefix(b"data: "))["choices"]


def test_a_stop_string_aborts_the_engine_request(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "one two three"
    events = http.events(TEXT, {"prompt": "a", "stop": "two"})
    assert "".join(event["choices"][0]["text"] for event in events) == "one "
    assert (engine.num_running, engine.num_aborted) == (0, 1)


def test_a_dead_engine_is_a_503(http: Http, engine: FakeClient) -> None:
    engine.is_alive = False
    for stream in (False, True):
        response = http.post(TEXT, {"prompt": "a", "stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"


def test_an_engine_that_dies_in_the_middle(http: Http, engine: FakeClient, served: Served) -> None:
    original = served.metrics.start

    class Dying:
        """Kills the engine when the second token has been counted."""

        def __init__(self, num_prompt: int) -> None:
            self.timer = original(num_prompt)
            self.num_seen = 0

        def advance(self, *arguments: Any) -> None:
            self.timer.advance(*arguments)
            self.num_seen += 1
            engine.is_alive = self.num_seen < 2

        def fail(self) -> None:
            self.timer.fail()

        def close(self) -> None:
            self.timer.close()

    served.metrics.start = Dying  # type: ignore[assignment, method-assign]
    *events, failure = http.events(TEXT, {"prompt": "a"})
    assert len(events) == 2
    assert failure["error"]["code"] == "engine_dead"
