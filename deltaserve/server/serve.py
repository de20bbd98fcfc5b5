"""The life of a server process: find the model, start the engine, serve, leave.

The engine process is started first; the HTTP application is imported and built while it loads. Then three things may
end the server:

| what                 | how it ends                                                                  | exit code |
| -------------------- | ---------------------------------------------------------------------------- | --------- |
| SIGTERM, SIGINT      | no new requests; running ones get `--shutdown-timeout`, then are aborted     | 0         |
| the engine dies      | running requests fail, /health says 503 for a moment, then the process exits | 1         |
| a second signal      | at once; the engine follows, because it sees its parent gone                 | by signal |
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Generator
from ipaddress import ip_address
from math import ceil
from typing import TYPE_CHECKING, TypeVar

import uvicorn
import uvloop
from rich.console import Console

from deltaserve.core.errors import ConfigError
from deltaserve.engine.client import Client
from deltaserve.server.checkpoint import Checkpoint, find_checkpoint
from deltaserve.server.console import LoadProgress, print_summary
from deltaserve.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deltaserve.server.build import Edge

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
DEAD_HEALTH_S = 2.0  # how long a server without an engine still answers /health
LATE_RESPONSES_S = 5  # for answers to leave after the engine has stopped
KEEP_ALIVE_S = 75

Result = TypeVar("Result")


def serve(settings: Settings, console: Console) -> int:
    """Until a signal or the engine's death; the exit code. Raises ConfigError before anything is served."""
    started_s = time.monotonic()
    checkpoint = find_checkpoint(settings.model, settings.revision, settings.download_dir)
    if checkpoint.note:
        console.print(checkpoint.note, highlight=False, soft_wrap=True)
    with bind(settings.host, settings.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Process(settings, checkpoint, listener, console, started_s).run())


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is noticed before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        other = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another {other}") from None
    return listener


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    level = settings.uvicorn_log_level
    return uvicorn.Config(
        app,
        log_level=level,
        access_log=level in ("info", "debug", "trace"),
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=ceil(settings.shutdown_timeout) + LATE_RESPONSES_S,
    )


class _Process:
    def __init__(
        self, settings: Settings, checkpoint: Checkpoint, listener: socket.socket, console: Console, started_s: float
    ) -> None:
        self._settings = settings
        self._checkpoint = checkpoint
        self._listener = listener
        self._console = console
        self._started_s = started_s
        self._stop = asyncio.Event()

    async def run(self) -> int:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        with LoadProgress(self._console) as progress:
            config = self._settings.engine_config(self._checkpoint.directory)
            started = await self._unless_stopped(self._start(Client.start(config, progress)))
        if started is None:
            return 0
        client, edge = started
        try:
            return await self._serve(client, edge)
        finally:
            await client.shutdown()

    def _on_signal(self, number: int) -> None:
        """From the second time on a signal does what it does to any process."""
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        self._stop.set()

    async def _start(self, engine: Coroutine[None, None, Client]) -> tuple[Client, Edge]:
        start = asyncio.create_task(engine)
        try:
            await asyncio.sleep(0)  # the engine process is on its way now
            from deltaserve.server.build import Edge  # noqa: PLC0415 - slow, and there is time now

            edge = Edge.read(self._settings, self._checkpoint)
            return await start, edge
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)

    async def _unless_stopped(self, work: Coroutine[None, None, Result]) -> Result | None:
        """None if a signal came first; `work` is then cancelled and awaited."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        return task.result()

    async def _serve(self, client: Client, edge: Edge) -> int:
        config = uvicorn_config(edge.application(client), self._settings)
        server = _Server(config, on_started=lambda: self._summarize(client, edge))
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        http.add_done_callback(lambda _: self._stop.set())
        reason = await self._unless_stopped(client.wait_dead())
        if reason is not None:
            logger.error("the engine is dead: %s", reason)
            await asyncio.sleep(DEAD_HEALTH_S)
        server.should_exit = True
        await self._drain(client)
        await http
        return 0 if reason is None else 1

    async def _drain(self, client: Client) -> None:
        timeout_s = self._settings.shutdown_timeout
        if client.num_open:
            self._console.print(f"stopping; {client.num_open} running requests get {timeout_s:g} s", highlight=False)
        await client.shutdown(timeout_s)

    def _summarize(self, client: Client, edge: Edge) -> None:
        host, port = self._listener.getsockname()[:2]
        host = "localhost" if ip_address(host).is_unspecified else host  # no browser opens 0.0.0.0 everywhere
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print_summary(self._console, edge.names, client.info, url, time.monotonic() - self._started_s)


class _Server(uvicorn.Server):
    """uvicorn, but signals are ours: it would end the process by the signal, not with exit code 0."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
