"""What crosses the border between a Client and its engine process: typed MessagePack, no pickle.

    client -> engine   Submit, Abort, GetStats, Stop
    engine -> client   Progress*, Ready, then Chunks (one a step), Rejected, Stats

Each direction is one ordered stream. An engine that fails says so by a file and its exit (`engine.child`), not by a
message: it may no longer be able to send one.
"""

from __future__ import annotations

import msgspec

from deltaserve.core.types import SamplingParams, TokenChunk
from deltaserve.engine.info import EngineInfo, EngineStats


class _Message(msgspec.Struct, tag=True, array_like=True):
    """Encoded as [name of the class, fields...]."""


class Submit(_Message):
    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams


class Abort(_Message):
    request_id: int


class GetStats(_Message):
    """Answered by one Stats, in order."""


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
    """A Submit that the engine refused: the parts of a RequestError."""

    request_id: int
    message: str
    param: str | None
    is_context_length: bool


class Stats(_Message):
    stats: EngineStats


ToEngine = Submit | Abort | GetStats | Stop
FromEngine = Progress | Ready | Chunks | Rejected | Stats

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

REQUESTS_SOCKET = "requests"
CHUNKS_SOCKET = "chunks"
