"""A real engine process behind a Client: what comes through, what is freed, and how everything ends.

Starting a process costs seconds, so one client serves all tests that leave it alive.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig
from deltaserve.core.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from deltaserve.core.events import BlocksStored, CacheCleared
from deltaserve.core.types import FinishReason, RequestOptions, SamplingParams, TokenChunk
from deltaserve.engine import launch
from deltaserve.engine.client import Client, merge
from deltaserve.engine.llm import LLM

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [tuple(range(n, 2 * n)) for n in (1, 3, 63, 64, 65, 130, 200)] + [tuple(range(1000, 0, -1))]


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """Runs coroutines on one event loop for the whole module."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def config(sample_checkpoint: Path) -> EngineConfig:
    return EngineConfig(
        sample_checkpoint,
        max_model_len=1024,
        num_threads=1,
        debug_checks=True,
        cache=CacheConfig(num_pages=200),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
    )


@pytest.fixture(scope="module")
def client(run: Run[Any], config: EngineConfig) -> Iterator[Client]:
    client = run(Client.start(config))
    yield client
    assert run(client.shutdown()) == 0


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> list[tuple[int, ...]]:
    """The same prompts by LLM in this process, one by one."""
    settings = {"max_model_len": 1024, "num_threads": 1, "num_pages": 200}
    with LLM(config.model, **settings) as llm:
        return [tuple(llm.generate(prompt_ids, GREEDY)[0].token_ids) for prompt_ids in PROMPTS]


async def collect(chunks: AsyncGenerator[TokenChunk, None]) -> TokenChunk:
    return merge([chunk async for chunk in chunks])


async def tokens_of(client: Client, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
    return (await collect(client.generate(prompt_ids, GREEDY))).token_ids


async def wait_until(is_so: Callable[[], bool], timeout_s: float = 3.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.02)


async def assert_all_free(client: Client) -> None:
    stats = await client.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.num_available_pages, stats.num_available_slots) == (stats.num_pages, stats.num_slots)
    assert client.num_open == 0


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children_of(process_id: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]


def test_ready_tells_the_sizes(client: Client, config: EngineConfig) -> None:
    info = client.info
    assert (info.max_model_len, info.num_pages, info.num_rows) == (1024, 200, 16)
    assert info.has_prefix_cache and info.num_slots == 2 * 16 + info.num_snapshots > 32
    assert (info.model_type, info.vocab_size, info.num_ranks) == ("qwen3_5_moe_text", 1024, 1)
    assert len(info.eos_ids) == 2 and len(info.pools) >= 4
    assert sum(info.timings_s.values()) < 60 and info.timings_s.keys() >= {"import", "config", "weights", "pools"}


def test_tokens_are_those_of_llm_alone_and_together(
    run: Run[Any], client: Client, expected: list[tuple[int, ...]]
) -> None:
    async def both() -> None:
        assert await tokens_of(client, PROMPTS[4]) == expected[4]
        assert await asyncio.gather(*(tokens_of(client, ids) for ids in PROMPTS)) == expected
        await assert_all_free(client)

    run(both())


def test_the_last_chunk_says_why(run: Run[Any], client: Client) -> None:
    async def ends() -> None:
        whole = await collect(client.generate((1, 2), replace(GREEDY, max_tokens=3, logprobs=2, prompt_logprobs=0)))
        assert whole.finish_reason is FinishReason.LENGTH and len(whole.token_ids) == 3
        assert whole.logprobs is not None and [entry.token_id for entry in whole.logprobs] == list(whole.token_ids)
        assert whole.prompt_logprobs is not None and whole.prompt_logprobs[0] is None
        assert len(whole.prompt_logprobs) == 2
        stop = replace(GREEDY, stop_token_ids=(whole.token_ids[1],))
        stopped = await collect(client.generate((1, 2), stop))
        assert stopped.finish_reason is FinishReason.STOP and stopped.stop_token_id == whole.token_ids[1]

    run(ends())


