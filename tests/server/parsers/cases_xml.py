"""The XML format: whole calls, text around them, and what models get wrong."""

from __future__ import annotations

from tests.server.parsers.golden import JSON, Case, Raw, call

WEATHER = call("get_weather", city="Paris")
PARIS = ("get_weather", {"city": "Paris"})
OSLO = ("get_weather", {"city": "Oslo"})
OPEN = "<tool_call>\n<function=get_weather>\n"

CASES = [
    Case("one call", WEATHER, None, [PARIS]),
    Case(
        "two parameters",
        call("get_weather", city="Paris", days="3"),
        None,
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    Case("no parameters", call("ping"), None, [("ping", {})]),
    Case("no parameters, no lines", "<tool_call><function=ping></function></tool_call>", None, [("ping", {})]),
    Case(
        "no lines",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        None,
        [PARIS],
    ),
    Case("text before", f"I look it up.\n\n{WEATHER}", "I look it up.", [PARIS]),
    Case("text before, glued", f"So:{WEATHER}", "So:", [PARIS]),
    Case("text after", f"{WEATHER}\n\nDone.", "Done.", [PARIS]),
    Case("text before and after", f"First.\n\n{WEATHER}\nThen.", "First.\n\n\nThen.", [PARIS]),
    Case("white space alone around it", f"\n\n{WEATHER}\n", None, [PARIS]),
    Case("parallel", f"{WEATHER}\n{call('get_weather', city='Oslo')}", None, [PARIS, OSLO]),
    Case("parallel, glued", f"{WEATHER}{call('get_weather', city='Oslo')}", None, [PARIS, OSLO]),
    Case("three calls", "\n".join([call("ping"), WEATHER, call("ping")]), None, [("ping", {}), PARIS, ("ping", {})]),
    Case("text between calls", f"{WEATHER}\nand\n{call('ping')}", "and", [PARIS, ("ping", {})]),
    Case(
        "two functions in one tool_call",
        "<tool_call>\n<function=ping>\n</function>\n<function=ping>\n</function>\n</tool_call>",
        None,
        [("ping", {}), ("ping", {})],
    ),
    Case(
        "blank lines inside",
        WEATHER.replace("\n<", "\n\n \n<").replace("\n\n \n</parameter", "\n</parameter"),
        None,
        [PARIS],
    ),
    Case("a name no tool has", call("get_time", city="Paris"), None, [("get_time", {"city": "Paris"})]),
    Case("a parameter no tool has", call("get_weather", place="5"), None, [("get_weather", {"place": "5"})]),
    Case(
        "a parameter given twice",
        call("bash", command="a")[: -len("</function>\n</tool_call>")]
        + "<parameter=command>\nb\n</parameter>\n</function>\n</tool_call>",
        None,
        [("bash", Raw('{"command": "a", "command": "b"}'))],
    ),
    Case(
        "names in quotes", WEATHER.replace("=get_weather", '="get_weather"').replace("=city", "='city'"), None, [PARIS]
    ),
    Case(
        "names with spaces", WEATHER.replace("=get_weather", "= get_weather ").replace("=city", "=city "), None, [PARIS]
    ),
    Case("no > behind the function", WEATHER.replace("get_weather>", "get_weather"), None, [PARIS]),
    Case("no > behind the parameter", WEATHER.replace("city>", "city"), None, [PARIS]),
    Case("no </tool_call>", WEATHER.removesuffix("\n</tool_call>"), None, [PARIS]),
    Case("no </tool_call> before text", WEATHER.replace("\n</tool_call>", "\n\nDone."), "Done.", [PARIS]),
    Case(
        "no </tool_call> before a call",
        WEATHER.removesuffix("\n</tool_call>") + "\n" + call("ping"),
        None,
        [PARIS, ("ping", {})],
    ),
    Case("no </function>", WEATHER.replace("</function>\n", ""), None, [PARIS]),
    Case(
        "no </function> before a call",
        WEATHER.replace("</function>\n</tool_call>", "") + call("ping"),
        None,
        [PARIS, ("ping", {})],
    ),
    Case("no </parameter>", WEATHER.replace("</parameter>\n", ""), None, [PARIS]),
    Case(
        "no </parameter> before the next",
        call("get_weather", city="Paris", days="3").replace("Paris\n</parameter>", "Paris"),
        None,
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    Case("neither </parameter> nor </function>", OPEN + "<parameter=city>\nParis\n</tool_call>", None, [PARIS]),
    Case(
        "neither, before a call",
        OPEN + "<parameter=city>\nParis\n</tool_call>\n" + call("ping"),
        None,
        [PARIS, ("ping", {})],
    ),
    Case("ended in a value", OPEN + "<parameter=city>\nParis\n", None, [PARIS]),
    Case("ended in a number", OPEN + "<parameter=days>\n12", None, [("get_weather", {"days": 12})]),
    Case("ended behind the name", OPEN, None, [("get_weather", {})]),
    Case(
        "ended in half a mark",
        OPEN + "<parameter=city>\nParis\n</para",
        None,
        [("get_weather", {"city": "Paris\n</para"})],
    ),
    Case("ended in a key", OPEN + "<parameter=ci", "<parameter=ci", [("get_weather", {})]),
    Case("no <tool_call>", WEATHER.removeprefix("<tool_call>\n"), None, [PARIS]),
    Case("no <tool_call>, text before", "Here:\n" + WEATHER.removeprefix("<tool_call>\n"), "Here:", [PARIS]),
    Case("neither <tool_call> nor its end", WEATHER[len("<tool_call>\n") : -len("\n</tool_call>")], None, [PARIS]),
    Case("a bare function that no tool is", "Use <function=map>x</function>.", "Use <function=map>x</function>."),
    Case("bare functions are XML", "<function=ping></function>", "<function=ping></function>", format=JSON),
    Case("XML where JSON is usual", WEATHER, None, [PARIS], format=JSON),
    Case(
        "text between parameters",
        OPEN + "the city:\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "the city:",
        [PARIS],
    ),
    Case(
        "marks that are none, between parameters",
        OPEN + "<b>x</b><parameter=>\n<parameter=city>Paris</parameter></function></tool_call>",
        "<b>x</b><parameter=>",
        [PARIS],
    ),
    Case("a JSON object for parameters", OPEN + '{"city": "Paris"}\n</function>\n</tool_call>', None, [PARIS]),
    Case(
        "a Python dict for parameters",
        OPEN + "{'days': None, 'city': 'Paris',}\n</function>\n</tool_call>",
        None,
        [("get_weather", {"days": None, "city": "Paris"})],
    ),
    Case("a JSON object that is not closed", OPEN + '{"city": "Paris"\n</function>\n</tool_call>', None, [PARIS]),
    Case(
        "a JSON object that the end closes",
        OPEN + '{"city": "Paris", "days": 3',
        None,
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    Case(
        "a JSON object that breaks off",
        OPEN + '{"city": Paris}\n</function>\n</tool_call>',
        "Paris}",
        [("get_weather", Raw('{"city": '))],
    ),
    Case("</tool_call> twice", WEATHER + "\n</tool_call>", None, [PARIS]),
    Case("</function> twice", WEATHER.replace("</function>", "</function>\n</function>"), None, [PARIS]),
    Case(
        "<tool_call> in a sentence",
        "The model writes <tool_call> and a name.",
        "The model writes <tool_call> and a name.",
    ),
    Case(
        "<tool_call> in a sentence, then a call",
        f"After <tool_call> comes it:\n{WEATHER}",
        "After <tool_call> comes it:",
        [PARIS],
    ),
    Case("an empty tool_call", "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>"),
    Case("a function without a name", "<tool_call>\n<function=>\n</function>", "<tool_call>\n<function=>\n</function>"),
    Case("<tool_call> twice", "<tool_call>\n" + WEATHER, "<tool_call>", [PARIS]),
    Case("a stray </tool_call>", "a </tool_call> b", "a </tool_call> b"),
    Case("a mark in capitals", "<TOOL_CALL><function", "<TOOL_CALL><function"),
    Case("no call at all", " if a < b and c > d:\n    x = '<tool'\n", " if a < b and c > d:\n    x = '<tool'\n"),
    Case("nothing", "", ""),
    Case("white space alone", " \n", " \n"),
    Case("half a mark at the end", "a <tool_ca", "a <tool_ca"),
    Case("half a mark after a call", WEATHER + "\n</tool", "</tool", [PARIS]),
    Case("a < after a call", WEATHER + "\n< 5", "< 5", [PARIS]),
    Case("a fence around the call", f"```\n{WEATHER}\n```", "```\n\n```", [PARIS]),
    Case("no tools: everything is text", WEATHER, WEATHER, has_tools=False),
    # Cut at a limit: the call stays open.
    Case(
        "cut before the name", "So.\n\n<tool_call>\n<function=get_w", "So.\n\n<tool_call>\n<function=get_w", is_cut=True
    ),
    Case("cut in <tool_call>", "So.\n\n<tool_c", "So.\n\n<tool_c", is_cut=True),
    Case("cut behind the name", OPEN, None, [("get_weather", Raw(""))], is_cut=True),
    Case("cut in a key", OPEN + "<parameter=ci", None, [("get_weather", Raw('{"ci'))], is_cut=True),
    Case(
        "cut in a second key",
        OPEN + "<parameter=city>a</parameter>\n<parameter=da",
        None,
        [("get_weather", Raw('{"city": "a", "da'))],
        is_cut=True,
    ),
    Case("cut in a mark", OPEN + "<parame", None, [("get_weather", Raw(""))], is_cut=True),
    Case("cut behind a key", OPEN + "<parameter=city>", None, [("get_weather", Raw('{"city": "'))], is_cut=True),
    Case(
        "cut in a value", OPEN + '<parameter=city>\nPa"r', None, [("get_weather", Raw('{"city": "Pa\\"r'))], is_cut=True
    ),
    Case(
        "cut behind a line",
        OPEN + "<parameter=city>\nParis\n",
        None,
        [("get_weather", Raw('{"city": "Paris\\n'))],
        is_cut=True,
    ),
    Case("cut in a number", OPEN + "<parameter=days>\n12", None, [("get_weather", Raw('{"days": "12'))], is_cut=True),
    Case(
        "cut in a closing mark",
        OPEN + "<parameter=city>\nParis\n</par",
        None,
        [("get_weather", Raw('{"city": "Paris\\n</par'))],
        is_cut=True,
    ),
    Case(
        "cut behind a value",
        OPEN + "<parameter=city>\nParis\n</parameter>\n",
        None,
        [("get_weather", Raw('{"city": "Paris"'))],
        is_cut=True,
    ),
    Case("cut behind </function>", WEATHER.removesuffix("\n</tool_call>"), None, [PARIS], is_cut=True),
    Case("cut in </tool_call>", WEATHER.removesuffix("l>"), None, [PARIS], is_cut=True),
    Case(
        "cut in the second call",
        WEATHER + "\n" + OPEN + "<parameter=city>\nO",
        None,
        [PARIS, ("get_weather", Raw('{"city": "O'))],
        is_cut=True,
    ),
    Case("cut in text after a call", WEATHER + "\nSo it", "So it", [PARIS], is_cut=True),
    # One call is all that is wanted.
    Case("single: the second call goes", WEATHER + "\n" + call("ping"), None, [PARIS], is_single=True),
    Case("single: text after it goes", f"a\n{WEATHER}\nb", "a", [PARIS], is_single=True),
    Case(
        "single: no </tool_call>", WEATHER.removesuffix("\n</tool_call>") + call("ping"), None, [PARIS], is_single=True
    ),
    Case(
        "single: a second function goes",
        "<tool_call><function=ping></function><function=ping></function></tool_call>",
        None,
        [("ping", {})],
        is_single=True,
    ),
    Case("single: no call at all", "a <b> c", "a <b> c", is_single=True),
    # A turn that was begun with a call.
    Case(
        "named",
        "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        None,
        [PARIS],
        start=OPEN,
        is_single=True,
    ),
    Case("named, ended at once", "", None, [("get_weather", {})], start=OPEN, is_single=True),
    Case("required", WEATHER.removeprefix("<tool_call>\n"), None, [PARIS], start="<tool_call>\n"),
    Case(
        "required, parallel",
        WEATHER.removeprefix("<tool_call>\n") + "\n" + call("ping"),
        None,
        [PARIS, ("ping", {})],
        start="<tool_call>\n",
    ),
    Case("required, but no call", "I cannot.", "<tool_call>\nI cannot.", start="<tool_call>\n"),
]
