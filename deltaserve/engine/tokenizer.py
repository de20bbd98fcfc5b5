"""The tokenizer of a checkpoint directory: text to ids by the `tokenizers` library, ids to bytes by a table.

The family's tokenizers are byte-level BPE: each vocabulary entry is a string of bytes, written with one printable
character per byte. Text is therefore the UTF-8 reading of the tokens' bytes joined, whatever the borders between
tokens; `decode` here and `engine.text` both use `token_bytes`, so they agree. Ids that no token has (the padded rows
of the embedding) have no bytes. A tokenizer with another decoder is refused.

Reads `tokenizer.json`; end-of-sequence ids come from `generation_config.json`, which knows the end of a chat turn,
else from `config.json` and `tokenizer_config.json`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from deltaserve.core.chat import ChatMarkers
from deltaserve.core.errors import CheckpointError, RequestError
from deltaserve.grammar.compiler import Grammars, Vocabulary
from deltaserve.model.config_file import read_json, token_ids


class Tokenizer:
    """Encodes and decodes. Safe to share between threads: it is never changed after it is made."""

    def __init__(self, directory: Path | str) -> None:
        directory = Path(directory)
        self._tokenizer = _load(directory / "tokenizer.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_ids = read_eos_ids(directory)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Ids that have a token, added ones included; the model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens written out in `text` become their ids; a RequestError if `text` is not Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            sentence = f"the text holds a lone surrogate at character {error.start}, which no UTF-8 text can hold"
            raise RequestError(sentence, "prompt") from error
        # The library's `encode` holds the interpreter lock to the end; this one lets other threads run meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens together; bytes that are not UTF-8 become U+FFFD."""
        hidden: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in hidden).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none if no token has this id."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else _bytes_of(token)
        return known

    def id_to_token(self, token_id: int) -> str | None:
        """The entry as the vocabulary writes it, or None if no token has this id."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < 1 << 31 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of an entry as the vocabulary writes it."""
        return self._tokenizer.token_to_id(token)


def read_chat_markers(directory: Path | str) -> ChatMarkers | None:
    """How this checkpoint's chats are written in tokens; None without a tokenizer, or without such tokens."""
    if not (Path(directory) / "tokenizer.json").is_file():
        return None
    return ChatMarkers.from_encode(Tokenizer(directory).encode)


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """What grammars must know of `vocab_size` ids, as many as the model has rows."""

    def encode(text: str) -> list[int]:
        """Without the tokens that are no text, though their marks stand in it."""
        ids = tokenizer.encode(text)
        if tokenizer.added_ids.isdisjoint(ids):
            return ids
        return [token_id for character in text for token_id in tokenizer.encode(character)]

    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    return Vocabulary(tokens, tokenizer.added_ids, tokenizer.eos_ids, encode)


def read_grammars(directory: Path | str, vocab_size: int) -> Grammars | None:
    """Grammars over a checkpoint's tokenizer, which is read when it is needed; None if there is none."""
    if not (Path(directory) / "tokenizer.json").is_file():
        return None
    return Grammars(lambda: grammar_vocabulary(Tokenizer(directory), vocab_size))


def read_eos_ids(directory: Path | str) -> tuple[int, ...]:
    """The ids that end a sequence, from the first source that has any; empty if none has.

    Raises ConfigError where a source holds something else than ids.
    """
    directory = Path(directory)
    generation, config = _read_json(directory / "generation_config.json"), _read_json(directory / "config.json")
    inner = config.get("generation_config") or {}
    if ids := _eos_ids("generation_config.json", generation) or _eos_ids("config.json", inner):
        return ids
    text_config = config.get("text_config") or config
    ids = _eos_ids("config.json", text_config) or _eos_ids("config.json", config)
    return tuple(dict.fromkeys(ids + _turn_end(_read_json(directory / "tokenizer_config.json"))))


def _turn_end(tokenizer_config: dict[str, Any]) -> tuple[int, ...]:
    """The id of the tokenizer's own end token, which in this family ends a turn and which config.json leaves out."""
    token = tokenizer_config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    added = tokenizer_config.get("added_tokens_decoder") or {}
    return tuple(int(token_id) for token_id, entry in added.items() if entry.get("content") == content)


def _eos_ids(file: str, source: dict[str, Any]) -> tuple[int, ...]:
    return token_ids(f"eos_token_id in {file}", source.get("eos_token_id"))


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a checkpoint directory needs the tokenizer.json of its model")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read ({error}); fetch the file again") from error
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        kind = type(tokenizer.decoder).__name__
        raise CheckpointError(f"{path} has the decoder {kind}; only byte-level tokenizers (ByteLevel) are served")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 characters stand for their own code; the other bytes take the code points from 256 up."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    """An entry with a character outside the byte alphabet is an added token, written as plain text."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
