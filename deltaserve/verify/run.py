"""Runs gates one after the other and makes a report of them. A gate that fails, or breaks, does not stop the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deltaserve.core.errors import DeltaserveError
from deltaserve.verify.book import Book, SkippedError, Status, TargetGoneError
from deltaserve.verify.compare import is_more_frequent
from deltaserve.verify.gates import Gate
from deltaserve.verify.lab import Lab
from deltaserve.verify.memory_watch import MemoryWatch

CONTROL_GATE = "batched"  # it is the control


@dataclass(slots=True)
class Outcome:
    """What a run came to. `interrupted` and `gone` say why gates are missing at the end."""

    books: list[Book] = field(default_factory=list)
    interrupted: bool = False
    gone: str | None = None
    wall_s: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all that ran passed, something ran, and nothing was cut short."""
        ran = [book for book in self.books if book.status is not Status.SKIPPED]
        return (
            bool(ran) and all(book.status is Status.PASSED for book in ran) and not self.interrupted and not self.gone
        )


def run_gates(
    lab: Lab, gates: Sequence[Gate], on_start: Callable[[Gate], None], on_done: Callable[[Book], None]
) -> Outcome:
    """`on_start` and `on_done` hear of every gate. Ctrl-C ends the run and keeps what is known."""
    outcome, started_s = Outcome(), time.monotonic()
    with MemoryWatch() as lab.memory:
        for gate in gates:
            on_start(gate)
            book = Book(gate.name, lab.level)
            outcome.books.append(book)
            try:
                _run(lab, gate, book)
            except KeyboardInterrupt:
                book.failure = "interrupted"
                outcome.interrupted = True
            except TargetGoneError as error:
                book.failure = outcome.gone = str(error)
            on_done(book)
            if outcome.interrupted or outcome.gone:
                break
    outcome.wall_s = time.monotonic() - started_s
    return outcome


def _run(lab: Lab, gate: Gate, book: Book) -> None:
    started_s = time.monotonic()
    try:
        gate.run(lab, book)
        _judge_frequency(lab, book)
    except SkippedError as error:
        if book.cases:
            book.skip_part("the rest", str(error))
        else:
            book.skip_reason = str(error)
    except TargetGoneError:
        raise
    except DeltaserveError as error:
        book.failure = str(error)
    except AssertionError as error:  # the engine's own checks
        book.failure = f"a check of the engine's books failed: {error}"
    finally:
        book.wall_s = time.monotonic() - started_s


def _judge_frequency(lab: Lab, book: Book) -> None:
    """At the near level ties may go either way, but not more often than without what the gate is about."""
    if lab.level.is_exact or not book.num_compared or book.gate == CONTROL_GATE:
        return
    splits, count = lab.control()
    book.note(
        f"{book.num_splits} splits in {book.num_compared} comparisons; control, cold in a batch: {splits} in {count}"
    )
    if is_more_frequent(book.num_splits, book.num_compared, splits, count):
        book.failure = (
            f"{book.num_splits} of {book.num_compared} answers split, more often than {splits} of {count} cold ones do"
        )
