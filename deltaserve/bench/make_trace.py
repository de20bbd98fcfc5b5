"""Agentic traces from a seed, with stated medians: many conversations, interleaved as users and tools take their time.

| generator | what it is                                                                                              |
| --------- | ------------------------------------------------------------------------------------------------------- |
| chat      | long conversations on six system prompts, some about a document; thinking goes when the user answers;   |
|           | a few answers asked for again, a few last messages edited                                               |
| tools     | agents: a task, then a loop of tool calls with up to four results at once, then the next task, which    |
|           | rewrites the loop without its thinking                                                                  |
| forks     | many users on eight system prompts: short talks, trunks from which several branches go on, retries      |

Who says what when is drawn first, in units; then three scales (for what is there at the start, for what users and tools
add, for what the model writes) are solved so that the median prompt, the median answer and the share of prompt tokens
seen before are those of `Shape`. `Measured` is what came out, counted on the trace itself; what is not within 2 % is
refused.

Times are those of an open loop: an answer takes as long as 50 tokens a second need, whatever a cache does, so that
every policy meets the same trace. Sessions begin at random, so fast that about `num_alive` are under way.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from deltaserve.bench.conversation import (
    Ids,
    Message,
    Part,
    Piece,
    Role,
    Text,
    Words,
    num_tokens,
    prompt_parts,
    reply_parts,
)
from deltaserve.bench.traces import HashIds, TraceRow
from deltaserve.core.errors import ConfigError

FIRST_TOKEN_S, TOKEN_S = 0.5, 0.02
TOLERANCE = 0.02
_UNIT_TOKENS = 100_000
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Shape:
    """What to make. `seen_share` is of prompt tokens, token-weighted, against a cache that forgets nothing."""

    num_requests: int = 1000
    prompt_tokens: int = 8192
    output_tokens: int = 400
    seen_share: float | None = None  # None: what the generator can reach at most seeds
    num_alive: int = 32
    max_tokens: int = 262_144


@dataclass(frozen=True, slots=True)
class Measured:
    num_requests: int
    num_sessions: int
    prompt_tokens: float
    output_tokens: float
    seen_share: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what is sent, what the model will answer, and when either is complete."""

    session_id: str
    arrival_s: float
    finish_s: float
    prompt: tuple[Piece, ...]
    reply: tuple[Piece, ...]

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.prompt) + num_tokens(self.reply)

    def later(self, by_s: float) -> Turn:
        return replace(self, arrival_s=self.arrival_s + by_s, finish_s=self.finish_s + by_s)


Scales = tuple[float, float, float]  # tokens a unit, by Part
Session = list[Turn]


class Author:
    """Draws texts and times of one session; numbers make texts differ between sessions."""

    def __init__(self, rng: random.Random, scales: Scales, numbers: Iterator[int]) -> None:
        self.rng = rng
        self._scales = scales
        self._numbers = numbers

    def text(self, part: Part, median: float, spread: float) -> Text:
        units = median * math.exp(spread * max(-2.5, min(2.5, self.rng.gauss(0, 1))))
        return Text(next(self._numbers), part, max(4, round(units * self._scales[part])))

    def user(self, median: float = 1.0) -> Message:
        return Message(Role.USER, (self.text(Part.TURN, median, 0.8),))

    def reply(self, thinking: float, answer: float) -> Message:
        thought = self.text(Part.OUTPUT, thinking, 0.7)
        return Message(Role.ASSISTANT, (self.text(Part.OUTPUT, answer, 0.7),), thought)

    def pause_s(self, median_s: float, spread: float, long_share: float = 0.0, long_s: float = 0.0) -> float:
        """Log-normal; a `long_share` of pauses has the median `long_s` instead."""
        median_s = long_s if self.rng.random() < long_share else median_s
        return median_s * math.exp(self.rng.gauss(0, spread))

    def times(self, median: float, spread: float, most: int) -> int:
        return max(1, min(most, round(median * math.exp(self.rng.gauss(0, spread)))))