@pytest.mark.parametrize("way", ["close", "break", "cancel", "abort"])
def test_every_way_out_aborts(run: Run[Any], client: Client, way: str) -> None:
    long = replace(GREEDY, max_tokens=900)

    async def read(request_id: int, got: list[TokenChunk]) -> None:
        async for chunk in client.generate((1, 2, 3), long, request_id):
            got.append(chunk)
            if way == "break":
                break

    async def leave() -> None:
        request_id, got = client.new_request_id(), list[TokenChunk]()
        if way == "close":
            async with aclosing(client.generate((1, 2, 3), long)) as chunks:
                await anext(chunks)
        else:
            task = asyncio.create_task(read(request_id, got))
            await wait_until(lambda: bool(got))
            if way == "cancel":
                task.cancel()
            elif way == "abort":
                client.abort(request_id)
                client.abort(request_id)
            await asyncio.wait([task])
            assert task.cancelled() == (way == "cancel")
            if way == "abort":
                assert got[-1].finish_reason is FinishReason.ABORT
        await wait_until(lambda: client.num_open == 0)
        await assert_all_free(client)

    run(leave())


def test_requests_may_be_read_in_another_order_than_made(
    run: Run[Any], client: Client, expected: list[tuple[int, ...]]
) -> None:
    async def backwards() -> None:
        made = [client.generate(ids, GREEDY) for ids in PROMPTS]
        for chunks, tokens in reversed(list(zip(made, expected, strict=True))):
            assert (await collect(chunks)).token_ids == tokens

    run(backwards())


def test_a_request_that_nobody_reads_is_never_sent(run: Run[Any], client: Client) -> None:
    async def unread() -> None:
        before = (await client.stats()).num_requests
        chunks = client.generate((1, 2), GREEDY)
        assert (await client.stats()).num_requests == before
        await chunks.aclose()
        await assert_all_free(client)

    run(unread())


def test_many_streams_with_random_disconnects_leave_nothing(run: Run[Any], client: Client) -> None:
    chance = random.Random(0)

    async def one(prompt_ids: tuple[int, ...], num_read: int, delay_s: float) -> None:
        async with aclosing(client.generate(prompt_ids, GREEDY)) as chunks:
            async for _ in chunks:
                num_read -= 1
                if not num_read:
                    return
                await asyncio.sleep(delay_s)

    async def everybody() -> None:
        tasks = [
            asyncio.create_task(one((n + 1,) * chance.randint(1, 150), chance.randint(1, 40), chance.choice((0, 0.01))))
            for n in range(48)
        ]
        for task in chance.sample(tasks, 12):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await assert_all_free(client)

    run(everybody())


def test_a_slow_reader_gets_what_has_gathered_and_delays_nobody(
    run: Run[Any], client: Client, expected: list[tuple[int, ...]]
) -> None:
    async def slow() -> list[TokenChunk]:
        got = []
        async for chunk in client.generate(PROMPTS[1], GREEDY):
            got.append(chunk)
            await asyncio.sleep(0.5)
        return got

    async def meet() -> None:
        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        assert await asyncio.gather(*(tokens_of(client, ids) for ids in PROMPTS)) == expected
        got = await task
        assert merge(got).token_ids == expected[1] and len(got) < len(expected[1]) / 2

    run(meet())


def test_a_wrong_request_is_refused_at_the_call(run: Run[Any], client: Client) -> None:
    async def refused() -> None:
        with pytest.raises(RequestError, match="vocabulary"):
            client.generate((1 << 20,), GREEDY)
        with pytest.raises(ContextLengthError):
            client.generate((1,) * 1024, GREEDY)
        await assert_all_free(client)

    run(refused())


def test_what_only_the_engine_refuses_comes_back_as_the_same_error(
    run: Run[Any], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "info", replace(client.info, max_model_len=1 << 20, vocab_size=1 << 20))

    async def refused() -> None:
        with pytest.raises(ContextLengthError, match="context length") as length:
            await collect(client.generate((1,) * 2000, GREEDY))
        assert length.value.param == "prompt"
        with pytest.raises(RequestError, match="token id 5000") as vocabulary:
            await collect(client.generate((5000,), GREEDY))
        assert vocabulary.value.param == "prompt"
        await assert_all_free(client)

    run(refused())


