"""Offloaded = not: pages and states that were evicted to host memory and came back for a hit answer as before.

The device's pools hold little more than one prompt, the host's hold all, and each round finds its prefixes there. In
debug mode the engine also compares the restored bytes with those that were saved.
"""

from __future__ import annotations

from deltaserve.verify.book import Book
from deltaserve.verify.gates.cached import GROUP, count_hits, num_pages, tight_pools
from deltaserve.verify.lab import Lab, needs_engine
from deltaserve.verify.target import Tally

NUM_ROUNDS = 3


def check_offloaded(lab: Lab, book: Book) -> None:
    """Rounds over all prompts in pairs; from the second round on there is something to restore."""
    needs_engine(lab, "a client cannot move a prefix to host memory; give a model directory")
    asks = lab.some_asks()
    with lab.session(tight_pools(asks, host_pages=2 * sum(map(num_pages, asks)))) as session:
        tally = Tally(session)
        num_hits = 0
        for number in range(2 if lab.is_quick else NUM_ROUNDS):
            for start in range(0, len(asks), GROUP):
                group = asks[start : start + GROUP]
                answers = session.ask(group)
                lab.compare_all(book, f"round {number}", group, answers)
                num_hits += count_hits(answers)
        book.event("hits", num_hits, at_least=len(asks) // 3)
        for kind in ("pages", "snapshots"):
            book.event(f"{kind} saved", tally.count(f"{kind}_saved"))
            book.event(f"{kind} restored", tally.count(f"{kind}_restored"))
