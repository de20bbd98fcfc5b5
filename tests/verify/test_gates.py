"""Each gate passes on a target that is right, and fails on one that is wrong in the way the gate is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deltaserve.verify.ask import Answer
from deltaserve.verify.book import Book, SkippedError, Status
from deltaserve.verify.gates import GATES
from deltaserve.verify.gates.batched import check_batched
from deltaserve.verify.gates.burst import check_burst
from deltaserve.verify.gates.cached import check_cached
from deltaserve.verify.gates.chunked import check_chunked
from deltaserve.verify.gates.drafts import check_drafts
from deltaserve.verify.gates.isolation import check_isolation
from deltaserve.verify.gates.needles import check_needles
from deltaserve.verify.gates.offloaded import check_offloaded
from deltaserve.verify.gates.preempted import check_preempted
from deltaserve.verify.gates.residency import check_residency
from deltaserve.verify.lab import Lab
from tests.verify.fakes import Circumstances, Faults, run_gate, with_token

GateFunction = Callable[[Lab, Book], None]
Condition = Callable[[Circumstances], bool]

FAKED: tuple[GateFunction, ...] = (
    check_chunked,
    check_batched,
    check_cached,
    check_preempted,
    check_offloaded,
    check_drafts,
    check_isolation,
    check_needles,
    check_residency,
    check_burst,
)
NEED_AN_ENGINE = (check_chunked, check_preempted, check_offloaded)


def spoiled_where(condition: Condition) -> Faults:
    """A wrong last token wherever the condition holds."""

    def spoil(seen: Circumstances, answer: Answer) -> Answer:
        return with_token(answer, len(answer.token_ids) - 1) if condition(seen) else answer

    return Faults(spoil=spoil)


@pytest.mark.parametrize("gate", FAKED)
def test_a_right_target_passes(gate: GateFunction) -> None:
    book = run_gate(gate)
    assert book.status is Status.PASSED, book.reason
    assert book.cases


@pytest.mark.parametrize("gate", [gate for gate in FAKED if gate not in NEED_AN_ENGINE])
def test_a_right_server_passes(gate: GateFunction) -> None:
    book = run_gate(gate, is_engine=False)
    assert book.status is Status.PASSED, book.reason


@pytest.mark.parametrize("gate", NEED_AN_ENGINE)
def test_what_a_client_cannot_do_is_skipped_with_the_reason(gate: GateFunction) -> None:
    with pytest.raises(SkippedError, match="give a model directory"):
        run_gate(gate, is_engine=False)


@pytest.mark.parametrize(
    ("gate", "condition"),
    [
        (check_chunked, lambda seen: seen.setup.chunk == 64),
        (check_batched, lambda seen: not seen.is_alone),
        (check_cached, lambda seen: seen.num_cached > 0),
        (check_cached, lambda seen: seen.num_cached > 300),
        (check_cached, lambda seen: seen.num_cached > 0 and seen.setup.num_pages is not None),
        (check_preempted, lambda seen: seen.is_preempted),
        (check_preempted, lambda seen: seen.is_preempted and seen.setup.caching),
        (check_offloaded, lambda seen: seen.setup.host_pages > 0 and seen.num_cached > 0),
        (check_drafts, lambda seen: bool(seen.setup.num_drafts) and seen.ask.use_drafts),
        (check_isolation, lambda seen: seen.num_cached > 0),
        (check_burst, lambda seen: not seen.is_alone),
    ],
)
def test_a_wrong_token_where_the_gate_looks_fails_it(gate: GateFunction, condition: Condition) -> None:
    book = run_gate(gate, spoiled_where(condition))
    assert book.status is Status.FAILED
    assert any(case.position is not None and case.gap == pytest.approx(2.0) for case in book.cases)
    assert "top-2 gap 2.0" in book.reason


@pytest.mark.parametrize(
    ("gate", "lacking", "words"),
    [
        (check_batched, "company", "same time"),
        (check_cached, "hits", "hits"),
        (check_cached, "evictions", "evicted"),
        (check_preempted, "preemptions", "preemptions"),
        (check_offloaded, "offload", "saved"),
        (check_drafts, "drafts", "drafts accepted"),
        (check_isolation, "hits", "hits"),
        (check_needles, "hits", "hits"),
        (check_residency, "company", "same time"),
    ],
)
def test_right_answers_prove_nothing_where_the_event_did_not_happen(
    gate: GateFunction, lacking: str, words: str
) -> None:
    book = run_gate(gate, Faults(without=frozenset([lacking])))
    assert book.status is Status.FAILED
    assert any(words in event.name and not event.is_enough for event in book.events)


def test_a_budget_that_is_not_kept_fails() -> None:
    book = run_gate(check_chunked, Faults(without=frozenset(["chunks"])))
    assert book.status is Status.FAILED
    assert book.reason.startswith("budget 64 is kept: a step computed ")


def test_a_salt_that_is_ignored_fails_isolation() -> None:
    book = run_gate(check_isolation, Faults(ignores_salt=True))
    assert book.status is Status.FAILED
    assert "under a salt that nobody had used" in book.reason


def test_the_word_of_another_request_fails_isolation() -> None:
    def leak(seen: Circumstances, answer: Answer) -> Answer:
        leaks = seen.num_cached > 0 and seen.previous is not None
        return replace(answer, text=seen.previous.text) if leaks and seen.previous else answer

    book = run_gate(check_isolation, Faults(spoil=leak))
    assert book.status is Status.FAILED
    assert "the answer holds" in book.reason


def test_a_needle_that_is_found_cold_but_not_cached_fails() -> None:
    def forget(seen: Circumstances, answer: Answer) -> Answer:
        return replace(answer, text="I do not know.") if seen.num_cached else answer

    book = run_gate(check_needles, Faults(spoil=forget))
    assert [case.passed for case in book.cases] == [True, True, True, False, False, False] * 2


def test_pages_that_stay_behind_fail_the_burst() -> None:
    book = run_gate(check_burst, Faults(leaks_pages=True))
    assert book.status is Status.FAILED
    assert "pages are free after a reset" in book.reason


def test_a_request_without_an_answer_fails_the_burst_and_the_residents() -> None:
    def refuse(seen: Circumstances, answer: Answer) -> Answer:
        return answer if seen.is_alone else Answer(error="the server is overloaded")

    for gate in (check_burst, check_residency):
        book = run_gate(gate, Faults(spoil=refuse))
        assert book.status is Status.FAILED
        assert "the server is overloaded" in book.reason


def test_a_preemption_fails_the_residents() -> None:
    book = run_gate(check_residency, Faults(preempts=True))
    assert book.status is Status.FAILED
    assert book.reason == "no preemption: 8 preemptions"


def test_answers_that_do_not_depend_on_the_prompt_prove_nothing() -> None:
    def mute(_: Circumstances, answer: Answer) -> Answer:
        size = len(answer.token_ids)
        return replace(answer, token_ids=(7,) * size, tops=(((7, -0.1), (8, -2.1)),) * size)

    book = run_gate(check_chunked, Faults(spoil=mute))
    assert book.status is Status.FAILED
    assert "would prove nothing" in book.reason


def test_drafts_are_skipped_without_a_draft_head() -> None:
    with pytest.raises(SkippedError, match="no draft head"):
        run_gate(check_drafts, has_draft_head=False)


def test_every_gate_has_a_name_and_a_claim() -> None:
    assert len({gate.name for gate in GATES}) == len(GATES)
    assert all(gate.claim for gate in GATES)
