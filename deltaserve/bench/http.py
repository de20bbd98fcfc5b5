"""Any server with OpenAI's /v1/completions, driven with prompts of token ids and streamed answers.

Plain `http.client` in threads: the client shares the machine's cores with the server, so it must cost little, and the
same client serves every engine. One connection a request.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deltaserve.bench.work import Measured, Prompts, Shape
from deltaserve.core.errors import ConfigError

TIMEOUT_S = 900.0
START_TIMEOUT_S = 300.0
START = "from deltaserve.cli import main; main()"


@dataclass(frozen=True, slots=True)
class _Answer:
    num_tokens: int
    first_token_s: float


class HttpTarget:
    """`url` is the server's root, such as http://localhost:8000."""

    def __init__(self, url: str, name: str | None = None) -> None:
        address = urlsplit(url if "//" in url else f"//{url}")
        if not address.hostname or address.scheme not in ("", "http"):
            raise ConfigError(f"--url must be an http address such as http://localhost:8000, not {url!r}")
        self._address = (address.hostname, address.port or 80)
        self.model = str(self._get("/v1/models")["data"][0]["id"])
        self.name = name or f"{self.model} over HTTP"

    def run(self, prompts: Prompts, shape: Shape) -> Measured:
        start_s = time.perf_counter()
        with ThreadPoolExecutor(shape.num_streams) as pool:
            answers = list(pool.map(lambda prompt: self._complete(list(prompt), shape.output_tokens), prompts))
        wall_s = time.perf_counter() - start_s
        first_token_s = tuple(answer.first_token_s for answer in answers)
        return Measured(sum(answer.num_tokens for answer in answers), wall_s, first_token_s=first_token_s)

    def close(self) -> None:
        """Nothing is kept open."""

    def _complete(self, prompt: list[int], max_tokens: int) -> _Answer:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start_s = time.perf_counter()
        first_s, num_tokens = None, 0
        for event in self._post("/v1/completions", body):
            if first_s is None and event.get("choices"):
                first_s = time.perf_counter() - start_s
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
        if first_s is None or num_tokens != max_tokens:
            raise ConfigError(f"{self.name} answered {num_tokens} tokens instead of {max_tokens}")
        return _Answer(num_tokens, first_s)

    def _post(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ConfigError(
                    f"{self.name} answered {response.status}: {response.read(300).decode(errors='replace')}"
                )
            for line in response:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield json.loads(data)
        finally:
            connection.close()

    def _get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, ValueError) as error:
            host, port = self._address
            raise ConfigError(f"no server answers at {host}:{port} ({error}); start one or correct --url") from error
        finally:
            connection.close()
        return answer


class ServerTarget(HttpTarget):
    """Our own server, started for the measurement. `ready_s` is from the start of the process to /health."""

    def __init__(self, directory: Path, *, num_threads: int, max_streams: int) -> None:
        port = _free_port()
        command = [sys.executable, "-c", START, "serve", str(directory), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--num-threads", str(num_threads), "--max-num-seqs", str(max_streams)]
        start_s = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        try:
            self._wait(port)
            self.ready_s = time.perf_counter() - start_s
            super().__init__(f"http://127.0.0.1:{port}", "deltaserve over HTTP")
        except BaseException:
            self._process.kill()
            raise

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def _wait(self, port: int) -> None:
        deadline_s = time.perf_counter() + START_TIMEOUT_S
        while not _is_healthy(port):
            if self._process.poll() is not None or time.perf_counter() > deadline_s:
                raise ConfigError("`deltaserve serve` did not get ready; run it by hand to see why")
            time.sleep(0.05)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
