"""Copying: a text again, word for word, whole or a named part of it."""

from __future__ import annotations

from collections.abc import Callable

from training.chat import Turn, assistant, user
from training.draw import Draw
from training.tasks.stories import sentence

WISHES = (
    "Repeat this text exactly:\n\n{}",
    "Copy this text:\n\n{}",
    "Repeat after me: {}",
    "Write this again, word for word:\n\n{}",
    "Say exactly this: {}",
    "Repeat the following:\n\n{}",
    "{}\n\nRepeat the text above exactly.",
    "{}\n\nCopy the text above.",
)
ORDINALS = ("first", "second", "third", "fourth", "fifth")
MAX_WORDS = 120


def copy_exchange(draw: Draw) -> list[Turn]:
    kind = draw.random()
    if kind < 0.7:
        text = draw.until_mine(lambda: draw.pick(TEXTS)(draw))
        return [user(draw.pick(WISHES).format(text)), assistant(text, "I repeat the text.")]
    return _line(draw) if kind < 0.9 else _number(draw)


def _words(draw: Draw) -> str:
    return " ".join(draw.word("plain") for _ in range(draw.log_between(2, MAX_WORDS)))


def _invented(draw: Draw) -> str:
    return " ".join(draw.invented(draw.between(1, 3)) for _ in range(draw.log_between(1, MAX_WORDS / 4)))


def _mixed(draw: Draw) -> str:
    makers: list[Callable[[], str]] = [
        lambda: draw.word("plain"),
        lambda: draw.word("first"),
        draw.invented,
        lambda: draw.digits(draw.between(1, 6)),
        lambda: draw.word("plain").upper(),
        lambda: draw.word("plain").title() + draw.pick(",.;:!?"),
    ]
    return " ".join(draw.pick(makers)() for _ in range(draw.log_between(2, MAX_WORDS / 2)))


def _digits(draw: Draw) -> str:
    return draw.digits(draw.log_between(3, 40))


def _prose(draw: Draw) -> str:
    return " ".join(sentence(draw) for _ in range(draw.log_between(1, 12)))


def _items(draw: Draw) -> str:
    words = [draw.word("plain") for _ in range(draw.between(2, 15))]
    style = draw.between(0, 2)
    if style == 0:
        return ", ".join(words)
    return "\n".join(f"- {word}" if style == 1 else f"{i}. {word}" for i, word in enumerate(words, 1))


TEXTS = (_words, _words, _invented, _mixed, _digits, _prose, _items)


def _line(draw: Draw) -> list[Turn]:
    """A named line of several."""
    lines = [draw.until_mine(lambda: " ".join(draw.word("plain") for _ in range(draw.between(2, 6)))) for _ in range(5)]
    lines = lines[: draw.between(2, 5)]
    index = draw.between(0, len(lines) - 1)
    name = "last" if index == len(lines) - 1 and draw.chance(0.5) else ORDINALS[index]
    return [user(f"Repeat the {name} line:\n\n" + "\n".join(lines)), assistant(lines[index], f"The {name} line.")]


def _number(draw: Draw) -> list[Turn]:
    """One word, several times."""
    word, times = draw.until_mine(lambda: draw.word("plain")), draw.between(2, 12)
    wish = draw.pick(("Write {} {} times.", "Say {} {} times.", "Repeat the word {} {} times."))
    return [user(wish.format(word, times)), assistant(" ".join([word] * times), f"{times} times.")]
