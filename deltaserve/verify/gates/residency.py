"""Residency: as many contexts as there are rows stay at the same time, each in a salt of its own, and none gives way.

The pages are all but filled: a context that is pushed out and computed again shows as a preemption, one that was
served from another's pages in its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.core.types import BLOCK
from deltaserve.verify.ask import Answer, Ask, greedy
from deltaserve.verify.book import Book, SkippedError
from deltaserve.verify.lab import Lab, check_diversity
from deltaserve.verify.target import AS_IT_IS, Counters, Setup, Tally, Traffic

NUM_CONTEXTS = 8
NUM_TOKENS = 24
CONTEXT_TOKENS = 4096
FEW_CONTEXT_TOKENS = 448


@dataclass(slots=True)
class Peak:
    """The most of what was seen."""

    num_running: int = 0
    num_pages: int = 0

    def watch(self, counters: Counters) -> None:
        self.num_running = max(self.num_running, int(counters["num_running"]))
        self.num_pages = max(self.num_pages, int(counters["num_pages"] - counters["num_free_pages"]))


def check_residency(lab: Lab, book: Book) -> None:
    """An engine gets hardly more pages than it needs; a server as many and as long contexts as it has room for."""
    length = min(FEW_CONTEXT_TOKENS if lab.is_quick else CONTEXT_TOKENS, lab.limit(NUM_TOKENS))
    setup = Setup(rows=NUM_CONTEXTS, num_pages=NUM_CONTEXTS * _pages_for(length)) if lab.is_engine else AS_IT_IS
    peak = Peak()
    with lab.session(setup) as session:
        counters = session.counters()
        num_pages = int(counters["num_pages"])
        num_contexts = min(NUM_CONTEXTS, _num_rows(counters))
        length = min(length, (num_pages // num_contexts - 1) * BLOCK - NUM_TOKENS)
        if length < BLOCK:
            raise SkippedError(f"{num_pages} pages are too few for {num_contexts} contexts")
        asks = [_ask(lab, length - index) for index in range(num_contexts)]
        tally = Tally(session)
        answers = session.ask(asks, Traffic(watch=peak.watch))
        num_preemptions = tally.count("num_preemptions")
    _judge(book, asks, answers, num_preemptions)
    book.event("contexts that ran at the same time", peak.num_running, at_least=num_contexts)
    share = f"{peak.num_pages / num_pages:.0%}"
    book.note(
        f"{num_contexts} contexts of {length:,} tokens; at most {peak.num_pages:,} of {num_pages:,} pages ({share})"
    )


def _judge(book: Book, asks: Sequence[Ask], answers: Sequence[Answer], num_preemptions: int) -> None:
    for index, answer in enumerate(answers):
        is_complete = answer.error is None and len(answer.token_ids) == NUM_TOKENS
        detail = answer.error or f"{len(answer.token_ids)} of {NUM_TOKENS} tokens"
        book.expect(f"context {index} of {len(asks[index].prompt_ids):,} tokens", is_complete, detail)
    check_diversity(book, "contexts", answers)
    book.expect("no preemption", num_preemptions == 0, f"{num_preemptions} preemptions")


def _pages_for(length: int) -> int:
    """Of one context with its answer, and one more."""
    return -(-(length + NUM_TOKENS) // BLOCK) + 1


def _num_rows(counters: Counters) -> int:
    """Two slots are each row's; the others are the cache's."""
    return max(1, int(counters["num_slots"] - counters.get("num_snapshots", 0)) // 2)


def _ask(lab: Lab, length: int) -> Ask:
    return greedy(lab.writer.recall(length).prompt_ids, NUM_TOKENS).salted(lab.writer.salt("resident"))
