"""What requests leave behind and others find: hits, what may be published, and what must not be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.boundaries import BoundaryKind, SlotVersion
from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import CacheConfig
from deltaserve.core.plan import OpKind
from deltaserve.core.request import RequestStatus
from deltaserve.core.types import CacheNote
from tests.cache.ledger import MARKERS, Ledger
from tests.fakes import make_sizes

OPENED = (900, 912, 902, 930)


def ids(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def message(role: tuple[int, ...], length: int, text: int = 5) -> tuple[int, ...]:
    return (MARKERS.im_start, *role, 902, *([text] * (length - 5)), MARKERS.im_end, 902)


def ledger_of(num_pages: int = 64, num_rows: int = 3, num_snapshots: int = 16) -> Ledger:
    return Ledger(num_pages, num_rows, num_snapshots)


@pytest.mark.parametrize("length", [64 * n + rest for n in (0, 1, 3) for rest in (1, 2, 62, 63, 64)])
def test_the_same_prompt_resumes_at_its_last_boundary(length: int) -> None:
    ledger = ledger_of()
    assert ledger.serve(ids(length))[0].num_tokens == 0
    hit, request = ledger.serve(ids(length))
    assert hit.num_tokens == (length - 1) // 64 * 64
    assert request.cache_record is not None
    assert (request.cache_record.num_cached, request.cache_record.note) == (hit.num_tokens, CacheNote.FULL)
    ledger.check()


@pytest.mark.parametrize("num_output", [1, 30, 64, 65, 100, 128])
def test_the_next_turn_resumes_behind_the_answer(num_output: int) -> None:
    """All but 127 tokens at most: the last output token is never computed, and a full ring is not folded at the end."""
    ledger = ledger_of()
    _, first = ledger.serve(ids(100), num_output)
    prompt = first.known_ids(0, first.num_known)
    hit, _ = ledger.serve(prompt + ids(50, 500))
    assert len(prompt) - 127 <= hit.num_tokens < len(prompt)
    ledger.check()


def test_a_shared_start_hits_on_its_second_use_at_a_turn_end_and_on_its_third_anywhere() -> None:
    ledger = ledger_of()
    system = message(MARKERS.system, 200)
    hits = [ledger.serve(system + message(MARKERS.user, 100, text) + OPENED)[0] for text in (1, 2)]
    assert [hit.num_tokens for hit in hits] == [0, 192]
    raw = [ledger.serve(ids(200, 2000) + ids(100, start))[0] for start in (3000, 4000, 5000)]
    assert [(hit.num_tokens, hit.num_matched, hit.note) for hit in raw] == [
        (0, 0, CacheNote.COLD),
        (0, 192, CacheNote.NO_SNAPSHOT),
        (192, 192, CacheNote.DIVERGED),
    ]
    ledger.check()


def test_the_next_prompt_leaves_the_path_behind_the_last_user_message() -> None:
    """Twelve tool calls with their thinking; the template drops it when the next user message comes."""
    ledger = ledger_of(num_pages=256, num_snapshots=64)
    head = message(MARKERS.system, 300) + message(MARKERS.user, 200)
    path = head
    for call in range(12):
        hit, request = ledger.serve(path + OPENED, num_output=80)
        if call:
            assert hit.num_tokens >= len(path) - 100 - 127
        path += OPENED + tuple(request.output_ids) + (MARKERS.im_end, 902)
        path += (900, 911, 902, 920, *[call] * 60, 901, 902)
    stripped = head + message(MARKERS.assistant, 150) + message(MARKERS.user, 90) + OPENED
    assert ledger.serve(stripped)[0].num_tokens == 448 == len(head) // 64 * 64
    ledger.check()


def test_salts_and_models_do_not_share() -> None:
    ledger = ledger_of()
    ledger.serve(ids(300))
    assert ledger.serve(ids(300), cache_salt="mine")[0].num_matched == 0
    assert ledger.serve(ids(300), cache_salt="mine")[0].num_tokens == 256
    assert ledger.serve(ids(300))[0].num_tokens == 256
    sizes = make_sizes(8, 1)
    keys = []
    for identity in ("a", "b"):
        request = ledger.request(ids(64))
        CacheManager(sizes, identity=identity).match(request)
        keys += request.block_hashes
    assert len(set(keys)) == 2


def test_prompt_logprobs_look_nothing_up_but_leave_something() -> None:
    ledger = ledger_of()
    request = ledger.request(ids(300))
    request.params = replace(request.params, prompt_logprobs=1)
    ledger.open(request)
    ledger.finish(request, 2)
    again = ledger.request(ids(300))
    again.params = request.params
    hit = ledger.manager.match(again)
    assert (hit.num_tokens, hit.note) == (0, CacheNote.PROMPT_LOGPROBS)
    again.output_ids.append(5)  # reported by now: it comes back from a preemption
    assert ledger.manager.match(again).num_tokens == 256
    ledger.check()


def test_two_equal_prompts_the_second_awaits_the_first() -> None:
    ledger = ledger_of()
    first, second = ledger.request(ids(300)), ledger.request(ids(300))
    ledger.open(first)
    assert ledger.manager.match(second).awaits == 256
    ledger.step(first, 128)
    assert ledger.manager.match(second).awaits == 256, "the first chunk reached no wanted boundary"
    ledger.step(first)
    hit = ledger.open(second)
    assert hit is not None and (hit.num_tokens, hit.awaits) == (256, 0)
    ledger.check()


@pytest.mark.parametrize("how", ["abort", "preempt", "fail", "reset"])
def test_who_awaits_does_not_wait_for_one_that_is_gone(how: str) -> None:
    ledger = ledger_of()
    first, second = ledger.request(ids(300)), ledger.request(ids(300))
    ledger.open(first)
    if how == "reset":
        ledger.manager.reset()
    else:
        ledger.release(first, is_preempted=how == "preempt", is_sound=how != "fail")
    assert ledger.manager.match(second).awaits == 0
    ledger.check()


def test_two_that_publish_the_same_in_one_step() -> None:
    """The first page of a name stays; the other's own are freed with it."""
    ledger = ledger_of(num_pages=16)
    first, second = ledger.request(ids(200)), ledger.request(ids(200))
    ledger.open(first)
    ledger.open(second)
    assert ledger.plan(first, 500) and ledger.plan(second, 500)
    ledger.execute()
    ledger.commit(first, 7)
    ledger.commit(second, 7)
    ledger.check()
    assert ledger.manager.stats.pages_now == 3
    ledger.release(second)
    ledger.check()
    ledger.release(first)
    assert ledger.manager.num_free_pages == 16 - 3
    assert ledger.serve(ids(200))[0].num_tokens == 192


