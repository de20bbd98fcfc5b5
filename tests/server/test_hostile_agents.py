"""Whatever stands in a field of the agents' formats, the answer is never a 5xx, and the engine is left clean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from deltaserve.server.anthropic_input import CountTokensRequest, MessagesRequest
from deltaserve.server.responses_input import ResponsesRequest
from tests.server.agent_forms import MESSAGES, RESPONSES
from tests.server.fakes import FakeClient, Http


def nested(depth: int, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"type": value}
    return value


PARTS: list[Any] = [{"type": kind} for kind in ("text", "input_text", "thinking", "tool_use", "tool_result", "message")]
VALUES: list[Any] = [
    *(0, 1, -1, 2**31 - 1, 2**63, 10**18, 10**400, 0.5, -0.0, 1e308, True, False),
    *("", " ", "a", "auto", "none", "enabled", "\x00", "x" * 5000, "é\u2028<think></think><tool_call>"),
    *([], [None], [[]], [{}], [""], ["a"] * 300, {}, {"": ""}, {"type": None}, {"type": "function", "name": None}),
    *({"type": "enabled", "budget_tokens": 10**30}, {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}),
    *(PARTS, [{"role": "user", "content": PARTS}], [{"role": "assistant", "content": PARTS}], [{"role": []}]),
    *([{"role": "assistant", "content": ""}], [{"role": "user", "content": "a", "tool_calls": 5}]),
    *([{"type": "function", "name": "f", "parameters": nested(900, dict)}], nested(900, list), nested(900, dict)),
]
FORMS: list[tuple[str, type[msgspec.Struct], dict[str, Any]]] = [
    (RESPONSES, ResponsesRequest, {"input": "Hello"}),
    (MESSAGES, MessagesRequest, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}),
    (f"{MESSAGES}/count_tokens", CountTokensRequest, {"messages": [{"role": "user", "content": "Hello"}]}),
]


@pytest.mark.parametrize(("path", "kind", "base"), FORMS)
def test_any_value_in_any_field(
    http: Http, engine: FakeClient, path: str, kind: type[msgspec.Struct], base: dict[str, Any]
) -> None:
    engine.reply = lambda k: "a"
    statuses = set()
    for name in kind.__struct_fields__:
        for value in VALUES:
            body = msgspec.json.encode({**base, name: value})
            headers = {"content-type": "application/json"}
            response = http.request("POST", path, content=body, headers=headers)
            assert response.status_code < 500, (name, str(value)[:80], response.text)
            assert response.status_code == 200 or response.json()["error"]["message"]
            statuses.add(response.status_code)
    assert statuses >= {200, 400, 404}
    assert engine.num_running == 0
