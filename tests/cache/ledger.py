"""A memory that follows the manager's orders and knows what every block should hold; requests run on it by hand.

A page that was written to its end, and a slot, hold the hash of all tokens up to there. A row that starts from a block
which holds anything else than the hash of its own tokens had a stale or a foreign hit: an AssertionError at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.layout import HostSizes
from deltaserve.cache.manager import CacheManager, Hit, Holding
from deltaserve.cache.retention import Retention
from deltaserve.core.chat import ChatMarkers
from deltaserve.core.config import CacheConfig
from deltaserve.core.events import BlocksRemoved, BlocksStored
from deltaserve.core.plan import EMPTY_SLOT, BlockOp, Cut, OpKind
from deltaserve.core.request import Request, RequestStatus
from deltaserve.core.types import BLOCK, RequestOptions, SamplingParams
from tests.fakes import make_sizes

Content = int | str | None
GARBAGE = "garbage"
MARKERS = ChatMarkers(900, 901, (902,), (910,), (911,), (912,), (920,))


def truth(token_ids: tuple[int, ...], salt: str = "") -> int:
    return hash((salt, token_ids))


@dataclass(slots=True)
class Planned:
    """A row of the step that is out: tokens [start, end), and the slots it will write."""

    end: int
    cuts: tuple[Cut, ...]
    fold: int | None


class Ledger:
    """A manager and its memory. Each method is one thing that a scheduler does, and checks what it sees."""

    def __init__(
        self,
        num_pages: int,
        num_rows: int,
        num_snapshots: int = 0,
        host: tuple[int, int] = (0, 0),
        *,
        markers: ChatMarkers | None = MARKERS,
        debug: bool = True,
        make_pool: Callable[[int], BlockPool] = BlockPool,
        retention: Retention | None = None,
        config: CacheConfig = CacheConfig(),  # noqa: B008
    ) -> None:
        sizes = make_sizes(num_pages, num_rows, num_snapshots=num_snapshots, host=HostSizes(*host))
        self.manager = CacheManager(
            sizes, config, markers=markers, debug=debug, make_pool=make_pool, retention=retention
        )
        self.num_rows = num_rows
        self._may_evict_in_vain = make_pool is not BlockPool
        self._blocks: dict[bool, list[Content]] = {False: [None] * sizes.num_pages, True: [None] * sizes.num_slots}
        self._host: dict[bool, dict[int, tuple[Content, Content]]] = {False: {}, True: {}}
        self._seals: dict[bool, dict[int, Content]] = {False: {}, True: {}}
        self.running: dict[int, tuple[Request, Holding]] = {}
        self.planned: dict[int, Planned] = {}
        self.resumable: set[bytes] = set()  # by the events
        self._next_sequence = 0
        self._next_id = 0

    def request(self, prompt_ids: tuple[int, ...], **options: str) -> Request:
        self._next_id += 1
        params = SamplingParams(max_tokens=1 << 20)
        return Request(self._next_id, prompt_ids, params, options=RequestOptions(**options))  # type: ignore[arg-type]

    def open(self, request: Request, keep_free: int = 0) -> Hit | None:
        """Match and open; None if refused, in which case nothing may have changed."""
        before = self._counts()
        hit = self.manager.match(request)
        holding = self.manager.open(request, hit, request.num_known, keep_free)
        if holding is None:
            assert self._counts() == before or self._may_evict_in_vain, "a refusal changed something"
            return None
        request.status, request.num_computed = RequestStatus.RUNNING, hit.num_tokens
        self.running[request.id] = (request, holding)
        assert holding.boundary == hit.num_tokens < request.num_known
        return hit

    def plan(self, request: Request, num_tokens: int) -> bool:
        """A row of so many tokens, to a boundary or the end of what is known; whether there was room for it."""
        holding, start = self.running[request.id][1], request.num_computed
        if self.manager.reserve(request, request.num_known) is None:
            return False
        if start - holding.boundary == BLOCK:
            planned = Planned(start + 1, (), start)
        elif start != holding.boundary or start >= len(request.prompt_ids):
            planned = Planned(start + 1, (), None)
        else:
            end = min(request.num_known, (start + max(num_tokens, BLOCK)) // BLOCK * BLOCK)
            cuts = self.manager.cuts(request, start, end)
            planned = Planned(end, cuts, None)
            assert [cut.position for cut in cuts] == sorted({cut.position for cut in cuts})
            assert all(start < cut.position <= end for cut in cuts)
        self.planned[request.id] = planned
        return True

    def execute(self, rng: random.Random | None = None) -> None:
        """The step that is out, up to its end, or to a place drawn from `rng`."""
        work: list[Callable[[], None]] = [self._bind(op) for op in self.manager.take_block_ops()]
        work += [lambda request_id=request_id: self._run(request_id) for request_id in self.planned]  # type: ignore[misc]
        for each in work[: len(work) if rng is None else rng.randint(0, len(work))]:
            each()

    def commit(self, request: Request, token_id: int) -> None:
        """The request's row is back; it gets a token if it has none to compute."""
        planned = self.planned.pop(request.id)
        request.num_computed = planned.end
        if planned.fold is not None:
            self.manager.commit(request, planned.fold)
        elif planned.cuts:
            self.manager.commit(request, planned.cuts[-1].position)
        if request.num_computed == request.num_known:
            request.output_ids.append(token_id)

    def step(self, request: Request, num_tokens: int = 1 << 20, token_id: int = 7) -> None:
        """One whole step of one request."""
        assert self.plan(request, num_tokens)
        self.execute()
        self.commit(request, token_id)

    def release(self, request: Request, is_preempted: bool = False, is_sound: bool = True) -> None:
        """Preempted, ended, or failed: then all that it alone has written is garbage."""
        holding = self.running.pop(request.id)[1]
        self.planned.pop(request.id, None)
        if not is_preempted:
            request.status = RequestStatus.FINISHED
        if not is_sound:
            self._spoil(holding)
        self.manager.release(request, is_sound)
        if is_preempted:
            request.status, request.num_computed = RequestStatus.WAITING, 0

    def finish(self, request: Request, num_output: int) -> None:
        """Compute the prompt and so many output tokens, and go."""
        while len(request.output_ids) < num_output:
            self.step(request, token_id=1000 + len(request.output_ids))
        self.release(request)

    def serve(self, prompt_ids: tuple[int, ...], num_output: int = 1, **options: str) -> tuple[Hit, Request]:
        """A whole life."""
        request = self.request(prompt_ids, **options)
        hit = self.open(request)
        assert hit is not None
        self.finish(request, num_output)
        return hit, request

    def check(self) -> None:
        """The books, the events, and every block that a hit could give."""
        self.manager.check()
        self._read_events()
        index = self.manager._content.index
        assert self.resumable == {key for key, node in index.nodes.items() if node.num_live}

    def _spoil(self, holding: Holding) -> None:
        shared = {page for _, other in self.running.values() for page in other.pages}
        for page in holding.pages[holding.num_hit_blocks :]:
            if page not in shared:
                self._blocks[False][page] = GARBAGE
        lent = {other.live_slot for _, other in self.running.values()}
        for snapshot in holding.published:
            if snapshot.slot is not None and snapshot.slot not in lent:
                self._blocks[True][snapshot.slot] = GARBAGE

    def _counts(self) -> tuple[object, ...]:
        manager = self.manager
        return (manager.num_free_pages, manager.num_free_slots, manager.num_available_pages, replace(manager.stats))

    def _read_events(self) -> None:
        for event in self.manager.take_events():
            assert event.sequence == self._next_sequence, "an event was lost"
            self._next_sequence += 1
            if isinstance(event, BlocksStored):
                assert event.parent_hash is None or event.parent_hash in self.resumable
                assert not self.resumable & set(event.block_hashes)
                assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                self.resumable |= set(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                assert set(event.block_hashes) <= self.resumable
                self.resumable -= set(event.block_hashes)
            else:
                self.resumable.clear()

    def _bind(self, op: BlockOp) -> Callable[[], None]:
        return lambda: self._do(op)

    def _do(self, op: BlockOp) -> None:
        blocks, host, seals = self._blocks[op.is_slot], self._host[op.is_slot], self._seals[op.is_slot]
        if op.kind is OpKind.SAVE:
            host[op.target] = (blocks[op.source], seals.get(op.source))
        elif op.kind is OpKind.RESTORE:
            blocks[op.target], seals[op.target] = host.pop(op.source)
        elif op.kind is OpKind.POISON:
            blocks[op.source] = GARBAGE
            seals.pop(op.source, None)
        elif op.kind is OpKind.SEAL:
            assert blocks[op.source] not in (GARBAGE, None), f"garbage published: {op}"
            seals[op.source] = blocks[op.source]
        else:
            assert blocks[op.source] == seals[op.source] not in (GARBAGE, None), f"not what was sealed: {op}"

    def _run(self, request_id: int) -> None:
        """Write what the row writes; before that, look at all it reads."""
        (request, holding), planned = self.running[request_id], self.planned[request_id]
        pages, slots = self._blocks[False], self._blocks[True]
        salt, start = request.options.cache_salt, request.num_computed
        for depth in range(start // BLOCK):
            expected = truth(request.known_ids(0, (depth + 1) * BLOCK), salt)
            assert pages[holding.pages[depth]] == expected, f"request {request_id} reads a wrong page at {depth}"
        if holding.live_slot != EMPTY_SLOT:
            expected = truth(request.known_ids(0, holding.boundary), salt)
            assert slots[holding.live_slot] == expected, f"request {request_id} reads a wrong state"
        for depth in range(start // BLOCK, -(-planned.end // BLOCK)):
            end = (depth + 1) * BLOCK
            is_full = end <= planned.end
            pages[holding.pages[depth]] = truth(request.known_ids(0, end), salt) if is_full else GARBAGE
        writes = [(cut.position, cut.slot) for cut in planned.cuts]
        if planned.fold is not None:
            assert holding.spare_slot is not None
            writes.append((planned.fold, holding.spare_slot))
        for position, slot in writes:
            slots[slot] = truth(request.known_ids(0, position), salt)
