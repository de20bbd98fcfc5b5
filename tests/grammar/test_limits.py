"""Conjunctions are counted from above, through references; what is usual passes."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.grammar.limits import grammar_joins_too_many, joins_too_many

PATTERN: dict[str, Any] = {"type": "string", "pattern": "a.*b"}


def chain(length: int) -> dict[str, Any]:
    """A definition that refers to itself twice, then to the next, and so on."""
    defs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(length)}
    return {"$defs": defs | {f"d{length}": PATTERN}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "is_too_much"),
    [
        ({}, False),
        ({"type": "object", "properties": {f"p{n}": PATTERN for n in range(50)}}, False),
        ({"anyOf": [PATTERN] * 50}, False),
        ({"allOf": [PATTERN] * 6}, False),
        ({"allOf": [PATTERN] * 7}, True),
        ({"allOf": [{"properties": {"a": PATTERN}}] * 7}, True),
        ({"items": {"prefixItems": [{"allOf": [{"anyOf": [PATTERN, {}]}] * 7}]}}, True),
        (chain(2), False),
        (chain(3), True),
        (chain(60), True),
        ({"$ref": "#"}, False),
        ({"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}, "v": PATTERN}}}, "$ref": "#/$defs/n"}, False),
        ({"$defs": {"a/b": {"allOf": [PATTERN] * 7}}, "$ref": "#/$defs/a~1b"}, True),
        ({"$defs": {"a": {"allOf": [PATTERN] * 7}}, "$ref": "#/%24defs/a"}, True),
        ({"anyOf": [{}, {"allOf": [PATTERN] * 7}], "$ref": "#/anyOf/1"}, True),
        ({"$ref": "#/anyOf/9", "anyOf": []}, False),
        ({"multipleOf": 1000}, False),
        ({"multipleOf": 0.01}, False),
        ({"multipleOf": 1001}, True),
        ({"multipleOf": 1e300}, True),
        ({"multipleOf": 1e-9}, False),
        ({"multipleOf": 0.1234}, True),
        ({"allOf": [{"multipleOf": 7}, {"multipleOf": 11}]}, True),
        ({"allOf": "x", "properties": [], "anyOf": {}, "$ref": 5, "multipleOf": True, "pattern": 3}, False),
    ],
    ids=lambda value: str(value)[:50],
)
def test_schemas(schema: dict[str, Any], is_too_much: bool) -> None:
    assert joins_too_many(schema) == is_too_much


def test_grammars() -> None:
    many = " & ".join(f"/{letter}/" for letter in "abcdefgh")
    assert grammar_joins_too_many(f"start: A\nA: {many}")
    assert not grammar_joins_too_many('start: A "&&&&&&&&" /&{9}&&&&&&&/ \nA: /a/ & /b/')
