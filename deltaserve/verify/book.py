"""What a gate writes down while it runs: cases, events that must have happened, notes, parts it had to skip."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from deltaserve.core.errors import DeltaserveError
from deltaserve.verify.ask import Answer
from deltaserve.verify.compare import EXACT, Level, Verdict, compare, largest_difference


class SkippedError(DeltaserveError):
    """This gate, or this part of it, cannot be run here; the sentence says why."""


class TargetGoneError(DeltaserveError):
    """The target stopped answering: no further gate can be run."""


class Status(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Case:
    """`position` and `gap` tell of a split, also of one that the level allows. `is_compared`: two answers were."""

    name: str
    passed: bool
    detail: str = ""
    position: int | None = None
    gap: float | None = None
    is_compared: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """How often something happened, and how often it had to for the gate to prove anything."""

    name: str
    count: int
    at_least: int = 0

    @property
    def is_enough(self) -> bool:
        return self.count >= self.at_least

    def __str__(self) -> str:
        return f"{self.name} {self.count:,}" + ("" if self.is_enough else f" (needs {self.at_least:,})")


@dataclass(slots=True)
class Book:
    """The record of one gate. `failure` and `skip_reason` are sentences that concern all of it."""

    gate: str
    level: Level = EXACT
    cases: list[Case] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped_parts: list[str] = field(default_factory=list)
    failure: str | None = None
    skip_reason: str | None = None
    wall_s: float = 0.0
    largest_difference: float = 0.0

    @property
    def status(self) -> Status:
        if self.skip_reason is not None:
            return Status.SKIPPED
        is_fine = self.failure is None and self.num_failed == 0 and all(event.is_enough for event in self.events)
        return Status.PASSED if is_fine and self.cases else Status.FAILED

    @property
    def num_failed(self) -> int:
        return sum(not case.passed for case in self.cases)

    @property
    def num_compared(self) -> int:
        return sum(case.is_compared for case in self.cases)

    @property
    def num_splits(self) -> int:
        return sum(case.position is not None for case in self.cases)

    @property
    def reason(self) -> str:
        """Why it did not pass: one sentence, or empty."""
        if self.status is Status.PASSED:
            return ""
        lacking = [str(event) for event in self.events if not event.is_enough]
        first = next((f"{case.name}: {case.detail}" for case in self.cases if not case.passed), None)
        unproved = f"proved nothing: {', '.join(lacking)}" if lacking else None
        return self.skip_reason or self.failure or first or unproved or "proved nothing: no case was run"

    def expect(self, name: str, passed: bool, detail: str = "") -> None:
        """A case that is right or wrong; `detail` says what was seen."""
        self.cases.append(Case(name, passed, detail))

    def compare(self, name: str, reference: Answer, answer: Answer) -> Verdict:
        """A case that passes if both answers are one."""
        verdict = compare(reference, answer, self.level)
        self.largest_difference = max(self.largest_difference, largest_difference(reference, answer))
        self.cases.append(Case(name, verdict.passed, verdict.detail, verdict.position, verdict.gap, is_compared=True))
        return verdict

    def event(self, name: str, count: float, at_least: int = 1) -> None:
        """Without `at_least` of it the gate proves nothing and fails."""
        self.events.append(Event(name, int(count), at_least))

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def skip_part(self, part: str, reason: str) -> None:
        self.skipped_parts.append(f"{part}: {reason}")
