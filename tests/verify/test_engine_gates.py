"""Gates on real engines that are sabotaged: each finds its fault on a model with random weights.

The sabotage sits between scheduler and runner, where plans and outputs pass, so that the books stay in order and only
the answers tell; or it takes away what debug mode lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from deltaserve.cache import lookup
from deltaserve.core.config import EngineConfig
from deltaserve.core.errors import ConfigError
from deltaserve.core.plan import EMPTY_SLOT, OpKind, Row, RowKind, StepOutput, StepPlan
from deltaserve.engine.loop import Engine, Runner
from deltaserve.verify.ask import Answer, Ask
from deltaserve.verify.book import Book, Status
from deltaserve.verify.compare import EXACT
from deltaserve.verify.engine_target import EngineTarget, build
from deltaserve.verify.gates import choose
from deltaserve.verify.lab import Lab, Options
from deltaserve.verify.prompts import Writer
from deltaserve.verify.run import run_gates
from deltaserve.verify.target import AS_IT_IS, TOGETHER, Counters, Session, Setup, Target, Traffic

EditPlan = Callable[[StepPlan], StepPlan]
EditOutput = Callable[[StepPlan, StepOutput], StepOutput]


class Saboteur:
    """Stands before a runner and changes what passes."""

    def __init__(self, runner: Runner, edit_plan: EditPlan, edit_output: EditOutput) -> None:
        self._runner = runner
        self._edit_plan = edit_plan
        self._edit_output = edit_output

    def execute(self, plan: StepPlan) -> StepOutput:
        return self._edit_output(plan, self._runner.execute(self._edit_plan(plan)))


def nothing(plan: StepPlan) -> StepPlan:
    return plan


def no_output(_: StepPlan, output: StepOutput) -> StepOutput:
    return output


def sabotaged(edit_plan: EditPlan = nothing, edit_output: EditOutput = no_output) -> Callable[[EngineConfig], Engine]:
    """Engines whose prefix cache, or whose other luxury, is what goes wrong; the plain reference stays right."""

    def make(config: EngineConfig) -> Engine:
        engine = build(config)
        if config.scheduler.max_num_batched_tokens != 4096 or config.cache.enable_prefix_caching:
            engine._runner = Saboteur(engine._runner, edit_plan, edit_output)
        return engine

    return make


def open_target(checkpoint: Path, make: Callable[[EngineConfig], Engine] = build, **settings: object) -> EngineTarget:
    config = EngineConfig(checkpoint, max_model_len=1024, num_threads=1, **settings)  # type: ignore[arg-type]
    return EngineTarget(config, "sample", make)


def run(target: Target, *names: str) -> list[Book]:
    """With prompts of at most 200 tokens."""
    chosen = Options(is_quick=True, seed=1, max_tokens=456)
    lab = Lab(target, EXACT, chosen, Writer(target, 1))
    return run_gates(lab, choose(names), lambda _: None, lambda _: None).books


def with_rows(plan: StepPlan, edit: Callable[[Row], Row]) -> StepPlan:
    return replace(plan, rows=tuple(edit(row) for row in plan.rows))


def from_nothing(plan: StepPlan) -> StepPlan:
    """Prompts that go on from a state go on from the state of nothing; their pages are right."""
    return with_rows(plan, lambda row: replace(row, slot_in=EMPTY_SLOT) if row.kind is RowKind.PREFILL else row)


def resumed_from_nothing(plan: StepPlan) -> StepPlan:
    """Only requests that come back with output."""
    back = {admission.request_id for admission in plan.admitted if admission.output_ids}
    return with_rows(plan, lambda row: replace(row, slot_in=EMPTY_SLOT) if row.request_id in back else row)


def never_restored(plan: StepPlan) -> StepPlan:
    return replace(plan, block_ops=tuple(op for op in plan.block_ops if op.kind is not OpKind.RESTORE))


def first_two_swapped(plan: StepPlan, output: StepOutput) -> StepOutput:
    """Tokens of two neighbours."""
    rows = list(output.rows)
    both = [index for index, row in enumerate(plan.rows) if row.kind is not RowKind.PREFILL][:2]
    if len(both) == 2:
        one, other = both
        swapped = rows[one].token_ids, rows[other].token_ids
        rows[other], rows[one] = replace(rows[other], token_ids=swapped[0]), replace(rows[one], token_ids=swapped[1])
    return replace(output, rows=tuple(rows))


def test_gates_that_need_no_reading_pass_on_random_weights(sample_checkpoint: Path) -> None:
    for book in run(open_target(sample_checkpoint), "chunked", "offloaded"):
        assert book.status is Status.PASSED, f"{book.gate}: {book.reason}"


@pytest.mark.parametrize(
    ("gate", "make"),
    [
        ("chunked", sabotaged(from_nothing)),
        ("cached", sabotaged(from_nothing)),
        ("preempted", sabotaged(resumed_from_nothing)),
        ("batched", sabotaged(edit_output=first_two_swapped)),
    ],
)
def test_a_wrong_state_or_row_shows_as_a_split(
    sample_checkpoint: Path, gate: str, make: Callable[[EngineConfig], Engine]
) -> None:
    (book,) = run(open_target(sample_checkpoint, make), gate)
    assert book.status is Status.FAILED
    assert book.num_splits > 0, book.reason
    assert all(case.gap is not None for case in book.cases if case.position is not None)


def test_bytes_that_do_not_come_back_are_found_in_debug_mode(sample_checkpoint: Path) -> None:
    (book,) = run(open_target(sample_checkpoint, sabotaged(never_restored)), "offloaded")
    assert book.status is Status.FAILED
    assert book.failure is not None
    assert "nobody has sealed" in book.failure or "bytes restored differ" in book.failure


def test_a_salt_that_does_not_count_is_found(sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = lookup.root_key
    monkeypatch.setattr(lookup, "root_key", lambda identity, adapter, _: right(identity, adapter, ""))
    (book,) = run(open_target(sample_checkpoint), "isolation")
    assert book.status is Status.FAILED
    assert "under a salt that nobody had used" in book.reason


class Deaf:
    """A target that does not hear of some sampling parameters."""

    def __init__(self, target: Target, **values: object) -> None:
        self._target = target
        self._values = values
        self.about = target.about

    @contextmanager
    def session(self, setup: Setup = AS_IT_IS) -> Iterator[Session]:
        with self._target.session(setup) as session:
            yield DeafSession(session, self._values)

    def encode(self, text: str) -> list[int]:
        return self._target.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._target.decode(token_ids)

    def render(self, messages: Sequence[object], **template_kwargs: object) -> list[int]:
        return self._target.render(messages, **template_kwargs)  # type: ignore[arg-type]

    def close(self) -> None:
        self._target.close()


class DeafSession:
    def __init__(self, session: Session, values: dict[str, object]) -> None:
        self._session = session
        self._values = values

    def ask(self, asks: Sequence[Ask], traffic: Traffic = TOGETHER) -> list[Answer]:
        return self._session.ask([ask.with_params(**self._values) for ask in asks], traffic)

    def counters(self) -> Counters:
        return self._session.counters()

    def reset_cache(self) -> None:
        self._session.reset_cache()


@pytest.mark.parametrize(
    ("values", "check"),
    [
        ({"seed": None}, "seeds"),
        ({"seed": 1}, "seeds"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.0}, "top_p"),
        ({"min_p": 0.0}, "min_p"),
        ({"temperature": 0.0}, "seeds"),
        ({"temperature": 1.0}, "temperature 0"),
        ({"logit_bias": {}}, "logit_bias"),
        ({"stop": ()}, "stop"),
        ({"stop_token_ids": ()}, "stop_token_ids"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"max_tokens": 12}, "max_tokens"),
        ({"repetition_penalty": 1.0}, "repetition_penalty"),
        ({"presence_penalty": 0.0, "frequency_penalty": 0.0}, "presence and frequency"),
        ({"logprobs": None}, "logprobs"),
        ({"prompt_logprobs": None}, "prompt_logprobs"),
    ],
)
def test_an_option_that_is_ignored_is_named(
    options_target: EngineTarget, values: dict[str, object], check: str
) -> None:
    (book,) = run(Deaf(options_target, **values), "options")
    assert book.status is Status.FAILED
    failed = [case.name for case in book.cases if not case.passed]
    assert any(name.startswith(check) for name in failed), failed


def test_options_that_are_heard_pass(options_target: EngineTarget) -> None:
    (book,) = run(options_target, "options")
    assert book.status is Status.PASSED, book.reason
    assert len(book.cases) > 15


@pytest.fixture(scope="module")
def options_target(sample_checkpoint: Path) -> EngineTarget:
    """One engine for all of the tests of options."""
    engine = build(open_target(sample_checkpoint).engine_config(AS_IT_IS))
    engine.close = lambda: None  # type: ignore[method-assign]
    return open_target(sample_checkpoint, lambda _: engine)


def test_synthetic_acceptance_is_refused(sample_checkpoint: Path) -> None:
    from deltaserve.core.config import SpeculativeConfig

    with pytest.raises(ConfigError, match="synthetic"):
        open_target(sample_checkpoint, speculative=SpeculativeConfig(3, synthetic_acceptance=2.0))
