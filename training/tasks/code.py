"""Simple Python: small functions and classes, asked for in a chat or continued as plain text.

The body depends on the function's name and what its docstring says, never on chance; names of arguments vary. Held
out are combinations of function and names.
"""

from __future__ import annotations

from training.chat import Parts, Turn, assistant, user
from training.draw import Draw, capital

# name, what it does, arguments, body; {a} and {b} are the arguments' names, {k} a number.
FUNCTIONS = (
    ("add", "Return the sum of {a} and {b}.", "ab", "return {a} + {b}"),
    ("subtract", "Return the difference of {a} and {b}.", "ab", "return {a} - {b}"),
    ("multiply", "Return the product of {a} and {b}.", "ab", "return {a} * {b}"),
    ("divide", "Return {a} divided by {b}.", "ab", "return {a} / {b}"),
    ("power", "Return {a} to the power of {b}.", "ab", "return {a} ** {b}"),
    ("maximum", "Return the larger of {a} and {b}.", "ab", "return {a} if {a} > {b} else {b}"),
    ("minimum", "Return the smaller of {a} and {b}.", "ab", "return {a} if {a} < {b} else {b}"),
    ("average", "Return the average of {a} and {b}.", "ab", "return ({a} + {b}) / 2"),
    ("is_equal", "Return whether {a} and {b} are equal.", "ab", "return {a} == {b}"),
    ("square", "Return the square of {a}.", "a", "return {a} * {a}"),
    ("cube", "Return the cube of {a}.", "a", "return {a} * {a} * {a}"),
    ("double", "Return twice {a}.", "a", "return 2 * {a}"),
    ("half", "Return half of {a}.", "a", "return {a} / 2"),
    ("negate", "Return {a} with the other sign.", "a", "return -{a}"),
    ("absolute", "Return {a} without its sign.", "a", "return {a} if {a} >= 0 else -{a}"),
    ("is_even", "Return whether {a} is even.", "a", "return {a} % 2 == 0"),
    ("is_odd", "Return whether {a} is odd.", "a", "return {a} % 2 == 1"),
    ("is_positive", "Return whether {a} is positive.", "a", "return {a} > 0"),
    ("is_empty", "Return whether {a} is empty.", "a", "return len({a}) == 0"),
    ("first", "Return the first item of {a}.", "a", "return {a}[0]"),
    ("last", "Return the last item of {a}.", "a", "return {a}[-1]"),
    ("count", "Return the number of items in {a}.", "a", "return len({a})"),
    ("reverse", "Return {a} in reverse order.", "a", "return {a}[::-1]"),
    ("contains", "Return whether {b} is in {a}.", "ab", "return {b} in {a}"),
    ("upper", "Return {a} in capital letters.", "a", "return {a}.upper()"),
    ("lower", "Return {a} in small letters.", "a", "return {a}.lower()"),
    ("words", "Return the words of {a}.", "a", "return {a}.split()"),
    ("join", "Return {a} joined by {b}.", "ab", "return {b}.join({a})"),
    ("greet", "Return a greeting for {a}.", "a", 'return f"Hello, {{{a}}}!"'),
    ("add_{k}", "Return {a} plus {k}.", "a", "return {a} + {k}"),
    ("times_{k}", "Return {a} times {k}.", "a", "return {a} * {k}"),
    ("is_above_{k}", "Return whether {a} is above {k}.", "a", "return {a} > {k}"),
    ("first_{k}", "Return the first {k} items of {a}.", "a", "return {a}[:{k}]"),
    ("total", "Return the sum of all items of {a}.", "a",
     "result = 0\nfor item in {a}:\n    result += item\nreturn result"),
    ("product", "Return the product of all items of {a}.", "a",
     "result = 1\nfor item in {a}:\n    result *= item\nreturn result"),
    ("factorial", "Return the factorial of {a}.", "a",
     "result = 1\nfor i in range(1, {a} + 1):\n    result *= i\nreturn result"),
    ("fibonacci", "Return the Fibonacci number {a}.", "a",
     "x, y = 0, 1\nfor _ in range({a}):\n    x, y = y, x + y\nreturn x"),
    ("squares", "Return the squares of all items of {a}.", "a", "return [item * item for item in {a}]"),
    ("evens", "Return the even items of {a}.", "a", "return [item for item in {a} if item % 2 == 0]"),
    ("lengths", "Return the length of each item of {a}.", "a", "return [len(item) for item in {a}]"),
    ("largest", "Return the largest item of {a}.", "a",
     "result = {a}[0]\nfor item in {a}:\n    if item > result:\n        result = item\nreturn result"),
    ("count_of", "Return how often {b} is in {a}.", "ab",
     "result = 0\nfor item in {a}:\n    if item == {b}:\n        result += 1\nreturn result"),
    ("countdown", "Print the numbers from {a} down to 1.", "a",
     "while {a} > 0:\n    print({a})\n    {a} -= 1"),
    ("print_all", "Print each item of {a}.", "a", "for item in {a}:\n    print(item)"),
)  # fmt: skip
ARGUMENTS = (
    "x", "y", "a", "b", "n", "m", "value", "other", "left", "right", "items", "numbers", "text", "data", "p", "q",
)  # fmt: skip
WISHES = (
    "Write a Python function {name} that does this: {what}",
    "Write the function {name} in Python. {what}",
    "Write Python code: a function {name}. {what}",
    "Give me a Python function {name}. {what}",
)
FIELDS = ("name", "size", "colour", "price", "owner", "count", "place", "title", "age", "weight", "speed", "level")


