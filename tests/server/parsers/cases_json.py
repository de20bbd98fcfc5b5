"""The JSON format, and what models get wrong in it."""

from __future__ import annotations

from dataclasses import replace

from tests.server.parsers.golden import JSON, XML, Case, Raw

PARIS = ("get_weather", {"city": "Paris"})
BODY = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


def call(body: str = BODY) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def bash(arguments: str) -> str:
    return call(f'{{"name": "bash", "arguments": {arguments}}}')


WEATHER = call()
PING = call('{"name": "ping", "arguments": {}}')

_CASES = [
    Case("one call", WEATHER, None, [PARIS]),
    Case("no lines", f"<tool_call>{BODY}</tool_call>", None, [PARIS]),
    Case(
        "over many lines",
        call('{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}'),
        None,
        [PARIS],
    ),
    Case("empty arguments", PING, None, [("ping", {})]),
    Case("no arguments", call('{"name": "ping"}'), None, [("ping", {})]),
    Case("null for arguments", call('{"name": "ping", "arguments": null}'), None, [("ping", {})]),
    Case("arguments first", call('{"arguments": {"city": "Paris"}, "name": "get_weather"}'), None, [PARIS]),
    Case("parameters for arguments", WEATHER.replace("arguments", "parameters"), None, [PARIS]),
    Case(
        "arguments as a string",
        call('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'),
        None,
        [PARIS],
    ),
    Case(
        "more keys",
        call(
            '{"id": 7, "type": "function", "name": "get_weather", "x": [{"y": null}], "arguments": {"city": "Paris"}}'
        ),
        None,
        [PARIS],
    ),
    Case("a key behind the arguments", call(BODY[:-1] + ', "id": "a"}'), None, [PARIS]),
    Case("arguments twice", call(BODY[:-1] + ', "arguments": {"city": "Oslo"}}'), None, [PARIS]),
    Case(
        "nested",
        bash('{"a": {"b": [1, {"c": "}"}], "d": true}, "e": -1.5e3}'),
        None,
        [("bash", {"a": {"b": [1, {"c": "}"}], "d": True}, "e": -1500.0})],
    ),
    Case(
        "types are the model's own",
        bash('{"n": "5", "m": 5, "b": false, "z": null}'),
        None,
        [("bash", {"n": "5", "m": 5, "b": False, "z": None})],
    ),
    Case("text before and after", f"First.\n{WEATHER}\nThen.", "First.\n\nThen.", [PARIS]),
    Case("parallel", f"{WEATHER}\n{PING}", None, [PARIS, ("ping", {})]),
    Case(
        "two objects in one tool_call",
        call(f'{BODY}\n{{"name": "ping", "arguments": {{}}}}'),
        None,
        [PARIS, ("ping", {})],
    ),
    Case("a name no tool has", call('{"name": "nope", "arguments": {}}'), None, [("nope", {})]),
    Case(
        "</tool_call> in a string",
        bash('{"command": "echo \'</tool_call>\'"}'),
        None,
        [("bash", {"command": "echo '</tool_call>'"})],
    ),
    Case(
        "<tool_call> in a string",
        bash('{"command": "<tool_call>{\\"name\\": 1}"}'),
        None,
        [("bash", {"command": '<tool_call>{"name": 1}'})],
    ),
    Case("</think> in a string", bash('{"command": "</think>"}'), None, [("bash", {"command": "</think>"})]),
    Case(
        "braces in a string", bash('{"command": "mkdir test/{a,b"}'), None, [("bash", {"command": "mkdir test/{a,b"})]
    ),
    Case(
        "escapes",
        bash('{"command": "a\\n\\"b\\" \\\\ \\u00e9 \\ud83d\\ude80"}'),
        None,
        [("bash", {"command": 'a\n"b" \\ é \U0001f680'})],
    ),
    Case(
        "escapes that JSON lacks",
        bash('{"command": "grep \'\\d+\\.\' \\u12 it\\\'s"}'),
        None,
        [("bash", {"command": "grep '\\d+\\.' \\u12 it's"})],
    ),
    Case("raw lines in a string", bash('{"command": "a\n\tb"}'), None, [("bash", {"command": "a\n\tb"})]),
    Case(
        "single quotes",
        call("{'name': 'bash', 'arguments': {'command': 'say \"hi\"'}}"),
        None,
        [("bash", {"command": 'say "hi"'})],
    ),
    Case(
        "Python's words",
        bash('{"a": True, "b": None, "c": [False]}'),
        None,
        [("bash", {"a": True, "b": None, "c": [False]})],
    ),
    Case("commas too many", bash('{"a": [1, 2, ], }'), None, [("bash", {"a": [1, 2]})]),
    Case("a ] left out", bash('{"a": [{"b": 1}}'), None, [("bash", {"a": [{"b": 1}]})]),
    Case("no last brace", call(BODY[:-1]), None, [PARIS]),
    Case("no last two braces", call(BODY[:-2]), None, [PARIS]),
    Case("a brace too many", call(BODY + "}"), None, [PARIS]),
    Case("no </tool_call>", f"<tool_call>\n{BODY}", None, [PARIS]),
    Case("no </tool_call> before text", f"<tool_call>\n{BODY}\nDone.", "Done.", [PARIS]),
    Case("no </tool_call>, no braces", f"<tool_call>\n{BODY[:-2]}", None, [PARIS]),
    Case(
        "ended in a number",
        '<tool_call>\n{"name": "get_weather", "arguments": {"days": 12',
        None,
        [("get_weather", {"days": 12})],
    ),
    Case(
        "ended in a string",
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls',
        None,
        [("bash", Raw('{"command": "ls'))],
    ),
    Case("ended behind the name", '<tool_call>\n{"name": "ping"', None, [("ping", {})]),
    Case("no name", call('{"arguments": {"city": "Paris"}}'), call('{"arguments": {"city": "Paris"}}')),
    Case("a name that is none", call('{"name": 5, "arguments": {}}'), call('{"name": 5, "arguments": {}}')),
    Case("an empty name", call('{"name": "", "arguments": {}}'), call('{"name": "", "arguments": {}}')),
    Case("arguments that are a list", bash("[1]"), bash("[1]")),
    Case("arguments that are text", bash('"ls -l"'), bash('"ls -l"')),
    Case("an empty object", call("{}"), call("{}")),
    Case("no JSON", call("{get_weather in Paris}"), call("{get_weather in Paris}")),
    Case("keys without quotes", call('{name: "ping"}'), call('{name: "ping"}')),
    Case("no comma", call('{"name": "ping" "arguments": {}}'), call('{"name": "ping" "arguments": {}}')),
    Case("garbage behind the name", call('{"name": "ping", arguments: {}}'), call('{"name": "ping", arguments: {}}')),
    Case("a list of calls", call(f"[{BODY}]"), call(f"[{BODY}]")),
    Case("a Python call", call("get_weather(city='Paris')"), call("get_weather(city='Paris')")),
    Case("no call, then a call", call("{}") + "\n" + WEATHER, call("{}"), [PARIS]),
    Case("a call inside what is none", '<tool_call>\n{"na ' + WEATHER, '<tool_call>\n{"na', [PARIS]),
    Case("a call behind what is none", "<tool_call>\n{na " + WEATHER, "<tool_call>\n{na", [PARIS]),
    Case(
        "quotes that are not escaped",
        bash('{"command": "say "hi" now"}'),
        'hi" now"}}\n</tool_call>',
        [("bash", Raw('{"command": "say "'))],
    ),
    Case("a word that is none", bash('{"a": 1, "b": yes}'), "yes", [("bash", Raw('{"a": 1, "b": '))]),
    Case("JSON without tool_call", BODY, BODY),
    Case("cut before the name", '<tool_call>\n{"name": "get_we', '<tool_call>\n{"name": "get_we', is_cut=True),
    Case(
        "cut behind the name", '<tool_call>\n{"name": "ping", "argu', '<tool_call>\n{"name": "ping", "argu', is_cut=True
    ),
    Case(
        "cut in the arguments", f"<tool_call>\n{BODY[:-5]}", None, [("get_weather", Raw('{"city": "Par'))], is_cut=True
    ),
    Case(
        "cut in a word",
        '<tool_call>\n{"name": "bash", "arguments": {"a": tru',
        None,
        [("bash", Raw('{"a": '))],
        is_cut=True,
    ),
    Case(
        "cut in an escape",
        '<tool_call>\n{"name": "bash", "arguments": {"a": "b\\u00',
        None,
        [("bash", Raw('{"a": "b'))],
        is_cut=True,
    ),
    Case("cut behind the arguments", f"<tool_call>\n{BODY[:-1]}", None, [PARIS], is_cut=True),
    Case("single", f"{WEATHER}\n{PING}", None, [PARIS], is_single=True),
    Case(
        "named",
        ' {"city": "Paris"}}\n</tool_call>',
        None,
        [PARIS],
        start='<tool_call>\n{"name": "get_weather", "arguments":',
        is_single=True,
    ),
    Case("required", f"{BODY}\n</tool_call>", None, [PARIS], start="<tool_call>\n"),
    Case("required, but no call", "Sorry.", "<tool_call>\nSorry.", start="<tool_call>\n"),
]

CASES = [
    *(replace(case, name=f"JSON: {case.name}", format=JSON) for case in _CASES),
    Case("JSON where XML is usual", WEATHER, None, [PARIS], format=XML),
]
