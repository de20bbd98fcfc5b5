"""Preempted = not: a request that had to give everything back, at any moment and often, answers as undisturbed.

| part          | why requests are pushed out                     | how they come back                 |
| ------------- | ----------------------------------------------- | ---------------------------------- |
| computed anew | drawn at random, no prefix cache                | from nothing                       |
| resumed       | drawn at random, with the prefix cache          | as a hit on what they had computed |
| starved       | the pages do not suffice for all rows           | as there is room                   |
"""

from __future__ import annotations

from deltaserve.core.types import BLOCK
from deltaserve.verify.book import Book
from deltaserve.verify.lab import Lab, needs_engine
from deltaserve.verify.target import Setup, Tally, Traffic

ROWS = 6
STARVED_ROWS, STARVED_TOKENS = 4, 40


def check_preempted(lab: Lab, book: Book) -> None:
    """Each part with an engine of its own."""
    needs_engine(lab, "a client cannot push a request out; give a model directory")
    _check_random(lab, book, "computed anew", Setup(caching=False, rows=ROWS, chunk=2 * BLOCK))
    _check_random(lab, book, "resumed", Setup(rows=ROWS, chunk=2 * BLOCK))
    _check_starved(lab, book)


def _check_random(lab: Lab, book: Book, part: str, setup: Setup) -> None:
    asks = lab.some_asks()
    with lab.session(setup) as session:
        tally = Tally(session)
        answers = session.ask(asks, Traffic(preempt=lab.writer.rng()))
        lab.compare_all(book, part, asks, answers)
        book.event(f"preemptions, {part}", tally.count("num_preemptions"), at_least=len(asks) // 3)
        if setup.caching:
            book.event("tokens resumed from the cache", tally.count("num_hit"), at_least=BLOCK)


def _check_starved(lab: Lab, book: Book) -> None:
    """Rows are let in together, begin with one page and come to need two; there are not two for each."""
    lengths = [BLOCK - 1 - index for index in range(STARVED_ROWS)]
    asks = [
        lab.ask(lab.writer.recall(length).prompt_ids, STARVED_TOKENS, index) for index, length in enumerate(lengths)
    ]
    setup = Setup(rows=STARVED_ROWS, num_pages=STARVED_ROWS + 1, num_snapshots=STARVED_ROWS, chunk=4 * BLOCK)
    with lab.session(setup) as session:
        tally = Tally(session)
        lab.compare_all(book, "starved", asks, session.ask(asks))
        book.event("preemptions, starved", tally.count("num_preemptions"))
