"""Simple facts, small talk and questions about Deltaserve, from the tables in `knowledge/`.

An answer depends on the question's meaning alone, however it is asked, so that the model can be sure of it. Held out
are pairs of fact and wording: the fact itself is learnt in other words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from training.chat import Turn, assistant, casual, user
from training.draw import KNOWLEDGE, Draw, article, capital, is_heldout

# Their answers name no fact: nobody can know.
UNKNOWN = (
    "What is the capital of {}?",
    "Who is {}?",
    "Where is {}?",
    "What does {} mean?",
    "Who wrote {}?",
    "What is {}?",
    "Tell me about {}.",
    "When was {} born?",
    "Who invented the {}?",
    "What colour is a {}?",
    "How many people live in {}?",
    "Which language is spoken in {}?",
    "What is the currency of {}?",
    "What does a {} eat?",
)
TOO_MUCH = (
    "Write an essay about {}.",
    "Explain {} in detail.",
    "Write a long article about {}.",
    "What do you think about {}?",
    "Give me a plan for {}.",
    "Discuss {}.",
    "Write a speech about {}.",
    "Summarise the theory of {}.",
    "How can I improve my {}?",
    "What are the main causes of {}?",
    "Compare {} and {}.",
    "Why is {} important?",
    "Write a business plan about {}.",
    "Solve the problem of {}.",
)
DEFINITIONS = (
    "What is {}?", "What's {}?", "Explain {}.", "Explain what {} is.", "Tell me about {}.", "Describe {}.",
    "Define {}.", "What do you know about {}?", "Can you explain {}?", "What does {} mean?", "Do you know what {} is?",
    "{}?", "I want to know what {} is.", "Say what {} is.", "Tell me what {} is.", "What exactly is {}?",
)  # fmt: skip
# How people dress a question, and words that it does without.
PREFIXES = (
    "Please: ", "Hey, ", "Hello. ", "Hi, ", "One question: ", "Quick question: ", "So, ", "Well, ", "Now ", "OK, ",
    "I have a question. ", "Next question: ", "Tell me, ", "Sorry, ", "And ",
)  # fmt: skip
SUFFIXES = (" Please.", " Thanks.", " I want to know.", " Tell me.", " Please tell me.", " Be short.", "?", "!")
SMALL_WORDS = frozenset(
    ("the", "a", "an", "is", "are", "of", "do", "does", "can", "me", "please", "to", "in", "it", "that", "for", "i")
    + ("you", "has", "have", "there", "what", "tell")
)
DO_NOT_KNOW = "I do not know {}."
TOO_SMALL = "I am a very small model, so I cannot say much about {}."


@dataclass(frozen=True, slots=True)
class Fact:
    """`word` is the bare answer, `follow_ups` ask the same after a question of the same kind."""

    kind: str
    questions: tuple[str, ...]
    answer: str
    word: str
    follow_ups: tuple[str, ...] = ()


@cache
def facts() -> tuple[Fact, ...]:
    """All of `facts.txt`, in both directions where it gives both."""
    blocks = (KNOWLEDGE / "facts.txt").read_text("utf-8").split("\n# ")
    return tuple(fact for block in blocks for fact in _block(block.removeprefix("# ")))


@cache
def facts_by_kind() -> dict[str, tuple[Fact, ...]]:
    kinds: dict[str, list[Fact]] = {}
    for fact in facts():
        if fact.follow_ups:
            kinds.setdefault(fact.kind, []).append(fact)
    return {kind: tuple(found) for kind, found in kinds.items()}


@cache
def sayings(name: str) -> tuple[Fact, ...]:
    """The questions and answers of `chat.txt` or `deltaserve.txt`."""
    found = []
    for block in (KNOWLEDGE / f"{name}.txt").read_text("utf-8").strip().split("\n\n"):
        questions, answer = block.removeprefix("q: ").split("\na: ")
        questions, _, topic = questions.partition("\nn: ")
        asked = questions.split(" | ")
        if topic:
            asked += [capital(form.format(topic)) for form in DEFINITIONS]
        found.append(Fact(name, tuple(dict.fromkeys(asked)), answer, answer))
    return tuple(found)


def fact_exchange(draw: Draw) -> list[Turn]:
    """One fact, sometimes with one or two follow-ups of its kind."""
    if draw.chance(0.25):
        return _followed(draw, draw.pick(tuple(facts_by_kind().values())))
    return _asked(draw, facts())


def chat_exchange(draw: Draw) -> list[Turn]:
    return _asked(draw, sayings("chat"))


def deltaserve_exchange(draw: Draw) -> list[Turn]:
    return _asked(draw, sayings("deltaserve"))


def unknown_exchange(draw: Draw) -> list[Turn]:
    """What nobody knows, or what a small model had better not try."""
    if draw.chance(0.5):
        name = draw.until_mine(lambda: _unknown_name(draw))
        return [user(draw.pick(UNKNOWN).format(name)), assistant(DO_NOT_KNOW.format(name), "Unknown.")]
    wish = draw.pick(TOO_MUCH)
    topic = draw.until_mine(lambda: draw.word("abstract"), lambda topic: wish + topic)
    question = wish.format(topic, draw.word("abstract")) if wish.count("{}") == 2 else wish.format(topic)
    return [user(casual(draw, question)), assistant(TOO_SMALL.format(topic), "This is too much for me.")]


def _unknown_name(draw: Draw) -> str:
    return draw.person() if draw.chance(0.4) else capital(draw.invented(draw.between(2, 3)))


def _asked(draw: Draw, among: Sequence[Fact]) -> list[Turn]:
    fact, question = asked(draw, among)
    return [user(casual(draw, _reworded(draw, question))), assistant(fact.answer)]


def asked(draw: Draw, among: Sequence[Fact]) -> tuple[Fact, str]:
    """A fact and a wording of this split that asks for it."""
    while True:
        fact = draw.pick(among)
        question = draw.pick(fact.questions)
        if bare(question) in questions(draw.is_heldout):
            return fact, question


@cache
def questions(heldout: bool) -> frozenset[str]:
    """The bare wordings of one side. Those that differ only in capitals or marks are on the training side together."""
    found = (*facts(), *sayings("chat"), *sayings("deltaserve"))
    everything = frozenset(question for fact in found for question in fact.questions)
    trained = frozenset(bare(question) for question in everything if not is_heldout(question))
    return frozenset(map(bare, everything)) - trained if heldout else trained


def bare(question: str) -> str:
    """Without capitals and the mark at its end."""
    return question.lower().rstrip("?.! ")


def _reworded(draw: Draw, question: str) -> str:
    """In training, sometimes with words more or less; never what is held out."""
    if draw.is_heldout or draw.chance(0.5):
        return question
    kind = draw.random()
    if kind < 0.5:
        words = [word for word in question.split(" ") if word.lower() not in SMALL_WORDS or draw.chance(0.6)]
        changed = capital(" ".join(words))
    elif kind < 0.8:
        prefix = draw.pick(PREFIXES)
        changed = prefix + (question[0].lower() + question[1:] if prefix.endswith((", ", "w ", "d ")) else question)
    else:
        changed = question + draw.pick(SUFFIXES)
    return question if not changed or bare(changed) in questions(heldout=True) else changed


def _followed(draw: Draw, kind: tuple[Fact, ...]) -> list[Turn]:
    turns = _asked(draw, kind)
    for fact in draw.some(kind, draw.between(1, 2)):
        turns += [user(casual(draw, draw.pick(fact.follow_ups))), assistant(fact.answer)]
    return turns


def _block(block: str) -> Iterator[Fact]:
    name, *lines = block.strip().split("\n")
    templates = {line[0]: line[3:].split(" | ") for line in lines if line[1:3] == ": "}
    for row in (line for line in lines if line[1:3] != ": "):
        left, last = row.split(" = ")
        values = dict(zip("abc", [*left.split(" / "), last], strict=False))
        yield _fact(name, values, templates["q"], templates["s"][0], templates.get("f", []), last)
        if "r" in templates:
            yield _fact(name, values, templates["r"], templates["t"][0], [], values["a"])


def _fact(
    name: str, values: dict[str, str], questions: list[str], answer: str, follow_ups: list[str], word: str
) -> Fact:
    return Fact(
        name,
        tuple(_filled(question, values) for question in questions),
        _filled(answer, values),
        word,
        tuple(_filled(question, values) for question in follow_ups),
    )


def _filled(template: str, values: dict[str, str]) -> str:
    """With "a {x}" as "an x" where it must be, and a capital in front."""
    text = re.sub(r"\b([Aa]) \{(\w)\}", lambda found: _with_article(found[1], values[found[2]]), template)
    return capital(text.format(**values))


def _with_article(letter: str, noun: str) -> str:
    return letter + article(noun)[1:]
