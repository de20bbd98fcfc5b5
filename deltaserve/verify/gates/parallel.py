"""TP1 = TP2: ranks that share each layer answer as one rank. Starts processes, so only where it was asked for."""

from __future__ import annotations

from deltaserve.verify.book import Book, SkippedError
from deltaserve.verify.gates.cached import count_hits
from deltaserve.verify.lab import Lab, needs_engine
from deltaserve.verify.target import Setup


def check_parallel(lab: Lab, book: Book) -> None:
    """Cold and cached, in a batch."""
    needs_engine(lab, "a client cannot set the number of ranks; give a model directory")
    num_ranks = lab.options.num_ranks
    if num_ranks < 2:
        raise SkippedError("it starts processes; ask for it with --tensor-parallel-size 2")
    asks = lab.some_asks()
    with lab.session(Setup(num_ranks=num_ranks)) as session:
        lab.compare_all(book, f"{num_ranks} ranks, cold", asks, session.ask(asks))
        answers = session.ask(asks)
    lab.compare_all(book, f"{num_ranks} ranks, cached", asks, answers)
    book.event("hits", count_hits(answers))