class Talk:
    """A conversation in the making: `ask` sends what has been said so far and appends the answer."""

    def __init__(self, session_id: str, messages: Sequence[Message], now_s: float = 0.0) -> None:
        self.session_id = session_id
        self.messages = tuple(messages)
        self.now_s = now_s
        self.turns: Session = []

    def say(self, message: Message) -> None:
        self.messages += (message,)

    def ask(self, reply: Message) -> None:
        prompt, written = tuple(prompt_parts(self.messages)), tuple(reply_parts(reply))
        finish_s = self.now_s + FIRST_TOKEN_S + TOKEN_S * num_tokens(written)
        self.turns.append(Turn(self.session_id, self.now_s, finish_s, prompt, written))
        self.messages += (reply,)
        self.now_s = finish_s

    def branch(self, messages: tuple[Message, ...], now_s: float) -> Talk:
        return Talk(self.session_id, messages, now_s)


def chat(author: Author, systems: Sequence[Message], session_id: str) -> Session:
    talk = Talk(session_id, (_popular(author, systems),))
    document = author.text(Part.BASE, 1.0, 0.8) if author.rng.random() < 0.6 else None
    for turn in range(author.times(13, 0.5, 60)):
        before = talk.messages
        talk.say(_question(author, document if turn == 0 else None))
        talk.ask(author.reply(0.6, 0.4))
        if author.rng.random() < 0.04:
            _answer_again(author, talk, before)
        talk.now_s += author.pause_s(40, 1.0, long_share=0.08, long_s=900)
    return talk.turns


def _question(author: Author, document: Text | None) -> Message:
    question = author.user(5.0 if author.rng.random() < 0.1 else 1.0)
    return question if document is None else replace(question, texts=(document, *question.texts))


def _answer_again(author: Author, talk: Talk, before: tuple[Message, ...]) -> None:
    """The user wants another answer, or has edited the last message."""
    question = talk.messages[len(before)]
    talk.now_s += author.pause_s(10, 0.5)
    talk.messages = before
    talk.say(question if author.rng.random() < 0.5 else author.user())
    talk.ask(author.reply(0.6, 0.4))


def tools(author: Author, systems: Sequence[Message], session_id: str) -> Session:
    talk = Talk(session_id, (_popular(author, systems),))
    task = author.user()
    talk.say(replace(task, texts=(author.text(Part.BASE, 0.8, 0.6), *task.texts)))
    for _ in range(author.times(2, 0.5, 8)):
        for _ in range(author.times(9, 0.5, 40)):
            talk.ask(author.reply(0.5, 0.5))
            talk.now_s += author.pause_s(1.5, 1.0)
            num_results = author.rng.choice((1, 1, 1, 2, 2, 3, 4))
            results = tuple(author.text(Part.TURN, 1.0 / num_results**0.5, 1.0) for _ in range(num_results))
            talk.say(Message(Role.TOOL, results))
        talk.ask(author.reply(0.5, 1.5))
        talk.now_s += author.pause_s(60, 1.0, long_share=0.15, long_s=1200)
        talk.say(author.user())
    return talk.turns


def forks(author: Author, systems: Sequence[Message], session_id: str) -> Session:
    talk = Talk(session_id, (_popular(author, systems),))
    for _ in range(author.times(2, 0.6, 8)):
        talk.say(author.user())
        talk.ask(author.reply(0.6, 0.4))
        talk.now_s += author.pause_s(30, 0.8)
    turns = talk.turns
    if author.rng.random() < 0.5:
        for _ in range(author.times(4, 0.5, 10)):
            branch = talk.branch(talk.messages, talk.now_s + author.pause_s(5, 1.0))
            for _ in range(author.times(1.5, 0.5, 4)):
                branch.say(author.user())
                branch.ask(author.reply(0.6, 0.4))
                branch.now_s += author.pause_s(15, 0.8)
            turns = turns + branch.turns
    return turns + [again for turn in turns if (again := _retry(author, turn)) is not None]


def _retry(author: Author, turn: Turn) -> Turn | None:
    """The same prompt once more: a client that gave up on the answer, or wants a second one."""
    if author.rng.random() >= 0.1:
        return None
    return turn.later(turn.finish_s - turn.arrival_s + author.pause_s(10, 1.0))


