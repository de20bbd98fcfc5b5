"""Ten thousand random operations on the books, on pools so small that everything is evicted, saved and restored."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from deltaserve.cache.blocks import BlockPool
from deltaserve.core.request import Request, RequestStatus
from tests.cache.ledger import MARKERS, Ledger

NUM_OPERATIONS = 10_000
MAX_KNOWN = 64 * 10


class RandomlyRefusing(BlockPool):
    """One reservation in ten is refused."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._rng = random.Random(num_blocks)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        return None if self._rng.random() < 0.1 else super().reserve(num_blocks)


def message(role: int, rng: random.Random) -> tuple[int, ...]:
    body = tuple(rng.randrange(50) for _ in range(rng.choice((3, 30, 60, 61, 62, 100))))
    return (MARKERS.im_start, role, 902, *body, MARKERS.im_end, 902)


@dataclass
class Walk:
    """Operations in random order. `texts` are token paths that later requests extend or leave."""

    ledger: Ledger
    rng: random.Random
    texts: list[tuple[int, ...]] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    num_hits: int = 0
    num_aborted: int = 0

    def prompt(self) -> tuple[int, ...]:
        """New, or some way along a path that is known, and then on."""
        rng = self.rng
        base: tuple[int, ...] = rng.choice(self.texts) if self.texts and rng.random() < 0.85 else ()
        cut = rng.choice((len(base), len(base), len(base) // 2, len(base) // 64 * 64, rng.randint(0, len(base))))
        roles = (910, 911, 912)
        ids = base[:cut]
        for _ in range(rng.randint(0, 3)):
            ids += message(rng.choice(roles), rng)
        return ids[: MAX_KNOWN - 70] or (1, 2)

    def submit(self) -> None:
        if len(self.waiting) < 6:
            salt = self.rng.choice(("", "", "", "other"))
            session = {"session_id": str(self.rng.randrange(3))} if self.rng.random() < 0.3 else {}
            self.waiting.append(self.ledger.request(self.prompt(), cache_salt=salt, **session))

    def admit(self) -> None:
        ledger = self.ledger
        if self.waiting and len(ledger.running) < ledger.num_rows:
            request = self.waiting[0]
            awaits = ledger.manager.match(request).awaits
            if awaits and self.rng.random() < 0.7:
                return
            hit = ledger.open(request, keep_free=self.rng.choice((0, 0, 1, 3)))
            if hit is not None:
                self.waiting.pop(0)
                self.num_hits += hit.num_tokens > 0

    def step(self) -> None:
        """Plan some rows; then they run, or are stopped half-way, and some requests end while they do."""
        ledger, rng = self.ledger, self.rng
        for request, _ in list(ledger.running.values()):
            if request.id in ledger.running and rng.random() < 0.8:
                while not ledger.plan(request, rng.choice((64, 128, 500))):
                    victim = rng.choice([each for each, _ in ledger.running.values()])
                    self.preempt(victim)
                    if victim is request:
                        break
        if rng.random() < 0.01:
            ledger.execute(rng)
            ledger.manager.reset()
            for request_id in list(ledger.planned):
                self.end(ledger.running[request_id][0])
            return
        ledger.execute()
        for request_id in list(ledger.planned):
            request = ledger.running[request_id][0]
            if rng.random() < 0.03:
                self.end(request, is_sound=rng.random() < 0.5)
            else:
                ledger.commit(request, rng.randrange(50))

    def decode(self) -> None:
        """One request goes on for a while."""
        requests = [request for request, _ in self.ledger.running.values()]
        if requests:
            request = self.rng.choice(requests)
            for _ in range(self.rng.randint(1, 80)):
                if request.num_known >= MAX_KNOWN or not self.ledger.plan(request, 128):
                    return
                self.ledger.execute()
                self.ledger.commit(request, self.rng.randrange(50))

    def preempt(self, request: Request) -> None:
        self.ledger.release(request, is_preempted=True)
        self.waiting.insert(0, request)

    def end(self, request: Request, is_sound: bool = True) -> None:
        self.ledger.release(request, is_sound=is_sound)
        self.texts.append(request.known_ids(0, request.num_known))
        del self.texts[:-8]

    def forget(self) -> None:
        if self.waiting:
            request = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            request.status = RequestStatus.FINISHED
            self.ledger.manager.forget(request)

    def stop_one(self) -> None:
        requests = [request for request, _ in self.ledger.running.values()]
        if requests:
            request = self.rng.choice(requests)
            self.rng.choice((self.end, self.end, self.preempt))(request)

    def reset(self) -> None:
        if self.rng.random() < 0.05:
            self.ledger.manager.reset()

    def go(self, num_operations: int) -> None:
        choices = [self.submit, self.admit, self.step, self.decode, self.stop_one, self.forget, self.reset]
        weights = [3, 4, 6, 2, 2, 0.3, 0.3]
        for _ in range(num_operations):
            self.rng.choices(choices, weights)[0]()
            self.ledger.check()
        self._drain()

    def _drain(self) -> None:
        for request, _ in list(self.ledger.running.values()):
            self.end(request)
        self.ledger.manager.reset()
        self.ledger.check()
        manager = self.ledger.manager
        assert manager.num_free_pages == manager.num_available_pages == manager.num_usable_pages


@pytest.mark.parametrize(
    ("seed", "num_pages", "num_rows", "num_snapshots", "host", "make_pool"),
    [
        (1, 24, 4, 3, (10, 4), BlockPool),
        (2, 12, 3, 0, (0, 0), BlockPool),
        (3, 40, 4, 10, (0, 0), BlockPool),
        (4, 16, 2, 2, (40, 3), BlockPool),
        (5, 20, 3, 4, (6, 8), RandomlyRefusing),
    ],
)
def test_ten_thousand_operations(
    seed: int, num_pages: int, num_rows: int, num_snapshots: int, host: tuple[int, int], make_pool: type[BlockPool]
) -> None:
    ledger = Ledger(num_pages, num_rows, num_snapshots, host, make_pool=make_pool)
    walk = Walk(ledger, random.Random(seed))
    walk.go(NUM_OPERATIONS // 5)
    stats = ledger.manager.stats
    assert walk.num_hits > 50 and stats.snapshots_evicted > 50 and stats.pages_evicted > 50, (walk.num_hits, stats)
    if host[0]:
        assert min(stats.pages_saved, stats.pages_restored, stats.snapshots_saved, stats.snapshots_restored) > 5, stats
