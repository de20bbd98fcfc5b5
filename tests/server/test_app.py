"""The routes around generation: models, tokens, health, metrics, the page and the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server import app as application
from tests.server.fakes import FakeClient, Http

HELLO = [{"role": "user", "content": "Hello"}]


def test_models_lists_every_name(http: Http) -> None:
    answer = http.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["tiny", "tiny-alias"]
    card = http.get("/v1/models/tiny-alias").json()
    assert card["block_size"] == 64
    assert card == answer["data"][1]
    assert (card["object"], card["max_model_len"], card["root"]) == ("model", 512, "/models/tiny")


def test_version(http: Http) -> None:
    assert http.get("/version").json() == {"version": "9.9"}


def test_health_follows_the_engine(http: Http, engine: FakeClient) -> None:
    assert http.get("/health").status_code == 200
    assert http.request("HEAD", "/health").status_code == 200
    engine.is_alive = False
    assert http.get("/health").status_code == 503


def test_tokenize_and_detokenize_are_inverse(http: Http, tokenizer: Tokenizer) -> None:
    answer = http.post("/tokenize", {"prompt": "Hello é <|im_end|>", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("Hello é <|im_end|>")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert answer["max_model_len"] == 512
    assert http.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hello é <|im_end|>"}


def test_tokenize_renders_messages_as_chat_does(http: Http, engine: FakeClient) -> None:
    ids = http.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    http.post("/v1/chat/completions", {"messages": HELLO})
    assert tuple(ids) == engine.requests[0][0]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HELLO}])
def test_tokenize_wants_one_of_prompt_and_messages(http: Http, body: dict[str, object]) -> None:
    assert http.post("/tokenize", body).json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("token_id", [-1, 1024, 10**30])
def test_detokenize_refuses_ids_outside_the_vocabulary(http: Http, token_id: int) -> None:
    assert http.post("/detokenize", {"tokens": [1, token_id]}).json()["error"]["param"] == "tokens[1]"


def test_long_texts_are_tokenised_alike(http: Http, tokenizer: Tokenizer) -> None:
    text = "Some words, é. " * 1000
    assert http.post("/tokenize", {"prompt": text}).json()["tokens"] == tokenizer.encode(text)


def test_stats_are_the_engines_figures(http: Http, engine: FakeClient) -> None:
    stats = http.get("/stats").json()
    assert (stats["model"], stats["alive"], stats["num_free_pages"]) == ("tiny", True, 90)
    engine.is_alive = False
    assert http.get("/stats").json() == {"model": "tiny", "alive": False}


def test_metrics_count_requests_and_show_the_engine(http: Http, engine: FakeClient) -> None:
    http.post("/v1/completions", {"prompt": [5, 6, 7], "n": 2, "max_tokens": 2})
    engine.stall_after = 1
    http.leave("/v1/completions", {"prompt": [5, 6, 7]}, num_parts=0)
    text = http.get("/metrics").text

    def value(name: str, labels: str = 'model_name="tiny"') -> float:
        found = re.search(rf"^deltaserve_{name}{{{labels}}} (\S+)$", text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    assert value("prompt_tokens_total") == 9
    assert value("generation_tokens_total") == 5
    assert value("request_success_total", 'finished_reason="length",model_name="tiny"') == 2
    assert value("request_success_total", 'finished_reason="abort",model_name="tiny"') == 1
    assert value("time_to_first_token_seconds_count") == 3
    assert value("inter_token_latency_seconds_count") == 2
    assert value("e2e_request_latency_seconds_count") == 3
    assert value("kv_cache_usage_perc") == pytest.approx(0.05), "pages that may be dropped are not in use"
    assert value("num_requests_running") == 0
    assert value("num_preemptions_total") == 3
    engine.is_alive = False
    assert "deltaserve_num_requests_running" not in http.get("/metrics").text


def test_page_needs_nothing_from_elsewhere(http: Http) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    sources = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    files = {path for path in sources if path.startswith("/")}
    assert all(source in files or source.startswith("data:") for source in sources)
    seen: set[str] = set()
    while files - seen:
        path = (files - seen).pop()
        seen.add(path)
        response = http.get(path)
        assert response.status_code == 200, path
        files |= set(re.findall(r'from "(/page/[^"]+)"', response.text))
    assert seen == {f"/page/{file.name}" for file in application.PAGE.iterdir() if file.suffix != ".html"}


def test_page_files_mention_only_ids_that_exist(http: Http) -> None:
    ids = set(re.findall(r'id="([^"]+)"', http.get("/").text))
    script = (Path(application.PAGE) / "chat.js").read_text("utf-8")
    assert set(re.findall(r'find\("([^"]+)"\)', script)) <= ids
    assert set(re.findall(r'"(\w+)"', script.split("].map(find)")[0].rsplit("= [", 1)[1])) <= ids


def test_page_asks_for_nothing_without_its_key() -> None:
    scripts = {file.name: file.read_text("utf-8") for file in application.PAGE.glob("*.js")}
    assert "authorization" in scripts["request.js"]
    assert [name for name, text in scripts.items() if re.search(r"\bfetch\(", text)] == ["request.js"]


def test_documentation_describes_the_bodies(http: Http) -> None:
    assert http.get("/docs").status_code == 200
    document = http.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "temperature", "stream_options"} <= set(
        document["components"]["schemas"]["ChatRequest"]["properties"]
    )
    assert "StreamOptions" in document["components"]["schemas"]
