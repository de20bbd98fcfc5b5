"""Runs and reports: what counts as passed, what is written down, and how a run ends early."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deltaserve import cli
from deltaserve.core.errors import ConfigError, EngineDeadError
from deltaserve.verify.ask import Answer
from deltaserve.verify.book import Book, SkippedError, Status, TargetGoneError
from deltaserve.verify.command import choose_level, verify_target
from deltaserve.verify.compare import EXACT, Level
from deltaserve.verify.gates import GATES, Gate, choose
from deltaserve.verify.gates.batched import check_batched
from deltaserve.verify.gates.cached import check_cached
from deltaserve.verify.gates.memory import check_memory
from deltaserve.verify.lab import Lab
from deltaserve.verify.run import run_gates
from tests.verify.fakes import GAP, Circumstances, FakeTarget, Faults, make_lab, with_token

GateFunction = Callable[[Lab, Book], None]


def passes(_: Lab, book: Book) -> None:
    book.expect("a case", True)


def fails(_: Lab, book: Book) -> None:
    book.expect("a case", True)
    book.expect("another", False, "it was [wrong]")


def is_skipped(_: Lab, book: Book) -> None:
    raise SkippedError("not here")


def proves_nothing(_: Lab, book: Book) -> None:
    book.expect("a case", True)
    book.event("hits", 0)


def raises(error: BaseException) -> GateFunction:
    def gate(_: Lab, book: Book) -> None:
        book.expect("a case", True)
        raise error

    return gate


def run(*gates: GateFunction, lab: Lab | None = None, json: Path | None = None) -> tuple[int, str]:
    """Exit code and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    found = [Gate(f"gate{index}", "it holds", gate) for index, gate in enumerate(gates)]
    code = verify_target(lab or make_lab(FakeTarget()), found, console, json)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def test_exit_code_0_means_that_something_ran_and_all_that_ran_passed() -> None:
    assert run(passes, is_skipped)[0] == 0
    assert run(passes, fails)[0] == 1
    assert run(passes, proves_nothing)[0] == 1
    assert run(is_skipped)[0] == 1
    assert run(lambda lab, book: None)[0] == 1, "a gate without a case has shown nothing"


def test_the_output_says_what_failed_and_what_was_skipped() -> None:
    code, text = run(fails, is_skipped, proves_nothing, passes)
    assert code == 1
    assert "gate0 failed: another: it was [wrong]" in text
    assert "not here" in text
    assert "proved nothing: hits 0 (needs 1)" in text
    assert "1 passed, 2 failed, 1 skipped" in text


@pytest.mark.parametrize("error", [EngineDeadError("the engine died"), AssertionError("page 3 has two owners")])
def test_a_gate_that_breaks_fails_and_the_next_one_runs(error: Exception) -> None:
    code, text = run(raises(error), passes)
    assert code == 1
    assert str(error) in text
    assert "1 passed, 1 failed" in text


def test_a_part_that_cannot_be_run_leaves_the_rest_of_the_gate() -> None:
    code, text = run(raises(SkippedError("no such counter")))
    assert code == 0
    assert "gate0 left out the rest: no such counter" in text


def test_a_target_that_is_gone_ends_the_run() -> None:
    code, text = run(passes, raises(TargetGoneError("no server answers at x:1")), passes)
    assert code == 1
    assert "the rest did not run: no server answers at x:1" in text
    assert "gate2" not in text


def test_ctrl_c_prints_what_is_known() -> None:
    code, text = run(passes, raises(KeyboardInterrupt()), passes)
    assert code == 130
    assert "1 passed, 1 failed" in text
    assert "interrupted" in text


def test_the_json_report_holds_every_case(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run(check_batched, fails, json=file)
    report = json.loads(file.read_text("utf-8"))
    assert report["passed"] is False
    assert report["level"] == "exact"
    assert report["target"]["name"] == "a fake"
    assert {"deltaserve", "python", "commit"} <= report["versions"].keys()
    assert report["hardware"]
    assert report["gates"][0]["num_cases"] == len(report["gates"][0]["cases"]) > 16
    assert report["gates"][1]["cases"][1] == {
        "name": "another", "passed": False, "detail": "it was [wrong]", "position": None, "gap": None,
        "is_compared": False,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be written"):
        run(passes, json=tmp_path / "no" / "report.json")


def test_near_ties_pass_the_near_level_unless_they_are_more_frequent_than_cold_ones() -> None:
    """Ties where the prefix was cached; the control shows none, or as many."""

    def tie(seen: Circumstances, answer: Answer) -> Answer:
        return with_token(answer, 2) if seen.num_cached else answer

    def tie_in_company_too(seen: Circumstances, answer: Answer) -> Answer:
        return with_token(answer, 2) if seen.num_cached or not seen.is_alone else answer

    for spoil, passed in ((tie, False), (tie_in_company_too, True)):
        lab = make_lab(FakeTarget(Faults(spoil=spoil), level=Level(1.5 * GAP)))
        outcome = run_gates(lab, [Gate("cached", "", check_cached)], lambda _: None, lambda _: None)
        assert outcome.books[0].num_failed == 0
        assert outcome.passed is passed, outcome.books[0].reason
        assert "control" in outcome.books[0].notes[-1]


def test_memory_is_watched_and_judged() -> None:
    import time

    def wait(_: Lab, book: Book) -> None:
        book.expect("time passes", True)
        time.sleep(0.3)

    for floor_bytes, code in ((0, 0), (1 << 60, 1)):
        lab = make_lab(FakeTarget(), min_free_bytes=floor_bytes)
        assert run(wait, check_memory, lab=lab)[0] == code


def test_gates_are_chosen_by_name() -> None:
    assert [gate.name for gate in choose(("cached", "burst"))] == ["cached", "burst"]
    assert "needles" not in [gate.name for gate in choose((), ("needles",))]
    with pytest.raises(ConfigError, match="there is no gate 'cache'; there are chunked, "):
        choose(("cache",))


def test_levels() -> None:
    assert choose_level("auto", 0.5, EXACT) == EXACT
    assert choose_level("auto", 1.0, Level(0.5)) == Level(1.0)
    assert choose_level("near", 0.5, EXACT) == Level(0.5)
    for name, gap in (("loose", 0.5), ("near", 0.0), ("near", 5.0)):
        with pytest.raises(ConfigError):
            choose_level(name, gap, EXACT)


def test_the_command_lists_gates_and_refuses_what_no_target_can_do(make_checkpoint: Callable[..., Path]) -> None:
    result = CliRunner().invoke(cli.app, ["verify", "--list"])
    assert result.exit_code == 0
    assert all(gate.name in result.output for gate in GATES)
    bare = str(make_checkpoint(kind="moe", mtp=False))
    for arguments, sentence in (
        (["localhost:1", "--num-speculative-tokens", "2"], "is for a model directory"),
        ([bare, "--num-speculative-tokens", "2"], "has no draft head"),
        ([bare, "--num-speculative-tokens", "8"], "between 0 and 7"),
        ([bare, "--level", "loose"], "--level must be one of"),
    ):
        result = CliRunner().invoke(cli.app, ["verify", *arguments])
        assert isinstance(result.exception, ConfigError), result.output
        assert sentence in str(result.exception)


def test_statuses_need_cases() -> None:
    assert Book("empty").status is Status.FAILED
