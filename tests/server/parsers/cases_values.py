"""Values in the XML format: which JSON a parameter's text becomes, and texts that look like marks."""

from __future__ import annotations

from typing import Any

from tests.server.parsers.golden import Case, call

# (parameter of the tool `typed`, text, value)
TYPED: list[tuple[str, str, Any]] = [
    ("text", "42", "42"),
    ("text", "-0.50", "-0.50"),
    ("text", "true", "true"),
    ("text", "null", "null"),
    ("text", "None", "None"),
    ("text", '{"a": 1}', '{"a": 1}'),
    ("text", "[1, 2]", "[1, 2]"),
    ("text", '"quoted"', '"quoted"'),
    ("text", "", ""),
    ("text", " ", " "),
    ("text", "  indented\n    code  ", "  indented\n    code  "),
    ("text", "\nblank lines\n", "\nblank lines\n"),
    ("text", "tab\tand \\ and \"quotes\" and 'single'", "tab\tand \\ and \"quotes\" and 'single'"),
    ("text", "C:\\new\\u0041", "C:\\new\\u0041"),
    ("text", "naïve 日本 \U0001f680 \u2028 \x7f", "naïve 日本 \U0001f680 \u2028 \x7f"),
    ("text", "line\r\nline\x0b\x00", "line\r\nline\x0b\x00"),
    ("text", "a < b && c > d </ e", "a < b && c > d </ e"),
    ("count", "5", 5),
    ("count", " 5 ", 5),
    ("count", "-3", -3),
    ("count", "+7", 7),
    ("count", "007", 7),
    ("count", "5.0", 5),
    ("count", "1180591620717411303424", 2**70),
    ("count", "5.5", "5.5"),
    ("count", "five", "five"),
    ("count", "1,000", "1,000"),
    ("count", "", ""),
    ("count", "null", None),
    ("count", "None", None),
    ("ratio", "1.5", 1.5),
    ("ratio", "2", 2),
    ("ratio", "1e5", 1e5),
    ("ratio", ".5", 0.5),
    ("ratio", "5.", 5.0),
    ("ratio", "+1.25", 1.25),
    ("ratio", "inf", "inf"),
    ("ratio", "NaN", "NaN"),
    ("ratio", "1e999.", "1e999."),
    ("on", "true", True),
    ("on", "True", True),
    ("on", "FALSE", False),
    ("on", "yes", "yes"),
    ("on", "1", "1"),
    ("tags", '["a", "b"]', ["a", "b"]),
    ("tags", "[]", []),
    ("tags", "['a', 'it\\'s']", ["a", "it's"]),
    ("tags", '["a", "b",]', ["a", "b"]),
    ("tags", '["a\nb"]', ["a\nb"]),
    ("tags", "a, b", "a, b"),
    ("tags", '["a"', '["a"'),
    ("tags", '["a"] and more', '["a"] and more'),
    ("options", '{"a": {"b": [1, true, null]}}', {"a": {"b": [1, True, None]}}),
    ("options", "{'a': True, 'b': None, 'c': \"it's\"}", {"a": True, "b": None, "c": "it's"}),
    ("options", '"{\\"a\\": 1}"', {"a": 1}),
    ("options", "{}", {}),
    ("options", "[1]", [1]),
    ("options", "plain", "plain"),
    ("options", '{"pattern": "\\d+"}', {"pattern": "\\d+"}),
    ("options", '{\n  "a": "</parameter>"\n}', {"a": "</parameter>"}),
    ("note", "null", None),
    ("note", "text", "text"),
    ("note", "5", "5"),
    ("either", "42", 42),
    ("either", "42nd", "42nd"),
    ("either", "null", "null"),
    ("limit", "null", None),
    ("limit", "9", 9),
    ("level", "2", 2),
    ("colour", "1", "1"),
    ("fixed", "5", 5),
    ("any", "42", "42"),
    ("any", '{"a": 1}', '{"a": 1}'),
    ("point", '{"x": 1}', {"x": 1}),
    ("maybe_point", '{"x": 1}', {"x": 1}),
    ("maybe_point", "null", None),
    ("loop", "true", True),
    ("lost", "5", "5"),
    ("shape", '{"w": 1}', {"w": 1}),
    ("rows", "[1, 2]", [1, 2]),
    ("open", "null", None),
    ("parts", '[{"type": "text"}]', [{"type": "text"}]),
    ("parts", "text", "text"),
    ("python", "5", 5),
    ("odd", "5", "5"),
    ("broken", "5", "5"),
    ("additional", "5", 5),
]

# Texts of string parameters that hold marks of the format.
MARKED = [
    "<parameter>a</parameter>\n<b/>",
    "close with </parameter> in a line",
    "print('</parameter>')\nprint('</function>')\nprint('</tool_call>')",
    "def f():\n    return '<parameter=path>'",
    "<parameter=unknown>\nx",
    "the <parameter=content> mark, not at a line's beginning",
    "<function=bash>\n</function> is how it ends",
    "</function>\n</parameter>\nand more",
    "<tool_call> opens",
    "a </tool_call>\nb",
    "<think>\nhm\n</think>",
    "</parameter",
    "<!-- </parameters> --></parameter>x",
    "{{ '</parameter>\n' }}\n{%- endfor %}",
    "<|im_end|> in quotes",
]

CODE = """import re

def f(x: "str") -> None:
\treturn re.sub(r"\\\\d+", '\\n', x)  # "a" \\ 'b'
"""

CASES = [
    *(
        Case(f"{key} {text!r}", call("typed", **{key: text}), None, [("typed", {key: value})])
        for key, text, value in TYPED
    ),
    *(
        Case(
            f"marks in {text!r}",
            call("write_file", path="a", content=text),
            None,
            [("write_file", {"path": "a", "content": text})],
        )
        for text in MARKED
    ),
    *(
        Case(
            f"marks first, {text!r}",
            call("write_file", content=text, path="a"),
            None,
            [("write_file", {"path": "a", "content": text})],
        )
        for text in MARKED
    ),
    Case(
        "code", call("write_file", path="f.py", content=CODE), None, [("write_file", {"path": "f.py", "content": CODE})]
    ),
    Case(
        "an unfinished brace",
        call("bash", command="mkdir -p test/{test1,test2"),
        None,
        [("bash", {"command": "mkdir -p test/{test1,test2"})],
    ),
    Case(
        "a heredoc",
        call("bash", command="cat <<'EOF' > a\n<x>\nEOF"),
        None,
        [("bash", {"command": "cat <<'EOF' > a\n<x>\nEOF"})],
    ),
    Case(
        "many types in one call",
        call("typed", text="1", count="1", ratio="1", on="true", tags="[1]", options="{}", limit="null"),
        None,
        [("typed", {"text": "1", "count": 1, "ratio": 1, "on": True, "tags": [1], "options": {}, "limit": None})],
    ),
]
