"""Sums with two operands: digit by digit, from the right, with carries; the steps are the thought.

Without thinking a short sum is answered at once, and a long one shows its steps in the answer. Held out are pairs of
operands, whatever the operation's wording.
"""

from __future__ import annotations

from training.chat import Turn, assistant, casual, user
from training.draw import Draw

QUESTIONS = {
    "+": (
        "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b} = ?", "Compute {a} + {b}.", "Add {a} and {b}.",
        "How much is {a} + {b}?", "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "{a} + {b}", "{a}+{b}",
        "What is {a}+{b}?",
    ),
    "-": (
        "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b} = ?", "Compute {a} - {b}.",
        "Subtract {b} from {a}.", "How much is {a} - {b}?", "Calculate {a} - {b}.", "{a} - {b}", "{a}-{b}",
    ),
    "*": (
        "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b} = ?", "Compute {a} * {b}.", "Multiply {a} by {b}.",
        "How much is {a} * {b}?", "What is the product of {a} and {b}?", "Calculate {a} * {b}.", "{a} * {b}", "{a}*{b}",
        "What is {a} x {b}?",
    ),
}  # fmt: skip
STORIES = {
    "+": (
        "{who} has {a} {thing}s and gets {b} more. How many {thing}s does {who} have?",
        "There are {a} {thing}s in one box and {b} in another. How many {thing}s are there?",
    ),
    "-": (
        "{who} has {a} {thing}s and gives away {b}. How many {thing}s are left?",
        "There were {a} {thing}s and {b} were sold. How many {thing}s are left?",
    ),
    "*": (
        "{who} has {a} boxes with {b} {thing}s each. How many {thing}s are there?",
        "A {thing} costs {a} euros. How much do {b} cost?",
    ),
}
COUNTABLE = ("apple", "book", "coin", "egg", "pencil", "ticket", "button", "stone", "flower", "cake", "cup", "plum")
MAX_AT_ONCE = 99


def sum_exchange(draw: Draw) -> list[Turn]:
    sign = draw.pick("++--*")
    a, b = draw.until_mine(lambda: _operands(draw, sign), lambda pair: f"{pair[0]} {pair[1]}")
    lines = steps(a, b, sign)
    equation = f"{a} {sign} {b} = {result(a, b, sign)}."
    is_short = max(a, b) <= MAX_AT_ONCE if sign != "*" else max(a, b) <= 10
    shown = equation if is_short else "\n".join([*lines, equation])
    return [user(_question(draw, a, b, sign)), assistant(equation, "\n".join(lines), shown)]


def result(a: int, b: int, sign: str) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def steps(a: int, b: int, sign: str) -> list[str]:
    """The lines between question and answer."""
    if sign == "+":
        return added(a, b)
    if sign == "-":
        return subtracted(a, b) if a >= b else [f"{a} is less than {b}", *subtracted(b, a), f"-{b - a}"]
    return multiplied(a, b)


def added(a: int, b: int) -> list[str]:
    """Both numbers at one width, a line for each digit from the right, and the sum."""
    width = max(len(str(a)), len(str(b)))
    x, y = f"{a:0{width}}", f"{b:0{width}}"
    lines, carry = [f"{x} + {y}"], 0
    for p, q in zip(reversed(x), reversed(y), strict=True):
        total = int(p) + int(q) + carry
        lines.append(f"{p} + {q} + {carry} = {total // 10} {total % 10}")
        carry = total // 10
    return [*lines, str(a + b)]


def subtracted(a: int, b: int) -> list[str]:
    """Of `a` not less than `b`: a line for each digit from the right, which may borrow from the next."""
    width = len(str(a))
    x, y = f"{a:0{width}}", f"{b:0{width}}"
    lines, borrowed = [f"{x} - {y}"], 0
    for p, q in zip(reversed(x), reversed(y), strict=True):
        total = int(p) - int(q) - borrowed
        owed = int(total < 0)
        lines.append(f"{p} - {q} - {borrowed} = {owed} {total + 10 * owed}")
        borrowed = owed
    return [*lines, str(a - b)]


def multiplied(a: int, b: int) -> list[str]:
    """One product for each digit of `b`, then their sum."""
    if a < 10 and b < 10:
        return [f"{a} * {b} = {a * b}"]
    ones, tens = b % 10, b // 10 * 10
    lines = [f"{a} * {b}", *_times_digit(a, ones, 1)]
    if not tens:
        return [*lines, str(a * b)]
    return [*lines, *_times_digit(a, tens // 10, 10), *added(a * ones, a * tens)]


def _times_digit(a: int, digit: int, scale: int) -> list[str]:
    """From the right, the carry in front of the digit, as in `added`."""
    lines, carry = [f"{a} * {digit * scale}"], 0
    for p in reversed(str(a)):
        total = int(p) * digit + carry
        lines.append(f"{p} * {digit} + {carry} = {total // 10} {total % 10}")
        carry = total // 10
    return [*lines, str(a * digit * scale)]


def _operands(draw: Draw, sign: str) -> tuple[int, int]:
    if sign == "*":
        kind = draw.random()
        high_a, high_b = (10, 10) if kind < 0.35 else (99, 9) if kind < 0.65 else (99, 99)
        a, b = draw.between(0, high_a), draw.between(0, high_b)
        return (a, b) if draw.chance(0.5) else (b, a)
    a, b = (draw.between(0, 10 ** draw.between(1, 4) - 1) for _ in range(2))
    if sign == "-" and a < b and draw.chance(0.8):
        return b, a
    return a, b


def _question(draw: Draw, a: int, b: int, sign: str) -> str:
    if draw.chance(0.15) and min(a, b) > 1 and result(a, b, sign) >= 0:
        story = draw.pick(STORIES[sign])
        return story.format(a=a, b=b, who=draw.word("first"), thing=draw.pick(COUNTABLE))
    return casual(draw, draw.pick(QUESTIONS[sign]).format(a=a, b=b))
