"""What goes wrong on the client's side of the border ends in an error at once, never in a wait without end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from deltaserve.core.config import CacheConfig, EngineConfig
from deltaserve.core.errors import EngineDeadError
from deltaserve.core.types import SamplingParams
from deltaserve.engine import messages
from deltaserve.engine.client import Client

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@asynccontextmanager
async def started(directory: Path) -> AsyncIterator[Client]:
    config = EngineConfig(directory, max_model_len=256, num_threads=1, cache=CacheConfig(num_pages=8))
    async with asyncio.timeout(30), await Client.start(config) as client:
        yield client


def test_a_request_that_cannot_be_sent_stays_one_bad_request(sample_checkpoint: Path) -> None:
    async def unsendable() -> None:
        async with started(sample_checkpoint) as client:
            with pytest.raises(TypeError):
                await anext(client.generate((np.int64(5),), PARAMS))
            assert client.num_open == 0 and client.is_alive
            assert [chunk async for chunk in client.generate((5,), PARAMS)][-1].finish_reason is not None

    asyncio.run(unsendable())


def test_a_message_that_cannot_be_read_fails_whoever_waits(
    sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misread(data: bytes) -> messages.FromEngine:
        raise ValueError("gibberish")

    async def unreadable() -> None:
        async with started(sample_checkpoint) as client:
            monkeypatch.setattr(messages, "decode_from_engine", misread)
            with pytest.raises(EngineDeadError, match="could not be taken: ValueError: gibberish"):
                _ = [chunk async for chunk in client.generate((5,), PARAMS)]
            assert "gibberish" in await client.wait_dead()

    asyncio.run(unreadable())
