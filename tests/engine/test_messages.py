"""What crosses the border arrives as it left."""

from __future__ import annotations

import msgspec
import pytest

from deltaserve.cache.manager import CacheStats
from deltaserve.core.errors import ContextLengthError, DeltaserveError, OverloadedError, RequestError
from deltaserve.core.events import BlocksRemoved, BlocksStored, CacheCleared
from deltaserve.core.types import (
    CacheNote,
    CacheRecord,
    FinishReason,
    GrammarRule,
    RequestOptions,
    SamplingParams,
    Thinking,
    TokenChunk,
    TokenLogprob,
)
from deltaserve.engine import messages
from deltaserve.engine.info import EngineInfo, EngineStats, RequestRecord
from deltaserve.scheduler.speculation import DraftCounts

PARAMS = SamplingParams(
    max_tokens=3,
    seed=-5,
    logit_bias={7: -1.5},
    stop=("a", "é"),
    stop_token_ids=(1,),
    logprobs=0,
    temperature=0,
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(4, 5),
    thinking=Thinking(7, 6, is_open=False, budget=9),
    grammar=GrammarRule('{"grammars": []}', (8,)),
)
EVENTS = (
    BlocksStored(1, None, (b"a" * 16, b"b" * 16), tuple(range(128))),
    CacheCleared(2),
    BlocksStored(3, b"a" * 16, (b"c" * 16,), tuple(range(64))),
    BlocksRemoved(4, (b"c" * 16,)),
)
LOGPROB = TokenLogprob(3, -0.5, 2, ((1, -0.1), (3, -0.5)))
RECORD = CacheRecord(100, 64, 128, 0, CacheNote.NO_SNAPSHOT)
CHUNK = TokenChunk(9, (3, 4), (LOGPROB, LOGPROB), (None, LOGPROB), FinishReason.STOP, 4, 64, RECORD, "sentence")


@pytest.mark.parametrize(
    "message",
    [
        messages.Submit(1, (1, 2, 3), PARAMS, RequestOptions(-3, "salt", "session", use_drafts=False)),
        messages.Abort(1 << 40),
        messages.GetStats(),
        messages.GetRecords(),
        messages.GetEvents(),
        messages.ResetPrefixCache(),
        messages.Stop(),
    ],
)
def test_to_the_engine(message: messages.ToEngine) -> None:
    assert messages.decode_to_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Progress("weights", 0.5),
        messages.Ready(EngineInfo("qwen3_next", 100, 50, (1, 2), 3, 4, 5, pools=("a",), timings_s={"load": 0.5})),
        messages.Chunks([CHUNK, TokenChunk(2)]),
        messages.Rejected(1, "RequestError", "no", "prompt"),
        messages.Stats(
            EngineStats(
                *range(1, 14), 0.5, *range(7, 13), 0.25, 0.5, CacheStats(5), DraftCounts(4, 12, 7, [4, 4], [4, 3])
            )
        ),
        messages.Records([RequestRecord(3, RECORD)]),
        messages.Events.of(EVENTS),
        messages.Done(),
    ],
)
def test_from_the_engine(message: messages.FromEngine) -> None:
    assert messages.decode_from_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    "error",
    [RequestError("no", "stop[1]"), RequestError("no"), ContextLengthError("long", "prompt"), OverloadedError("full")],
)
def test_rejections_become_the_errors_they_were(error: DeltaserveError) -> None:
    message = messages.decode_from_engine(messages.encode(messages.Rejected.of(7, error)))
    assert isinstance(message, messages.Rejected) and message.request_id == 7
    again = message.to_error()
    assert (type(again), str(again)) == (type(error), str(error))
    assert getattr(again, "param", None) == getattr(error, "param", None)


def test_events_come_in_the_order_of_their_numbers() -> None:
    message = messages.decode_from_engine(messages.encode(messages.Events.of(EVENTS)))
    assert isinstance(message, messages.Events) and message.in_order() == EVENTS


def test_logprobs_may_be_minus_infinity() -> None:
    chunk = TokenChunk(1, (2,), (TokenLogprob(2, float("-inf"), 1),))
    assert messages.decode_from_engine(messages.encode(messages.Chunks([chunk]))) == messages.Chunks([chunk])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\xa5Abort\xa1x", b"\x91\xa5Other"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_to_engine(data)
