"""What is refused before the grammar library sees it, because its work would explode.

The library decides whether several regexes can hold for one text at once in time that doubles with each of them, and
counts none of it. So the conjunctions that a schema or a grammar can build are counted here, from above. Of a
`multipleOf` it makes a machine with as many states as the number has units of its last digit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_JOINED = 6  # regexes for one text
MAX_DIVISOR = 1000
_DIVISOR_WEIGHT = 4  # regexes that a multipleOf counts for
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_CHILD = ("additionalProperties", "items", "not", "contains", "propertyNames")
_CHILDREN = ("prefixItems", "properties", "patternProperties")


def joins_too_many(schema: Mapping[str, Any]) -> bool:
    """Whether more than MAX_JOINED patterns may meet in one value of the schema, or a multipleOf is too large.

    Raises ValueError for a reference that is not by path, since nothing here follows it.
    """
    return _Counter(schema).count(schema) > MAX_JOINED


def grammar_joins_too_many(grammar: str) -> bool:
    """Whether a Lark grammar has more than MAX_JOINED intersections outside of its literals."""
    return _LITERAL.sub("", grammar).count("&") > MAX_JOINED


class _Counter:
    """Counts each definition once; one inside itself adds nothing."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, int] = {}

    def count(self, schema: object) -> int:
        """All branches of allOf meet, one of anyOf and oneOf does, and of children each is a text of its own."""
        if not isinstance(schema, Mapping):
            return 0
        own = isinstance(schema.get("pattern"), str) + isinstance(schema.get("format"), str) + _divisor(schema)
        joined = sum(self.count(branch) for branch in _listed(schema.get("allOf")))
        either = sum(self._most(_listed(schema.get(name))) for name in ("anyOf", "oneOf"))
        return own + joined + either + self._referred(schema.get("$ref")) + self._most(_children(schema))

    def _most(self, schemas: Iterable[object]) -> int:
        return max((self.count(schema) for schema in schemas), default=0)

    def _referred(self, path: object) -> int:
        if not isinstance(path, str):
            return 0
        if path != "#" and not path.startswith("#/"):
            raise ValueError(f"$ref {path!r:.100} is not taken; refer to a definition by #/")
        if path not in self._known:
            self._known[path] = 0
            self._known[path] = self.count(self._find(path))
        return self._known[path]

    def _find(self, path: str) -> object:
        found: object = self._root
        for name in unquote(path).removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
            else:
                found = found.get(name) if isinstance(found, Mapping) else None
        return found


def _divisor(schema: Mapping[str, Any]) -> int:
    number = schema.get("multipleOf")
    if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
        return 0
    digits = Decimal(str(number)).normalize()
    size = abs(int(digits.scaleb(-int(digits.as_tuple().exponent)))) if abs(number) < 1 << 60 else MAX_DIVISOR + 1
    whole = size if number != int(number) else abs(int(number))
    return _DIVISOR_WEIGHT if max(size, whole) <= MAX_DIVISOR else MAX_JOINED + 1


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _children(schema: Mapping[str, Any]) -> list[object]:
    found = [schema.get(name) for name in _CHILD]
    for name in _CHILDREN:
        value = schema.get(name)
        found += value.values() if isinstance(value, Mapping) else _listed(value)
    return found