@dataclass(frozen=True, slots=True)
class Generator:
    """`session` writes one; `num_systems` shared system prompts of about `system_units` are there before."""

    session: Callable[[Author, Sequence[Message], str], Session]
    num_systems: int
    system_units: float
    seen_share: float


GENERATORS = {
    "chat": Generator(chat, num_systems=6, system_units=0.4, seen_share=0.9),
    "tools": Generator(tools, num_systems=4, system_units=0.6, seen_share=0.94),
    "forks": Generator(forks, num_systems=8, system_units=1.0, seen_share=0.9),
}


def make(name: str, shape: Shape, seed: int) -> tuple[tuple[Turn, ...], Measured]:
    """The trace in order of arrival, and what it measures.

    Raises ConfigError for an unknown generator, and where the shape cannot be reached (naming what can).
    """
    if name not in GENERATORS:
        raise ConfigError(f"no generator {name!r}; known are {', '.join(GENERATORS)}")
    if shape.seen_share is None:
        shape = replace(shape, seen_share=GENERATORS[name].seen_share)
    scales: Scales = (_UNIT_TOKENS, _UNIT_TOKENS, _UNIT_TOKENS)
    shape_made = replace(shape, max_tokens=1 << 62)  # the first round only learns the structure
    for _ in range(_ROUNDS):
        turns = _write(name, shape_made, seed, scales)
        table = _PartTable(turns)
        measured = table.measured(turns)
        if _is_within(measured, shape):
            return turns, measured
        scales = table.solve(shape, scales)
        shape_made = shape
    raise ConfigError(
        f"{name} with seed {seed} gives prompts of {measured.prompt_tokens:.0f} tokens, {measured.seen_share:.1%} seen "
        f"before, not {shape.prompt_tokens} and {shape.seen_share:.1%}; ask for a share nearer to it or more requests"
    )


def to_rows(turns: Sequence[Turn]) -> list[TraceRow]:
    """As a trace file holds them, at their times. A row is a whole prompt, so sessions show by what prompts share."""
    words, hash_ids = Words(), HashIds()
    return [
        TraceRow(
            input_length=num_tokens(turn.prompt),
            output_length=num_tokens(turn.reply),
            hash_ids=hash_ids.of(words.ids(turn.prompt)),
            timestamp_ms=round(1000 * (turn.arrival_s - turns[0].arrival_s), 3),
        )
        for turn in turns
    ]


def _is_within(measured: Measured, shape: Shape) -> bool:
    assert shape.seen_share is not None
    pairs = (
        (measured.prompt_tokens, shape.prompt_tokens),
        (measured.output_tokens, shape.output_tokens),
        (measured.seen_share, shape.seen_share),
    )
    return all(abs(made - asked) <= TOLERANCE / 2 * asked for made, asked in pairs)


def _write(name: str, shape: Shape, seed: int, scales: Scales) -> tuple[Turn, ...]:
    """The first `num_requests` that fit `max_tokens`. Scales change lengths and times, nothing else that is drawn."""
    generator, numbers = GENERATORS[name], count()
    author = Author(random.Random(f"{name} {seed} systems"), scales, numbers)
    systems = [
        Message(Role.SYSTEM, (author.text(Part.BASE, generator.system_units, 0.3),))
        for _ in range(generator.num_systems)
    ]
    sessions: list[Session] = []
    num_drawn = 0
    while num_drawn < shape.num_requests * 1.3:
        rng = random.Random(f"{name} {seed} {len(sessions)}")
        session = generator.session(Author(rng, scales, numbers), systems, f"{name}-{len(sessions)}")
        sessions.append([turn for turn in session if turn.num_tokens <= shape.max_tokens])
        num_drawn += len(sessions[-1])
    return tuple(_interleave(sessions, shape, random.Random(f"{name} {seed} starts")))[: shape.num_requests]


def _interleave(sessions: Sequence[Session], shape: Shape, rng: random.Random) -> list[Turn]:
    """Sessions start at random, as fast as keeps `num_alive` of their mean duration under way."""
    durations_s = [max((turn.finish_s for turn in session), default=0.0) for session in sessions]
    gap_s = sum(durations_s) / len(sessions) / shape.num_alive
    start_s, turns = 0.0, []
    for session in sessions:
        turns += [turn.later(start_s) for turn in session]
        start_s += rng.expovariate(1 / gap_s)
    return sorted(turns, key=lambda turn: turn.arrival_s)


