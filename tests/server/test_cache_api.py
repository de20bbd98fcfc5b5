"""What clients see and steer of the prefix cache, the queue and the drafts."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from deltaserve.cache.manager import CacheStats
from deltaserve.core.errors import OverloadedError
from deltaserve.core.types import RequestOptions
from deltaserve.engine.info import EngineInfo
from deltaserve.scheduler.speculation import DraftCounts
from deltaserve.server.app import create_app
from deltaserve.server.console import print_summary
from deltaserve.server.metrics import ENGINE_COUNTERS, ENGINE_GAUGES, Metrics
from deltaserve.server.served import Served
from tests.server.fakes import FakeClient, Http

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    TEXT: {"prompt": [5, 6, 7]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_cached", [0, 64])
def test_usage_says_what_was_cached_streamed_or_not(http: Http, engine: FakeClient, path: str, num_cached: int) -> None:
    engine.num_cached = num_cached
    details = {"cached_tokens": num_cached}
    assert http.post(path, BODIES[path]).json()["usage"]["prompt_tokens_details"] == details
    running = {"include_usage": True, "continuous_usage_stats": True}
    events = http.events(path, BODIES[path] | {"stream_options": running})
    assert len(events) > 3
    assert all(event["usage"]["prompt_tokens_details"] == details for event in events)


def test_choices_of_one_prompt_count_its_cached_tokens_once(http: Http, engine: FakeClient) -> None:
    engine.num_cached = 64
    usage = http.post(TEXT, {"prompt": [[1, 2], [3, 4]], "n": 3}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2 * 64}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, RequestOptions()),
        ({"priority": -3}, RequestOptions(priority=-3)),
        ({"cache_salt": "tenant"}, RequestOptions(cache_salt="tenant")),
        ({"session_id": "abc"}, RequestOptions(session_id="abc")),
        ({"speculative": False}, RequestOptions(use_drafts=False)),
        ({"speculative": True, "priority": 0}, RequestOptions()),
        (dict.fromkeys(("priority", "cache_salt", "session_id", "speculative")), RequestOptions()),
    ],
    ids=str,
)
def test_fields_reach_the_engine(
    http: Http, engine: FakeClient, path: str, fields: dict[str, Any], options: RequestOptions
) -> None:
    assert http.post(path, BODIES[path] | fields).status_code == 200
    assert engine.options == [options]


@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [("from-header", None, "from-header"), ("from-header", "from-body", "from-body"), ("", None, None)],
)
def test_a_session_may_come_by_header_and_the_body_wins(
    http: Http, engine: FakeClient, header: str, field: str | None, expected: str | None
) -> None:
    body = BODIES[CHAT] | {"session_id": field}
    assert http.request("POST", CHAT, json=body, headers={"X-Session-ID": header}).status_code == 200
    assert engine.options == [RequestOptions(session_id=expected)]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1 << 31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": ["a"]}, "session_id"),
        ({"session_id": "x" * 1025}, "session_id"),
        ({"speculative": "no"}, "speculative"),
        ({"speculative": 0}, "speculative"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_values_are_refused_naming_the_field(
    http: Http, engine: FakeClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = http.post(path, BODIES[path] | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(response.text) < 400
    assert not engine.requests


def test_a_huge_priority_is_an_ordinary_refusal(http: Http) -> None:
    raw = b'{"prompt": [5], "priority": ' + b"9" * 4000 + b"}"
    response = http.request("POST", TEXT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400 and len(response.text) < 400


@pytest.mark.parametrize(
    "fields", [{"priority": 1}, {"cache_salt": "a"}, {"session_id": "a"}, {"speculative": False}], ids=str
)
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_where_nothing_is_generated_they_are_refused(http: Http, path: str, fields: dict[str, Any]) -> None:
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [5]}
    assert http.post(path, body).status_code == 200
    response = http.post(path, body | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))


def test_reset_prefix_cache(http: Http, engine: FakeClient) -> None:
    response = http.request("POST", "/reset_prefix_cache")
    assert response.status_code == 200 and "message" in response.json()
    assert engine.num_resets == 1
    assert http.get("/reset_prefix_cache").status_code == 405
    engine.is_alive = False
    assert http.request("POST", "/reset_prefix_cache").status_code == 503


def test_debug_requests_says_how_requests_met_the_cache(http: Http, engine: FakeClient) -> None:
    engine.num_cached = 64
    http.post(TEXT, BODIES[TEXT])
    assert http.get("/debug/requests").json() == {
        "requests": [
            {
                "id": 0,
                "prompt_tokens": 100,
                "cached_tokens": 64,
                "matched_tokens": 128,
                "restored_tokens": 0,
                "note": "no_snapshot",
            }
        ]
    }


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_full_queue_is_429_in_openais_shape(http: Http, engine: FakeClient, path: str, is_stream: bool) -> None:
    engine.refusal = OverloadedError("5 requests wait already")
    response = http.post(path, BODIES[path] | {"stream": is_stream})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) > 0
    expected = {"message": "5 requests wait already", "type": "rate_limit_error", "param": None, "code": "overloaded"}
    assert response.json() == {"error": expected}


def test_other_refusals_have_no_retry_after(http: Http) -> None:
    assert "retry-after" not in http.post(TEXT, {"prompt": ""}).headers


def metrics_of(http: Http) -> dict[str, float]:
    text = http.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(deltaserve_\S+) (\S+)$", text, re.MULTILINE)}


def test_metrics_show_cache_and_drafts_under_the_usual_names(http: Http, engine: FakeClient) -> None:
    engine.figures = {
        "cache": CacheStats(num_looked_up=1000, num_hit=640, snapshots_now=3),
        "drafts": DraftCounts(10, 30, 17, [10, 10, 10], [9, 6, 2]),
        "num_snapshots": 12,
        "num_refused": 4,
    }
    found = metrics_of(http)
    label = '{model_name="tiny"}'
    assert found[f"deltaserve_prefix_cache_queries_total{label}"] == 1000
    assert found[f"deltaserve_prefix_cache_hits_total{label}"] == 640
    assert found[f"deltaserve_num_snapshots_held{label}"] == 3
    assert found[f"deltaserve_num_snapshots{label}"] == 12
    assert found[f"deltaserve_admission_rejections_total{label}"] == 4
    assert found[f"deltaserve_spec_decode_num_drafts_total{label}"] == 10
    assert found[f"deltaserve_spec_decode_num_draft_tokens_total{label}"] == 30
    assert found[f"deltaserve_spec_decode_num_accepted_tokens_total{label}"] == 17
    name = "deltaserve_spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[f'{name}{{model_name="tiny",position="{place}"}}'] for place in range(3)] == [9, 6, 2]


def test_each_figure_is_read_from_a_field_of_its_own() -> None:
    names = [name for name, *_ in (*ENGINE_GAUGES, *ENGINE_COUNTERS)]
    assert len(set(names)) == len(names)
    codes = [read.__code__ for _, _, read in (*ENGINE_GAUGES, *ENGINE_COUNTERS)]
    assert len({(code.co_names, code.co_consts) for code in codes}) == len(codes)


def test_stats_hold_the_cache_and_the_drafts(http: Http, engine: FakeClient) -> None:
    engine.figures = {"cache": CacheStats(num_hit=7), "drafts": DraftCounts(2, 4, 3, [2, 2], [2, 1])}
    stats = http.get("/stats").json()
    assert stats["cache"]["num_hit"] == 7 and stats["drafts"]["accepted_by_position"] == [2, 1]


def test_synthetic_acceptance_is_said_wherever_the_model_is_named(http: Http, served: Served) -> None:
    loud = Http(create_app(replace(served, synthetic_acceptance=2.5, metrics=Metrics("tiny", 2.5))))
    assert loud.get("/v1/models").json()["data"][1]["synthetic_acceptance_length"] == 2.5
    assert loud.get("/v1/models/tiny").json()["synthetic_acceptance_length"] == 2.5
    assert metrics_of(loud)['deltaserve_synthetic_acceptance_length{model_name="tiny"}'] == 2.5
    assert "synthetic" not in json.dumps(http.get("/v1/models").json())
    assert "synthetic" not in http.get("/metrics").text


INFO = EngineInfo("qwen3_next", 100, 50, (1,), 3, 4, 5, num_snapshots=7)


@pytest.mark.parametrize(
    ("info", "lines"),
    [
        (INFO, ["prefix cache 7 snapshots; no host tier", "drafts none", "machine 1 thread\n"]),
        (replace(INFO, num_ranks=2, num_threads=4), ["machine 2 ranks, 4 threads together"]),
        (replace(INFO, has_prefix_cache=False), ["prefix cache off"]),
        (replace(INFO, num_host_pages=90, num_host_slots=5), ["on the host 5 more and 90 pages"]),
        (replace(INFO, num_drafts=3), ["drafts up to 3 a step\n"]),
        (replace(INFO, num_drafts=3, synthetic_acceptance=2.9), ["SYNTHETIC acceptance of 2.9 tokens a step"]),
    ],
)
def test_the_banner_says_what_is_on(info: EngineInfo, lines: list[str]) -> None:
    console = Console(file=io.StringIO(), width=200)
    print_summary(console, ("tiny",), info, "http://localhost:1", 1.0)
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r" +", " ", console.file.getvalue()).replace(" \n", "\n")
    assert all(line in text for line in lines), text
