"""Gates against servers: a real one with random weights, and small ones that answer wrongly or not at all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltaserve.core.errors import ConfigError, DeltaserveError
from deltaserve.server.sampling import Limits, sampling_params, with_budget
from deltaserve.server.schema import CompletionRequest, parse
from deltaserve.verify.ask import greedy
from deltaserve.verify.command import URL, app
from deltaserve.verify.compare import EXACT
from deltaserve.verify.http_target import HttpTarget, completion_body, read_answer
from deltaserve.verify.target import Setup

READY_S = 60.0
CARD = {"id": "m", "max_model_len": 512}
STATS = {"num_running": 0, "drafts": {"verified_by_position": []}}


@contextmanager
def answering(paths: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """A server that gives each path its status and body, whatever is asked; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = paths.get(self.path, (404, {"error": {"message": "nothing here"}}))
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[str]:
    """A real server's URL."""
    command = [sys.executable, "-m", "deltaserve.cli", "serve", str(directory), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        timer = threading.Timer(READY_S, process.kill)
        timer.start()
        lines, url = [], None
        for line in process.stderr:
            lines.append(line)
            url = re.search(r"^chat\s+(http://\S+)", line)
            if url:
                break
        timer.cancel()
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        try:
            assert url is not None, "".join(lines)
            yield url[1]
        finally:
            process.kill()
            reader.join()


def models(card: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    return {"/v1/models": (200, {"data": [card]}), "/stats": (200, STATS), "/version": (200, {"version": "9"})}


def test_a_real_server_passes_what_a_client_can_see(sample_checkpoint: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ("--max-model-len", "2K", "--max-num-seqs", "8", "--num-pages", "160", "--num-snapshots", "64")
    with serving(sample_checkpoint, *flags, "--num-threads", "1") as url:
        gates = ("batched", "cached", "chunked", "isolation", "burst", "residency", "options", "drafts", "memory")
        chosen = [word for gate in gates for word in ("--gate", gate)]
        arguments = [url, "--quick", "--seed", "2", "--level", "exact", "--json", str(report), "--max-model-len", "456"]
        result = CliRunner().invoke(app, [*arguments, *chosen])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text("utf-8"))
    statuses = {gate["gate"]: gate["status"] for gate in found["gates"]}
    skipped = {gate: status for gate, status in statuses.items() if status != "passed"}
    assert skipped == {"chunked": "skipped", "drafts": "skipped", "memory": "skipped"}
    assert "give a model directory" in result.output
    assert found["target"]["facts"]["url"] == url
    (cached,) = (gate for gate in found["gates"] if gate["gate"] == "cached")
    assert cached["events"]["hits, whole"] > 8


def test_a_server_that_dies_ends_the_run_with_its_report() -> None:
    with answering(models(CARD)) as url:
        target = HttpTarget(url)
    with target.session() as session, pytest.raises(DeltaserveError, match="no server answers at 127"):
        session.ask([greedy((1, 2), 3)])


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        ({}, "answers, but not as a server of models"),
        ({"/v1/models": (200, b"<html>")}, "answers, but not as a server of models"),
        ({"/v1/models": (200, {"data": []})}, "answers, but not as a server of models"),
        ({"/v1/models": (200, {"data": [{"id": "gpt"}]})}, "without saying its max_model_len"),
        ({"/v1/models": (200, {"data": [CARD]})}, "only Deltaserve's own servers"),
        (models(CARD | {"synthetic_acceptance_length": 2.9}), "synthetic acceptance"),
    ],
)
def test_what_cannot_be_verified_is_refused(paths: dict[str, tuple[int, Any]], sentence: str) -> None:
    with answering(paths) as url, pytest.raises(ConfigError, match=sentence):
        HttpTarget(url)


def test_addresses() -> None:
    for url in ("http://localhost:8000", "https://x.org/v1", "localhost:8000", "10.0.0.1:80/"):
        assert URL.fullmatch(url), url
    for path in ("models/tiny", "Qwen/Qwen3.5-4B", "/models/a:b", "localhost"):
        assert not URL.fullmatch(path), path
    for url in ("http://", "http://x:99999", "ftp://x"):
        with pytest.raises(ConfigError):
            HttpTarget(url)
    with pytest.raises(ConfigError, match="start one with `deltaserve serve`"):
        HttpTarget("http://127.0.0.1:9")


def test_an_engine_that_is_gone_is_told_from_a_request_that_is_wrong() -> None:
    dead = {"/v1/completions": (503, {"error": {"message": "the engine process was killed"}})}
    wrong = {"/v1/completions": (400, {"error": {"message": "prompt is too long"}})}
    with answering(models(CARD) | wrong) as url, HttpTarget(url).session() as session:
        (answer,) = session.ask([greedy((1, 2), 3)])
        assert answer.error == "/v1/completions was answered with status 400: prompt is too long"
    with (
        answering(models(CARD) | dead) as url,
        HttpTarget(url).session() as session,
        pytest.raises(DeltaserveError, match="has lost its engine: the engine process was killed"),
    ):
        session.ask([greedy((1, 2), 3)])


def test_a_server_is_taken_as_it_is() -> None:
    with answering(models(CARD)) as url:
        target = HttpTarget(url)
        assert not target.about.is_engine
        assert not target.about.has_draft_head
        assert target.about.level != EXACT
        with (
            pytest.raises(DeltaserveError, match="cannot change the server's settings"),
            target.session(Setup(chunk=64)),
        ):
            pass


def test_bodies_leave_nothing_to_the_servers_defaults() -> None:
    body = completion_body(greedy((1, 2), 3, logit_bias={5: 1.0}, stop=("a",)).salted("s"), "m")
    assert body["prompt"] == [1, 2]
    assert (body["cache_salt"], body["logit_bias"], body["stop"]) == ("s", {"5": 1.0}, ["a"])
    assert (body["top_k"], body["top_p"], body["temperature"], body["ignore_eos"]) == (0, 1.0, 0.0, True)
    assert "speculative" not in body


@pytest.mark.parametrize("limits", [{}, {"allowed_token_ids": (4, 7)}])
def test_the_server_reads_back_what_a_gate_asks_for(limits: dict[str, Any]) -> None:
    ask = greedy((1, 2), 3, logit_bias={5: 1.0}, stop=("a",), seed=4, **limits)
    request = parse(CompletionRequest, json.dumps(completion_body(ask, "m")).encode())
    read = sampling_params(request, {}, Limits(max_model_len=64, vocab_size=9, max_logprobs=2), ask.params.logprobs)
    assert with_budget(read, 3) == ask.params


def test_a_report_that_cannot_be_written_is_known_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json: .* cannot be written"):
        CliRunner().invoke(app, ["nowhere", "--json", str(tmp_path / "absent" / "x.json")], catch_exceptions=False)


def test_answers_are_read_with_their_alternatives_in_order() -> None:
    choice = {
        "text": "ab", "token_ids": [5, 6], "finish_reason": "length",
        "logprobs": {"top_logprobs": [{"token_id:6": -2, "token_id:5": -0.5}, {"token_id:6": -0.1, "token_id:9": -3}]},
    }  # fmt: skip
    answer = read_answer({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 64}}})
    assert answer.token_ids == (5, 6)
    assert answer.tops == (((5, -0.5), (6, -2.0)), ((6, -0.1), (9, -3.0)))
    assert answer.num_cached == 64
