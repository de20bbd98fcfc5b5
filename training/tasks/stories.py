"""Short stories, and loose sentences that fill long texts.

A story depends on its topic alone, so that the model can be sure of every word. The loose sentences are drawn at
random: they stand between what matters.
"""

from __future__ import annotations

from functools import lru_cache

from training.chat import Turn, assistant, casual, user
from training.draw import Draw, article, capital, stable, word_lists

STORY_WISHES = (
    "Tell me a story about a {}.",
    "Write a story about a {}.",
    "Write a short story about a {}.",
    "Can you tell me a story about a {}?",
    "I would like a story about a {}.",
    "Please tell me a short story about a {}.",
)
OPENINGS = (
    "Once upon a time there was {one}.",
    "Long ago there lived {one} near a {place}.",
    "There was once {one} in a {place}.",
)
WANTS = (
    "The {who} wanted to find a {adjective} {thing}.",
    "Every day the {who} dreamed of a {adjective} {thing}.",
    "The {who} had lost a {adjective} {thing}.",
)
DEEDS = (
    "So the {who} went to the {place} and looked everywhere.",
    "One morning the {who} walked all the way to the {place}.",
    "In the {weather} the {who} set out for the {place}.",
)
MEETINGS = (
    "There it met a {friend}, who knew the way.",
    "On the road it met a {friend}, and the two became friends.",
    "A {friend} came by and offered to help.",
)
ENDS = (
    "Together they found the {thing} and went home happy.",
    "In the evening they found the {thing} under a tree.",
    "They shared the {thing} and lived happily ever after.",
)
STORY = (OPENINGS, WANTS, DEEDS, MEETINGS, ENDS)

SENTENCES = (
    "The {adjective} {job} {past} a {thing} near the {place}.",
    "{first} {past} the {thing} and went back to the {place}.",
    "In {month} the {place} is full of {weather}.",
    "A {colour} {animal} sat on the {thing}.",
    "{first} and {first2} met at the {place} on {day}.",
    "The {thing} in the {place} was {adjective} and {adjective2}.",
    "Nobody knew why the {animal} {past} so early.",
    "On {day} the {job} bought {number} {colour} {thing}s.",
    "There was {weather} over the {place} all day.",
    "{first} likes {food} more than {food2}.",
    "The {job} said that the {thing} was too {adjective}.",
    "After lunch {first} walked from the {place} to the {place2}.",
    "The {animal} followed the {job} through the {place}.",
    "It was a {adjective} day in {city}.",
    "The people of {city} eat {food} with {food2}.",
    "{first} wrote a letter about the {adjective} {place}.",
    "The old {thing} belonged to a {job} from {city}.",
    "When the {weather} came, the {animal} hid behind the {thing}.",
    "{first} has {number} {animal}s and one {colour} {thing}.",
    "The road from the {place} to the {place2} is {adjective}.",
    "Every {day} the {job} {past} for an hour.",
    "A {adjective} {thing} lay on the {thing2}.",
    "The {place} of {city} is older than the {place2}.",
    "{first} could not find the {colour} {thing}.",
)
SLOTS = ("adjective", "job", "past", "thing", "place", "first", "month", "weather", "colour", "animal", "day", "number")
MORE_SLOTS = ("food", "city")
TWICE = ("first", "adjective", "food", "place", "thing")


def sentence(draw: Draw) -> str:
    """One loose sentence."""
    words = {slot: draw.word(slot) for slot in SLOTS + MORE_SLOTS}
    words |= {f"{slot}2": draw.word(slot) for slot in TWICE}
    return _tidy(draw.pick(SENTENCES).format_map(words))


@lru_cache(maxsize=4096)
def story(topic: str) -> str:
    """The one story about this topic."""
    lists = word_lists()

    def chosen(slot: str) -> str:
        return lists[slot][stable(topic + slot, len(lists[slot]))]

    words = {slot: chosen(slot) for slot in ("place", "adjective", "thing", "weather")}
    friend = lists["animal"][stable(topic + "friend", len(lists["animal"]))]
    words |= {"who": topic, "one": article(topic), "friend": friend if friend != topic else "stranger"}
    lines = (kinds[stable(f"{topic} {index}", len(kinds))] for index, kinds in enumerate(STORY))
    return " ".join(_tidy(line.format_map(words)) for line in lines)


def topics() -> tuple[str, ...]:
    return word_lists()["animal"] + word_lists()["job"]


def story_exchange(draw: Draw) -> list[Turn]:
    """Held out are pairs of wish and topic."""
    wish, topic = draw.until_mine(lambda: (draw.pick(STORY_WISHES), draw.pick(topics())), " ".join)
    question = _tidy(wish.format(topic))
    return [user(casual(draw, question)), assistant(story(topic), f"A story about {article(topic)}.")]


def _tidy(text: str) -> str:
    """An "a" before a vowel becomes "an", a sentence starts with a capital, and plurals of "dress" get their e."""
    words = text.split(" ")
    for index in range(len(words) - 1):
        if words[index] in ("a", "A") and words[index + 1][0] in "aeiou":
            words[index] += "n"
    return capital(" ".join(words))
