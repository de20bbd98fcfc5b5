"""Recall: something is told once, anywhere in a long text or chat, and asked for at the end.

Long conversations ask for several things one after the other, so that one long reading teaches often. Filler is loose
sentences, random words, numbered lines or an ordinary chat. Held out are the words that must be recalled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.chat import GIVEN, Conversation, Turn, assistant, casual, user
from training.draw import Draw, capital
from training.tasks.stories import sentence

POOL_SIZE, NUM_MEASURED = 12_000, 60
# Lengths in tokens, on average; they only have to be near.
NEEDLE_TOKENS = 16
TURN_TOKENS = 7.5
CHAT_CHARS = 3.1

NAMES = (
    "code word", "password", "secret word", "magic word", "secret code", "pass phrase", "secret number",
    "magic number", "access code", "pin", "key word", "passkey", "special number", "needle",
)  # fmt: skip
NUMERIC = ("secret number", "magic number", "pin", "special number", "access code")
TELLINGS = (
    "The {name} is {word}.",
    "Remember that the {name} is {word}.",
    "Remember this: the {name} is {word}.",
    "Note: the {name} is {word}.",
    "Important: the {name} is {word}.",
    "Please remember the {name} {word}.",
    "Do not forget that the {name} is {word}.",
    "Here is the {name}: {word}.",
    "The {name} you need is {word}.",
    "The {name} is: {word}.",
)
QUESTIONS = (
    "What is the {name}?",
    "Tell me the {name}.",
    "What was the {name}?",
    "Which {name} was given?",
    "Repeat the {name}.",
    "Do you remember the {name}?",
    "What is the {name} in the text?",
    "Give me the {name}.",
    "Find the {name}.",
    "What {name} is mentioned in the text?",
)
ANSWER = "The {name} is {word}."
THOUGHT = "I look for the {name}."

READ_FIRST = ("Read this text.", "Here is a text.", "Read the following and answer.", "Text:", "Read carefully.", "")
THEN_ASK = ("{}", "Now answer: {}", "Question: {}", "{} Answer with the text above.")
OWN_NAME_TOLD = ("My name is {}.", "I am {}.", "Hello, my name is {}.", "Call me {}.", "Hi, I am {}.")
OWN_NAME_ASKED = ("What is my name?", "Who am I?", "Do you know my name?", "Do you remember my name?")
NOTED = "I will remember it."
# So many needles may have names without an owner.
MAX_BARE = 8


@dataclass(frozen=True, slots=True)
class Needle:
    """`name` is what it is called, such as "code word of Anna"; `word` what must be recalled."""

    name: str
    word: str

    def telling(self, draw: Draw) -> str:
        return draw.pick(TELLINGS).format(name=self.name, word=self.word)

    def question(self, draw: Draw) -> str:
        return casual(draw, draw.pick(QUESTIONS).format(name=self.name))

    def answer(self) -> Turn:
        return assistant(ANSWER.format(name=self.name, word=self.word), THOUGHT.format(name=self.name))


class Filler:
    """Long text that matters to nobody, quickly: sentences come from a pool that is written once.

    `count_tokens` tells how long a text is.
    """

    def __init__(self, draw: Draw, count_tokens: Callable[[str], int]) -> None:
        self.draw = draw
        self.count_tokens = count_tokens
        self.sentences = [sentence(draw) for _ in range(POOL_SIZE)]
        self.kinds = (self.prose, self.prose, self.words, self.record)

    def any(self, num_tokens: int, separator: str) -> list[str]:
        """Pieces that take about as many tokens when joined; of one kind, seldom of two."""
        share = 0.7 if self.draw.chance(0.1) else 1.0
        pieces = self._one_kind(int(share * num_tokens), separator)
        return pieces if share == 1.0 else pieces + self._one_kind(int((1 - share) * num_tokens), separator)

    def _one_kind(self, num_tokens: int, separator: str) -> list[str]:
        """A few pieces first, whose length tells how many it takes."""
        piece = self.draw.pick(self.kinds)
        sample = [piece() for _ in range(NUM_MEASURED)]
        each = self.count_tokens(separator.join(sample)) / NUM_MEASURED
        count = max(0, round(num_tokens / each))
        return [*sample, *(piece() for _ in range(count - NUM_MEASURED))][:count]

    def prose(self) -> str:
        return self.draw.pick(self.sentences)

    def words(self) -> str:
        """Words in no order."""
        return " ".join([self.draw.word("plain") for _ in range(12)]) + "."

    def record(self) -> str:
        """What looks like a needle and is none."""
        draw = self.draw
        return f"The {draw.word('colour')} {draw.word('thing')} is in the {draw.word('place')}."


def needles(draw: Draw, count: int) -> list[Needle]:
    """Different ones: of different bare names, or of people or things."""
    if count <= MAX_BARE and draw.chance(0.6):
        return [Needle(name, _word(draw, name)) for name in draw.some(NAMES, count)]
    owners = draw.some(draw.words["first" if draw.chance(0.6) else "thing"], count)
    of = "of" if owners[0][0].isupper() else "of the"
    name = draw.pick(NAMES)
    kinds = [name if draw.chance(0.5) else draw.pick(NAMES) for _ in owners]
    return [Needle(f"{kind} {of} {owner}", _word(draw, kind)) for kind, owner in zip(kinds, owners, strict=True)]


def text_recall(
    draw: Draw, filler: Filler, num_tokens: int, num_needles: int, depth: float | None = None
) -> list[Turn]:
    """All in one user message of about `num_tokens`; later questions follow one by one.

    `depth` puts a single needle there, from 0 (start) to 1 (end); else they lie anywhere.
    """
    found = needles(draw, num_needles)
    separator = "\n" if draw.chance(0.25) else " "
    pieces = filler.any(num_tokens - NEEDLE_TOKENS * num_needles, separator)
    for needle in found:
        place = draw.random() if depth is None else depth
        pieces.insert(round(place * len(pieces)), needle.telling(draw))
    first, *later = _asked(draw, found)
    turns = [user(_wrapped(draw, separator.join(pieces), first.question(draw)), GIVEN), first.answer()]
    for needle in later:
        turns += [user(needle.question(draw)), needle.answer()]
    return turns


def chat_recall(draw: Draw, chat: Callable[[], list[Turn]], num_tokens: int, num_needles: int) -> list[Turn]:
    """Told in turns of an ordinary long chat, asked at its end."""
    found = needles(draw, num_needles)
    exchanges: list[list[Turn]] = []
    num_filled = 0.0
    while num_filled < num_tokens - 2 * NEEDLE_TOKENS * num_needles:
        exchanges.append(chat())
        num_filled += sum(len(turn.text) / CHAT_CHARS + TURN_TOKENS for turn in exchanges[-1])
    for needle in found:
        told = [user(needle.telling(draw)), assistant(NOTED, "I note it.")]
        exchanges.insert(draw.between(0, len(exchanges)), told)
    turns = [turn for exchange in exchanges for turn in exchange]
    for needle in _asked(draw, found):
        turns += [user(needle.question(draw)), needle.answer()]
    return turns


def single(draw: Draw, filler: Filler, num_tokens: int, depth: float) -> Conversation:
    """What the scores are made of: one needle at one depth."""
    return Conversation("needle", text_recall(draw, filler, num_tokens, 1, depth))


def fact_exchange(draw: Draw) -> list[Turn]:
    """A few things told in one message, one or two of them asked."""
    things = draw.some(draw.words["thing"], draw.between(1, 6))
    places = [draw.word("place") for _ in things]
    told = [f"The {thing} is in the {place}." for thing, place in zip(things, places, strict=True)]
    first, *others = draw.some(range(len(things)), draw.between(1, 2))
    question = f"Where is the {things[first]}?"
    turns = [user(f"{' '.join(told)} {question}"), assistant(told[first])]
    for index in others:
        turns += [user(casual(draw, f"And where is the {things[index]}?")), assistant(told[index])]
    return turns


def name_exchange(draw: Draw) -> list[Turn]:
    """The user's own name, told and asked."""
    name = draw.until_mine(lambda: draw.word("first"))
    told, asked = draw.pick(OWN_NAME_TOLD).format(name), draw.pick(OWN_NAME_ASKED)
    return [
        user(told),
        assistant(f"Hello, {name}! How can I help you?"),
        user(casual(draw, asked)),
        assistant(f"Your name is {name}."),
    ]


