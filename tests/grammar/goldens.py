"""Schemas of every kind that requests bring, each with values that fit and values that do not."""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "maxLength": 12}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}

# name: (schema, values that fit, values that do not)
GOLDENS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "flat": (
        {
            "type": "object",
            "properties": {"name": NAME, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        [{"name": "Ann", "age": 3}, {"name": "", "age": -12}],
        [{"name": "Ann"}, {"name": 3, "age": 3}, {"name": "Ann", "age": 3, "more": 1}, [], "Ann"],
    ),
    "optional": (
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
            "additionalProperties": False,
        },
        [{}, {"a": True}, {"b": None}, {"a": False, "b": None}],
        [{"a": None}, {"c": 1}, None],
    ),
    "nested": (
        {
            "type": "object",
            "properties": {
                "user": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer"},
                        "home": {
                            "type": "object",
                            "properties": {"city": NAME},
                            "required": ["city"],
                            "additionalProperties": False,
                        },
                    },
                    "required": ["id", "home"],
                    "additionalProperties": False,
                }
            },
            "required": ["user"],
            "additionalProperties": False,
        },
        [{"user": {"id": 7, "home": {"city": "Oslo"}}}],
        [{"user": {"id": 7}}, {"user": {"id": 7, "home": {}}}, {"id": 7}],
    ),
    "enum": ({"enum": ["red", "green", 3, None, [1, 2]]}, ["red", "green", 3, None, [1, 2]], ["blue", 4, True, [2]]),
    "const": ({"const": {"kind": "x", "n": [1]}}, [{"kind": "x", "n": [1]}], [{"kind": "y", "n": [1]}, "x"]),
    "any_of": (
        {
            "anyOf": [
                {"type": "integer"},
                {"type": "object", "properties": {"e": NAME}, "required": ["e"], "additionalProperties": False},
                {"type": "null"},
            ]
        },
        [5, {"e": "x"}, None],
        ["5", {}, [5], 1.5],
    ),
    "types": ({"type": ["boolean", "integer"]}, [True, 12], [None, "x", 1.5]),
    "array": (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        [[], [1], [1, -2, 3, 4]],
        [[1.5], ["1"], [1, 2, 3, 4, 5], {}],
    ),
    "array_of_objects": (
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"k": {"enum": ["a", "b"]}, "n": {"type": "number"}},
                "required": ["k", "n"],
                "additionalProperties": False,
            },
        },
        [[{"k": "a", "n": 1.5}], [{"k": "b", "n": -1e3}, {"k": "a", "n": 0}]],
        [[], [{"k": "c", "n": 1}], [{"k": "a"}]],
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "integer"}, NAME], "items": False, "minItems": 2},
        [[1, "x"]],
        [[1], ["x", 1], [1, "x", 2]],
    ),
    "range": ({"type": "integer", "minimum": -5, "maximum": 120}, [-5, 0, 99, 120], [-6, 121, 1.5, "7"]),
    "number": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1, 0.001], [0, 1.01, -0.5]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 5}, ["ab", "abcde", "é😀"], ["a", "abcdef", ""]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, ["AB-123"], ["ab-123", "AB-12", "xAB-123"]),
    "date": ({"type": "string", "format": "date"}, ["2026-11-30"], ["30.11.2026", "2026-11-3"]),
    "escapes": (
        {
            "type": "object",
            "properties": {'q"\\\n': {"enum": ['say "hi"\n', "tab\tand \\ slash", "é😀"]}},
            "required": ['q"\\\n'],
            "additionalProperties": False,
        },
        [{'q"\\\n': 'say "hi"\n'}, {'q"\\\n': "tab\tand \\ slash"}, {'q"\\\n': "é😀"}],
        [{'q"\\\n': "hi"}, {"q": "é😀"}],
    ),
    "refs": (
        {
            "$defs": {
                "point": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                    "required": ["x", "y"],
                    "additionalProperties": False,
                }
            },
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/point"}, "b": {"$ref": "#/$defs/point"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        [{"a": {"x": 1, "y": 2}, "b": {"x": 0, "y": 0}}],
        [{"a": {"x": 1}, "b": {"x": 0, "y": 0}}, {"a": 1, "b": 2}],
    ),
    "recursive": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        [{"v": 1, "next": None}, {"v": 1, "next": {"v": 2, "next": {"v": 3, "next": None}}}],
        [{"v": 1}, {"v": 1, "next": {"v": 2}}, None],
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1, "b": 2}],
        [{"a": "1"}, {"a": None}],
    ),
    "all_of": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10, "5"]),
    "union": (
        {
            "$defs": {
                name: {
                    "type": "object",
                    "properties": {"kind": {"const": name}, field: {"type": "integer"}},
                    "required": ["kind", field],
                    "additionalProperties": False,
                }
                for name, field in (("cat", "lives"), ("dog", "bones"))
            },
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "bones": 0}],
        [{"kind": "cat", "bones": 9}, {"kind": "cow"}],
    ),
    "multiple": ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100}, [0, 7, 98], [1, 105]),
    "annotated": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "T",
            "description": "d",
            "type": "object",
            "properties": {"a": {"title": "A", "default": 3, "examples": [4], "type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 1}],
        [{"a": "1"}, {}],
    ),
}

# What cannot be honoured, and a word of the reason.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "strin"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"$ref": "#/$defs/absent"}, "absent"),
    ({"$ref": "http://localhost/schema.json"}, "localhost"),
    ({"$defs": {"a": {"$anchor": "q"}}, "$ref": "#q"}, "#q"),
    ({"type": "string", "format": "no-such-format"}, "no-such-format"),
    ({"type": "string", "pattern": "("}, "regex"),
    ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "complex"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "nsatisfiable"),
    ({"enum": ["x" * 200_000]}, "characters"),
    ({"type": "integer", "multipleOf": 9_999_991}, "multipleOf"),
    ({"type": "number", "multipleOf": 0.12345}, "multipleOf"),
    ({"allOf": [{"type": "string", "pattern": f"a{n}.*b"} for n in range(40)]}, "may meet"),
    (
        {
            "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"pattern": f"{n}.*b"}]} for n in range(9)},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/d0"}},
        },
        "may meet",
    ),
]
