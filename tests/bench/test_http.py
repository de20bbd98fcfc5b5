"""The HTTP client against a small server that answers as vLLM does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deltaserve.bench.http import HttpTarget
from deltaserve.bench.work import Shape, random_prompts
from deltaserve.core.errors import ConfigError


class Handler(BaseHTTPRequestHandler):
    """Streams `max_tokens` events, then usage; a prompt that starts with 13 ends early, with 14 is refused."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": "peer"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"][0] == 14:
            self.reply(400, b"refused")
            return
        count = 1 if body["prompt"][0] == 13 else body["max_tokens"]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = [{"choices": [{"text": "x"}]} for _ in range(count)]
        events.append({"choices": [], "usage": {"completion_tokens": count}})
        for line in [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]:
            for part in (line[:7], line[7:]):  # a line may come in pieces
                self.wfile.write(f"{len(part):x}\r\n{part}\r\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_counts_tokens_and_times_the_first(url: str) -> None:
    shape = Shape(num_streams=3, prompt_tokens=10, output_tokens=5)
    measured = HttpTarget(url).run(random_prompts(shape, 4096, seed=0), shape)
    assert measured.num_output_tokens == 5 * shape.num_requests
    assert measured.first_token_s is not None
    assert len(measured.first_token_s) == shape.num_requests
    assert all(0 < first_s < measured.wall_s for first_s in measured.first_token_s)


@pytest.mark.parametrize(("token", "reason"), [(13, "1 tokens instead of 5"), (14, "answered 400: refused")])
def test_a_wrong_answer_is_an_error(url: str, token: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        HttpTarget(url).run([[token, 1, 2]], Shape(1, 3, 5))


@pytest.mark.parametrize("wrong", ["https://localhost:1", "http://", "127.0.0.1:1"])
def test_an_address_without_a_server_is_an_error(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        HttpTarget(wrong)