def code_exchange(draw: Draw) -> list[Turn]:
    if draw.chance(0.15):
        name, fields = _class_of(draw)
        wish = f"Write a Python class {name} with the fields {' and '.join(fields)}."
        return [user(wish), assistant(f"```python\n{_class(name, fields)}\n```", "I write a class.")]
    name, what, arguments, body = _function(draw)
    code = f"def {name}({', '.join(arguments)}):\n{_indented(body)}"
    wish = draw.pick(WISHES).format(name=f"{name}({', '.join(arguments)})", what=what)
    return [user(wish), assistant(f"```python\n{code}\n```", f"The function is {name}.")]


def code_parts(draw: Draw) -> Parts:
    """A file of a few functions and classes; what chance decides counts little."""
    parts: Parts = []
    for _ in range(draw.between(1, 5)):
        if draw.chance(0.15):
            name, fields = _class_of(draw)
            head, body = _class(name, fields).split("\n", 1)
            parts += [(f"{head}\n", 0.05), (body.rstrip() + "\n\n\n", 0.7)]
            continue
        name, what, arguments, body = _function(draw)
        parts.append((f'def {name}({", ".join(arguments)}):\n    """{what}"""\n', 0.1))
        parts.append((_indented(body) + "\n\n\n", 0.7))
    return parts


def _function(draw: Draw) -> tuple[str, str, list[str], str]:
    (name, what, slots, body), names, k = draw.until_mine(
        lambda: (draw.pick(FUNCTIONS), draw.some(ARGUMENTS, 2), draw.between(2, 99)),
        lambda made: f"{made[0][0]} {' '.join(made[1])} {made[2]}",
    )
    values = {"a": names[0], "b": names[1], "k": k}
    return name.format(**values), what.format(**values), names[: len(slots)], body.format(**values)


def _class_of(draw: Draw) -> tuple[str, list[str]]:
    return draw.until_mine(
        lambda: (capital(draw.word("thing")), draw.some(FIELDS, draw.between(1, 3))),
        lambda made: made[0] + " ".join(made[1]),
    )


def _class(name: str, fields: list[str]) -> str:
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    return "\n".join(lines + [f"        self.{field} = {field}" for field in fields])


def _indented(body: str) -> str:
    return "\n".join("    " + line for line in body.split("\n"))
