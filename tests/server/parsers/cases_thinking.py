"""Thinking and calls together: where the one ends and the other begins."""

from __future__ import annotations

from deltaserve.server.parsers.reasoning import State
from tests.server.parsers.golden import JSON, Case, Raw, call

OPENED, ANSWER, UNDECIDED = State.OPENED, State.ANSWER, State.UNDECIDED
WEATHER = call("get_weather", city="Paris")
PARIS = ("get_weather", {"city": "Paris"})
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'

CASES = [
    Case("thinking, call", f"hm\n</think>\n\n{WEATHER}", None, [PARIS], "hm", OPENED),
    Case("thinking, text, call", f"hm\n</think>\n\nI look.\n\n{WEATHER}", "I look.", [PARIS], "hm", OPENED),
    Case("thinking, text", "hm\n</think>\n\nNo.", "No.", [], "hm", OPENED),
    Case("thinking again opened", f"<think>\nhm\n</think>\n\n{WEATHER}", None, [PARIS], "hm", OPENED),
    Case("opened by the model", f"<think>\nhm\n</think>\n\n{WEATHER}", None, [PARIS], "hm", UNDECIDED),
    Case("left to the model, which calls", WEATHER, None, [PARIS], "", UNDECIDED),
    Case("left to the model, which answers", "Yes.", "Yes.", [], "", UNDECIDED),
    Case("thinking that is empty", f"\n</think>\n\n{WEATHER}", None, [PARIS], "", OPENED),
    Case("off: the marks are text", "a</think>b<think>c", "a</think>b<think>c", [], "", ANSWER),
    Case("off: a call", WEATHER, None, [PARIS], "", ANSWER),
    Case("never ends", "hm, so", None, [], "hm, so", OPENED, is_cut=True),
    Case("never ends, and that by itself", "hm, so", None, [], "hm, so", OPENED),
    Case("cut in </think>", "hm </thi", None, [], "hm </thi", OPENED, is_cut=True),
    Case("cut behind </think>", "hm</think>", "", [], "hm", OPENED, is_cut=True),
    Case(
        "cut in a call behind it",
        "hm</think>\n\n<tool_call>\n<function=ping>\n",
        None,
        [("ping", Raw(""))],
        "hm",
        OPENED,
        is_cut=True,
    ),
    Case("no </think> before the call", f"hm, I call.\n{WEATHER}", None, [PARIS], "hm, I call.", OPENED),
    Case("</think> behind the call", f"hm\n{WEATHER}\n</think>\n\nDone.", "Done.", [PARIS], "hm", OPENED),
    Case(
        "</think> behind two calls", f"hm\n{WEATHER}\n{call('ping')}</think>", None, [PARIS, ("ping", {})], "hm", OPENED
    ),
    Case("</think> once is enough", f"hm\n{WEATHER}\n</think></think>", "</think>", [PARIS], "hm", OPENED),
    Case("text behind a call without </think>", f"hm\n{WEATHER}\n\nDone.", "Done.", [PARIS], "hm", OPENED),
    Case(
        "no </think>, and cut",
        "hm\n" + WEATHER.partition("</function>")[0],
        None,
        [("get_weather", Raw('{"city": "Paris"'))],
        "hm",
        OPENED,
        is_cut=True,
    ),
    Case("a JSON call without </think>", f"hm\n{PING}", None, [("ping", {})], "hm", OPENED, format=JSON),
    Case(
        "a thought about <tool_call>",
        "First <tool_call>, then <function=NAME>.\n</think>\n\nSo.",
        "So.",
        [],
        "First <tool_call>, then <function=NAME>.",
        OPENED,
    ),
    Case(
        "a thought about another tool",
        f"{call('other')} is not mine</think>So.",
        "So.",
        [],
        f"{call('other')} is not mine",
        OPENED,
    ),
    Case(
        "a thought about a JSON call",
        '<tool_call>{"name": "other"}</tool_call>\n</think>So.',
        "So.",
        [],
        '<tool_call>{"name": "other"}</tool_call>',
        OPENED,
        format=JSON,
    ),
    Case(
        "a thought about a function",
        "I use <function=ping> now</think>So.",
        "So.",
        [],
        "I use <function=ping> now",
        OPENED,
    ),
    Case("a thought that ends in <tool_call>", "so: <tool_call>", None, [], "so: <tool_call>", OPENED, is_cut=True),
    Case(
        "a thought that ends in a name",
        "so: <tool_call><function=pi",
        None,
        [],
        "so: <tool_call><function=pi",
        OPENED,
        is_cut=True,
    ),
    Case("<tool_call></think>", "<tool_call></think>So.", "So.", [], "<tool_call>", OPENED),
    Case(
        "no tools: the call is a thought",
        f"hm {WEATHER}</think>So.",
        "So.",
        [],
        f"hm {WEATHER}",
        OPENED,
        has_tools=False,
    ),
    Case("no tools: the call is text", f"hm</think>{WEATHER}", WEATHER, [], "hm", OPENED, has_tools=False),
    Case("</think> twice", f"hm\n</think>\n</think>\n\n{WEATHER}", None, [PARIS], "hm", OPENED),
    Case(
        "</think> in a value",
        f"hm</think>{call('bash', command='echo </think>')}",
        None,
        [("bash", {"command": "echo </think>"})],
        "hm",
        OPENED,
    ),
    Case(
        "</think> in a value, late",
        f"hm{call('bash', command='echo </think>')}",
        None,
        [("bash", {"command": "echo </think>"})],
        "hm",
        OPENED,
    ),
    Case("</think> in the answer", "hm</think>use </think> so", "use </think> so", [], "hm", OPENED),
    Case(
        "less than",
        "a < b and b </c and <think> too\n\nok</think>\n\n1 < 2",
        "1 < 2",
        [],
        "a < b and b </c and <think> too\n\nok",
        OPENED,
    ),
    Case(
        "inside a thought that was continued", f"and so\n</think>\n\n{WEATHER}", None, [PARIS], "and so", State.THINKING
    ),
    Case("single, without </think>", f"hm\n{WEATHER}\n{WEATHER}", None, [PARIS], "hm", OPENED, is_single=True),
    Case("many bytes", "日本 \U0001f914\n</think>\n\n是 \U0001f680", "是 \U0001f680", [], "日本 \U0001f914", OPENED),
]
