"""The scheduler and the prefix cache: who hits what, who waits for whom, and what is never found.

`FakeRunner` compares the pages and the slot of every hit with what the request's own tokens would have written, and
`assert_finished` all tokens with those of a lone, cold request; freed blocks are filled with poison.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from deltaserve.cache.layout import HostSizes
from deltaserve.core.chat import ChatMarkers
from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.plan import OpKind, StepOutput, StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import CacheNote, FinishReason, RequestOptions, SamplingParams
from tests.fakes import expected_prompt_logprobs
from tests.scheduler.harness import VOCAB, Harness, prompt_of

NEWLINE, WORDS = 92, 90
MARKERS = ChatMarkers(
    im_start=90, im_end=91, newline=(NEWLINE,), system=(93,), user=(94,), assistant=(95,), tool_response=(96,)
)
GREEDY = SamplingParams(max_tokens=1)


def cached(
    num_pages: int = 64, num_rows: int = 4, budget: int = 256, num_snapshots: int = 24, **rest: object
) -> Harness:
    return Harness(num_pages, num_rows, budget, is_caching=True, num_snapshots=num_snapshots, **rest)  # type: ignore[arg-type]


def ask(harness: Harness, prompt_ids: tuple[int, ...], max_tokens: int = 1, **options: object) -> int:
    """A request served to its end, its tokens checked; how many tokens of its prompt were cached."""
    params = replace(GREEDY, max_tokens=max_tokens)
    request_id = harness.add(prompt_ids, params, options=RequestOptions(**options))  # type: ignore[arg-type]
    harness.run()
    harness.assert_finished(request_id)
    return harness.requests[request_id].num_cached


def rows_of(plan: StepPlan | None) -> list[tuple[int, str, int, int]]:
    """Request, kind, start and number of tokens of each row."""
    assert plan is not None
    return [(row.request_id, row.kind.name, row.start, len(row.token_ids)) for row in plan.rows]


# Hits


@pytest.mark.parametrize(("budget", "num_drafts"), [(64, 0), (65, 3), (127, 3), (1000, 0)])
def test_s3_f09_cached_equals_cold_around_block_edges(budget: int, num_drafts: int) -> None:
    """Row S3-F09: the hit is what pages and states both hold, a block short of the end, however it was computed."""
    for number, length in enumerate([64 * n + rest for n in (1, 2, 3) for rest in (-2, -1, 0, 1, 2, 33, 62, 63)]):
        harness = cached(budget=budget, speculative=SpeculativeConfig(num_drafts))
        prompt = prompt_of(length, salt=number)
        assert ask(harness, prompt, 30) == 0
        assert ask(harness, prompt, 30) == (length - 1) // 64 * 64
        assert ask(harness, (*prompt, 5), 5) == length // 64 * 64
        assert ask(harness, (*prompt[:-1], (prompt[-1] + 1) % VOCAB, 3), 5) == (length - 1) // 64 * 64
        harness.assert_idle()


def test_the_first_chunk_says_what_was_cached_and_why_not_more() -> None:
    harness = cached()
    prompt = prompt_of(200)
    for expected in (CacheNote.COLD, CacheNote.FULL):
        ask(harness, prompt, 5)
        request_id = len(harness.requests)
        first, *rest = harness.chunks[request_id]
        assert first.cache is not None
        assert first.cache == harness.requests[request_id].cache_record
        assert (first.cache.note, first.cache.num_prompt) == (expected, 200)
        assert first.num_cached == first.cache.num_cached == (0 if expected is CacheNote.COLD else 192)
        assert all(chunk.cache is None and chunk.num_cached == first.num_cached for chunk in rest)


def test_without_a_cache_nothing_is_kept_and_no_op_is_sent() -> None:
    harness = Harness(budget=256)
    for _ in range(2):
        assert ask(harness, prompt_of(200), 80) == 0
        assert harness.requests[len(harness.requests)].cache_record is not None
    assert all(plan.block_ops == () for plan in harness.runner.steps)
    assert harness.manager.num_free_pages == harness.manager.num_usable_pages


def test_a_shared_beginning_hits_on_its_second_use_at_a_turn_end_and_on_its_third_anywhere() -> None:
    harness = cached(markers=MARKERS, vocab_size=WORDS)
    system = message(MARKERS.system, range(3, 200))
    beginnings = [(*system, *message(MARKERS.user, [n] * 50), *GENERATE) for n in (1, 2)]
    assert [ask(harness, beginning) for beginning in beginnings] == [0, len(system) // 64 * 64]
    harness = cached()
    common = prompt_of(300)
    hits = [ask(harness, (*common, *prompt_of(90, salt=n))) for n in (1, 2, 3)]
    assert hits == [0, 0, 256]


def test_salts_and_prompt_logprobs_share_nothing() -> None:
    harness = cached()
    prompt = prompt_of(200)
    assert [ask(harness, prompt, cache_salt=salt) for salt in ("", "a", "b", "a", "")] == [0, 0, 0, 192, 192]


@pytest.mark.parametrize("budget", [64, 1000])
def test_s3_f11_prompt_logprobs_are_whole_though_the_prompt_is_cached(budget: int) -> None:
    """Row S3-F11: such a request looks nothing up, and others hit what it leaves."""
    harness = cached(budget=budget)
    prompt = prompt_of(200)
    for _ in range(2):
        request_id = harness.add(prompt, SamplingParams(max_tokens=3, prompt_logprobs=1))
        harness.run()
        assert harness.chunks[request_id][0].prompt_logprobs == expected_prompt_logprobs(prompt)
        record = harness.requests[request_id].cache_record
        assert record is not None
        assert record.note is CacheNote.PROMPT_LOGPROBS
    assert ask(harness, prompt) == 192


# Waiting for one another


def test_s3_f05_two_equal_prompts_in_one_step() -> None:
    """Row S3-F05: the second waits until the first has written, and reads nothing before."""
    harness = cached(budget=512)
    prompt = prompt_of(200)
    first, second, other = harness.add(prompt, GREEDY), harness.add(prompt, GREEDY), harness.submit(100, 1)
    assert rows_of(harness.step()) == [(first, "PREFILL", 0, 200), (other, "PREFILL", 0, 100)]
    assert rows_of(harness.step()) == [(second, "PREFILL", 192, 8)]
    harness.assert_all_finished()
    assert harness.tokens(first) == harness.tokens(second)
    assert harness.requests[second].num_cached == 192


def test_thirty_equal_prompts_are_computed_once() -> None:
    harness = cached(num_rows=8, budget=128)
    ids = [harness.add(prompt_of(500), replace(GREEDY, max_tokens=30)) for _ in range(30)]
    harness.run()
    harness.assert_all_finished()
    assert [harness.requests[request_id].num_cached for request_id in ids] == [0] + [448] * 29


@pytest.mark.parametrize("ending", ["abort", "fail", "preempt", "discard"])
def test_who_waits_goes_on_when_the_one_it_waits_for_does_not(ending: str) -> None:
    harness = cached(budget=64)
    prompt = prompt_of(400)
    first, second = harness.add(prompt, GREEDY), harness.add(prompt, GREEDY)
    for _ in range(3):
        assert rows_of(harness.step())[0][0] == first
    if ending == "abort":
        harness.abort(first)
    elif ending == "fail":
        assert harness.scheduler.fail(first, "no") is not None
    elif ending == "preempt":
        harness.scheduler.preempt(first)
    else:
        plan = harness.scheduler.schedule()
        assert plan is not None
        harness.runner.execute(plan)
        assert harness.scheduler.discard(plan) == [first]
    plan = harness.step()
    assert rows_of(plan)[0] == ((first if ending == "preempt" else second), "PREFILL", *resume(ending))
    harness.run()
    harness.assert_all_finished(but=set() if ending == "preempt" else {first})


def resume(ending: str) -> tuple[int, int]:
    """Start and tokens of the next chunk: behind what the three steps computed, if that is kept."""
    return (192, 64) if ending in ("abort", "preempt") else (0, 64)


def test_a_waiting_request_that_leaves_is_forgotten() -> None:
    harness = cached(budget=64)
    prompt = prompt_of(400)
    first, second, third = (harness.add(prompt, GREEDY) for _ in range(3))
    harness.step()
    forgotten: list[int] = []
    forget = harness.manager.forget

    def listen(request: Request) -> None:
        forgotten.append(request.id)
        forget(request)

    harness.manager.forget = listen  # type: ignore[method-assign]
    assert harness.abort(second)
    assert harness.scheduler.fail(third, "no") is not None
    assert forgotten == [second, third]
    harness.run()
    harness.assert_finished(first)
    harness.assert_idle()


# What is not kept


def test_what_failed_is_found_by_nobody() -> None:
    harness = cached(budget=1000)
    prompt = prompt_of(300)
    request_id = harness.add(prompt, replace(GREEDY, max_tokens=100))
    for _ in range(5):
        harness.step()
    plan = harness.scheduler.schedule()
    assert plan is not None
    (row,) = harness.runner.execute(plan).rows
    (chunk,) = harness.scheduler.update(plan, StepOutput(plan.step_id, (replace(row, token_ids=(), error="NaN"),)))
    assert (chunk.finish_reason, chunk.error) == (FinishReason.ERROR, "NaN")
    harness.assert_idle()
    assert ask(harness, prompt) == 0
    harness.scheduler.fail(harness.add(prompt_of(300, salt=1), GREEDY), "no such luck")
    assert request_id not in harness.manager.holders


def test_a_plan_stopped_half_way_leaves_nothing_and_ends_only_its_own() -> None:
    harness = cached(budget=256)
    prompt = prompt_of(250)
    stays = [harness.submit(1, 200) for _ in range(2)]
    harness.step()
    gone = harness.add(prompt, GREEDY)
    waits = [harness.add(prompt_of(200, salt=9), GREEDY), harness.submit(64, 4)]
    plan = harness.scheduler.schedule()
    assert plan is not None
    assert {row.request_id for row in plan.rows} >= {gone}
    harness.runner.execute(plan)
    ended = harness.scheduler.discard(plan)
    assert ended == [row.request_id for row in plan.rows]
    assert harness.scheduler.num_waiting == 2
    harness.run()
    for request_id in {*stays, *waits} - set(ended):
        harness.assert_finished(request_id)
    assert ask(harness, prompt) == 0
    harness.assert_idle()


def test_what_a_discarded_request_had_published_is_withdrawn() -> None:
    harness = cached()
    prompt, other = prompt_of(250), prompt_of(250, salt=1)
    ask(harness, other)
    harness.add(prompt, replace(GREEDY, max_tokens=20))
    for _ in range(4):
        harness.step()
    plan = harness.scheduler.schedule()
    assert plan is not None
    assert plan.block_ops == ()
    harness.runner.execute(plan)
    harness.scheduler.discard(plan)
    assert ask(harness, prompt) == 0
    assert ask(harness, other) == 192, "no op was lost: what others left stays"


def test_lost_block_ops_end_the_cache() -> None:
    """Whether a page has reached the host, or come back, nobody knows once the plan that said so was stopped."""
    harness = cached(num_pages=8, budget=512, num_snapshots=2, host=HostSizes(8, 4))
    prompts = [prompt_of(300, salt=salt) for salt in range(3)]
    for prompt in prompts:
        ask(harness, prompt)
    harness.add(prompts[0], GREEDY)
    plan = harness.scheduler.schedule()
    assert plan is not None
    assert any(op.kind is OpKind.RESTORE for op in plan.block_ops)
    harness.runner.execute(plan)
    harness.scheduler.discard(plan)
    assert [ask(harness, prompt) for prompt in prompts] == [0, 0, 0]
    harness.assert_idle()


# Preemption, which donates and comes back


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_s3_f07_a_resumed_request_samples_each_token_once(num_drafts: int) -> None:
    """Row S3-F07: preempted at random points, resumed as a hit on its own pages; nothing is sampled twice."""
    rng = random.Random(7)
    harness = cached(num_pages=20, num_rows=3, budget=100, speculative=SpeculativeConfig(num_drafts))
    ids = [harness.submit(rng.randint(100, 300), 150) for _ in range(6)]
    while harness.scheduler.has_work:
        if rng.random() < 0.15:
            harness.scheduler.preempt(rng.choice([*harness.manager.holders] or ids))
            harness.scheduler.check()
        harness.step()
    harness.assert_all_finished()
    assert harness.scheduler.num_preemptions > 15
    sampled = dict.fromkeys(ids, 0)
    hits = 0
    for plan in harness.runner.steps:
        resumed = {admission.request_id for admission in plan.admitted if admission.output_ids}
        for row in plan.rows:
            sampled[row.request_id] += row.is_last
            hits += row.request_id in resumed and row.start > 0
    assert hits > 10
    for request_id in ids:
        chunks = harness.chunks[request_id]
        assert sampled[request_id] == len(chunks)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 150
        assert harness.requests[request_id].num_cached == chunks[0].num_cached == 0


def test_preempted_in_its_prompt_it_goes_on_where_it_was() -> None:
    harness = cached(budget=64)
    request_id = harness.submit(400, 3)
    for _ in range(4):
        harness.step()
    assert harness.scheduler.preempt(request_id)
    assert rows_of(harness.step()) == [(request_id, "PREFILL", 256, 64)]
    harness.run()
    harness.assert_all_finished()


def test_a_row_pushed_out_comes_back_from_the_host() -> None:
    harness = cached(num_pages=7, num_rows=2, budget=512, num_snapshots=1, host=HostSizes(16, 8))
    low, high = harness.submit(190, 200, priority=1), harness.submit(100, 320)
    harness.run()
    harness.assert_all_finished()
    assert harness.requests[low].num_preemptions > 0
    assert harness.requests[high].num_preemptions == 0
    stats = harness.manager.stats
    assert min(stats.pages_saved, stats.pages_restored, stats.num_restored) > 0


# Conversations. Words are 0..89; the model says words only.

GENERATE = (MARKERS.im_start, *MARKERS.assistant, NEWLINE)


def message(role: tuple[int, ...], words: object) -> tuple[int, ...]:
    return (MARKERS.im_start, *role, NEWLINE, *(int(word) % WORDS for word in words), MARKERS.im_end, NEWLINE)  # type: ignore[attr-defined]


class Chat:
    """What a client with a chat template sends: thinking is part of the history until the next real user message."""

    def __init__(self, harness: Harness, rng: random.Random, num_system: int) -> None:
        self._harness, self._rng = harness, rng
        self._told: list[tuple[int, ...]] = []  # every sequence that the cache could know
        self.history = message(MARKERS.system, self._words(num_system))
        self._turn: tuple[int, ...] = ()  # answers and tool results since the last user message, thinking included
        self._stripped: tuple[int, ...] = ()  # the same without thinking
        self.lost: list[int] = []  # tokens of the reusable beginning that did not hit

    def _words(self, num: int) -> list[int]:
        return [self._rng.randrange(WORDS) for _ in range(num)]

    def user(self, num_words: int) -> None:
        self.history += self._stripped + message(MARKERS.user, self._words(num_words))
        self._turn = self._stripped = ()

    def tool_results(self, *nums: int) -> None:
        words = [*MARKERS.tool_response, *itertools.chain.from_iterable(self._words(num) for num in nums)]
        result = (MARKERS.im_start, *MARKERS.user, NEWLINE, *words, MARKERS.im_end, NEWLINE)
        self._turn, self._stripped = self._turn + result, self._stripped + result

    def answer(self, num_thinking: int, num_words: int) -> None:
        prompt = self.history + self._turn + GENERATE
        reusable = max((common(prompt, told) for told in self._told), default=0)
        params = SamplingParams(max_tokens=num_thinking + num_words)
        request_id = self._harness.add(prompt, params, options=RequestOptions(session_id="chat"))
        self._harness.run()
        self._harness.assert_finished(request_id)
        self.lost.append(reusable - self._harness.requests[request_id].num_cached)
        said = self._harness.tokens(request_id)
        self._told.append(prompt + said)
        end = (MARKERS.im_end, NEWLINE)
        self._turn += GENERATE + said + end
        self._stripped += GENERATE + said[num_thinking:] + end


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("num_drafts", "budget"), [(0, 2048), (3, 130)])
def test_every_turn_of_a_chat_hits_all_but_127_tokens_of_what_is_reusable(
    seed: int, num_drafts: int, budget: int
) -> None:
    rng = random.Random(seed)
    harness = cached(
        num_pages=200, budget=budget, markers=MARKERS, vocab_size=WORDS, speculative=SpeculativeConfig(num_drafts)
    )
    chat = Chat(harness, rng, num_system=rng.randint(100, 400))
    for _ in range(6):
        chat.user(rng.randint(1, 200))
        for _ in range(rng.choice((0, 0, 1, 3))):
            chat.answer(rng.choice((0, 40, 150)), rng.randint(1, 30))
            chat.tool_results(*(rng.randint(1, 150) for _ in range(rng.choice((1, 1, 3)))))
        chat.answer(rng.choice((0, 0, 90)), rng.randint(1, 120))
    assert len(chat.lost) > 8
    assert max(chat.lost) <= 127


def test_after_twelve_tool_calls_a_new_user_message_still_hits_behind_the_last_one() -> None:
    harness = cached(num_pages=400, budget=2048, markers=MARKERS, vocab_size=WORDS, num_snapshots=40)
    rng = random.Random(5)
    chat = Chat(harness, rng, num_system=300)
    chat.user(60)
    chat.answer(30, 50)
    chat.user(90)
    for _ in range(12):
        chat.answer(40, 10)
        chat.tool_results(60, 20)
    chat.answer(40, 30)
    chat.user(70)
    chat.answer(20, 20)
    assert len(chat.lost) == 15
    assert max(chat.lost) <= 127
    assert harness.requests[15].num_cached > 400


# Several cuts in one row


def test_cuts_inside_a_chunk_come_in_order_and_the_last_is_the_rows_own() -> None:
    harness = cached(budget=1000, markers=MARKERS, vocab_size=WORDS)
    system, user = message(MARKERS.system, range(200)), message(MARKERS.user, range(300))
    harness.add((*system, *user, *GENERATE), GREEDY)
    plan = harness.step()
    assert plan is not None
    (row,) = plan.rows
    positions = [cut.position for cut in row.cuts]
    assert positions == sorted(
        {len(system) // 64 * 64, (len(system) + len(user)) // 64 * 64, (len(row.token_ids)) // 64 * 64}
    )
    assert len({cut.slot for cut in row.cuts}) == len(row.cuts) > 1
    assert row.slot_out == row.cuts[-1].slot
    assert harness.manager.stats.snapshots_published >= len(row.cuts)


def test_a_long_prompt_is_short_once_its_beginning_is_cached() -> None:
    """Ten questions about one long document: the first is held to its share, the rest have little left to compute."""
    harness = cached(
        num_pages=400, num_rows=6, budget=512, clock=lambda plan: 0.01 + 1e-4 * plan.num_tokens,
        long_prefill_min_tokens=1000,
    )  # fmt: skip
    document = prompt_of(3_000)
    streams = [harness.submit(1, 2_000) for _ in range(2)]
    harness.step()
    ids = [harness.add((*document, n), replace(GREEDY, max_tokens=2)) for n in range(10)]
    while any(not harness.requests[request_id].output_ids for request_id in ids):
        harness.step()
    computed = sum(len(row.token_ids) for plan in harness.runner.steps for row in plan.rows if row.request_id in ids)
    assert computed < 3_000 + 10 * 130
    first, second = (
        next(
            i
            for i, plan in enumerate(harness.runner.steps)
            if any(r.request_id == one and r.is_last for r in plan.rows)
        )
        for one in (ids[0], ids[-1])
    )
    assert second - first < 12
    for request_id in streams:
        harness.abort(request_id)
    harness.run()
    harness.assert_idle()


def test_a_short_prompt_does_not_wait_for_a_long_one_that_its_share_holds_back() -> None:
    """Both begin with one system message, and the long one, at a fiftieth of the time, has not written it yet."""
    harness = cached(
        num_pages=400, num_rows=6, budget=512, clock=lambda plan: 0.01 + 1e-4 * plan.num_tokens,
        long_prefill_min_tokens=1000, long_prefill_share=0.02, markers=MARKERS, vocab_size=WORDS,
    )  # fmt: skip
    system = message(MARKERS.system, range(3, 803))
    stream = harness.submit(1, 2_000)
    long = harness.add((*system, *message(MARKERS.user, range(1_000)), *GENERATE), GREEDY)
    while not harness.requests[long].num_computed:
        harness.step()
    short = harness.add((*system, *message(MARKERS.user, [5] * 50), *GENERATE), GREEDY)
    assert harness.manager.match(harness.requests[short]).awaits == len(system) // 64 * 64
    for _ in range(3):
        harness.step()
    assert harness.requests[short].output_ids
    assert harness.requests[long].num_computed < len(system)
    harness.abort(stream)
    harness.run()
    for request_id in (short, long):
        harness.assert_finished(request_id)


def test_requests_of_one_prompt_need_pages_for_one() -> None:
    """Six share 40 pages of a pool of 60."""
    harness = cached(num_pages=60, num_rows=6, budget=4096)
    prompt = prompt_of(40 * 64 + 1)
    ask(harness, prompt)
    ids = [harness.add(prompt, replace(GREEDY, max_tokens=60)) for _ in range(6)]
    harness.step()
    assert harness.scheduler.num_running == 6
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    for request_id in ids:
        harness.assert_finished(request_id)
