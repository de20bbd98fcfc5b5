"""Drafts on = off: speculation changes no token, cold, cached, in chunks, in a batch and preempted.

On a server each request is asked for with and without drafts. The reference never uses them.
"""

from __future__ import annotations

from dataclasses import replace

from deltaserve.core.types import BLOCK
from deltaserve.verify.book import Book, SkippedError
from deltaserve.verify.gates.cached import count_hits
from deltaserve.verify.lab import Lab
from deltaserve.verify.target import AS_IT_IS, Session, Setup, Tally, Traffic, ask_alone

NUM_DRAFTS = 3
DRAFTED, ACCEPTED = "num_verified", "num_accepted"


def check_drafts(lab: Lab, book: Book) -> None:
    """Skipped without a draft head."""
    if not lab.target.about.has_draft_head:
        kind = "the checkpoint has no draft head (mtp.* tensors)" if lab.is_engine else "the server makes no drafts"
        raise SkippedError(kind)
    num_drafts = lab.options.num_drafts or NUM_DRAFTS
    if not lab.is_engine:
        with lab.session(AS_IT_IS) as session:
            _check_two_ways(lab, book, session)
        return
    book.note(f"{num_drafts} drafts a step")
    with lab.session(Setup(num_drafts=num_drafts)) as session:
        _check_two_ways(lab, book, session)
    with lab.session(Setup(num_drafts=num_drafts, rows=5, chunk=BLOCK)) as session:
        asks, tally = lab.some_asks(), Tally(session)
        traffic = Traffic(preempt=lab.writer.rng())
        lab.compare_all(book, "in chunks, in a batch, preempted", asks, session.ask(asks, traffic))
        book.event("preemptions", tally.count("num_preemptions"))


def _check_two_ways(lab: Lab, book: Book, session: Session) -> None:
    """Cold alone, then cached in a batch; and requests that refuse drafts beside requests that take them."""
    asks, tally = lab.some_asks(), Tally(session)
    salt = lab.writer.salt("drafts")
    salted = [ask.salted(salt) for ask in asks]
    lab.compare_all(book, "cold", asks, ask_alone(session, salted))
    mixed = [replace(ask, use_drafts=index % 3 > 0) for index, ask in enumerate(salted)]
    answers = session.ask(mixed)
    lab.compare_all(book, "cached, in a batch, some without", asks, answers)
    book.event("hits", count_hits(answers))
    num_drafted, num_accepted = tally.count(DRAFTED), tally.count(ACCEPTED)
    book.event("drafts accepted", num_accepted)
    book.note(f"{num_accepted} of {num_drafted} drafts accepted")
