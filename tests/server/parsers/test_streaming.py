"""What is certain goes out at once: text waits only where it may become a mark, values only where their type says."""

from __future__ import annotations

from deltaserve.engine.text import TextDelta
from deltaserve.server.parsers.json_text import JsonText
from deltaserve.server.parsers.reasoning import State
from tests.server.parsers.golden import JSON, Case


def outputs(case: Case, *pieces: str) -> list[str]:
    """What each piece gives, kinds left out."""
    reader = case.reader()
    return ["".join(part.text for part in reader.feed(TextDelta(text=piece))) for piece in pieces]


def test_text() -> None:
    case = Case("", "")
    assert outputs(case, "a", " ", "b <", "c <tool", "_call> ", "is") == ["a", "", " b", " <c", "", " <tool_call> is"]
    assert outputs(case, "<tool_call>", "\n", "<func", "tion x") == ["", "", "", "<tool_call>\n<function x"]


def test_string_values_go_out_as_they_come() -> None:
    pieces = (
        "<tool_call>\n<function=bash>\n",
        "<parameter=command>",
        "\nl",
        's "',
        "\n",
        "-l </",
        "b",
        "\n</parameter>",
        "\n<",
        "/function>",
    )
    expected = ["bash", '{"command": "', "l", 's \\"', "", "\\n-l ", "</b", "", "", '"}']
    assert outputs(Case("", ""), *pieces) == expected


def test_other_values_wait_for_their_end() -> None:
    pieces = ("<tool_call><function=typed><parameter=count>", "1", "2", "</parameter><", "/function>")
    assert outputs(Case("", ""), *pieces) == ['typed{"count": ', "", "", "", "12}"]


def test_json_arguments_go_out_as_they_come() -> None:
    pieces = (
        '<tool_call>\n{"name": "ba',
        'sh", "argu',
        'ments": ',
        '{"command"',
        ': "l',
        "s\\",
        'n", "n": 1',
        "2",
        "}",
        "}",
    )
    expected = ["", "", "", 'bash{"command"', ': "l', "s", '\\n", "n": ', "", "12}", ""]
    assert outputs(Case("", "", format=JSON), *pieces) == expected


def test_thinking() -> None:
    case = Case("", "", state=State.OPENED)
    assert outputs(case, "so <tool", "_call> it is", "\n</thi", "nk>\n\n", "Yes") == [
        "so ",
        "<tool_call> it is",
        "",
        "",
        "Yes",
    ]


def test_a_long_json_text_is_read_in_one_go_and_in_pieces() -> None:
    text = '{"a": [' + '{"b": "x\\n", "c": [1, 2.5, true]}, ' * 50 + "null]}"
    whole, pieces = JsonText(), JsonText()
    assert whole.feed(text + " rest") == (text, len(text))
    assert "".join(pieces.feed(character)[0] for character in text) == text
    assert whole.is_complete
    assert pieces.is_complete
