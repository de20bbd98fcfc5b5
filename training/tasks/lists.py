"""Lists of words and numbers: sorting, counting, reversing, choosing, going on.

Held out are the lists themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.chat import Turn, assistant, user
from training.draw import Draw

KINDS = ("animal", "food", "thing", "first", "city", "colour", "job", "place")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
SORT = ("Sort these words: {}", "Put these words in alphabetical order: {}", "Order alphabetically: {}")
SORT_NUMBERS = ("Sort these numbers: {}", "Put these numbers in order: {}", "Order from small to large: {}")
REVERSE = ("Reverse this list: {}", "Write this list backwards: {}", "Give me this list in reverse order: {}")
COUNT = ("How many words are in this list: {}", "Count the items: {}", "How many items are there: {}")
NTH = ("What is the {} word of this list: {}", "Which word is the {} one: {}", "Give me the {} item: {}")
LAST = ("What is the last word of this list: {}", "Which item comes last: {}")
CONTAINS = ("Is {} in this list: {}", "Does this list contain {}: {}")
LARGEST = ("Which number is the largest: {}", "What is the largest of these numbers: {}", "Find the maximum: {}")
SMALLEST = ("Which number is the smallest: {}", "What is the smallest of these numbers: {}", "Find the minimum: {}")
COMPARE = ("Which is larger, {} or {}?", "What is more, {} or {}?", "Which number is bigger, {} or {}?")
FROM_TO = ("Count from {} to {}.", "Write the numbers from {} to {}.", "List the numbers from {} to {}.")
AFTER = ("What number comes after {}?", "Which number follows {}?", "What is the next number after {}?")
EVENNESS = ("Is {} even or odd?", "Is the number {} even or odd?", "Even or odd: {}?")


def list_exchange(draw: Draw) -> list[Turn]:
    return draw.pick((_words, _words, _numbers, _counting))(draw)


def _words(draw: Draw) -> list[Turn]:
    kind = draw.pick(KINDS)
    items = draw.until_mine(lambda: draw.some(draw.words[kind], draw.between(3, 8)), ", ".join)
    shown, task = ", ".join(items), draw.between(0, 5)
    if task == 0:
        items = items[:6]
        ordered = ", ".join(sorted(items, key=str.lower))
        return _turns(draw.pick(SORT).format(", ".join(items)), ordered, "I sort by the first letters.")
    if task == 1:
        return _turns(draw.pick(REVERSE).format(shown), ", ".join(reversed(items)), "I go from the end.")
    if task == 2:
        numbered = "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1))
        return _turns(draw.pick(COUNT).format(shown), f"There are {len(items)}.", numbered)
    if task == 3:
        index = draw.between(0, len(items) - 1)
        return _turns(draw.pick(NTH).format(ORDINALS[index], shown), f"It is {items[index]}.", f"Number {index + 1}.")
    if task == 4:
        return _turns(draw.pick(LAST).format(shown), f"It is {items[-1]}.", "I look at the end.")
    asked = draw.pick(items) if draw.chance(0.5) else draw.word(kind)
    answer = f"Yes, {asked} is in the list." if asked in items else f"No, {asked} is not in the list."
    return _turns(draw.pick(CONTAINS).format(*((asked, shown))), answer, f"I look for {asked}.")


def _numbers(draw: Draw) -> list[Turn]:
    most = 10 ** draw.between(1, 3) - 1
    numbers = draw.until_mine(lambda: _different(draw, most), str)
    shown, task = ", ".join(map(str, numbers)), draw.between(0, 4)
    if task == 0:
        numbers = numbers[:5]
        wish = draw.pick(SORT_NUMBERS).format(", ".join(map(str, numbers)))
        return _turns(wish, ", ".join(map(str, sorted(numbers))), "I start with the smallest.")
    if task == 1:
        return _turns(draw.pick(LARGEST).format(shown), f"The largest is {max(numbers)}.", "I compare.")
    if task == 2:
        return _turns(draw.pick(SMALLEST).format(shown), f"The smallest is {min(numbers)}.", "I compare.")
    if task == 3:
        a, b = numbers[:2]
        return _turns(draw.pick(COMPARE).format(a, b), f"{max(a, b)} is larger.", "I compare.")
    return _turns(draw.pick(REVERSE).format(shown), ", ".join(map(str, reversed(numbers))), "I go from the end.")


def _counting(draw: Draw) -> list[Turn]:
    start, task = draw.until_mine(lambda: draw.between(0, 200)), draw.between(0, 2)
    if task == 0:
        end = start + draw.between(2, 12)
        numbers = ", ".join(map(str, range(start, end + 1)))
        return _turns(draw.pick(FROM_TO).format(start, end), numbers, f"From {start} to {end}.")
    if task == 1:
        return _turns(draw.pick(AFTER).format(start), f"After {start} comes {start + 1}.", "I add one.")
    word = "odd" if start % 2 else "even"
    return _turns(draw.pick(EVENNESS).format(start), f"{start} is {word}.", f"The last digit is {start % 10}.")


def _different(draw: Draw, most: int) -> Sequence[int]:
    numbers = {draw.between(0, most) for _ in range(draw.between(3, 7))} | {0, most}
    return draw.shuffled(tuple(sorted(numbers)))


def _turns(question: str, answer: str, thought: str) -> list[Turn]:
    return [user(question), assistant(answer, thought)]
