"""All gates on the model that ships, as a user runs them, without drafts and with three."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve.verify.command import app
from deltaserve.verify.gates import GATES

TINY = Path(__file__).parents[2] / "models" / "tiny"
# What the small pools must have made happen, by gate.
PROOFS = {
    "cached": ("hits, whole", "hits, evicted", "pages and snapshots evicted"),
    "preempted": ("preemptions, computed anew", "tokens resumed from the cache", "preemptions, starved"),
    "offloaded": ("hits", "pages saved", "pages restored", "snapshots saved", "snapshots restored"),
    "drafts": ("hits", "drafts accepted", "preemptions"),
}


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_all_gates_are_green_on_the_shipped_model(tmp_path: Path, num_drafts: int) -> None:
    report = tmp_path / "report.json"
    arguments = [str(TINY), "--quick", "--seed", "1", "--num-threads", "1", "--json", str(report)]
    result = CliRunner().invoke(app, [*arguments, "--num-speculative-tokens", str(num_drafts)])
    assert result.exit_code == 0, result.output
    gates = {gate["gate"]: gate for gate in json.loads(report.read_text("utf-8"))["gates"]}
    assert gates.keys() == {gate.name for gate in GATES}
    assert [name for name, gate in gates.items() if gate["status"] != "passed"] == ["parallel"], "that one is asked for"
    for name, events in PROOFS.items():
        assert all(gates[name]["events"][event] > 0 for event in events), gates[name]["events"]


@pytest.mark.full
def test_ranks_answer_as_one(tmp_path: Path) -> None:
    arguments = [str(TINY), "--quick", "--gate", "parallel", "--tensor-parallel-size", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
