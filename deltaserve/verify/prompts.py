"""Prompts whose answer depends on what was said in them, at any exact length.

A recall prompt tells a word somewhere in plain filler and asks for it at the end, in the target's own chat format. No
two prompts tell the same word, so a state that belongs to another prompt or to an older one shows in the first tokens
of the answer, where a model can read at all; a model that cannot (random weights) still gets a text of its own.

Lengths are exact because pieces are joined as token ids: chat head, filler, telling, filler, question, chat tail; and
the filler is whole sentences, chosen so that their lengths add up (a model reads worse over torn ones).
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass

from deltaserve.core.types import BLOCK
from deltaserve.verify.book import SkippedError
from deltaserve.verify.target import Message, Target

# Around the ends of blocks: 64 n + these.
OFFSETS = (-2, -1, 0, 1, 2, 3, 17, 31, 32, 33, 47, 61, 62, 63, 64, 65, 66)
POOL_SIZE = 256
ALWAYS_A_SUM = 128  # from here on lengths of sentences are taken to add up to any number
TELLING = " Remember that the {name} is {word}."
QUESTION = " That was all.\n\nWhat is the {name}?"
OPENING = "Read this text.\n\nIt was a good day."
PADDING = "\n"  # where no sentence is short enough
NAMES = ("code word", "password", "secret word", "magic word", "secret code", "pass phrase", "access code", "key word")
ONSETS, VOWELS, CODAS = ("b", "br", "d", "f", "gl", "k", "l", "m", "n", "pl", "r", "t", "z"), "aeiou", "lmnrsxt"
SENTENCES = (
    " The {colour} {thing} is in the {place}.",
    " A {colour} {animal} sat on the {thing}.",
    " The {animal} went to the {place} on {day}.",
    " The {thing} in the {place} was {colour}.",
    " There was a {animal} at the {place} all day.",
)
WORDS = {
    "colour": ("red", "blue", "green", "yellow", "black", "white", "brown", "grey"),
    "thing": ("apple", "basket", "bell", "book", "bottle", "box", "chair", "clock", "drum", "flag", "hat", "lamp"),
    "place": ("bridge", "castle", "farm", "forest", "garden", "harbour", "house", "market", "park", "river", "school"),
    "animal": ("dog", "cat", "cow", "horse", "sheep", "goat", "fox", "wolf", "bear", "owl", "frog", "duck"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
}


@dataclass(frozen=True, slots=True)
class Recall:
    """A prompt, and the word that a right answer holds."""

    prompt_ids: tuple[int, ...]
    word: str


class Writer:
    """Writes prompts for one target. Equal seeds write equal prompts; a run without a seed repeats none of another."""

    def __init__(self, target: Target, seed: int | None = None) -> None:
        self._target = target
        self._draw = random.Random(int.from_bytes(os.urandom(8)) if seed is None else seed)
        self._head, self._tail = _chat_frame(target)
        self._pool = [target.encode(self._sentence()) for _ in range(POOL_SIZE)]
        self._sums = _sums({len(sentence) for sentence in self._pool})
        self._words: set[str] = set()

    @property
    def has_chat(self) -> bool:
        return bool(self._head)

    def rng(self) -> random.Random:
        """A generator of its own, so that what one gate draws does not depend on the gates before."""
        return random.Random(self._draw.getrandbits(64))

    def recall(self, num_tokens: int, depth: float = 0.5) -> Recall:
        """A prompt of exactly `num_tokens`; the word is told after a share `depth` of the filler."""
        name, word = self._draw.choice(NAMES), self.word()
        telling = self._target.encode(TELLING.format(name=name, word=word))
        opening = [*self._head, *self._target.encode(OPENING)]
        closing = [*self._target.encode(QUESTION.format(name=name)), *self._tail]
        num_filler = num_tokens - len(opening) - len(telling) - len(closing)
        if num_filler < 0:
            return Recall((*opening, *telling, *closing)[-num_tokens:], word)  # the end counts more
        sentences = self._sentences(num_filler)
        sentences.insert(round(depth * len(sentences)), telling)
        padding = self._target.encode(PADDING)[:1] * (num_filler - sum(map(len, sentences)) + len(telling))
        body = [token_id for sentence in sentences for token_id in sentence]
        return Recall((*opening, *padding, *body, *closing), word)

    def noise(self, num_tokens: int) -> tuple[int, ...]:
        """Different ordinary tokens in no order, after which a model is unsure."""
        found = sorted({token_id for sentence in self._pool for token_id in sentence})
        return tuple(self._draw.sample(found, min(num_tokens, len(found))))

    def text(self, num_sentences: int) -> str:
        return "".join(self._sentence() for _ in range(num_sentences)).strip()

    def word(self) -> str:
        """An invented word that was not given before."""
        while True:
            syllables = (self._draw.choice(ONSETS) + self._draw.choice(VOWELS) + self._draw.choice(CODAS) for _ in "ab")
            word = "".join(syllables)
            if word not in self._words:
                self._words.add(word)
                return word

    def salt(self, name: str) -> str:
        """A cache salt that nobody has used."""
        return f"verify-{name}-{self._draw.getrandbits(64):016x}"

    def _sentences(self, num_tokens: int) -> list[list[int]]:
        """Sentences of so many tokens together, or of a few less where no choice of them adds up."""
        left = num_tokens
        while left not in self._sums and left < ALWAYS_A_SUM:
            left -= 1
        chosen: list[list[int]] = []
        while left:
            fitting = [one for one in self._pool if self._is_sum(left - len(one))]
            if not fitting:
                break
            chosen.append(self._draw.choice(fitting))
            left -= len(chosen[-1])
        return chosen

    def _is_sum(self, num_tokens: int) -> bool:
        return num_tokens in self._sums or num_tokens >= ALWAYS_A_SUM

    def _sentence(self) -> str:
        words = {kind: self._draw.choice(words) for kind, words in WORDS.items()}
        return self._draw.choice(SENTENCES).format_map(words)


def edge_lengths(count: int, longest: int) -> list[int]:
    """`count` lengths around the ends of blocks, from short to `longest`; every offset is used before one repeats."""
    most = max(1, (longest - OFFSETS[-1]) // BLOCK)
    return [BLOCK * (1 + index * most // count) + OFFSETS[index % len(OFFSETS)] for index in range(count)]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def _chat_frame(target: Target) -> tuple[list[int], list[int]]:
    """Token ids before and after a user's text; nothing where there is no chat template."""
    try:
        one, other = (target.render([user(letter)]) for letter in "xq")
    except SkippedError:
        return [], []
    num_head = num_common(one, other)
    num_tail = min(num_common(one[::-1], other[::-1]), len(one) - num_head)
    return one[:num_head], one[len(one) - num_tail :]


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(other))
    return next((index for index in range(size) if one[index] != other[index]), size)


def _sums(lengths: Set[int]) -> frozenset[int]:
    """What lengths of sentences can add up to, below ALWAYS_A_SUM; nothing at all is 0."""
    found = {0}
    for total in range(1, ALWAYS_A_SUM):
        if any(total - length in found for length in lengths):
            found.add(total)
    return frozenset(found)