def _asked(draw: Draw, found: Sequence[Needle]) -> list[Needle]:
    return draw.some(found, draw.between(1, len(found)) if len(found) < 4 else len(found))


def _word(draw: Draw, name: str) -> str:
    if name.split(" of ")[0] in NUMERIC:
        return draw.until_mine(lambda: draw.digits(draw.between(3, 7)))
    kind = draw.random()
    if kind < 0.35:
        return draw.until_mine(lambda: draw.invented(draw.between(2, 3)))
    if kind < 0.55:
        return draw.until_mine(lambda: f"{draw.word('adjective')}-{draw.word('animal')}")
    if kind < 0.75:
        return draw.until_mine(lambda: draw.word("plain"))
    if kind < 0.85:
        return draw.until_mine(lambda: f"{draw.invented().upper()}-{draw.digits(draw.between(2, 4))}")
    return draw.until_mine(lambda: draw.digits(draw.between(3, 7)))


def _wrapped(draw: Draw, text: str, question: str) -> str:
    if draw.chance(0.2):
        return f"{capital(question)}\n\n{text}"
    head, tail = draw.pick(READ_FIRST), draw.pick(THEN_ASK).format(question)
    return f"{head}\n\n{text}\n\n{tail}" if head else f"{text}\n\n{tail}"
