"""Result files gain rows and replace those measured again; no row names a place on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from deltaserve.bench.record import Row, describe_command, describe_commit, describe_hardware, write_rows

ROW = Row("engine: output", 12.5, "tokens/s", "1 stream", "two cores", "abc", "scripts/bench cpu")


def test_rows_of_the_same_name_and_shape_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    other = replace(ROW, shape="8 streams")
    write_rows(path, [ROW, other])
    write_rows(path, [replace(ROW, value=13.0)])
    rows = {row["shape"]: row["value"] for row in json.loads(path.read_text())}
    assert rows == {"8 streams": 12.5, "1 stream": 13.0}


def test_a_command_names_directories_without_their_place(tmp_path: Path) -> None:
    directory = tmp_path / "tiny model"
    directory.mkdir()
    assert describe_command(["cpu", str(directory), "--rounds", "2"]) == "scripts/bench cpu 'tiny model' --rounds 2"


def test_hardware_and_commit_are_never_empty() -> None:
    assert "3 of" in describe_hardware(3) and "torch" in describe_hardware(3)
    assert describe_commit()
