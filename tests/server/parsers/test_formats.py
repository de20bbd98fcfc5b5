"""Which format is read: named by a flag, or seen in the template; and which marks the text must show."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.parsers.formats import Formats, ToolFormat, reveal

HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
TINY = Path(__file__).parents[3] / "models" / "tiny"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>\n<function=name> and <think>", Formats(ToolFormat.XML, has_thinking=True)),
        (HERMES, Formats(ToolFormat.JSON, has_thinking=False)),
        ("{{ content.split('</think>') }}", Formats(None, has_thinking=True)),
        ("", Formats(None, has_thinking=False)),
    ],
)
def test_auto_reads_the_template(template: str, expected: Formats) -> None:
    assert Formats.choose("auto", "auto", template) == expected


@pytest.mark.parametrize(
    ("tool_call_parser", "format_"),
    [
        ("qwen3_coder", ToolFormat.XML),
        ("qwen3_xml", ToolFormat.XML),
        ("hermes", ToolFormat.JSON),
        ("qwen3_json", ToolFormat.JSON),
        ("none", None),
    ],
)
def test_a_name_wins_over_the_template(tool_call_parser: str, format_: ToolFormat | None) -> None:
    assert Formats.choose(tool_call_parser, "none", HERMES + "<think>") == Formats(format_, has_thinking=False)
    assert Formats.choose(tool_call_parser, "qwen3", "") == Formats(format_, has_thinking=True)


@pytest.mark.parametrize(("flags", "name"), [(("llama", "auto"), "tool-call"), (("auto", "r1"), "reasoning")])
def test_an_unknown_name_is_refused_with_the_known_ones(flags: tuple[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{name}-parser must be one of auto, qwen3"):
        Formats.choose(*flags, "")


def test_the_shipped_model_writes_xml() -> None:
    template = (TINY / "chat_template.jinja").read_text("utf-8")
    assert Formats.choose("auto", "auto", template) == Formats(ToolFormat.XML, has_thinking=True)


def test_openings_end_where_a_token_ends() -> None:
    """The model must be able to go on as if it had written the opening itself."""
    tokenizer = Tokenizer(TINY)
    xml, json_ = ToolFormat.XML, ToolFormat.JSON
    rests = {
        (xml, "get_weather"): "<parameter=city>\nParis",
        (xml, None): "<function=get_weather>\n",
        (json_, "get_weather"): ' {"city": "Paris"}}',
        (json_, None): '{"name": "get_weather"',
    }
    for (format_, name), rest in rests.items():
        opening = format_.opening(name)
        assert tokenizer.encode(opening) + tokenizer.encode(rest) == tokenizer.encode(opening + rest)


def test_marks_that_the_tokenizer_calls_special_are_shown_where_they_are_read() -> None:
    tokenizer = copy.copy(Tokenizer(TINY))
    formats = Formats(ToolFormat.XML, has_thinking=True)
    assert reveal(tokenizer, formats.marks(with_calls=True)) is tokenizer
    think, call, end = (tokenizer.token_to_id(text) for text in ("<think>", "<tool_call>", "<|im_end|>"))
    tokenizer.special_ids |= {think, call}
    assert reveal(tokenizer, formats.marks(with_calls=True)).special_ids.isdisjoint({think, call})
    revealed = reveal(tokenizer, formats.marks(with_calls=False))
    assert think not in revealed.special_ids
    assert {call, end} <= revealed.special_ids
    assert revealed.token_bytes(think or 0) == b"<think>"
