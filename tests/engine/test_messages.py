"""What crosses the border arrives as it left."""

from __future__ import annotations

import msgspec
import pytest

from deltaserve.core.types import FinishReason, SamplingParams, TokenChunk, TokenLogprob
from deltaserve.engine import messages
from deltaserve.engine.info import EngineInfo, EngineStats

PARAMS = SamplingParams(
    max_tokens=3, seed=-5, logit_bias={7: -1.5}, stop=("a", "é"), stop_token_ids=(1,), logprobs=0, temperature=0
)
LOGPROB = TokenLogprob(3, -0.5, 2, ((1, -0.1), (3, -0.5)))
CHUNK = TokenChunk(9, (3, 4), (LOGPROB, LOGPROB), (None, LOGPROB), FinishReason.STOP, 4, 64, "sentence")


@pytest.mark.parametrize(
    "message",
    [messages.Submit(1, (1, 2, 3), PARAMS), messages.Abort(1 << 40), messages.GetStats(), messages.Stop()],
)
def test_to_the_engine(message: messages.ToEngine) -> None:
    assert messages.decode_to_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.Progress("weights", 0.5),
        messages.Ready(EngineInfo("qwen3_next", 100, 50, (1, 2), 3, 4, 5, pools=("a",), timings_s={"load": 0.5})),
        messages.Chunks([CHUNK, TokenChunk(2)]),
        messages.Rejected(1, "no", "prompt", is_context_length=True),
        messages.Stats(EngineStats(*range(1, 14), 0.5)),
    ],
)
def test_from_the_engine(message: messages.FromEngine) -> None:
    assert messages.decode_from_engine(messages.encode(message)) == message


def test_logprobs_may_be_minus_infinity() -> None:
    chunk = TokenChunk(1, (2,), (TokenLogprob(2, float("-inf"), 1),))
    assert messages.decode_from_engine(messages.encode(messages.Chunks([chunk]))) == messages.Chunks([chunk])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\xa5Abort\xa1x", b"\x91\xa5Other"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_to_engine(data)
