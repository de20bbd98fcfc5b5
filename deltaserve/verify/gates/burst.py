"""Burst: many more requests than rows arrive at once; all are answered, rightly, and nothing is held afterwards."""

from __future__ import annotations

import time

from deltaserve.core.types import BLOCK
from deltaserve.verify.book import Book, SkippedError
from deltaserve.verify.lab import Lab
from deltaserve.verify.target import AS_IT_IS, Counters, Session, Setup, Tally

NUM_REQUESTS, FEW_REQUESTS = 96, 40
NUM_TOKENS = 4
NUM_CHECKED = 12
ROWS = 8
IDLE_TIMEOUT_S = 20.0


def check_burst(lab: Lab, book: Book) -> None:
    """Short prompts of many lengths; some of the answers are compared with their cold references."""
    draw = lab.writer.rng()
    num_requests = FEW_REQUESTS if lab.is_quick else NUM_REQUESTS
    lengths = [draw.randrange(20, 2 * BLOCK) for _ in range(num_requests)]
    asks = [lab.ask(lab.writer.recall(length).prompt_ids, NUM_TOKENS, i) for i, length in enumerate(lengths)]
    salt = lab.writer.salt("burst")
    with lab.session(_setup(lab)) as session:
        tally = Tally(session)
        answers = session.ask([ask.salted(salt) for ask in asks])
        for index, answer in enumerate(answers):
            detail = answer.error or f"{len(answer.token_ids)} of {NUM_TOKENS} tokens"
            is_complete = answer.error is None and len(answer.token_ids) == NUM_TOKENS
            book.expect(f"request {index} of {len(asks[index].prompt_ids)} tokens", is_complete, detail)
        book.event("requests", tally.count("num_requests"), at_least=num_requests)
        _check_empty(lab, book, session)
    lab.compare_all(book, "some of them", asks[:NUM_CHECKED], answers[:NUM_CHECKED])


def _setup(lab: Lab) -> Setup:
    return Setup(rows=ROWS, num_pages=8 * ROWS, num_snapshots=ROWS) if lab.is_engine else AS_IT_IS


def _check_empty(lab: Lab, book: Book, session: Session) -> None:
    """Nothing runs or waits; without the cache's own holdings, every page and slot is free."""
    counters = _wait_idle(session)
    left = {name: int(counters[name]) for name in ("num_running", "num_waiting")}
    book.expect("nothing runs or waits afterwards", not any(left.values()), f"{left}")
    try:
        session.reset_cache()
    except SkippedError as error:
        return book.skip_part("pools empty afterwards", str(error))
    counters = session.counters()
    for kind in ("pages", "slots"):
        num_free, num_all = int(counters[f"num_free_{kind}"]), int(counters[f"num_{kind}"])
        sentence = f"{num_free} of {num_all} are free"
        book.expect(f"all {kind} are free after a reset of the cache", num_free == num_all, sentence)
    return None


def _wait_idle(session: Session) -> Counters:
    """A server may still be taking leave of the last request when its answer is here."""
    deadline_s = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        counters = session.counters()
        if not (counters["num_running"] or counters["num_waiting"]) or time.monotonic() > deadline_s:
            return counters
        time.sleep(0.05)