def test_aborted_in_the_middle_of_a_chunk() -> None:
    """The chunk ran, but nobody waited for it: nothing of it is kept; what came back before is."""
    ledger = ledger_of()
    request = ledger.request(ids(500))
    ledger.open(request)
    ledger.step(request, 128)
    ledger.plan(request, 256)
    ledger.execute()
    ledger.release(request)
    ledger.check()
    assert ledger.serve(ids(500))[0].num_tokens == 128


def test_a_plan_stopped_half_way() -> None:
    """Its block ops may not have been carried out: what they moved must not be believed."""
    ledger = Ledger(8, 2, 1, host=(16, 4))
    ledger.serve(ids(300))
    ledger.serve(ids(400, 1000))
    assert ledger.manager.stats.snapshots_saved
    request = ledger.request(ids(300))
    hit = ledger.open(request)
    assert hit is not None and hit.num_restored
    ledger.plan(request, 64)
    assert {op.kind for op in ledger.manager.take_block_ops()} >= {OpKind.RESTORE, OpKind.SAVE}  # and lost
    ledger.manager.reset()
    ledger.release(request)
    ledger.check()
    assert ledger.serve(ids(300))[0].num_tokens == ledger.serve(ids(400, 1000))[0].num_tokens == 0
    ledger.check()


