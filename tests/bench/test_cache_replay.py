"""Replays of traces so small that every hit can be told by hand."""

from __future__ import annotations

import random

import pytest

from deltaserve.bench.cache_policies import POLICIES, UNLIMITED, future_uses, make_manager
from deltaserve.bench.cache_replay import Arrival, Outcome, from_rows, from_turns, replay
from deltaserve.bench.flops import PrefillFlops
from deltaserve.bench.make_trace import GENERATORS, Shape, make
from deltaserve.bench.traces import TraceRow
from deltaserve.cache.layout import PoolSizes
from deltaserve.core.config import CacheConfig
from deltaserve.core.errors import ConfigError
from deltaserve.core.types import BLOCK
from deltaserve.model.presets import preset

CONFIG = preset("qwen3.5-0.8b")
FLOPS = PrefillFlops.of(CONFIG)
PROMPT_TOKENS = 2 * BLOCK + 1


def _sizes(num_pages: int, num_rows: int = 1, num_snapshots: int = 8) -> PoolSizes:
    num_slots = 1 + 2 * num_rows + num_snapshots
    return PoolSizes(CONFIG.cache_spec(), 1 + num_pages, num_slots, num_rows, 4096, num_snapshots=num_snapshots)


def _one_by_one(names: str, prompt_tokens: int = PROMPT_TOKENS) -> list[Arrival]:
    """A request a second; equal letters are equal prompts. Answers are of one token, so that nothing is decoded."""

    def arrival(at: int, name: str) -> Arrival:
        return Arrival(at, at + 0.5, None, lambda: ((ord(name),) * prompt_tokens, (1,)))

    return [arrival(at, name) for at, name in enumerate(names)]


def _run(policy: str, arrivals: list[Arrival], sizes: PoolSizes) -> Outcome:
    manager, on_start = make_manager(policy, sizes, CacheConfig(), FLOPS, arrivals)
    outcome = replay(arrivals, manager, sizes.num_rows, on_start)
    manager.check()
    return outcome


def _hits(policy: str, names: str, num_pages: int) -> list[int]:
    """Each prompt keeps two pages, and needs three while it runs."""
    arrivals = _one_by_one(names)
    _run(UNLIMITED, arrivals, _sizes(100))
    return [num_cached for _, num_cached in _run(policy, arrivals, _sizes(num_pages)).hits]


def test_with_room_for_all_every_prompt_hits_when_it_comes_again() -> None:
    for policy in (*POLICIES, UNLIMITED):
        assert _hits(policy, "abcab", 100) == [0, 0, 0, 128, 128]


def test_lru_loses_what_comes_round_and_the_oracle_knows_better() -> None:
    assert _hits("lru", "abca", 6) == [0, 0, 0, 0]
    assert _hits("oracle", "abca", 6) == [0, 0, 0, 128]
    assert _hits("lru", "abcb", 6) == _hits("oracle", "abcb", 6) == [0, 0, 0, 128]


def test_the_oracle_beats_the_others_on_random_traces() -> None:
    """On all of them together: it looks at one snapshot at a time, and on one trace that can be beaten."""
    rng = random.Random(0)
    totals = dict.fromkeys(POLICIES, 0)
    for _ in range(20):
        names = "".join(rng.choices("abcdefgh", [8, 5, 3, 2, 2, 1, 1, 1], k=60))
        for policy in POLICIES:
            totals[policy] += sum(_hits(policy, names, 9))
    assert totals["oracle"] > 1.05 * max(totals["lru"], totals["value"])


def test_value_is_above_lru_on_agentic_traces() -> None:
    """Small ones; the held-out ones of usual size are in bench/results."""
    shape = Shape(num_requests=120, prompt_tokens=2048, output_tokens=60, num_alive=12)
    totals = dict.fromkeys(("lru", "value"), 0.0)
    for name in GENERATORS:
        arrivals = from_turns(make(name, shape, seed=5)[0])
        shares = {policy: _run(policy, arrivals, _sizes(400, 12, 8)).hit_share for policy in totals}
        assert shares["value"] >= 0.98 * shares["lru"], (name, shares)
        totals = {policy: total + shares[policy] for policy, total in totals.items()}
    assert totals["value"] > 1.02 * totals["lru"], totals


def test_future_uses_are_the_blocks_that_a_hit_can_cover() -> None:
    arrivals = _one_by_one("aba", prompt_tokens=2 * BLOCK)
    _run(UNLIMITED, arrivals, _sizes(100))
    assert sorted(future_uses(arrivals).values()) == [[0, 2], [1]], "the last block is always computed"


def test_answers_become_hits_of_whoever_goes_on_from_them() -> None:
    prompt, answer = tuple(range(100)), tuple(range(1000, 1100))
    first = Arrival(0.0, 1.0, None, lambda: (prompt, answer))
    second = Arrival(2.0, 3.0, None, lambda: (prompt + answer + (7,) * 60, (1,)))
    too_soon = Arrival(0.5, 3.0, None, lambda: (prompt + answer + (8,) * 60, (1,)))
    assert _run(UNLIMITED, [first, second], _sizes(100)).hits == [(100, 0), (260, 192)]
    assert _run(UNLIMITED, [first, too_soon], _sizes(100, num_rows=2)).hits == [(100, 0), (260, 64)]


def test_where_rows_or_pages_are_short_the_earliest_answer_is_hurried() -> None:
    arrivals = [Arrival(0.0, 9.0, None, lambda at=at: ((at,) * 129, (1,))) for at in range(3)]  # type: ignore[misc]
    assert _run("lru", arrivals, _sizes(100, num_rows=1)).num_hurried == 2
    assert _run("lru", arrivals, _sizes(100, num_rows=3)).num_hurried == 0
    assert _run("lru", arrivals, _sizes(6, num_rows=3)).num_hurried == 1
    with pytest.raises(ConfigError, match="request 0 of 129 \\+ 1 tokens does not fit 2 pages"):
        _run("lru", arrivals, _sizes(2))


def test_hashes_of_the_first_replay_do_for_the_next() -> None:
    turns, _ = make("tools", Shape(num_requests=60, prompt_tokens=2048, output_tokens=40, num_alive=4), seed=1)
    arrivals = from_turns(turns)
    sizes = _sizes(400, num_rows=4)
    fresh = _run("value", arrivals, sizes)
    assert all(len(arrival.hashes) >= arrival.num_resumable_blocks for arrival in arrivals)
    assert _run("value", arrivals, sizes).hits == fresh.hits
    assert fresh.num_hit > 0


def test_rows_of_a_file_are_replayed_at_their_times() -> None:
    rows = [TraceRow(600, 5, (0, 1), timestamp_ms=3000), TraceRow(600, 5, (0, 2), timestamp_ms=1000)]
    arrivals = from_rows(rows)
    assert [arrival.arrival_s for arrival in arrivals] == [1.0, 3.0]
    assert [len(arrival.ids()[0]) for arrival in arrivals] == [600, 600]
    untimed = from_rows([TraceRow(600, 5, (0, 1)), TraceRow(100, 5)])
    assert [arrival.arrival_s for arrival in untimed] == [0.0, 1.0]


def test_flops_of_parts_add_up_and_later_tokens_cost_more() -> None:
    whole = FLOPS.between(0, 1000)
    assert FLOPS.between(0, 300) + FLOPS.between(300, 1000) == whole
    assert FLOPS.between(0, 1) == FLOPS.per_token + FLOPS.per_pair
    assert FLOPS.between(900, 1000) > FLOPS.between(0, 100)
