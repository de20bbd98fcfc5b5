"""JSON objects of a flat schema, filled from a text.

The object's keys come in the schema's order, its values from the text as they stand there. Fields are a name and a
type at random, so that schema and text must be read; held out are pairs of field names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from training.chat import Turn, Value, assistant, user
from training.draw import Draw, capital, joined

Make = Callable[[Draw], Value]

STRINGS: dict[str, Make] = {
    "name": lambda d: d.person(), "first_name": lambda d: d.word("first"), "last_name": lambda d: d.word("last"),
    "city": lambda d: d.word("city"), "colour": lambda d: d.word("colour"), "animal": lambda d: d.word("animal"),
    "job": lambda d: d.word("job"), "food": lambda d: d.word("food"), "day": lambda d: d.word("day"),
    "month": lambda d: d.word("month"), "place": lambda d: d.word("place"), "title": lambda d: d.word("abstract"),
    "owner": lambda d: d.word("first"), "code": lambda d: d.invented(2), "item": lambda d: d.word("thing"),
    "weather": lambda d: d.word("weather"), "friend": lambda d: d.word("first"), "label": lambda d: d.word("plain"),
    "email": lambda d: f"{d.word('first').lower()}@{d.word('thing')}.com", "brand": lambda d: capital(d.invented(2)),
}  # fmt: skip
INTEGERS: dict[str, Make] = {
    "age": lambda d: d.between(1, 99), "count": lambda d: d.between(0, 999), "year": lambda d: d.between(1900, 2099),
    "size": lambda d: d.between(1, 99), "id": lambda d: d.between(1, 99999), "level": lambda d: d.between(0, 10),
    "floor": lambda d: d.between(0, 40), "score": lambda d: d.between(0, 9999), "room": lambda d: d.between(1, 12),
}  # fmt: skip
NUMBERS: dict[str, Make] = {
    "price": lambda d: d.between(1, 99999) / 100, "weight": lambda d: d.between(1, 999) / 10,
    "height": lambda d: d.between(1, 299) / 100, "speed": lambda d: d.between(1, 999) / 10,
}  # fmt: skip
FLAGS = ("active", "open", "urgent", "new", "paid", "ready", "visible", "married")
ENUMS = {
    "status": ("open", "closed", "waiting"), "priority": ("low", "medium", "high"),
    "shape": ("round", "square", "flat"), "mood": ("happy", "sad", "calm"), "unit": ("metre", "inch", "mile"),
}  # fmt: skip

WISHES = (
    "Write a JSON object with the fields {fields} from this text: {text}",
    "Give me a JSON object with the fields {fields}.\n\nText: {text}",
    "{text}\n\nWrite this as a JSON object with the fields {fields}.",
    "Extract {fields} as JSON: {text}",
)
SCHEMA_WISHES = (
    "Answer with a JSON object of this schema:\n{schema}\n\nText: {text}",
    "{text}\n\nWrite a JSON object that follows this schema:\n{schema}",
    "Fill this JSON schema from the text.\n\nSchema: {schema}\n\nText: {text}",
)


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: str
    value: Value
    choices: tuple[str, ...] = ()

    def schema(self) -> dict[str, object]:
        return {"type": self.type} | ({"enum": list(self.choices)} if self.choices else {})

    def said(self, draw: Draw) -> str:
        """A sentence that gives the value."""
        name = self.name.replace("_", " ")
        if isinstance(self.value, bool):
            return _flag_said(draw, name, self.value)
        shown = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return capital(draw.pick(SAYINGS).format(name=name, value=shown))


SAYINGS = ("the {name} is {value}.", "the {name} is {value}.", "{name}: {value}.", "its {name} is {value}.")


def object_exchange(draw: Draw) -> list[Turn]:
    """A wish for an object, and the object."""
    fields = draw.until_mine(lambda: _fields(draw), lambda fields: " ".join(field.name for field in fields[:2]))
    said = [field.said(draw) for field in (draw.shuffled(fields) if draw.chance(0.5) else fields)]
    if draw.chance(0.3):
        said.insert(draw.between(0, len(said)), f"It was a {draw.word('adjective')} day.")
    text = " ".join(said)
    if draw.chance(0.5):
        wish = draw.pick(SCHEMA_WISHES).format(schema=json.dumps(schema_of(fields)), text=text)
    else:
        named = joined([f"{field.name} ({field.type})" for field in fields])
        wish = draw.pick(WISHES).format(fields=named, text=text)
    answer = json.dumps({field.name: field.value for field in fields})
    names = joined([field.name for field in fields])
    return [user(wish), assistant(answer, f"The fields are {names}.")]


def schema_of(fields: list[Field]) -> dict[str, object]:
    properties = {field.name: field.schema() for field in fields}
    return {"type": "object", "properties": properties, "required": [field.name for field in fields]}


def _fields(draw: Draw) -> list[Field]:
    found: dict[str, Field] = {}
    for _ in range(draw.between(2, 6)):
        field = _field(draw)
        found.setdefault(field.name, field)
    return list(found.values())


def _field(draw: Draw) -> Field:
    kind = draw.random()
    if kind < 0.5:
        name = draw.pick(tuple(STRINGS))
        return Field(name, "string", STRINGS[name](draw))
    if kind < 0.7:
        name = draw.pick(tuple(INTEGERS))
        return Field(name, "integer", INTEGERS[name](draw))
    if kind < 0.8:
        name = draw.pick(tuple(NUMBERS))
        return Field(name, "number", NUMBERS[name](draw))
    if kind < 0.9:
        return Field(draw.pick(FLAGS), "boolean", draw.chance(0.5))
    name = draw.pick(tuple(ENUMS))
    return Field(name, "string", draw.pick(ENUMS[name]), ENUMS[name])


def _flag_said(draw: Draw, name: str, value: bool) -> str:
    if draw.chance(0.3):
        return f"{name.capitalize()}: {json.dumps(value)}."
    return f"It is {name}." if value else f"It is not {name}."
