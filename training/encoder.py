"""A quick encoder for the plain text that the generators write, equal to the tokenizer's own.

The tokenizer's expression cuts text into words that are encoded one by one; for text in ASCII Python's `re` can do the
cutting, and words met before are looked up. Other text takes the tokenizer itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tokenizers

from deltaserve.model.sample_tokenizer import ADDED_TOKENS

CACHE_SIZE = 400_000

ADDED = re.compile("(" + "|".join(re.escape(token) for token in ADDED_TOKENS) + ")")
ASCII_WORDS = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Encoder:
    """Call it with text; it gives ids."""

    def __init__(self, path: Path | str) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._words = _Words(self.tokenizer)

    def __call__(self, text: str) -> list[int]:
        if not text.isascii():
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        words = self._words
        if len(words) > CACHE_SIZE:
            words.clear()
        if "<" not in text:
            return [token_id for word in ASCII_WORDS.findall(text) for token_id in words[word]]
        return [token_id for word in _pieces(text) for token_id in words[word]]


class _Words(dict[str, tuple[int, ...]]):
    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._tokenizer.encode(word, add_special_tokens=False).ids)
        self[word] = ids
        return ids


def _pieces(text: str) -> Iterator[str]:
    for index, piece in enumerate(ADDED.split(text)):
        if index % 2:
            yield piece
        else:
            yield from ASCII_WORDS.findall(piece)


@cache
def shared_encoder(path: str) -> Encoder:
    """One for each file, so that its words are kept."""
    return Encoder(path)
