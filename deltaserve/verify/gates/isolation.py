"""Isolation: what one request left in the cache answers that request alone, and no salt sees another's.

Twelve rounds. In each, a prompt fills the cache, an unrelated one runs, and the first is asked again: a hit, with its
own answer and no other round's word in it. Then the same prompt under another salt must find nothing cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltaserve.core.types import BLOCK
from deltaserve.verify.ask import Ask, greedy
from deltaserve.verify.book import Book
from deltaserve.verify.lab import Lab, check_diversity
from deltaserve.verify.prompts import Recall
from deltaserve.verify.target import Session

NUM_ROUNDS = 12
NUM_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Round:
    """A prompt that is asked again, and an unrelated one between."""

    mine: Recall
    other: Recall

    @property
    def ask(self) -> Ask:
        return greedy(self.mine.prompt_ids, NUM_TOKENS)


def check_isolation(lab: Lab, book: Book) -> None:
    """One engine for all rounds."""
    draw = lab.writer.rng()
    rounds = [
        Round(
            lab.writer.recall(2 * BLOCK + draw.randrange(BLOCK), depth=draw.random()),
            lab.writer.recall(BLOCK + draw.randrange(BLOCK), depth=draw.random()),
        )
        for _ in range(NUM_ROUNDS)
    ]
    with lab.session() as session:
        num_hits = sum(_check_round(lab, book, session, number, rounds) for number in range(NUM_ROUNDS))
    book.event("hits", num_hits, at_least=NUM_ROUNDS // 2)
    check_diversity(book, "all rounds", lab.cold([one.ask for one in rounds]))


def _check_round(lab: Lab, book: Book, session: Session, number: int, rounds: list[Round]) -> bool:
    """Whether the second time was a hit."""
    salt, other_salt = lab.writer.salt("mine"), lab.writer.salt("theirs")
    one = rounds[number]
    reference = lab.cold([one.ask])[0]
    session.ask([one.ask.salted(salt)])
    session.ask([greedy(one.other.prompt_ids, NUM_TOKENS).salted(salt)])
    again, elsewhere = (session.ask([one.ask.salted(name)])[0] for name in (salt, other_salt))
    book.compare(f"round {number}, again", reference, again)
    book.compare(f"round {number}, under another salt", reference, elsewhere)
    sentence = f"{elsewhere.num_cached} tokens were cached under a salt that nobody had used"
    book.expect(f"round {number}, no hit across salts", elsewhere.num_cached == 0, sentence)
    leaked = [word for word in _words_of_others(rounds, number) if word in again.text]
    book.expect(f"round {number}, no other round's word", not leaked, f"the answer holds {leaked}")
    return again.num_cached > 0


def _words_of_others(rounds: list[Round], number: int) -> list[str]:
    """Told to other requests. Of the words told before this round none may come out."""
    words = [word for one in rounds[:number] for word in (one.mine.word, one.other.word)]
    return [*words, rounds[number].other.word]
