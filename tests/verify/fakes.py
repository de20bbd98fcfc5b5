"""A target without a model: what follows a prompt is a hash of all tokens before, so every answer has one right form.

It reads well enough for needles, keeps a prefix cache by the rules, and counts what an engine would. `Faults` make it
wrong in one way each; a gate that does not notice its own fault is no gate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from deltaserve.core.errors import EngineDeadError
from deltaserve.core.types import BLOCK
from deltaserve.verify.ask import Answer, Ask
from deltaserve.verify.book import Book, SkippedError
from deltaserve.verify.compare import EXACT, Level
from deltaserve.verify.lab import Lab, Options
from deltaserve.verify.prompts import Writer
from deltaserve.verify.target import AS_IT_IS, TOGETHER, About, Counters, Message, Session, Setup, Traffic

VOCAB_SIZE = 5000
GAP = 2.0


@dataclass
class Faults:
    """What goes wrong. `spoil` sees each answer with the circumstances it was made in, and may change it."""

    spoil: Callable[[Circumstances, Answer], Answer] = lambda _, answer: answer
    without: frozenset[str] = frozenset()  # events that never happen
    ignores_salt: bool = False
    leaks_pages: bool = False
    preempts: bool = False
    dies: bool = False


@dataclass(frozen=True)
class Circumstances:
    ask: Ask
    setup: Setup
    num_cached: int
    is_alone: bool
    is_preempted: bool
    previous: Answer | None


class FakeTarget:
    def __init__(
        self, faults: Faults | None = None, *, is_engine: bool = True, level: Level = EXACT, has_draft_head: bool = True
    ) -> None:
        self.faults = faults or Faults()
        self.about = About("a fake", "fake", 2048, VOCAB_SIZE, level, is_engine, has_draft_head)
        self.words: dict[str, int] = {}
        self.num_sessions = 0
        self._only = FakeSession(self, AS_IT_IS)

    @contextmanager
    def session(self, setup: Setup = AS_IT_IS) -> Iterator[Session]:
        if not self.about.is_engine:
            if setup != AS_IT_IS:
                raise SkippedError("a client cannot change the server's settings")
            yield self._only
            return
        self.num_sessions += 1
        yield FakeSession(self, setup)

    def encode(self, text: str) -> list[int]:
        return [self.words.setdefault(word, len(self.words) + 1) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        names = {token_id: word for word, token_id in self.words.items()}
        return " ".join(names.get(token_id, f"<{token_id}>") for token_id in token_ids)

    def render(self, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
        """Thoughts are shown after the last user message only."""
        keeps = template_kwargs.get("preserve_thinking", True)
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        text = ""
        for index, message in enumerate(messages):
            thought = message.get("reasoning_content") if keeps or index > last else None
            text += f" <{message['role']}> {thought or ''} {message['content']} <end>"
        return self.encode(text + " <assistant>")

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class FakeSession:
    target: FakeTarget
    setup: Setup
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    known: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    previous: Answer | None = None

    def __post_init__(self) -> None:
        self.counts |= {"num_pages": self.setup.num_pages or 512, "num_slots": 32}
        self.counts["num_free_slots"] = 32

    def ask(self, asks: Sequence[Ask], traffic: Traffic = TOGETHER) -> list[Answer]:
        if not (traffic.is_plain or self.target.about.is_engine):
            raise SkippedError("a client cannot steer the server's steps")
        if self.target.faults.dies:
            raise EngineDeadError("the engine process was killed")
        answers = [self._answer(ask, len(asks) == 1, traffic) for ask in asks]
        self._count_steps(answers)
        if traffic.watch is not None:
            self._compute(asks, traffic.watch)
            num_running = min(self.setup.rows or 8, len(asks))
            traffic.watch(self.counters() | {"num_running": 0 if self._lacks("company") else num_running})
        return answers

    def counters(self) -> Counters:
        used = self.counts["pages_used"]
        return self.counts | {"num_free_pages": self.counts["num_pages"] - used}

    def reset_cache(self) -> None:
        self.known.clear()
        self.counts["pages_used"] = 1 if self.target.faults.leaks_pages else 0

    def _answer(self, ask: Ask, is_alone: bool, traffic: Traffic) -> Answer:
        num_cached = self._num_cached(ask) if self.setup.caching else 0
        is_preempted = traffic.preempt is not None or self._is_starved() or self.target.faults.preempts
        answer = right_answer(self.target, ask, num_cached)
        seen = Circumstances(ask, self.setup, num_cached, is_alone, is_preempted, self.previous)
        self.previous = answer
        answer = self.target.faults.spoil(seen, answer)
        self._learn(ask, answer)
        self._count(ask, answer, is_preempted)
        return answer

    def _num_cached(self, ask: Ask) -> int:
        found = self.known.get(self._salt(ask), [])
        common = max((num_common(ask.prompt_ids, path) for path in found), default=0)
        return 0 if self._lacks("hits") else min(common, len(ask.prompt_ids) - 1) // BLOCK * BLOCK

    def _learn(self, ask: Ask, answer: Answer) -> None:
        self.known.setdefault(self._salt(ask), []).append(ask.prompt_ids + answer.token_ids)

    def _salt(self, ask: Ask) -> str:
        return "" if self.target.faults.ignores_salt else ask.salt

    def _is_starved(self) -> bool:
        """Pages for hardly more than one of each row."""
        return self.setup.num_pages is not None and self.setup.num_pages <= (self.setup.rows or 0) + 1

    def _count(self, ask: Ask, answer: Answer, is_preempted: bool) -> None:
        events = {"num_requests": 1, "num_hit": answer.num_cached, "pages_used": 1}
        if is_preempted and not self._lacks("preemptions"):
            events |= {"num_preemptions": 1, "num_hit": BLOCK}
        if self.setup.num_pages is not None and self.setup.caching and not self._lacks("evictions"):
            events["pages_evicted"] = 2
        if self.setup.host_pages and not self._lacks("offload"):
            events |= dict.fromkeys(("pages_saved", "snapshots_saved", "pages_restored", "snapshots_restored"), 1)
        if ask.use_drafts and (self.setup.num_drafts or not self.target.about.is_engine) and not self._lacks("drafts"):
            events |= {"num_verified": 3, "num_accepted": 2}
        for name, count in events.items():
            self.counts[name] += count

    def _count_steps(self, answers: Sequence[Answer]) -> None:
        lengths = [len(answer.token_ids) for answer in answers]
        self.counts["num_steps"] += sum(lengths) if self._lacks("company") else max(lengths)

    def _compute(self, asks: Sequence[Ask], watch: Callable[[Counters], None]) -> None:
        """Chunk by chunk, then token by token."""
        chunk = 10_000 if self._lacks("chunks") else self.setup.chunk or 4096
        for ask in asks:
            left = len(ask.prompt_ids)
            while left:
                self.counts["num_computed_tokens"] += min(chunk, left)
                left -= min(chunk, left)
                watch(self.counters())

    def _lacks(self, event: str) -> bool:
        return event in self.target.faults.without


COUNTERS = (
    "num_running", "num_waiting", "num_preemptions", "num_requests", "num_steps", "num_computed_tokens", "num_hit",
    "pages_evicted", "snapshots_evicted", "pages_saved", "snapshots_saved", "pages_restored", "snapshots_restored",
    "num_verified", "num_accepted", "pages_used",
)  # fmt: skip


def right_answer(target: FakeTarget, ask: Ask, num_cached: int = 0) -> Answer:
    """The needle if there is one, then hashes of everything before; each with a second choice."""
    given: list[int] = []
    hashed = hashlib.blake2b(repr((ask.prompt_ids, ask.params.seed)).encode(), digest_size=4)
    needle = _needle(target, ask.prompt_ids)
    for index in range(ask.params.max_tokens or 0):
        hashed.update(b"next")
        number = int.from_bytes(hashed.digest(), "big") % (VOCAB_SIZE - 1) + 1
        given.append(needle if index == 0 and needle is not None else number)
    tops = tuple(((token_id, -0.1), (second_choice(token_id), -0.1 - GAP)) for token_id in given)
    return Answer(tuple(given), tops, target.decode(given), "length", num_cached)


def second_choice(token_id: int) -> int:
    return token_id % (VOCAB_SIZE - 1) + 1


def with_token(answer: Answer, position: int, token_id: int | None = None) -> Answer:
    """The answer with another token at a position (its second choice, unless told)."""
    tokens = list(answer.token_ids)
    tokens[position] = second_choice(tokens[position]) if token_id is None else token_id
    return replace(answer, token_ids=tuple(tokens))


def make_lab(target: FakeTarget, **options: Any) -> Lab:
    chosen = Options(is_quick=True, seed=1, **options)
    return Lab(target, target.about.level, chosen, Writer(target, chosen.seed))


def run_gate(gate: Callable[[Lab, Book], None], faults: Faults | None = None, **target: Any) -> Book:
    """The book of one gate on a fake."""
    fake = FakeTarget(faults, **target)
    book = Book(gate.__name__, fake.about.level)
    gate(make_lab(fake), book)
    return book


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    size = min(len(one), len(other))
    return next((index for index in range(size) if one[index] != other[index]), size)


def _needle(target: FakeTarget, prompt_ids: Sequence[int]) -> int | None:
    """The word after "Remember that the ... is"."""
    marks = [target.words.get("Remember"), target.words.get("is")]
    if marks[0] not in prompt_ids:
        return None
    told = list(prompt_ids[prompt_ids.index(marks[0]) :])
    return told[told.index(marks[1]) + 1] if marks[1] in told[:-1] else None