def _popular(author: Author, systems: Sequence[Message]) -> Message:
    """The n-th system prompt is asked for in proportion to 1 / n."""
    return author.rng.choices(systems, [1 / rank for rank in range(1, len(systems) + 1)])[0]


class _PartTable:
    """Tokens of every prompt by Part (markup last), and how many of those were seen before in a prompt or answer."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.prompts_NP = np.zeros((len(turns), 4))
        self.seen_NP = np.zeros((len(turns), 4))
        self.outputs_N = np.array([num_tokens(turn.reply) for turn in turns])
        known = _KnownPaths()
        answers: list[tuple[float, int]] = []
        for at, turn in enumerate(turns):
            while answers and answers[0][0] <= turn.arrival_s:
                answered = turns[heapq.heappop(answers)[1]]
                known.learn((*answered.prompt, *answered.reply))
            seen = known.learn(turn.prompt)
            self.seen_NP[at] = _tokens_by_part(turn.prompt[:seen])
            self.prompts_NP[at] = self.seen_NP[at] + _tokens_by_part(turn.prompt[seen:])
            heapq.heappush(answers, (turn.finish_s, at))

    def measured(self, turns: Sequence[Turn]) -> Measured:
        return Measured(
            num_requests=len(turns),
            num_sessions=len({turn.session_id for turn in turns}),
            prompt_tokens=float(np.median(self.prompts_NP.sum(1))),
            output_tokens=float(np.median(self.outputs_N)),
            seen_share=float(self.seen_NP.sum() / self.prompts_NP.sum()),
            duration_s=turns[-1].arrival_s - turns[0].arrival_s,
        )

    def solve(self, shape: Shape, scales: Scales) -> Scales:
        """New scales: outputs by their median, then the ratio of TURN to BASE by the share seen (bisection)."""
        assert shape.seen_share is not None
        by_output = shape.output_tokens / float(np.median(self.outputs_N))
        low, high = 1e-4, 1e4
        for _ in range(40):
            ratio = math.sqrt(low * high)
            factors = self._factors(shape, ratio, by_output)
            share = float((self.seen_NP @ factors).sum() / (self.prompts_NP @ factors).sum())
            low, high = (ratio, high) if share > shape.seen_share else (low, ratio)
        return tuple(scale * factor for scale, factor in zip(scales, factors[:3].tolist(), strict=True))

    def _factors(self, shape: Shape, ratio: float, by_output: float) -> npt.NDArray[np.float64]:
        """By how much to stretch (BASE, TURN, OUTPUT, markup) for the median prompt, TURN being `ratio` x BASE."""
        fixed_N = self.prompts_NP @ np.array([0, 0, by_output, 1.0])
        grow_N = self.prompts_NP @ np.array([1.0, ratio, 0, 0])
        low, high = 1e-8, 1e4
        for _ in range(60):
            base = math.sqrt(low * high)
            low, high = (base, high) if np.median(fixed_N + base * grow_N) < shape.prompt_tokens else (low, base)
        return np.array([base, base * ratio, by_output, 1.0])


class _KnownPaths:
    """Every sequence of pieces that was a prompt, or a prompt and its answer."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int | Ids], int] = {}

    def learn(self, pieces: Sequence[Piece]) -> int:
        """How many of the leading pieces were known; now all are."""
        node, num_known, nodes = 0, 0, self._nodes
        for piece in pieces:
            step = (node, piece.number if isinstance(piece, Text) else piece)
            following = nodes.get(step)
            if following is None:
                following = nodes[step] = len(nodes) + 1
            else:
                num_known += 1
            node = following
        return num_known


def _tokens_by_part(pieces: Sequence[Piece]) -> list[int]:
    """Of BASE, TURN, OUTPUT and markup."""
    lengths = [0, 0, 0, 0]
    for piece in pieces:
        if isinstance(piece, Text):
            lengths[piece.part] += piece.length
        else:
            lengths[3] += len(piece)
    return lengths
