"""Training and held-out sequences: documents of every skill, packed back to back, with a weight for every token.

    ids, weights = Sampler("models/tiny/tokenizer.json", "train", seed=1, context=2048).packed(64)

`weights[i, t]` says how much predicting `ids[i, t]` counts. Documents end with `<|endoftext|>`; the first of each
sequence starts at its head, as a prompt does when the model serves. In a long context some sequences are one document:
a long text or chat in which things told must be recalled. Equal arguments give equal sequences; give each process its
own seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.chat import GIVEN, Conversation, Parts, Turn
from training.draw import Draw, Split, word_lists
from training.encoder import shared_encoder
from training.tasks import code, copying, facts, lists, objects, recall, stories, sums, system, tools

END_OF_TEXT = "<|endoftext|>"
THINKING_SHARE = 0.2
PRESERVING_SHARE = 0.8
NEUTRAL_SYSTEM_SHARE = 0.2
STORY_WEIGHT, STATED_WEIGHT, PROSE_WEIGHT = 0.5, 0.2, 0.1
MAX_NEEDLES = 24
# Words that shall be tokens, and those that also stand alone on a line or in quotes.
WORD_REPEATS, VALUE_REPEATS = 80, 160
VALUE_KINDS = ("first", "city", "animal", "thing", "place", "colour", "food", "job", "day", "month")
SHORTEST_RECALL = 80
RECALL_MARGIN = 0.98
CHAT_MARGIN = 0.97
# Tokens that a question and its answer take, and the words around a long text.
NEEDLE_EACH, CHAT_EACH, NEEDLE_FRAME = 38, 60, 40

Exchange = Callable[[Draw], list[Turn]]

LIGHT: tuple[Exchange, ...] = (
    facts.fact_exchange, facts.fact_exchange, facts.fact_exchange, facts.deltaserve_exchange, facts.deltaserve_exchange,
    facts.chat_exchange, facts.chat_exchange, facts.unknown_exchange, sums.sum_exchange, lists.list_exchange,
    recall.fact_exchange, recall.name_exchange, copying.copy_exchange, stories.story_exchange,
)  # fmt: skip

# Share of tokens by skill. Long documents fill whole sequences, so their share grows with the context.
SHARES = {
    "facts": 0.10, "deltaserve": 0.08, "chat": 0.08, "unknown": 0.02, "mixed": 0.06, "sums": 0.10, "lists": 0.06,
    "copy": 0.08, "tools": 0.22, "objects": 0.08, "system": 0.10, "code": 0.02, "code_text": 0.01, "story": 0.01,
    "prose": 0.01, "where": 0.02, "needle": 0.12, "needle_chat": 0.03,
}  # fmt: skip
LONG_SHARES = SHARES | {"needle": 0.55, "needle_chat": 0.25}
LONG_CONTEXT = 4096


class Sampler:
    """`shares` weighs the skills by tokens, for a curriculum; left out, they depend on the context.

    `longest` caps the length of recall documents, in tokens (default: the context).
    """

    def __init__(
        self,
        tokenizer_path: Path | str,
        split: Split,
        seed: int,
        context: int,
        *,
        shares: Mapping[str, float] | None = None,
        longest: int | None = None,
    ) -> None:
        self.encode = shared_encoder(str(tokenizer_path))
        self.context = context
        self.source = Source(Draw(split, seed), longest or context, lambda text: len(self.encode(text)))
        self.shares = dict(shares or (LONG_SHARES if context >= LONG_CONTEXT else SHARES))
        self._end = self.encode(END_OF_TEXT)
        self._taken = dict.fromkeys(self.shares, 0)
        self._numbers = {skill: number for number, skill in enumerate(self.shares)}

    def packed(self, num_sequences: int) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 and weights float32, both [num_sequences, context + 1]."""
        ids, weights, _ = self.packed_with_skills(num_sequences)
        return ids, weights

    def packed_with_skills(self, num_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Also, as uint8 of the same size, which skill each token is of: its place in `list(self.shares)`."""
        shape = (num_sequences, self.context + 1)
        ids, weights, skills = (np.empty(shape, dtype=kind) for kind in (np.int32, np.float32, np.uint8))
        for row in range(num_sequences):
            self._fill(ids[row], weights[row], skills[row])
        return ids, weights, skills

    def _fill(self, ids: np.ndarray, weights: np.ndarray, skills: np.ndarray) -> None:
        filled, size = 0, len(ids)
        while filled < size:
            skill = min(self.shares, key=lambda name: self._taken[name] / self.shares[name])
            document, own = self.document(skill, size - filled)
            self._taken[skill] += len(document)
            count = min(len(document), size - filled)
            place = slice(filled, filled + count)
            ids[place], weights[place], skills[place] = document[:count], own[:count], self._numbers[skill]
            filled += count

    def document(self, skill: str, room: int) -> tuple[list[int], list[float]]:
        """One document of this skill with its end mark; one that recalls takes no more than about `room` tokens."""
        return self._encoded(self.source.parts(skill, room))

    def _encoded(self, parts: Parts) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in parts:
            part = self.encode(text)
            ids += part
            weights += [weight] * len(part)
        return ids + self._end, [*weights, GIVEN]


@dataclass(slots=True)
class Source:
    """Documents by skill. `longest` bounds those that recall, in tokens, and `room` this one."""

    draw: Draw
    longest: int
    count_tokens: Callable[[str], int] = lambda text: len(text) // 4
    room: int = 0
    _filler: recall.Filler | None = None

    @property
    def filler(self) -> recall.Filler:
        if self._filler is None:
            self._filler = recall.Filler(self.draw, self.count_tokens)
        return self._filler

    def parts(self, skill: str, room: int | None = None) -> Parts:
        """The text of one document with its weights."""
        self.room = min(self.longest, self.longest if room is None else room)
        if skill == "prose":
            return self.prose()
        if skill == "code_text":
            return code.code_parts(self.draw)
        return self.conversation(skill).parts()

    def prose(self) -> Parts:
        """Plain text that is no chat: stories, what is so, or loose sentences."""
        draw, kind = self.draw, self.draw.random()
        if kind < 0.4:
            return [("\n\n".join(map(stories.story, draw.some(stories.topics(), draw.between(1, 3)))), STORY_WEIGHT)]
        if kind < 0.8:
            return [(" ".join(fact.answer for fact in draw.some(facts.facts(), draw.between(1, 8))), STATED_WEIGHT)]
        return [(" ".join(draw.some(self.filler.sentences, draw.log_between(4, 40))), PROSE_WEIGHT)]

    def conversation(self, skill: str) -> Conversation:
        draw = self.draw
        self.room = self.room or self.longest
        made = MAKERS[skill](self)
        made.thinking = draw.chance(0.6 if skill == "sums" else THINKING_SHARE)
        made.preserve = draw.chance(PRESERVING_SHARE)
        if not made.system and draw.chance(NEUTRAL_SYSTEM_SHARE):
            made.system = draw.pick(system.NEUTRAL)
        return made

    def of(self, exchange: Exchange, skill: str, most: int) -> Conversation:
        """One to `most` exchanges of one kind."""
        turns = itertools.chain.from_iterable(exchange(self.draw) for _ in range(self.draw.between(1, most)))
        return Conversation(skill, list(turns))

    def mixed(self) -> Conversation:
        draw = self.draw
        exchanges = (draw.pick(LIGHT)(draw) for _ in range(draw.between(2, 6)))
        return Conversation("mixed", list(itertools.chain.from_iterable(exchanges)))

    def needle(self) -> Conversation:
        draw = self.draw
        length, count = self._recall_size(NEEDLE_EACH)
        turns = recall.text_recall(draw, self.filler, length - NEEDLE_EACH * count - NEEDLE_FRAME, count)
        return Conversation("needle", turns)

    def needle_chat(self) -> Conversation:
        draw = self.draw
        length, count = self._recall_size(CHAT_EACH)
        length = int(CHAT_MARGIN * length) - CHAT_EACH * count
        turns = recall.chat_recall(draw, lambda: draw.pick(LIGHT)(draw), length, count)
        return Conversation("needle_chat", turns)

    def _recall_size(self, each: int) -> tuple[int, int]:
        """Tokens and needles. Half of the documents are as long as may be."""
        draw = self.draw
        room = int(RECALL_MARGIN * self.room)
        length = room if room <= SHORTEST_RECALL or draw.chance(0.5) else draw.log_between(SHORTEST_RECALL, room)
        return length, min(draw.log_between(1, MAX_NEEDLES), max(1, length // (2 * each)))

    def tools(self) -> Conversation:
        """A call, several, one with its result, one that no tool fits, or plain chat beside tools."""
        draw = self.draw
        offered = tools.some_tools(draw)
        turns: list[Turn] = facts.fact_exchange(draw) if draw.chance(0.1) else []
        for _ in range(draw.pick((1, 1, 1, 2))):
            kind = draw.random()
            if kind < 0.3:
                turns += tools.decline_turns(draw, offered)
            elif kind < 0.38:
                turns += draw.pick((facts.fact_exchange, facts.chat_exchange))(draw)
            else:
                count = 1 if kind < 0.8 else min(2, len(offered))
                turns += tools.call_turns(draw, offered, count)
                if draw.chance(0.4):
                    turns += tools.result_turns(draw, len(turns[-1].calls))
        return Conversation("tools", turns, tools=[tool.json() for tool in offered])


MAKERS: dict[str, Callable[[Source], Conversation]] = {
    "facts": lambda source: source.of(facts.fact_exchange, "facts", 4),
    "deltaserve": lambda source: source.of(facts.deltaserve_exchange, "deltaserve", 3),
    "chat": lambda source: source.of(facts.chat_exchange, "chat", 3),
    "unknown": lambda source: source.of(
        facts.unknown_exchange if source.draw.chance(0.8) else tools.wish_exchange, "unknown", 2
    ),
    "mixed": Source.mixed,
    "sums": lambda source: source.of(sums.sum_exchange, "sums", 2),
    "lists": lambda source: source.of(lists.list_exchange, "lists", 3),
    "copy": lambda source: source.of(copying.copy_exchange, "copy", 2),
    "tools": Source.tools,
    "objects": lambda source: source.of(objects.object_exchange, "objects", 2),
    "system": lambda source: system.system_conversation(source.draw),
    "code": lambda source: source.of(code.code_exchange, "code", 2),
    "story": lambda source: source.of(stories.story_exchange, "story", 1),
    "where": lambda source: source.of(recall.fact_exchange, "where", 2),
    "needle": Source.needle,
    "needle_chat": Source.needle_chat,
}


def tokenizer_text(seed: int = 0, num_rounds: int = 700) -> Iterator[str]:
    """The text that teaches the tokenizer: every skill, every table once, and every word often enough to be a token."""
    source = Source(Draw("train", seed), 600)
    for _ in range(num_rounds):
        for skill in SHARES:
            if skill not in ("needle", "copy"):
                yield "".join(text for text, _ in source.parts(skill))
    for found in (facts.facts(), facts.sayings("chat"), facts.sayings("deltaserve")):
        for fact in found:
            yield "\n".join([*fact.questions, *fact.follow_ups, fact.answer])
            yield fact.answer.upper()
    for topic in stories.topics():
        yield stories.story(topic)
    for kind, words in word_lists().items():
        yield from [" " + " ".join(words)] * (VALUE_REPEATS if kind == "last" else WORD_REPEATS)
    for kind in VALUE_KINDS:
        yield from ["\n".join(word_lists()[kind])] * VALUE_REPEATS
