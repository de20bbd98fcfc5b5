"""The two things a gate can be run on, behind one protocol: see `engine_target` and `http_target`.

A target opens sessions. A session is an engine that is set in one way and answers asks; a server is always the same
session, so a Setup other than the default one is refused there, and the gate or the part of it is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from deltaserve.verify.ask import Answer, Ask
from deltaserve.verify.book import SkippedError
from deltaserve.verify.compare import Level

Message = Mapping[str, Any]
Counters = Mapping[str, float]  # the fields of engine.info.EngineStats


@dataclass(frozen=True, slots=True)
class Setup:
    """How the engine of a session is set; None leaves the choice to the target.

    `chunk` is the most tokens of one step, `rows` the most requests at once, `host_pages` the second tier's size.
    """

    caching: bool = True
    chunk: int | None = None
    rows: int | None = None
    num_pages: int | None = None
    num_snapshots: int | None = None
    host_pages: int = 0
    num_drafts: int | None = None
    num_ranks: int = 1
    no_eviction: bool = False


AS_IT_IS = Setup()


@dataclass(frozen=True, slots=True)
class Traffic:
    """How asks reach the engine: all at once, or ask i before step arrivals[i]; and what is done to them on the way.

    `preempt` draws which running requests are pushed out; `watch` sees the counters after every step.
    """

    arrivals: Sequence[int] | None = None
    preempt: Random | None = None
    watch: Callable[[Counters], None] | None = None

    @property
    def is_plain(self) -> bool:
        return self.arrivals is None and self.preempt is None


TOGETHER = Traffic()


class Session(Protocol):
    """One engine, set in one way."""

    def ask(self, asks: Sequence[Ask], traffic: Traffic = TOGETHER) -> list[Answer]:
        """All of them at the same time; one answer each, in order. SkippedError where traffic cannot be steered."""
        ...

    def counters(self) -> Counters: ...

    def reset_cache(self) -> None:
        """Drop what is only cached."""
        ...


@dataclass(frozen=True, slots=True)
class About:
    """What a target says of itself; `facts` go to the report. `num_drafts` is what its requests use."""

    name: str
    model: str
    max_model_len: int
    vocab_size: int
    level: Level
    is_engine: bool
    has_draft_head: bool
    num_drafts: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


class Target(Protocol):
    about: About

    def session(self, setup: Setup = AS_IT_IS) -> AbstractContextManager[Session]:
        """SkippedError where the target cannot be set so."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render(self, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. SkippedError without a chat template."""
        ...

    def close(self) -> None: ...


def ask_alone(session: Session, asks: Sequence[Ask]) -> list[Answer]:
    """One after the other."""
    return [session.ask([ask])[0] for ask in asks]


def flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a nested mapping under their own names."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value)
        elif isinstance(value, int | float):
            flat[name] = value
    return flat


class Tally:
    """How far a session's counters go from here on."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._before = session.counters()

    def count(self, *names: str) -> int:
        """Of all names together. SkippedError where the target does not count one."""
        now = self._session.counters()
        for name in names:
            if name not in now:
                raise SkippedError(f"the target does not count {name}")
        return int(sum(now[name] - self._before.get(name, 0) for name in names))
