"""Text streams against a second, slower definition of the same rules, over every way of cutting the tokens up."""

from __future__ import annotations

import codecs
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltaserve.core.types import FinishReason, SamplingParams, TokenChunk, TokenLogprob
from deltaserve.engine.text import TextDelta, TextStream

SPECIAL = 1000
SAMPLE = "na\u0308ive 👩‍👩‍👧 日本語 e\u0301, ÅÅ \u200d STOP ST"
BAD_BYTES = [b"\x80", b"\xff", b"\xe6", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe0\x80"]


@dataclass
class Bytes:
    """A vocabulary given as the bytes of each id; ids from SPECIAL on are special and read `<s>`."""

    pieces: list[bytes]
    special_ids: frozenset[int] = frozenset(range(SPECIAL, SPECIAL + 3))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return b"<s>"
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


@dataclass
class Output:
    """Deltas put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        assert len(delta.token_ids) == len(delta.offsets)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.offsets += delta.offsets
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def logprob(position: int, token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, logprob=-float(position), rank=1)


def chunks_of(ids: list[int], sizes: list[int], stop_token_id: int | None = None) -> list[TokenChunk]:
    """The ids in chunks of these sizes; the rest one by one; the last chunk finishes."""
    chunks, start = [], 0
    while start < len(ids) or not chunks:
        size = sizes[len(chunks)] if len(chunks) < len(sizes) else 1
        part = tuple(ids[start : start + size])
        is_last = start + size >= len(ids)
        chunks.append(
            TokenChunk(
                request_id=1,
                token_ids=part,
                logprobs=tuple(logprob(start + i, token_id) for i, token_id in enumerate(part)),
                finish_reason=None if not is_last else FinishReason.STOP if stop_token_id else FinishReason.LENGTH,
                stop_token_id=stop_token_id if is_last else None,
            )
        )
        start += size
    return chunks


def run(vocabulary: Bytes, params: SamplingParams, chunks: list[TokenChunk]) -> Output:
    stream, output = TextStream(vocabulary, params), Output()
    for chunk in chunks:
        output.add(stream.feed(chunk))
        if stream.is_finished:
            break
    return output


def spans(data: bytes) -> list[tuple[int, int]]:
    """[start, stop) in bytes of each character of `data`, as Python's own decoder sees them."""
    bad: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note", note)
    text = data.decode(errors="note")
    result, position, remaining = [], 0, list(bad)
    for character in text:
        if remaining and remaining[0][0] == position:
            result.append(remaining.pop(0))
        else:
            result.append((position, position + len(character.encode())))
        position = result[-1][1]
    return result


def define(vocabulary: Bytes, params: SamplingParams, ids: list[int]) -> Output:
    """The rules of engine.text read literally, with the whole output at hand. All ids are ordinary tokens."""
    hidden = vocabulary.special_ids if params.skip_special_tokens else frozenset()
    pieces = [b"" if i in hidden else vocabulary.token_bytes(i) for i in ids]
    data = b"".join(pieces)
    text, where = data.decode(errors="replace"), spans(data)
    starts = [sum(map(len, pieces[:n])) for n in range(len(ids) + 1)]
    offsets = []
    for start, piece in zip(starts, pieces, strict=False):
        own = [i for i, (a, b) in enumerate(where) if a < start + len(piece) and start < b]
        offsets.append(own[0] if own else len(_complete(data[:start])))
    protected = len(_complete(data[: starts[min(params.min_tokens, len(ids))]]))
    if params.min_tokens >= len(ids):
        protected = len(text)
    for end in range(protected + 1, len(text) + 1):
        found = [string for string in params.stop if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            cut = end if params.include_stop_str_in_output else end - len(longest)
            kept = [n for n in range(len(ids)) if offsets[n] < cut]
            return _output(text[:cut], ids, offsets, kept, FinishReason.STOP, longest)
    return _output(text, ids, offsets, list(range(len(ids))), FinishReason.LENGTH, None)


def _complete(data: bytes) -> str:
    """Characters that no further bytes can change: all but an end that is the beginning of a character."""
    for size in (3, 2, 1):
        end = data[-size:]
        if len(end) == size and any(_begins(end, character) for character in _OF_EACH_LENGTH):
            return data[:-size].decode(errors="replace")
    return data.decode(errors="replace")


def _begins(end: bytes, character: str) -> bool:
    """Whether `end` could become a character as long as this one, by continuing with some bytes."""
    whole = len(character.encode())
    return len(end) < whole and any(_is_text(end + tail) for tail in _TAILS[whole - len(end)])


def _is_text(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


_OF_EACH_LENGTH = ("é", "日", "👧")
_TAILS = {
    size: [bytes(tail) for tail in itertools.product((0x80, 0x9F, 0xA0, 0xBF), repeat=size)] for size in (1, 2, 3)
}


def _output(
    text: str, ids: list[int], offsets: list[int], kept: list[int], reason: FinishReason, stop: str | None
) -> Output:
    return Output(
        text, [ids[n] for n in kept], [logprob(n, ids[n]) for n in kept], [offsets[n] for n in kept], reason, stop
    )


@st.composite
def tokenised(draw: st.DrawFn) -> tuple[Bytes, list[int]]:
    """Text cut into tokens at any bytes, with bad bytes, empty and special tokens thrown in."""
    letters = st.text(alphabet="abSTOP é日👧\u0301", max_size=12)
    data = draw(letters).encode() + draw(st.sampled_from([SAMPLE.encode(), b"", *BAD_BYTES])) + draw(letters).encode()
    borders = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data))))
    pieces = [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]
    for piece in draw(st.lists(st.sampled_from(BAD_BYTES), max_size=2)):
        pieces.insert(draw(st.integers(0, len(pieces))), piece)
    ids = list(range(len(pieces)))
    for token_id in draw(st.lists(st.sampled_from([SPECIAL, SPECIAL + 1, 999]), max_size=3)):
        ids.insert(draw(st.integers(0, len(ids))), token_id)
    return Bytes(pieces), ids