def test_a_failed_row_takes_back_what_it_has_published() -> None:
    ledger = ledger_of()
    ledger.serve(ids(200))
    request = ledger.request(ids(600))
    hit = ledger.open(request)
    assert hit is not None and hit.num_tokens == 192
    ledger.step(request, 128)
    ledger.plan(request, 128)
    ledger.execute()
    ledger.release(request, is_sound=False)
    ledger.check()
    assert ledger.manager.match(ledger.request(ids(600))).num_matched == 192
    assert ledger.serve(ids(200))[0].num_tokens == 192


def test_what_a_failed_row_took_back_is_not_published_again_by_who_went_on_from_it() -> None:
    ledger = ledger_of()
    failed = ledger.request(ids(600))
    ledger.open(failed)
    ledger.step(failed)
    heir = ledger.request((*ids(600), *ids(300, start=5000)))
    hit = ledger.open(heir)
    assert hit is not None and hit.num_tokens == 576
    ledger.release(failed, is_sound=False)
    ledger.step(heir)
    ledger.check()
    ledger.release(heir)
    ledger.check()
    assert ledger.manager.match(ledger.request(ids(600))).num_matched == 0
    ledger.serve(ids(600))
    assert ledger.serve(ids(600))[0].num_tokens == 576


def test_preempted_in_the_step_that_admitted_it() -> None:
    ledger = ledger_of()
    ledger.serve(ids(300))
    request = ledger.request(ids(400))
    before = ledger.manager.stats.pages_now
    ledger.open(request)
    ledger.plan(request, 64)
    ledger.release(request, is_preempted=True)
    ledger.check()
    assert ledger.manager.stats.pages_now == before
    hit = ledger.open(request)
    assert hit is not None and hit.num_tokens == 256
    ledger.finish(request, 3)
    ledger.check()


def test_a_preempted_request_comes_back_as_a_hit() -> None:
    ledger = ledger_of()
    request = ledger.request(ids(100))
    ledger.open(request)
    while request.num_known < 250:
        ledger.step(request, token_id=request.num_known)
    ledger.release(request, is_preempted=True)
    (snapshot,) = [each for each in ledger.manager._content.slot_snapshots if each and each.num_waiting]
    assert (snapshot.kind, snapshot.node.depth) == (BoundaryKind.PREEMPTED, 3)
    hit = ledger.open(request)
    assert hit is not None and hit.num_tokens == 192
    assert snapshot.num_waiting == 0
    ledger.finish(request, 200)
    ledger.check()


def test_a_preempted_request_that_is_forgotten_keeps_nothing_alive() -> None:
    ledger = ledger_of()
    request = ledger.request(ids(200))
    ledger.open(request)
    ledger.step(request, 128)
    ledger.release(request, is_preempted=True)
    request.status = RequestStatus.FINISHED
    ledger.manager.forget(request)
    ledger.manager.forget(request)
    assert not any(each and each.num_waiting for each in ledger.manager._content.slot_snapshots)
    ledger.check()


def test_reset_while_requests_run() -> None:
    """They go on with what they hold, and nothing begun before a reset is ever hit after it."""
    ledger = ledger_of()
    ledger.serve(ids(200))
    request = ledger.request(ids(400))
    ledger.open(request)
    ledger.manager.reset()
    ledger.check()
    ledger.finish(request, 70)
    ledger.check()
    assert ledger.manager.num_free_pages == ledger.manager.num_usable_pages
    assert ledger.serve(ids(400))[0].num_matched == 0


