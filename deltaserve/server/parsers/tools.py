"""The tools of a request as the readers see them: names, parameters, and which JSON a parameter's text stands for.

In the XML format a value is bare text, so its type comes from the tool's JSON schema. `$ref` within the schema, type
lists, anyOf / oneOf / allOf, enum and const are looked through.

| the schema allows                | `text` becomes                                                                  |
| -------------------------------- | ------------------------------------------------------------------------------- |
| nothing said, or string alone    | a string, whatever it looks like                                                |
| several types                    | the first of null, boolean, integer, number, object or array that it can be     |
| no string                        | that type, or null for `null` and `None`                                        |
| anything, and nothing else fits  | a string: a wrong type is for the client to refuse, and nothing is lost         |
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltaserve.server.parsers.json_text import NUMBER, strict_container

# Besides JSON schema's own names, those of programming languages, which tools in the wild have.
TYPE_NAMES = {
    **{name: name for name in ("string", "integer", "number", "boolean", "null", "array", "object")},
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}
MAX_DEPTH = 16
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)(\.0+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Tool:
    """`schema` is that of the parameters, an object; empty where the tool is unknown."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)

    def types(self, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter may have; empty where nothing is said."""
        properties, rest = self._properties, self.schema.get("additionalProperties")
        return frozenset(_Types(self.schema).of(properties.get(parameter, rest), MAX_DEPTH))

    def may_follow(self, parameter: str, given: Iterable[str]) -> bool:
        """Whether a parameter of this name is still to come, after those `given`."""
        return parameter not in given and (parameter in self._properties or not self._properties)

    @property
    def _properties(self) -> Mapping[str, Any]:
        properties = self.schema.get("properties")
        return properties if isinstance(properties, dict) else {}


def make_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Tool]:
    """From a request's list, which `messages.check_tools` has accepted."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: Tool(function["name"], function.get("parameters") or {}) for function in functions}


def convert(text: str, types: frozenset[str]) -> str:
    """The JSON that the text of a parameter stands for."""
    if types and types != {"string"}:
        bare = text.strip()
        for kinds, read in READERS:
            if kinds & types or (kinds == {"null"} and "string" not in types):
                found = read(bare)
                if found is not None:
                    return found
    return json.dumps(text, ensure_ascii=False)


def _null(text: str) -> str | None:
    return "null" if text in ("null", "None") else None


def _boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _integer(text: str) -> str | None:
    found = _INTEGER.fullmatch(text)
    return None if found is None else found[1].replace("+", "") + found[2]


def _number(text: str) -> str | None:
    if NUMBER.fullmatch(text):
        return text
    if not _LOOSE_NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        return None
    return _integer(text) or json.dumps(float(text))


# In the order in which a value is tried.
READERS = (
    (frozenset(("null",)), _null),
    (frozenset(("boolean",)), _boolean),
    (frozenset(("integer",)), _integer),
    (frozenset(("number",)), _number),
    (frozenset(("object", "array")), strict_container),
)


class _Types:
    """Follows each `$ref` once, so that no schema takes long."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._followed: set[str] = set()

    def of(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, dict) or not depth:
            return set()
        named = schema.get("type")
        names = named if isinstance(named, list) else [named]
        found = {TYPE_NAMES.get(name.lower(), "string") for name in names if isinstance(name, str)}
        if not found:
            for inner in self._alternatives(schema):
                found |= self.of(inner, depth - 1)
        found = found or _implied(schema)
        return found | {"null"} if found and schema.get("nullable") is True else found

    def _alternatives(self, schema: Mapping[str, Any]) -> list[Any]:
        lists = [schema.get(name) for name in ("anyOf", "oneOf", "allOf")]
        inner = [item for alternatives in lists if isinstance(alternatives, list) for item in alternatives]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._followed:
            self._followed.add(reference)
            inner.append(_resolve(reference, self._root))
        return inner


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What `#/a/b` points to; None if it points nowhere, or out of the schema."""
    target: Any = root if reference.startswith("#") else None
    for name in reference.removeprefix("#").strip("/").split("/"):
        if name:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target


def _implied(schema: Mapping[str, Any]) -> set[str]:
    """Types that are not named, but follow from the rest of a schema."""
    listed = schema.get("enum")
    values = listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []
    if values:
        return {_type_of(value) for value in values}
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")