def test_the_cache_can_be_seen_steered_and_reset(run: Run[Any], client: Client) -> None:
    prompt = tuple(range(2, 202))

    async def num_cached(**options: Any) -> int:
        whole = await collect(client.generate(prompt, GREEDY, options=RequestOptions(**options)))
        assert whole.cache is not None and whole.cache.num_cached == whole.num_cached
        return whole.num_cached

    async def steered() -> None:
        await client.cache_events()
        assert [await num_cached(cache_salt="one") for _ in range(2)] == [0, 192]
        assert await num_cached(cache_salt="two") == 0, "salts share nothing"
        records = [record.cache.num_cached for record in await client.records()]
        assert records[-3:] == [0, 192, 0]
        await client.reset_prefix_cache()
        assert await num_cached(cache_salt="one") == 0
        events = await client.cache_events()
        assert [event.sequence for event in events] == list(range(events[0].sequence, events[-1].sequence + 1))
        kinds = [type(event) for event in events]
        assert kinds[0] is BlocksStored and CacheCleared in kinds and kinds[-1] is BlocksStored
        stats = await client.stats()
        assert stats.cache.num_hit >= 192 and stats.cache.num_looked_up > stats.cache.num_hit
        await assert_all_free(client)

    run(steered())


def test_wrong_options_are_refused_at_the_call(run: Run[Any], client: Client) -> None:
    async def refused() -> None:
        for name, value in (("priority", 1 << 40), ("session_id", ""), ("cache_salt", "x" * 2000), ("priority", "1")):
            with pytest.raises(RequestError, match=name) as caught:
                client.generate((1, 2), GREEDY, options=RequestOptions(**{name: value}))
            assert caught.value.param == name

    run(refused())


def test_a_full_queue_refuses_and_counts_it(run: Run[Any], config: EngineConfig) -> None:
    """One row, nobody may wait: the second request is refused, and the one that runs hears nothing of it."""

    async def full() -> None:
        scheduler = SchedulerConfig(max_num_seqs=1, max_queued=0)
        async with await Client.start(replace(config, scheduler=scheduler)) as client:
            async with aclosing(client.generate((1, 2), replace(GREEDY, max_tokens=900))) as chunks:
                await anext(chunks)
                with pytest.raises(OverloadedError):
                    await collect(client.generate((3, 4), GREEDY))
                assert (await client.stats()).num_refused == 1
                assert (await anext(chunks)).token_ids
            assert len(await tokens_of(client, (3, 4))) == 24

    run(full())


def test_signals_to_the_engine_are_left_to_its_parent(run: Run[Any], client: Client) -> None:
    async def ignored() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.process_id, number)
        assert len(await tokens_of(client, (1, 2))) == 24

    run(ignored())


def test_a_killed_engine_fails_every_request_at_once(run: Run[Any], config: EngineConfig) -> None:
    async def killed() -> None:
        client = await Client.start(config)
        long = replace(GREEDY, max_tokens=1000)
        tasks = [asyncio.create_task(collect(client.generate((n,), long))) for n in range(8)]
        await wait_until(lambda: client.num_open == 8)
        stats = asyncio.create_task(client.stats())
        await asyncio.sleep(0.1)
        os.kill(client.process_id, signal.SIGKILL)
        started_s = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - started_s < 1.5
        assert all(isinstance(result, EngineDeadError) for result in results), results
        assert await client.wait_dead() == client.dead_reason == "the engine process was ended by SIGKILL"
        assert not client.is_alive and client.num_open == 0
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.generate((1,), GREEDY)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await client.stats()
        await asyncio.wait([stats])
        assert await client.shutdown() == -signal.SIGKILL

    run(killed())


def test_two_ranks_give_the_tokens_of_one_and_fall_together(
    run: Run[Any], config: EngineConfig, expected: list[tuple[int, ...]]
) -> None:
    """The long prompt in one step makes a plan that takes more than one message to the other rank."""
    whole = replace(config, tensor_parallel_size=2, num_threads=2, scheduler=SchedulerConfig(8, 2048))

    async def two() -> None:
        client = await Client.start(whole)
        assert client.info.num_ranks == 2
        assert await asyncio.gather(*(tokens_of(client, ids) for ids in PROMPTS)) == expected
        await assert_all_free(client)
        (follower,) = children_of(client.process_id)
        task = asyncio.create_task(collect(client.generate((1,), replace(GREEDY, max_tokens=1000))))
        await asyncio.sleep(0.3)
        os.kill(follower, signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"^rank 1 was ended by SIGKILL$"):
            await task
        assert time.monotonic() - started_s < 2
        assert await client.shutdown() > 0

    run(two())


