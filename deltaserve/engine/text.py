"""From chunks of token ids to text, with stop strings: the last step before the client, for server and LLM alike.

Text is the UTF-8 reading of the tokens' bytes joined. A character whose bytes are not all there yet waits; bytes that
can never be UTF-8 become U+FFFD; at the end so does what still waits. Special tokens give no text when
`skip_special_tokens`; a stop token never does, unless `include_stop_str_in_output`.

Stop strings. The output stops at the first character with which some stop string is complete; if two are complete
there, the longer one counts. What a stop string completes within the first `min_tokens` tokens is not a stop. Text
that may be the beginning of a stop string waits until that is decided. All of this depends on the tokens alone: any
split of them into chunks gives the same text, ids, logprobs and stop reason.

What is cut. The text ends before the stop string (after it, if `include_stop_str_in_output`). A token *begins* at the
index of the first character that has one of its bytes; a token without bytes begins where the next character will be.
Tokens that begin at or after the end of the text are dropped, and their logprobs with them. So a token that holds the
last letters before a stop string is kept whole in the ids, and one that begins with the stop string is not.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from deltaserve.core.types import FinishReason, SamplingParams, TokenChunk, TokenLogprob


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one chunk added to the output, after hold-back.

    `token_ids`, `offsets` (the character of the whole output at which each token begins) and, where asked for,
    `logprobs` are parallel. `stop_reason` is the stop string, or the one of the request's `stop_token_ids`, that
    ended the output; None for end of sequence, as for every other ending.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class _Token(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None
    offset: int


class TextStream:
    """The text of one request. Feed it every chunk until a delta has a `finish_reason`, then abort the request."""

    def __init__(self, tokenizer: Vocabulary, params: SamplingParams) -> None:
        self.is_finished = False
        self._tokenizer = tokenizer
        self._params = params
        self._hidden: frozenset[int] = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._reader = _Utf8Reader()
        self._num_sent = 0  # characters given away
        self._held = ""  # characters after them
        self._tokens: list[_Token] = []  # not given away
        self._num_fed = 0
        self._num_unstoppable = 0  # characters that the first min_tokens tokens complete

    def feed(self, chunk: TokenChunk) -> TextDelta:
        assert not self.is_finished, "a finished stream is fed no more"
        self._read(chunk)
        stop = self._find_stop()
        if stop is not None:
            end = stop.end if self._params.include_stop_str_in_output else stop.start
            return self._send(end, FinishReason.STOP, stop.string, is_last=True)
        if chunk.finish_reason is not None:
            return self._send(len(self._held), chunk.finish_reason, self._stop_token(chunk), is_last=True)
        return self._send(len(self._held) - self._num_undecided(), None, None, is_last=False)

    def _read(self, chunk: TokenChunk) -> None:
        logprobs = chunk.logprobs or (None,) * len(chunk.token_ids)
        last = len(chunk.token_ids) - 1
        for index, (token_id, logprob) in enumerate(zip(chunk.token_ids, logprobs, strict=True)):
            is_stop = index == last and chunk.stop_token_id is not None
            self._read_token(token_id, logprob, is_stop)
        if chunk.finish_reason is not None:
            self._held += self._reader.finish()
            self._protect()

    def _read_token(self, token_id: int, logprob: TokenLogprob | None, is_stop: bool) -> None:
        is_hidden = token_id in self._hidden or (is_stop and not self._params.include_stop_str_in_output)
        before, text = self._reader.read(b"" if is_hidden else self._tokenizer.token_bytes(token_id))
        self._tokens.append(_Token(token_id, logprob, self._num_sent + len(self._held) + before))
        self._held += text
        self._num_fed += 1
        self._protect()

    def _protect(self) -> None:
        if self._num_fed <= self._params.min_tokens:
            self._num_unstoppable = self._num_sent + len(self._held)

    def _find_stop(self) -> _Stop | None:
        decided = self._num_unstoppable - self._num_sent
        found = [_find(self._held, string, decided) for string in self._params.stop]
        return min((stop for stop in found if stop is not None), key=lambda s: (s.end, s.start), default=None)

    def _num_undecided(self) -> int:
        """Characters at the end that may yet be the beginning of a stop string."""
        return max((_overlap(self._held, string) for string in self._params.stop), default=0)

    def _stop_token(self, chunk: TokenChunk) -> int | None:
        return chunk.stop_token_id if chunk.stop_token_id in self._params.stop_token_ids else None

    def _send(self, size: int, finish: FinishReason | None, reason: str | int | None, is_last: bool) -> TextDelta:
        """Give away `size` characters and the tokens that begin in them; all tokens where no stop string is watched."""
        text, self._held = self._held[:size], self._held[size:]
        self._num_sent += size
        keeps_all = not self._params.stop or (is_last and not isinstance(reason, str))
        num_tokens = len(self._tokens) if keeps_all else sum(t.offset < self._num_sent for t in self._tokens)
        tokens, self._tokens = self._tokens[:num_tokens], self._tokens[num_tokens:]
        self.is_finished = is_last
        logprobs = tuple(t.logprob for t in tokens if t.logprob is not None)
        return TextDelta(
            text=text,
            token_ids=tuple(t.token_id for t in tokens),
            logprobs=None if self._params.logprobs is None else logprobs,
            offsets=tuple(t.offset for t in tokens),
            finish_reason=finish,
            stop_reason=reason,
        )


class _Stop(NamedTuple):
    """A stop string and where it lies in the held text: [start, end)."""

    start: int
    end: int
    string: str


def _find(text: str, string: str, decided: int) -> _Stop | None:
    """The first place where `string` is complete after the first `decided` characters."""
    start = text.find(string, max(decided - len(string) + 1, 0))
    return None if start < 0 else _Stop(start, start + len(string), string)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a beginning, but not the whole, of `string`."""
    sizes = range(min(len(string) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(string[:size])), 0)


class _Utf8Reader:
    """Bytes to characters, a few bytes at a time; what waits is always the beginning of one character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, data: bytes) -> tuple[int, str]:
        """(characters that `data` completes but has no part in, all characters it completes).

        The first number is 1 where bytes waited for more and `data` shows that no more will come, else 0.
        """
        if not data or not self._waiting():
            return 0, self._decode(data)
        head = self._decode(data[:1])
        before = len(head) - (not self._waiting())
        return before, head + self._decode(data[1:])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _decode(self, data: bytes) -> str:
        """Python keeps half a surrogate back as if it could become a character; it cannot."""
        text = self._decoder.decode(data)
        waiting = self._waiting()
        return text + self.finish() if waiting[:1] == b"\xed" and waiting[1:] >= b"\xa0" else text

    def _waiting(self) -> bytes:
        return self._decoder.getstate()[0]
