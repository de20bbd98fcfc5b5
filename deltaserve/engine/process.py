"""Entry of the engine process, `python -m deltaserve.engine.process`: the loop of an Engine behind two sockets.

While requests run it looks for messages between steps without waiting; with nothing to do it sleeps until one comes.
The chunks of a step leave as one message. How the process is told to start and how it ends: `engine.child`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from deltaserve.core.errors import OverloadedError, RequestError
from deltaserve.engine import child, messages
from deltaserve.engine.build import Timeline, build_engine
from deltaserve.engine.launch import EngineJob
from deltaserve.engine.loop import Engine
from deltaserve.engine.shortages import Shortages

_STALL_MS = 10  # between two tries to plan a step, when requests wait but none can run
_PROGRESS_S = 0.1


class Link:
    """The engine's end of the two sockets. Neither side ever waits for the other to read."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._inbox = self._connect(zmq.PULL, directory / messages.REQUESTS_SOCKET)
        self._outbox = self._connect(zmq.PUSH, directory / messages.CHUNKS_SOCKET)
        self._last_progress_s = 0.0

    def receive(self, wait_ms: int | None) -> Iterator[messages.ToEngine]:
        """Messages that are there, after waiting for the first one at most `wait_ms` (None: as long as it takes)."""
        if not self._inbox.poll(wait_ms):
            return
        while self._inbox.poll(0):
            yield messages.decode_to_engine(self._inbox.recv())

    def send(self, message: messages.FromEngine) -> None:
        self._outbox.send(messages.encode(message))

    def report(self, stage: str, fraction: float) -> None:
        """Progress of the start, not too often."""
        if fraction >= 1 or time.monotonic() - self._last_progress_s > _PROGRESS_S:
            self._last_progress_s = time.monotonic()
            self.send(messages.Progress(stage, fraction))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _connect(self, kind: int, path: Path) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.connect(f"ipc://{path}")
        return socket


def serve(engine: Engine, link: Link) -> None:
    """Until told to stop. Raises EngineDeadError when a step fails."""
    shortages = Shortages()
    while True:
        for message in link.receive(_wait_ms(engine)):
            if isinstance(message, messages.Stop):
                return
            _obey(engine, link, message)
        if engine.has_work:
            chunks = engine.step()
            if chunks:
                link.send(messages.Chunks(chunks))
            if shortages.is_due(now_s := time.monotonic()):
                for sentence in shortages.look(engine.stats(), now_s):
                    sys.stderr.write(f"{sentence}\n")


def _wait_ms(engine: Engine) -> int | None:
    if not engine.has_work:
        return None
    return _STALL_MS if engine.is_stalled else 0


def _obey(engine: Engine, link: Link, message: messages.Submit | messages.Abort | messages.Question) -> None:
    match message:
        case messages.Submit():
            try:
                engine.submit(message.prompt_ids, message.params, message.request_id, message.options)
            except (RequestError, OverloadedError) as error:
                link.send(messages.Rejected.of(message.request_id, error))
        case messages.Abort():
            engine.abort(message.request_id)
        case _:
            link.send(_reply(engine, message))


def _reply(engine: Engine, question: messages.Question) -> messages.Reply:
    match question:
        case messages.GetStats():
            return messages.Stats(engine.stats())
        case messages.GetRecords():
            return messages.Records(list(engine.records))
        case messages.GetEvents():
            return messages.Events.of(engine.cache_events())
        case messages.ResetPrefixCache():
            engine.reset_prefix_cache()
            return messages.Done()


def _print_start(engine: Engine) -> None:
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in engine.info.timings_s.items())
    total_s = sum(engine.info.timings_s.values())
    for line in (*engine.info.notes, *engine.info.pools, f"engine ready in {total_s:.2f} s ({stages})"):
        sys.stderr.write(f"{line}\n")


def main() -> None:
    job = child.read_job(EngineJob)
    child.follow_parent(job.directory)
    timeline = Timeline(job.started_s)
    timeline.mark("import")

    def fail_with_rank(sentence: str) -> None:
        child.write_failure(job.directory, child.Failure("EngineDeadError", sentence))
        child.leave(child.FAILED)

    try:
        link = Link(job.directory)
        engine = build_engine(job.config, timeline, link.report, job.directory, fail_with_rank)
        _print_start(engine)
        link.send(messages.Ready(engine.info))
        serve(engine, link)
        engine.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, the client must hear of it
        child.report_failure(job.directory, error)
        child.leave(child.FAILED)
    link.close()
    child.leave(0)


if __name__ == "__main__":
    main()
