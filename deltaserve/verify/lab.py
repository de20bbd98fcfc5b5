"""What gates share: the target, the level, prompts, and the cold reference that every other way must equal.

A cold answer is computed alone, from nothing: in an engine of its own without prefix cache or drafts (its whole prompt
in one chunk), or, by a server, under a salt that nobody has used. It is computed once for each question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from deltaserve.verify.ask import Answer, Ask, greedy, sampled
from deltaserve.verify.book import Book, SkippedError
from deltaserve.verify.compare import Level, compare
from deltaserve.verify.memory_watch import MemoryWatch
from deltaserve.verify.prompts import Recall, Writer, edge_lengths
from deltaserve.verify.target import AS_IT_IS, Session, Setup, Target, ask_alone

PLAIN = Setup(caching=False, num_drafts=0)
NUM_TELLING = 8  # first tokens by which answers are told apart, whatever their lengths
OUTPUT_LENGTHS = (8, 12, 8, 20, 72, 12, 8)  # the long one crosses a boundary


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose. `num_drafts` None: those of the target. `is_quick`: fewer and shorter cases."""

    is_quick: bool = False
    seed: int | None = None
    num_drafts: int | None = None
    num_ranks: int = 1
    min_free_bytes: int = 0
    max_tokens: int | None = None  # longest prompt of the gates that go by length; None: the target's context


@dataclass(slots=True)
class Lab:
    """Everything a gate gets, but for its book."""

    target: Target
    level: Level
    options: Options
    writer: Writer
    memory: MemoryWatch | None = None
    _cold: dict[tuple[object, ...], Answer] = field(default_factory=dict)
    _control: tuple[int, int] | None = None
    _prompts: list[Recall] = field(default_factory=list)

    @property
    def is_engine(self) -> bool:
        return self.target.about.is_engine

    @property
    def is_quick(self) -> bool:
        return self.options.is_quick

    def session(self, setup: Setup = AS_IT_IS) -> AbstractContextManager[Session]:
        """With the drafts that the user asked for, unless the setup says."""
        if setup.num_drafts is None and self.options.num_drafts is not None:
            setup = replace(setup, num_drafts=self.options.num_drafts)
        return self.target.session(setup)

    def prompts(self) -> list[Recall]:
        """The gates' common prompts, at lengths around the ends of blocks: 17, or all of a longer list."""
        if not self._prompts:
            longest = min(self.limit(16 if not self.is_quick else 256), 1024 if not self.is_quick else 420)
            lengths = edge_lengths(17 if self.is_quick else 34, longest)
            self._prompts = [self.writer.recall(length) for length in lengths]
        return self._prompts

    def limit(self, num_output: int) -> int:
        """The longest prompt that leaves room for an answer of `num_output` tokens."""
        return (
            min(self.options.max_tokens or self.target.about.max_model_len, self.target.about.max_model_len)
            - num_output
        )

    def asks(self) -> list[Ask]:
        """One for each common prompt; at the exact level every second one is sampled with all rules."""
        return [
            self.ask(recall.prompt_ids, OUTPUT_LENGTHS[index % len(OUTPUT_LENGTHS)], index)
            for index, recall in enumerate(self.prompts())
        ]

    def some_asks(self) -> list[Ask]:
        """Those for gates that run them in several ways: a third of them where time is short."""
        return self.asks()[::3] if self.is_quick else self.asks()

    def ask(self, prompt_ids: tuple[int, ...], num_tokens: int, index: int) -> Ask:
        if self.level.is_exact and index % 2:
            return sampled(prompt_ids, num_tokens, seed=index)
        return greedy(prompt_ids, num_tokens)

    def cold(self, asks: Sequence[Ask]) -> list[Answer]:
        """Reference answers, in order."""
        missing = {ask.key: ask for ask in asks if ask.key not in self._cold}
        if missing:
            with self.target.session(PLAIN if self.is_engine else AS_IT_IS) as session:
                fresh = [self._fresh(ask) for ask in missing.values()]
                self._cold |= dict(zip(missing, ask_alone(session, fresh), strict=True))
        return [self._cold[ask.key] for ask in asks]

    def compare_all(self, book: Book, part: str, asks: Sequence[Ask], answers: Iterable[Answer]) -> None:
        """One case for each answer, against its cold reference."""
        references = self.cold(asks)
        for index, (ask, reference, answer) in enumerate(zip(asks, references, answers, strict=True)):
            book.compare(f"{part}, prompt {index} of {len(ask.prompt_ids)} tokens", reference, answer)
        check_diversity(book, part, references)

    def control(self) -> tuple[int, int]:
        """(splits, cases) between cold runs alone and in a batch: what the target does without any cache."""
        if self._control is None:
            asks = [ask for ask in self.asks() if ask.params.temperature == 0.0]
            setup = PLAIN if self.is_engine else AS_IT_IS
            with self.target.session(setup) as session:
                batch = session.ask([self._fresh(ask) for ask in asks])
            verdicts = [compare(*pair, self.level) for pair in zip(self.cold(asks), batch, strict=True)]
            self._control = sum(verdict.is_split for verdict in verdicts), len(verdicts)
        return self._control

    def _fresh(self, ask: Ask) -> Ask:
        """A server keeps what it computes, so each cold run has a salt of its own; drafts are what is verified."""
        return replace(ask, salt="" if self.is_engine else self.writer.salt("cold"), use_drafts=False)


def check_diversity(book: Book, part: str, answers: Sequence[Answer]) -> None:
    """Equal answers prove something only where different questions have different ones."""
    distinct = len({answer.token_ids[:NUM_TELLING] for answer in answers})
    if len(answers) > 2 and distinct <= len(answers) // 3:
        sentence = f"{distinct} different answers to {len(answers)} questions: equal ones would prove nothing"
        book.expect(f"{part}: answers tell prompts apart", False, sentence)


def needs_engine(lab: Lab, reason: str) -> None:
    """SkippedError for a server's URL."""
    if not lab.is_engine:
        raise SkippedError(reason)
