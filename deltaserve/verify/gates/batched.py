"""Alone = batched: company in the batch, its size, joins and leaves change no answer."""

from __future__ import annotations

from deltaserve.verify.ask import Ask
from deltaserve.verify.book import Book
from deltaserve.verify.gates.residency import Peak
from deltaserve.verify.lab import Lab
from deltaserve.verify.target import AS_IT_IS, Setup, Traffic

ARRIVAL_STEPS = 40


def check_batched(lab: Lab, book: Book) -> None:
    """All at once; then, where steps can be steered, joining at random ones."""
    asks = lab.asks()
    peak = Peak()
    with lab.session(_setup(lab)) as session:
        answers = session.ask(_fresh(lab, asks), Traffic(watch=peak.watch))
    lab.compare_all(book, "all at once", asks, answers)
    book.event("requests that ran at the same time", peak.num_running, at_least=3)
    if not lab.is_engine:
        return book.skip_part("joins at given steps", "a client cannot steer the server's steps")
    draw = lab.writer.rng()
    few = lab.some_asks()
    arrivals = [draw.randrange(ARRIVAL_STEPS) for _ in few]
    with lab.session(Setup(caching=False, rows=5, chunk=128)) as session:
        lab.compare_all(book, "joining and leaving", few, session.ask(few, Traffic(arrivals=arrivals)))
    return None


def _setup(lab: Lab) -> Setup:
    return Setup(caching=False) if lab.is_engine else AS_IT_IS


def _fresh(lab: Lab, asks: list[Ask]) -> list[Ask]:
    return asks if lab.is_engine else [ask.salted(lab.writer.salt("batched")) for ask in asks]