def test_a_slot_without_a_recorded_write_is_not_published() -> None:
    ledger = ledger_of()
    request = ledger.request(ids(300))
    ledger.open(request)
    ledger.step(request)
    holding = ledger.running[request.id][1]
    ledger.manager._content.drop_snapshot(ledger.manager._content.slot_snapshots[holding.live_slot])  # type: ignore[arg-type]
    ledger.manager._content.versions[holding.live_slot] = None
    ledger.release(request)
    assert ledger.manager.stats.snapshots_now == 0
    ledger.check()


def test_a_slot_written_for_another_path_is_our_own_mistake() -> None:
    ledger = ledger_of()
    request = ledger.request(ids(300))
    ledger.open(request)
    ledger.step(request)
    slot = ledger.running[request.id][1].live_slot
    ledger.manager._content.versions[slot] = SlotVersion(b"another", 256)
    with pytest.raises(AssertionError, match="another path"):
        ledger.release(request)


def test_further_cuts_stop_at_their_limit_and_are_counted() -> None:
    ledger = Ledger(64, 2, num_snapshots=1)
    prompt = message(MARKERS.system, 128) + message(MARKERS.user, 128) + message(MARKERS.user, 128) + OPENED
    first, second = ledger.request(prompt), ledger.request((1, *prompt))
    ledger.open(first)
    ledger.open(second)
    assert ledger.plan(first, 500) and ledger.plan(second, 500)
    assert [cut.position for cut in ledger.planned[first.id].cuts] == [128, 384]
    assert [cut.position for cut in ledger.planned[second.id].cuts] == [384]
    assert ledger.manager.stats.snapshots_refused == 3
    assert ledger.manager.match(ledger.request(prompt)).awaits == 384
    ledger.manager.check()


def test_a_hit_that_is_true_no_more_is_refused() -> None:
    ledger = ledger_of()
    ledger.serve(ids(300))
    request = ledger.request(ids(300))
    hit = ledger.manager.match(request)
    ledger.manager.reset()
    assert ledger.manager.open(request, hit, 300) is None
    ledger.check()
    assert ledger.open(request) is not None


def test_a_refusal_for_want_of_pages_touches_no_block_of_the_hit() -> None:
    """Who waits for pages asks in every step: to pin a long hit and let it go again would cost as much as a step."""

    class Shared(BlockPool):
        num_shared = 0

        def share(self, block_ids: Iterable[int]) -> None:
            Shared.num_shared += 1
            super().share(block_ids)

    ledger = Ledger(12, 2, 8, make_pool=Shared)
    ledger.serve(ids(300))
    assert ledger.open(ledger.request(ids(300, start=500))) is not None
    Shared.num_shared = 0
    longer = ledger.request((*ids(300), *ids(200, start=900)))
    assert ledger.manager.match(longer).num_tokens == 256
    assert ledger.open(longer) is None, "it needs 4 pages beside its hit of 4, and 3 are left"
    assert Shared.num_shared == 0
    ledger.check()


def test_switched_off_nothing_is_kept() -> None:
    ledger = Ledger(16, 2, 0, config=CacheConfig(enable_prefix_caching=False))
    ledger.serve(ids(300), 100)
    assert ledger.manager.num_free_pages == 16
    assert ledger.serve(ids(300))[0].note is CacheNote.OFF
    ledger.check()


def test_without_debug_a_step_without_hits_orders_nothing() -> None:
    ledger = Ledger(32, 2, 8, debug=False)
    ledger.serve(ids(300), 100)
    request = ledger.request(ids(300))
    ledger.open(request)
    ledger.plan(request, 64)
    assert ledger.manager.take_block_ops() == ()


def test_counts() -> None:
    ledger = ledger_of()
    ledger.serve(ids(300))
    ledger.serve(ids(300))
    stats = ledger.manager.stats
    assert (stats.num_looked_up, stats.num_hit, stats.num_restored) == (600, 256, 0)
    assert (stats.snapshots_published, stats.snapshots_now, stats.pages_now) == (1, 1, 4)
