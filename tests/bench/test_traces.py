"""What is read is what was written; what cannot be replayed is refused with its line, field and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltaserve.bench.traces import HASH_TOKENS, HashIds, RowTexts, TraceRow, read_trace, write_trace
from deltaserve.core.errors import ConfigError

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def _file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_rows_written_are_rows_read(tmp_path: Path) -> None:
    rows = (
        TraceRow(600, 5, (0, 1), timestamp_ms=0),
        TraceRow(512, 1, (0,), timestamp_ms=12.5, delay_ms=3.0, session_id="a\u2028b"),
        TraceRow(1, 9),
    )
    path = tmp_path / "trace.jsonl"
    write_trace(path, rows)
    assert read_trace(path) == rows


def test_fields_of_other_tools_are_passed_over(tmp_path: Path) -> None:
    line = json.dumps({"input_tokens": 3, "output_length": 2, "priority": 1, "request_id": "x"})
    assert read_trace(_file(tmp_path, line)) == (TraceRow(3, 2),)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input_length": None}, "input_length is missing"),
        ({"input_length": 0}, "input_length must be a whole number of at least 1, not 0"),
        ({"input_length": True}, "input_length must be a whole number"),
        ({"output_length": 2.5}, "output_length must be a whole number"),
        ({"hash_ids": [1]}, "needs 2 hash_ids of 512 tokens, not 1"),
        ({"hash_ids": [1, -2]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": []}, "hash_ids must be a list of whole numbers"),
        ({"timestamp": -1}, "timestamp must be milliseconds"),
        ({"timestamp": float("nan")}, "timestamp must be milliseconds"),
        ({"delay": "5"}, "delay must be milliseconds"),
        ({"session_id": 7}, "session_id must be a string"),
        ({"messages": []}, "messages is not replayed; give input_length and hash_ids instead"),
        ({"schema": "dynamo.agentic_mooncake"}, "only plain Mooncake rows are read"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    bad = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=r"trace\.jsonl line 2") as caught:
        read_trace(_file(tmp_path, json.dumps(GOOD), json.dumps(bad)))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("line", ["", "{", "[1]", "5"])
def test_a_line_that_is_no_object_is_refused_rather_than_skipped(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2 is not"):
        read_trace(_file(tmp_path, json.dumps(GOOD), line, json.dumps(GOOD)))


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    pointer = _file(tmp_path, "version https://git-lfs.github.com/spec/v1", "oid sha256:00", "size 5")
    with pytest.raises(ConfigError, match="git lfs pull"):
        read_trace(pointer)
    pointer.write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(pointer)
    pointer.write_bytes(b"\x1f\x8b\x08\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(pointer)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent")


def test_equal_hash_ids_are_equal_tokens_in_every_process() -> None:
    row = TraceRow(HASH_TOKENS + 100, 3, (5, 6))
    ids = RowTexts(10, 20_000).token_ids(row, 0)
    assert len(ids) == 612 and all(10 <= token_id < 20_000 for token_id in ids)
    assert RowTexts(10, 20_000).token_ids(TraceRow(2 * HASH_TOKENS, 3, (5, 6)), 9)[:612] == ids
    assert RowTexts(10, 20_000).token_ids(TraceRow(612, 3, (5, 7)), 0)[:HASH_TOKENS] == ids[:HASH_TOKENS]
    assert ids[:3] == (10444, 6283, 13709)


def test_rows_without_hash_ids_share_nothing() -> None:
    texts = RowTexts(10, 20_000)
    first, second = (texts.token_ids(TraceRow(700, 40), number) for number in (0, 1))
    assert len(first) == len(second) == 700 and first[:8] != second[:8]
    assert texts.answer_ids(TraceRow(700, 40), 0) != texts.answer_ids(TraceRow(700, 40), 1)


def test_hash_ids_say_how_far_prompts_are_the_same() -> None:
    hash_ids = HashIds()
    first, other = tuple(range(1300)), tuple(range(5000, 5600))
    assert hash_ids.of(first) == (0, 1, 2)
    assert hash_ids.of(first) == (0, 1, 2)
    assert hash_ids.of(first[:600] + other) == (0, 3, 4)
    assert hash_ids.of(other + first) == (5, 6, 7, 8)


def test_a_prompt_that_grows_keeps_the_id_of_its_open_block() -> None:
    hash_ids, tail = HashIds(), tuple(range(9000, 9400))
    first = tuple(range(600))
    assert hash_ids.of(first) == (0, 1)
    assert hash_ids.of(first + tail) == (0, 1), "600 tokens, then 1000, of two blocks"
    assert hash_ids.of(first[:550]) == (0, 1)
    assert hash_ids.of(first[:550] + tail) == (0, 2)


def test_made_up_texts_agree_where_the_prompts_they_stand_for_do() -> None:
    hash_ids, texts = HashIds(), RowTexts(0, 4096)
    prompts = [tuple(range(700)), tuple(range(1100)), (*range(900), *range(3000, 3500)), tuple(range(1024))]
    rows = [TraceRow(len(prompt), 1, hash_ids.of(prompt)) for prompt in prompts]
    made = [texts.token_ids(row, number) for number, row in enumerate(rows)]
    assert made[1][:700] == made[0] and made[3] == made[1][:1024]
    assert made[2][:512] == made[1][:512] and made[2][:1000] != made[1][:1000]