def test_an_idle_follower_is_missed_too(run: Run[Any], config: EngineConfig) -> None:
    async def idle() -> None:
        client = await Client.start(replace(config, tensor_parallel_size=2))
        (follower,) = children_of(client.process_id)
        os.kill(follower, signal.SIGKILL)
        assert await asyncio.wait_for(client.wait_dead(), 2) == "rank 1 was ended by SIGKILL"
        await wait_until(lambda: not is_running(client.process_id))
        assert await client.shutdown() > 0

    run(idle())


@pytest.mark.parametrize(
    ("num_ranks", "sentence"),
    [
        (1, r"^a step of the engine failed: ValueError: broken on purpose$"),
        (2, r"^rank 1: ValueError: broken on purpose$"),
    ],
)
def test_s3_f14_a_step_that_raises_on_any_rank_ends_the_engine(
    run: Run[Any], config: EngineConfig, monkeypatch: pytest.MonkeyPatch, num_ranks: int, sentence: str
) -> None:
    """Row S3-F14: one rank's failure must not leave an engine that goes on. The last rank raises in its third step."""

    def start_broken(config: EngineConfig, directory: Path) -> subprocess.Popen[bytes]:
        return launch.start("tests.engine.broken_engine", launch.EngineJob(config, directory, time.time()))

    monkeypatch.setattr(launch, "start_engine", start_broken)

    async def broken() -> None:
        client = await Client.start(replace(config, tensor_parallel_size=num_ranks))
        tasks = [asyncio.create_task(collect(client.generate((n,), GREEDY))) for n in range(3)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            with pytest.raises(EngineDeadError, match=sentence):
                raise result
        assert await client.shutdown() > 0

    run(broken())


ORPHANS = """
import asyncio, sys
from pathlib import Path
from deltaserve.core.config import EngineConfig
from deltaserve.core.types import SamplingParams
from deltaserve.engine import launch
from deltaserve.engine.client import Client

async def main():
    client = await Client.start(EngineConfig(Path(sys.argv[1]), tensor_parallel_size=2, max_model_len=1024))
    chunks = client.generate((1, 2), SamplingParams(max_tokens=1000, ignore_eos=True))
    await anext(chunks)
    print(client.process_id, client._directory, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_no_process_and_no_directory_outlives_a_killed_parent(sample_checkpoint: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", ORPHANS, str(sample_checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        engine, directory = parent.stdout.readline().split()
        family = [int(engine), *children_of(int(engine))]
        assert len(family) == 2 and all(map(is_running, family)) and Path(directory).is_dir()
        parent.kill()
    asyncio.run(wait_until(lambda: not any(map(is_running, family)) and not Path(directory).exists()))


def test_shutdown_drains_then_aborts(run: Run[Any], config: EngineConfig) -> None:
    async def drained() -> None:
        client = await Client.start(config)
        short = asyncio.create_task(collect(client.generate((1,), replace(GREEDY, max_tokens=3))))
        long = asyncio.create_task(collect(client.generate((2,), replace(GREEDY, max_tokens=1000))))
        await asyncio.sleep(0)
        assert client.num_open == 2
        closing = asyncio.create_task(client.shutdown(drain_s=1.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            client.generate((1,), GREEDY)
        assert (await short).finish_reason is FinishReason.LENGTH
        last = await long
        assert last.finish_reason is FinishReason.ABORT and last.token_ids
        assert await closing == 0
        assert not client.is_alive and not is_running(client.process_id)
        assert await client.shutdown() == 0

    run(drained())


def test_a_start_that_fails_is_a_sentence(run: Run[Any], config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 1048576 is more than the 8192 positions"):
        run(Client.start(replace(config, max_model_len=1 << 20)))
    (tmp_path / "config.json").write_text((config.model / "config.json").read_text())
    with pytest.raises(CheckpointError):
        run(Client.start(replace(config, model=tmp_path)))
