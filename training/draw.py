"""Random choices that keep training and held-out material apart, and the word lists.

Everything that must not leak from training into a score (code words, operand pairs, tool names, questions) is passed
through `Draw.mine`: a checksum of its text puts one in ten on the held-out side, for good. A training draw never sees
those, a held-out draw sees only those.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

Split = Literal["train", "heldout"]
T = TypeVar("T")

KNOWLEDGE = Path(__file__).parent / "knowledge"
HELDOUT_SHARE = 10
MAX_TRIES = 1000

ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gl", "h", "j", "k", "l", "m", "n", "p", "pl", "r", "s", "t", "v", "z")
VOWELS = ("a", "e", "i", "o", "u")
CODAS = ("", "l", "m", "n", "r", "s", "x", "t", "k")


def is_heldout(key: str) -> bool:
    """Whether this text belongs to the held-out side."""
    return zlib.crc32(key.encode()) % HELDOUT_SHARE == 0


def stable(key: str, count: int) -> int:
    """A number below `count` that depends on the text alone; one text, one answer."""
    return zlib.crc32(b"stable" + key.encode()) % count


@cache
def word_lists() -> dict[str, tuple[str, ...]]:
    """The lists of `knowledge/words.txt` by name."""
    lists: dict[str, tuple[str, ...]] = {}
    for block in (KNOWLEDGE / "words.txt").read_text("utf-8").split("[")[1:]:
        name, words = block.split("]")
        lists[name] = tuple(words.split())
    lists["plain"] = tuple(sorted({*lists["common"], *lists["thing"], *lists["adjective"], *lists["verb"]}))
    return lists


class Draw:
    """One stream of choices for one split. Equal seeds and splits give equal streams."""

    def __init__(self, split: Split, seed: int) -> None:
        self.is_heldout = split == "heldout"
        self.random = random.Random(f"{split} {seed}").random
        self.words = word_lists()

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def between(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + int(self.random() * (high - low + 1))

    def log_between(self, low: float, high: float) -> int:
        """From `low` to `high`, each doubling as likely as another."""
        return int(low * (high / low) ** self.random())

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different options (all of them if there are fewer), in random order."""
        count = min(count, len(options))
        if 4 * count < len(options):
            return self._few(options, count)
        pool = list(options)
        for i in range(count):
            j = i + int(self.random() * (len(pool) - i))
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def _few(self, options: Sequence[T], count: int) -> list[T]:
        chosen: dict[int, T] = {}
        while len(chosen) < count:
            place = int(self.random() * len(options))
            chosen[place] = options[place]
        return list(chosen.values())

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return self.some(options, len(options))

    def mine(self, key: str) -> bool:
        """Whether a draw of this split may use this text."""
        return is_heldout(key) == self.is_heldout

    def until_mine(self, make: Callable[[], T], key: Callable[[T], str] = str) -> T:
        """Draw until one belongs to this split."""
        for _ in range(MAX_TRIES):
            made = make()
            if self.mine(key(made)):
                return made
        raise AssertionError(f"{make} never gives anything for this split")

    def word(self, kind: str) -> str:
        return self.pick(self.words[kind])

    def person(self) -> str:
        return f"{self.word('first')} {self.word('last')}"

    def digits(self, count: int) -> str:
        return str(self.between(10 ** (count - 1), 10**count - 1))

    def invented(self, num_syllables: int = 2) -> str:
        """A word that no language has, such as "brelzat"."""
        return "".join(self.pick(ONSETS) + self.pick(VOWELS) + self.pick(CODAS) for _ in range(num_syllables))


def joined(items: Sequence[str]) -> str:
    """One, two and three as a sentence lists them."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def capital(text: str) -> str:
    """The first letter large, the others as they are."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
