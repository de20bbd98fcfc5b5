"""A real server process with a sample checkpoint, as clients see it: the `openai` client's tour, clients that leave,
a drain on SIGTERM, and the death of the engine.

All tests up to the first SIGTERM share one server, and that one ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

READY_S = 60.0
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@dataclass
class Live:
    process: subprocess.Popen[Any]
    url: str
    banner: tuple[str, ...] = ()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = httpx.get(f"{self.url}/stats").json()
        return stats

    def children(self) -> list[int]:
        """Process ids; the engine is the only child."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in path.read_text("ascii").split()]


@contextmanager
def running(directory: Path, *flags: str) -> Iterator[Live]:
    command = [sys.executable, "-m", "deltaserve.cli", "serve", str(directory), "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    timer = threading.Timer(READY_S, process.kill)
    timer.start()
    lines: list[str] = []
    url = None
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
        yield Live(process, url[1], tuple(lines))
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def live(sample_checkpoint: Path) -> Iterator[Live]:
    flags = ("--served-model-name", "tiny,alias", "--max-model-len", "2K", "--max-num-seqs", "16", "--num-pages", "64")
    with running(sample_checkpoint, *flags) as live:
        yield live


def test_models(live: Live) -> None:
    with live.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        assert client.models.retrieve("alias").id == "alias"


def test_chat_streamed_equals_whole(live: Live) -> None:
    with live.client() as client:
        arguments: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "seed": 5}
        whole = client.chat.completions.create(**arguments)
        stream = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24
    assert chunks[-1].usage == whole.usage
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    message: Any = whole.choices[0].message
    for name in ("content", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == (getattr(message, name) or "")
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_choices_and_seeds(live: Live) -> None:
    with live.client() as client:

        def texts(seed: int | None) -> list[str]:
            answer = client.completions.create(model="tiny", prompt="Once", n=2, seed=seed, max_tokens=12)
            return [choice.text for choice in answer.choices]

        first = texts(3)
        assert texts(3) == first
        assert texts(4)[0] == first[1], "choice k of a seed is choice 0 of seed + k"
        assert first[0] != first[1]
        assert texts(None) != texts(None)


def test_logprobs(live: Live) -> None:
    with live.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == answer.usage.completion_tokens if answer.usage else False
        for entry in logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob), "greedy takes the likeliest"
        echo = client.completions.create(model="tiny", prompt="Once upon", max_tokens=1, logprobs=1, echo=True)
        old = echo.choices[0].logprobs
        assert old is not None
        assert old.token_logprobs is not None
        assert all(value is not None and value <= 0 for value in old.token_logprobs[1:])


def test_cached_prompts_are_counted_salted_and_forgotten(live: Live) -> None:
    prompt = "Once upon a time there was a fox. " * 12

    def num_cached(**fields: Any) -> int:
        with live.client() as client:
            usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, extra_body=fields).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    salt = {"cache_salt": "fox"}
    assert [num_cached(**salt) == 0, num_cached(**salt) >= 64, num_cached(cache_salt="hen") == 0] == [True] * 3
    records = httpx.get(f"{live.url}/debug/requests").json()["requests"]
    assert [record["cached_tokens"] > 0 for record in records[-3:]] == [False, True, False]
    assert httpx.post(f"{live.url}/reset_prefix_cache").status_code == 200
    assert num_cached(**salt, session_id="s", priority=1, speculative=False) == 0
    metrics = httpx.get(f"{live.url}/metrics").text
    assert float(re.search(r"deltaserve_prefix_cache_hits_total\S+ (\S+)", metrics)[1]) >= 64  # type: ignore[index]


