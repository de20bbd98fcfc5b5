"""Needles: a word told at any depth of a text of any length is found, when the text is computed and when it is cached.

For models that can read; one with random weights fails here, and only here.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltaserve.core.types import BLOCK
from deltaserve.verify.ask import Answer, greedy
from deltaserve.verify.book import Book
from deltaserve.verify.gates.cached import count_hits
from deltaserve.verify.lab import Lab
from deltaserve.verify.prompts import Recall
from deltaserve.verify.target import Session, ask_alone

DEPTHS = (0.1, 0.5, 0.9)
LENGTHS = (512, 2048, 8192, 32768, 131072)
FEW_LENGTHS = (320, 1280)
NUM_TOKENS = 24


def check_needles(lab: Lab, book: Book) -> None:
    """Every length that fits, the longest that fits too unless time is short."""
    limit = lab.limit(NUM_TOKENS)
    lengths = [length for length in (FEW_LENGTHS if lab.is_quick else LENGTHS) if length < limit]
    if not lab.is_quick or not lengths:
        lengths.append(limit)
    book.note(f"lengths {', '.join(f'{length:,}' for length in lengths)}; depths {DEPTHS}")
    num_hits = 0
    with lab.session() as session:
        for length in lengths:
            num_hits += _check_length(lab, book, session, length)
    num_possible = sum(len(DEPTHS) for length in lengths if length > BLOCK)
    book.event("hits when asked again", num_hits, at_least=(num_possible + 1) // 2)


def _check_length(lab: Lab, book: Book, session: Session, length: int) -> int:
    """How many were hits the second time."""
    salt = lab.writer.salt("needles")
    found = [lab.writer.recall(length, depth) for depth in DEPTHS]
    asks = [greedy(recall.prompt_ids, NUM_TOKENS, ignore_eos=False).salted(salt) for recall in found]
    _check_words(book, f"{length:,} tokens, cold", found, ask_alone(session, asks))
    cached = ask_alone(session, asks)
    _check_words(book, f"{length:,} tokens, cached", found, cached)
    return count_hits(cached)


def _check_words(book: Book, part: str, found: Sequence[Recall], answers: Sequence[Answer]) -> None:
    for depth, recall, answer in zip(DEPTHS, found, answers, strict=True):
        detail = answer.error or f"{recall.word!r} is not in the answer {answer.text[:80]!r}"
        book.expect(f"{part}, depth {depth:.0%}", answer.error is None and recall.word in answer.text, detail)