STOPS = ["STOP", "TOP", "ST", "P S", "é", "\ufffd", "日本", "👧", "aa", "abab", "<s>", "\u0301"]
stops = st.lists(st.sampled_from(STOPS), max_size=3)


@settings(max_examples=400, deadline=None)
@given(
    case=tokenised(),
    stop=stops,
    sizes=st.lists(st.integers(1, 7), max_size=40),
    min_tokens=st.integers(0, 12),
    include=st.booleans(),
    skip=st.booleans(),
)
@example((Bytes([b"\xe6", b"A"]), [0, 1]), ["A"], [], 0, False, True)
@example((Bytes([b"x\xf0\x9f", b"\x91", b"\xa7y"]), [0, 1, 2]), ["👧"], [2], 0, True, True)
@example((Bytes([b"ab", b"STOP"]), [0, SPECIAL, 1]), ["STOP"], [3], 0, False, True)
def test_any_split_gives_what_the_definition_says(
    case: tuple[Bytes, list[int]], stop: list[str], sizes: list[int], min_tokens: int, include: bool, skip: bool
) -> None:
    vocabulary, ids = case
    params = SamplingParams(
        stop=tuple(stop),
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        logprobs=0,
    )
    assert run(vocabulary, params, chunks_of(ids, sizes)) == define(vocabulary, params, ids)


@settings(max_examples=100, deadline=None)
@given(case=tokenised(), stop=stops)
def test_what_is_given_away_is_never_taken_back(case: tuple[Bytes, list[int]], stop: list[str]) -> None:
    """Text so far is a beginning of the whole text without its stop string, whatever comes after."""
    vocabulary, ids = case
    stream, sent = TextStream(vocabulary, SamplingParams(stop=tuple(stop))), ""
    for n, token_id in enumerate(ids):
        delta = stream.feed(TokenChunk(1, (token_id,)))
        sent += delta.text
        if stream.is_finished:
            break
        for end in (n + 1, len(ids)):
            whole = define(vocabulary, SamplingParams(stop=tuple(stop)), ids[:end])
            assert whole.text.startswith(sent)


def test_text_comes_as_soon_as_it_is_sure() -> None:
    vocabulary = Bytes([b"a", b"S", b"T", b"x", "é".encode()[:1], "é".encode()[1:]])
    stream = TextStream(vocabulary, SamplingParams(stop=("STOP",)))
    texts = [stream.feed(TokenChunk(1, (token_id,))).text for token_id in range(6)]
    assert texts == ["a", "", "", "STx", "", "é"]


def test_ids_wait_only_with_text_that_may_be_cut() -> None:
    vocabulary = Bytes([b"a", b"S", b"x"])
    watched = TextStream(vocabulary, SamplingParams(stop=("STOP",)))
    assert [watched.feed(TokenChunk(1, (n,))).token_ids for n in range(3)] == [(0,), (), (1, 2)]
    free = TextStream(Bytes([b"\xe6", b"\x97", b"\xa5"]), SamplingParams())
    deltas = [free.feed(TokenChunk(1, (n,))) for n in range(3)]
    assert [(delta.token_ids, delta.text) for delta in deltas] == [((0,), ""), ((1,), ""), ((2,), "日")]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("sizes", [[], [2], [3]])
def test_a_stop_token_is_kept_in_the_ids(include: bool, sizes: list[int]) -> None:
    vocabulary = Bytes([b"one", b" two", b" end"])
    params = SamplingParams(stop_token_ids=(2,), include_stop_str_in_output=include, logprobs=0)
    output = run(vocabulary, params, chunks_of([0, 1, 2], sizes, stop_token_id=2))
    assert output.token_ids == [0, 1, 2] and len(output.logprobs) == 3
    assert output.text == ("one two end" if include else "one two")
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 2)


def test_end_of_sequence_has_no_stop_reason() -> None:
    output = run(Bytes([b"one", b"<e>"]), SamplingParams(), chunks_of([0, 1], [], stop_token_id=1))
    assert (output.text, output.finish_reason, output.stop_reason) == ("one", FinishReason.STOP, None)


def test_a_stop_string_before_the_end_of_sequence_wins() -> None:
    params = SamplingParams(stop=("two",))
    output = run(Bytes([b"one", b" two", b"<e>"]), params, chunks_of([0, 1, 2], [3], stop_token_id=2))
    assert (output.text, output.token_ids, output.stop_reason) == ("one ", [0, 1], "two")


def test_a_chunk_without_tokens_may_end_a_request() -> None:
    stream = TextStream(Bytes([b"a\xe6"]), SamplingParams(stop=("ab",)))
    assert stream.feed(TokenChunk(1, (0,))).text == ""
    last = stream.feed(TokenChunk(1, finish_reason=FinishReason.ABORT))
    assert (last.text, last.token_ids, last.finish_reason) == ("a\ufffd", (0,), FinishReason.ABORT)
    assert last.logprobs is None


def test_feeding_a_finished_stream_is_our_own_mistake() -> None:
    stream = TextStream(Bytes([b"a"]), SamplingParams())
    stream.feed(TokenChunk(1, (0,), finish_reason=FinishReason.LENGTH))
    with pytest.raises(AssertionError):
        stream.feed(TokenChunk(1, (0,)))
