"""System prompts: a rule that changes every answer of the chat, a name, or something to know.

The answers are those of the fact and chat tables, changed by the rule. Held out are the words that rules name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.chat import Conversation, Turn, assistant, casual, user
from training.draw import Draw
from training.tasks.facts import asked, chat_exchange, deltaserve_exchange, fact_exchange, facts

NEUTRAL = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are an assistant.",
    "Be helpful and short.",
    "Answer the user's questions.",
    "You are a helpful AI assistant.",
)
PREFIXES = {
    "Arr!": ("Speak like a pirate.", "You are a pirate.", "Answer like a pirate."),
    "Certainly.": ("Be very polite.", "Answer very politely.", "You are a polite butler."),
    "Hmph.": ("Be grumpy.", "You are a grumpy old man.", "Answer in a grumpy way."),
    "Beep.": ("You are a robot.", "Speak like a robot.", "Answer like a robot."),
    "Hooray!": ("Be very cheerful.", "You are a cheerful friend.", "Answer cheerfully."),
    "Meow.": ("You are a cat.", "Speak like a cat.", "Answer like a cat."),
}
CAPITALS = (
    "Answer in capital letters.", "Write everything in capitals.", "Use only capital letters.", "Answer in upper case.",
    "ALWAYS SHOUT.",
)  # fmt: skip
SMALL = ("Answer in lower case.", "Use only small letters.", "Write everything in lower case.")
END = (
    "End each answer with the word {}.", "End every answer with {}.", "Finish each answer with the word {}.",
    "The last word of each answer must be {}.",
)  # fmt: skip
BEGIN = (
    "Begin each answer with the word {}.", "Start every answer with {}.", "The first word of each answer must be {}.",
)  # fmt: skip
ONE_WORD = ("Answer with one word.", "Give only the answer, nothing else.", "Answer in as few words as possible.")
NAMED = ("Your name is {}.", "You are {}.", "You are called {}.", "You are an assistant called {}.")
NAME_QUESTIONS = ("What is your name?", "What are you called?", "Who are you?", "How shall I call you?")


@dataclass(frozen=True, slots=True)
class Rule:
    """What the system prompt says, and what it does to an answer."""

    text: str
    apply: Callable[[str], str]


def system_conversation(draw: Draw) -> Conversation:
    kind = draw.random()
    if kind < 0.15:
        return _named(draw)
    if kind < 0.3:
        return _one_word(draw)
    rule = _rule(draw)
    turns: list[Turn] = []
    for _ in range(draw.between(1, 3)):
        exchange = draw.pick((fact_exchange, fact_exchange, chat_exchange, deltaserve_exchange))(draw)
        turns += [_changed(turn, rule) for turn in exchange]
    system = f"{draw.pick(NEUTRAL)} {rule.text}" if draw.chance(0.3) else rule.text
    return Conversation("system", turns, system)


def _rule(draw: Draw) -> Rule:
    kind = draw.random()
    if kind < 0.25:
        return Rule(draw.pick(CAPITALS), str.upper)
    if kind < 0.35:
        return Rule(draw.pick(SMALL), str.lower)
    if kind < 0.55:
        prefix = draw.pick(tuple(PREFIXES))
        return Rule(draw.pick(PREFIXES[prefix]), lambda answer: f"{prefix} {answer}")
    word = draw.until_mine(lambda: draw.invented() if draw.chance(0.3) else draw.word("plain"))
    if kind < 0.8:
        return Rule(draw.pick(END).format(word), lambda answer: f"{answer} {word}")
    return Rule(draw.pick(BEGIN).format(word), lambda answer: f"{word} {answer}")


def _changed(turn: Turn, rule: Rule) -> Turn:
    return turn if turn.role == "user" else assistant(rule.apply(turn.text), "I follow the rule.")


def _named(draw: Draw) -> Conversation:
    """A name of its own, asked for among other things."""
    name = draw.until_mine(lambda: draw.word("first"))
    turns = fact_exchange(draw) if draw.chance(0.4) else []
    turns += [user(casual(draw, draw.pick(NAME_QUESTIONS))), assistant(f"My name is {name}.")]
    return Conversation("system", turns, draw.pick(NAMED).format(name))


def _one_word(draw: Draw) -> Conversation:
    """The bare answers of facts."""
    turns: list[Turn] = []
    for _ in range(draw.between(1, 3)):
        fact, question = asked(draw, facts())
        turns += [user(casual(draw, question)), assistant(fact.word, "Only the word.")]
    return Conversation("system", turns, draw.pick(ONE_WORD))