def test_stop_strings_cut_the_text(live: Live) -> None:
    with live.client() as client:
        arguments: Any = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": 24}
        text = client.completions.create(**arguments).choices[0].text
        stop = text[len(text) // 2 :][:2]
        cut = client.completions.create(**arguments, stop=stop).choices[0]
        assert cut.text == text[: text.index(stop)]
        assert cut.finish_reason == "stop"


def test_errors_are_the_clients_exceptions(live: Live) -> None:
    with live.client() as client:
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="none", messages=HELLO)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="tiny", prompt="word " * 3000)
        assert long.value.code == "context_length_exceeded"
    assert httpx.get(f"{live.url}/health").status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(live: Live) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 3, "stream": True})
    command = ["curl", "-sN", f"{live.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert answer.startswith('data: {"id":"chatcmpl-')
    assert answer.endswith("data: [DONE]\n\n")


def test_clients_that_leave_give_everything_back(live: Live) -> None:
    async def one(client: httpx.AsyncClient, rng: random.Random) -> None:
        stream = rng.random() < 0.7
        body = {
            "prompt": [rng.randrange(5, 900) for _ in range(rng.randint(1, 300))],
            "max_tokens": rng.randint(20, 200),
            "n": rng.choice((1, 1, 3)),
            "ignore_eos": True,
            "stream": stream,
        }
        try:
            timeout = None if rng.random() < 0.2 else httpx.Timeout(10, read=rng.uniform(0.05, 1.0))
            async with client.stream("POST", "/v1/completions", json=body, timeout=timeout) as response:
                num_chunks = rng.randint(1, 30)
                async for _ in response.aiter_bytes():
                    num_chunks -= 1
                    if not num_chunks and timeout is not None:
                        break
        except httpx.ReadTimeout:
            return

    async def all_of_them() -> None:
        rng = random.Random(1)
        async with httpx.AsyncClient(base_url=live.url) as client:
            await asyncio.gather(*(one(client, random.Random(rng.random())) for _ in range(32)))

    before = live.stats()
    asyncio.run(all_of_them())
    deadline_s = time.monotonic() + 20
    while (stats := live.stats())["num_running"] or stats["num_waiting"]:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.05)
    assert stats["num_requests"] > before["num_requests"]
    assert (stats["num_available_pages"], stats["num_available_slots"]) == (stats["num_pages"], stats["num_slots"])
    assert stats["num_pages"] == 64


def test_sigterm_lets_running_answers_finish(live: Live) -> None:
    body = {"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        live.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert live.process.wait(10) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{live.url}/health")


def test_sigterm_aborts_after_the_deadline(sample_checkpoint: Path) -> None:
    with running(sample_checkpoint, "--shutdown-timeout", "0.3") as live:
        body = {"prompt": "Once", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            live.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert live.process.wait(10) == 0


def test_a_small_queue_a_host_tier_and_synthetic_drafts(sample_checkpoint: Path) -> None:
    """The flags together: what they announce, and that one waiting request more is refused."""
    drafts = {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "0", "--host-cache-bytes", "16M", "--num-snapshots", "3")
    body = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with running(sample_checkpoint, *flags, "--speculative-config", json.dumps(drafts)) as live:
        assert any(re.search(r"^drafts +up to 3 a step, SYNTHETIC acceptance of 2.5", line) for line in live.banner)
        assert any(re.search(r"^prefix cache +3 snapshots; on the host \d+ more", line) for line in live.banner)
        assert httpx.get(f"{live.url}/v1/models").json()["data"][0]["synthetic_acceptance_length"] == 2.5
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            refused = httpx.post(f"{live.url}/v1/completions", json={"prompt": "Once", "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert "retry-after" in refused.headers
            stats = live.stats()
        assert stats["num_refused"] == 1
        assert stats["drafts"]["num_verified"] > 0
        metrics = httpx.get(f"{live.url}/metrics").text
        assert "deltaserve_synthetic_acceptance_length" in metrics
        assert re.search(r"spec_decode_num_accepted_tokens_per_pos_total\S*position=\"2\"", metrics)


def test_a_dead_engine_ends_the_server(sample_checkpoint: Path) -> None:
    with running(sample_checkpoint) as live:
        body = {"prompt": "Once", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(live.children()[0], signal.SIGKILL)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert httpx.get(f"{live.url}/health").status_code == 503
        assert live.process.wait(10) == 1


def test_a_signal_while_the_engine_loads(sample_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "deltaserve.cli", "serve", str(sample_checkpoint), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        live = Live(process, "")
        deadline_s = time.monotonic() + READY_S
        while not live.children() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
