"""What crosses the border between a Client and its engine process: typed MessagePack, no pickle.

    client -> engine   Submit, Abort, Stop, and questions: GetStats, GetRecords, GetEvents, ResetPrefixCache
    engine -> client   Progress*, Ready, then Chunks (one a step), Rejected, and one answer to each question, in order:
                       Stats, Records, Events, Done

Each direction is one ordered stream. An engine that fails says so by a file and its exit (`engine.child`), not by a
message: it may no longer be able to send one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from deltaserve.core.errors import ContextLengthError, DeltaserveError, OverloadedError, RequestError
from deltaserve.core.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from deltaserve.core.types import RequestOptions, SamplingParams, TokenChunk
from deltaserve.engine.info import EngineInfo, EngineStats, RequestRecord


class _Message(msgspec.Struct, tag=True, array_like=True):
    """Encoded as [name of the class, fields...]."""


class Submit(_Message):
    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions = RequestOptions()


class Abort(_Message):
    request_id: int


class GetStats(_Message):
    """Answered by Stats."""


class GetRecords(_Message):
    """Answered by Records."""


class GetEvents(_Message):
    """Answered by Events: those that nobody has asked for yet."""


class ResetPrefixCache(_Message):
    """Answered by Done, when the cache holds nothing but what running requests use."""


class Stop(_Message):
    """Leave now; requests that still run are dropped without a chunk."""


class Progress(_Message):
    """Where the start stands: a word for the stage, and how much of it is done, 0 to 1."""

    stage: str
    fraction: float


class Ready(_Message):
    info: EngineInfo


class Chunks(_Message):
    chunks: list[TokenChunk]


class Rejected(_Message):
    """A Submit that the engine refused: the parts of one of the errors in `REJECTIONS`."""

    request_id: int
    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, request_id: int, error: DeltaserveError) -> Rejected:
        param = error.param if isinstance(error, RequestError) else None
        return cls(request_id, type(error).__name__, str(error), param)

    def to_error(self) -> DeltaserveError:
        kind = REJECTIONS[self.kind]
        return kind(self.message, self.param) if issubclass(kind, RequestError) else kind(self.message)


class Stats(_Message):
    stats: EngineStats


class Records(_Message):
    """The latest requests, oldest first."""

    records: list[RequestRecord]


class Events(_Message):
    """Cache events by kind; their numbers say in which order they came."""

    stored: list[BlocksStored]
    removed: list[BlocksRemoved]
    cleared: list[CacheCleared]

    @classmethod
    def of(cls, events: Sequence[CacheEvent]) -> Events:
        return cls(
            [event for event in events if isinstance(event, BlocksStored)],
            [event for event in events if isinstance(event, BlocksRemoved)],
            [event for event in events if isinstance(event, CacheCleared)],
        )

    def in_order(self) -> tuple[CacheEvent, ...]:
        events: list[CacheEvent] = [*self.stored, *self.removed, *self.cleared]
        return tuple(sorted(events, key=lambda event: event.sequence))


class Done(_Message):
    """What was asked for has happened."""


REJECTIONS: dict[str, type[DeltaserveError]] = {
    kind.__name__: kind for kind in (RequestError, ContextLengthError, OverloadedError)
}
Question = GetStats | GetRecords | GetEvents | ResetPrefixCache
Reply = Stats | Records | Events | Done
ToEngine = Submit | Abort | Stop | Question
FromEngine = Progress | Ready | Chunks | Rejected | Reply

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

REQUESTS_SOCKET = "requests"
CHUNKS_SOCKET = "chunks"
