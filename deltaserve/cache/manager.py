"""Who owns which pages and slots: the only door to the cache for scheduler, engine and simulator.

A running request has a `Holding`: the pages of its tokens in order, the live slot (the state at its last boundary)
and a spare slot, into which the next boundary's state is written. The live slot is only read: it may be shared, and
for a cold request it is EMPTY_SLOT, which nobody owns.

| moment                            | pages               | live slot                   | spare slot                 |
| --------------------------------- | ------------------- | --------------------------- | -------------------------- |
| `open`, after `match`             | hit's shared + own  | hit's, shared               | own                        |
| `reserve`                         | grows               | unchanged                   | own (a new one if missing) |
| `cuts` (a prefill row is planned) | unchanged           | unchanged                   | the last cut's             |
| a step cuts or folds at b         | unchanged           | read                        | written                    |
| `commit(b)`, once the step is back| unchanged           | the former spare; old given | none                       |
|                                   |                     | back                        |                            |
| `release`                         | all given back      | given back                  | given back                 |

How a scheduler uses it, in this order:

    hit = match(request); [hit.awaits > hit.num_tokens: a running request is about to write more of it; better wait]
    open(request, hit, num_tokens)      the row starts at hit.num_tokens; its first plan carries take_block_ops()
    reserve(request, num_tokens)        before every further row
    cuts(request, start, end)           for every prefill row that is planned, once; slot_out is the last cut's slot
    request.num_computed = ...; commit(request, b)      after the step, if the row cut or folded; b is the last boundary
    release(request)                    status still RUNNING: it was preempted and will come back; else it has ended.
                                        is_sound=False: its step failed or was stopped half-way; nothing is kept of it
    take_block_ops()                    last thing before a plan is sent, since all the calls above may queue some

A plan that is stopped half-way (Ctrl-C) may have left its block_ops undone: `reset()` before its rows are released.

After a commit the pages up to the boundary are published under their names, and the slot if that boundary is wanted;
`release` publishes what the request has at its last boundary, whether it has ended or will come back. A request wants
boundaries from the moment it is opened, and another on the same path may wait for them.

Guaranteed: a request writes only pages and slots that it alone holds; a refused `open` or `reserve` changes nothing and
evicts nothing; a spare slot can always be had, since of `num_slots` two are for each row and at most `num_snapshots`
are written as further cuts; nothing is published but what `may_publish` allows; `check` recomputes every count.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.boundaries import Wanted, choose
from deltaserve.cache.content import Content
from deltaserve.cache.content_check import check_content
from deltaserve.cache.layout import PoolSizes, num_pages_for
from deltaserve.cache.lookup import EMPTY_HIT, Hit, Lookup
from deltaserve.cache.offload import free_pages, free_slots
from deltaserve.cache.prefix import Node, PrefixIndex
from deltaserve.cache.publish import Holding, Publisher
from deltaserve.cache.retention import Conversations, Retention, default_retention
from deltaserve.cache.stats import CacheStats
from deltaserve.core.chat import ChatMarkers
from deltaserve.core.config import CacheConfig
from deltaserve.core.events import CacheEvent
from deltaserve.core.plan import EMPTY_SLOT, BlockOp, Cut
from deltaserve.core.request import Request, RequestStatus
from deltaserve.core.types import BLOCK, CacheNote, CacheRecord

__all__ = ["EMPTY_HIT", "CacheManager", "CacheStats", "Hit", "Holding"]


class CacheManager:
    """The books of one pair of pools and of the host tier.

    `identity` names the model (and its adapter): nothing is shared between two of them. `markers` None: no message ends
    are known. `debug` queues POISON, SEAL and PROVE ops. `make_pool` is how tests put in a pool that refuses at will;
    `retention` decides what goes first when room is needed.
    """

    def __init__(
        self,
        sizes: PoolSizes,
        config: CacheConfig = CacheConfig(),  # noqa: B008 frozen
        *,
        identity: str = "",
        markers: ChatMarkers | None = None,
        debug: bool = False,
        make_pool: Callable[[int], BlockPool] = BlockPool,
        retention: Retention | None = None,
    ) -> None:
        self._config = config
        self._markers = markers
        self._max_cuts = sizes.num_snapshots
        self._num_cuts = 0  # slots of cuts in flight, beside spare ones
        self._content = Content(sizes, retention or default_retention(sizes), debug, make_pool)
        self._pages, self._slots = self._content.pages, self._content.slots
        self._lookup = Lookup(identity)
        self._publisher = Publisher(self._content, self._lookup)
        self._conversations = Conversations(config.retained_turns)
        self._holdings: dict[int, Holding] = {}

    @property
    def num_usable_pages(self) -> int:
        return self._pages.num_usable

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing."""
        return self._pages.num_free

    @property
    def num_available_pages(self) -> int:
        """Pages that a request could get: free ones, and those that only the cache holds."""
        return self._pages.num_available

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def num_available_slots(self) -> int:
        return self._slots.num_available

    @property
    def holders(self) -> KeysView[int]:
        """Ids of the requests that hold anything."""
        return self._holdings.keys()

    @property
    def index(self) -> PrefixIndex:
        """To look at only."""
        return self._content.index

    @property
    def stats(self) -> CacheStats:
        return self._content.counted()

    def match(self, request: Request) -> Hit:
        """The longest prefix of the request's known tokens that can be resumed, one token short of all at most."""
        assert request.num_known > 0
        if not self._config.enable_prefix_caching:
            return EMPTY_HIT
        if request.params.prompt_logprobs is not None and not request.output_ids:
            return Hit(0, note=CacheNote.PROMPT_LOGPROBS)
        return self._lookup.find(self._content.index, request)[0]

    def open(self, request: Request, hit: Hit, num_tokens: int, keep_free: int = 0) -> Holding | None:
        """The request takes its hit, pages for its first `num_tokens` tokens and a spare slot; or None, and nothing.

        Refused too if fewer than `keep_free` pages would stay available, or if the hit is no longer true (match again).
        Sets `request.cache_record`.
        """
        assert request.id not in self._holdings and num_tokens >= hit.num_tokens, (request.id, num_tokens, hit)
        path: list[Node] = []
        if hit.num_tokens:
            found, node = self._lookup.find(self._content.index, request)
            if found.num_tokens != hit.num_tokens:
                return None
            path = self._content.index.path(node)
        holding = self._take(path, num_tokens, keep_free)
        if holding is None:
            return None
        self._holdings[request.id] = holding
        self._count(request, hit)
        if self._config.enable_prefix_caching:
            self._start_turn(request, holding, path, hit)
        return holding

    def reserve(self, request: Request, num_tokens: int) -> Holding | None:
        """The pages of the first `num_tokens` tokens and a spare slot: all, or None and nothing changes."""
        holding = self._holdings[request.id]
        num_pages = max(num_pages_for(num_tokens) - len(holding.pages), 0)
        taken = self._reserve(num_pages, num_slots=int(holding.spare_slot is None))
        if taken is None:
            return None
        pages, slots = taken
        if pages:
            holding.pages += pages
        if slots:
            holding.spare_slot = slots[0]
        return holding

    def cuts(self, request: Request, start: int, end: int) -> tuple[Cut, ...]:
        """Where a prefill row [start, end) keeps its state: () if there is no boundary in (start, end].

        The last is the last boundary, into the spare slot; before it come the wanted ones for which there are slots.
        """
        holding = self._holdings[request.id]
        boundary = end // BLOCK * BLOCK
        self._give_back_cuts(holding)
        if boundary <= start:
            return ()
        assert holding.spare_slot is not None, holding
        for wanted in holding.wanted[::-1]:
            if start < wanted.position < boundary and not self._is_known(request, wanted.position):
                self._cut(request, holding, wanted)
        return (*holding.cuts, Cut(boundary, holding.spare_slot))

    def commit(self, request: Request, boundary: int) -> None:
        """A finished step has written the state at `boundary` to the spare slot, which now is the live one.

        `request.num_computed` counts the tokens computed and accepted, this step's among them.
        """
        holding = self._holdings[request.id]
        assert boundary > holding.boundary and boundary % BLOCK == 0, (boundary, holding)
        assert boundary <= request.num_computed, (boundary, request.num_computed)
        assert holding.spare_slot is not None, holding
        former = holding.live_slot
        holding.live_slot, holding.spare_slot, holding.boundary = holding.spare_slot, None, boundary
        if self._config.enable_prefix_caching:
            self._publisher.record(request, holding)
            self._publisher.publish(request, holding)
        self._give_back_cuts(holding)
        self._give_back(former)

    def release(self, request: Request, is_sound: bool = True) -> None:
        """The request holds nothing any more. The cache keeps what it had up to its boundary.

        Unless not `is_sound`: then the cache also drops what the request has published since it was opened.
        """
        holding = self._holdings.pop(request.id)
        self._publisher.pass_wanted(request, holding, request.num_known)
        if not is_sound:
            self._publisher.withdraw(holding, self._holdings.values())
        elif holding.is_donor and holding.boundary:
            self._publisher.donate(request, holding, is_preempted=request.status is RequestStatus.RUNNING)
        self._give_back_cuts(holding)
        self._content.give_back_pages(holding.pages)
        self._give_back(holding.live_slot)
        if holding.spare_slot is not None:
            self._give_back(holding.spare_slot)

    def forget(self, request: Request) -> None:
        """A waiting request will not come back: what was kept for it is as any other."""
        self._publisher.forget(request)

    def take_block_ops(self) -> tuple[BlockOp, ...]:
        """Those queued since the last call, in order; they belong into the next plan."""
        ops = tuple(self._content.ops)
        self._content.ops.clear()
        return ops

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Those since the last call, in order. If nobody takes them the oldest are dropped, and counted."""
        return self._content.events.take()

    def reset(self) -> None:
        """Forget all that is only cached. What runs now keeps what it holds, and the cache will keep nothing of it."""
        self._publisher.reset(list(self._holdings.values()))
        self._conversations.clear()
        self._content.reset()

    def check(self) -> None:
        """Recompute every count; AssertionError where the books differ. O(pools)."""
        holdings = list(self._holdings.values())
        slots = [slot for holding in holdings for slot in (holding.live_slot, holding.spare_slot)]
        slots += [cut.slot for holding in holdings for cut in holding.cuts]
        held = [slot for slot in slots if slot is not None and slot != EMPTY_SLOT]
        check_content(self._content, [page for holding in holdings for page in holding.pages], held)
        assert self._num_cuts == sum(len(holding.cuts) for holding in holdings) <= self._max_cuts, self._num_cuts
        num_promised = sum(len(holding.wanted) for holding in holdings)
        assert self._lookup.promised.total() == num_promised, (self._lookup.promised, num_promised)
        for request_id, holding in self._holdings.items():
            self._check_holding(request_id, holding)

    def _check_holding(self, request_id: int, holding: Holding) -> None:
        assert len(set(holding.pages)) == len(holding.pages), f"request {request_id} holds a page twice: {holding}"
        assert holding.boundary % BLOCK == 0, (request_id, holding)
        assert (holding.boundary == 0) == (holding.live_slot == EMPTY_SLOT), (request_id, holding)
        for slot in (holding.spare_slot, *(cut.slot for cut in holding.cuts)):
            is_own = slot is None or (self._slots.num_holders(slot) == 1 and not self._slots.is_evictable(slot))
            assert is_own, f"request {request_id} writes slot {slot}, which another holds too"
            assert slot is None or self._content.versions[slot] is None, f"slot {slot} is yet to be written"
        assert all(wanted.position > holding.boundary for wanted in holding.wanted), (request_id, holding)

    def _take(self, path: list[Node], num_tokens: int, keep_free: int) -> Holding | None:
        """The hit's blocks, brought back from the host where they are there, and the request's own."""
        content, snapshot = self._content, path[-1].snapshot if path else None
        shared = [node.page for node in path if node.page is not None]
        on_host = [node for node in path if node.page is None]
        num_pages = num_pages_for(num_tokens) - len(shared)
        # Asked before anything is touched: who waits for pages asks in every step, however long its hit.
        if num_pages + keep_free + self._pages.count_evictable(shared) > self._pages.num_available:
            return None
        if snapshot is not None:
            content.pin(path, snapshot)
        num_slots = 1 + (snapshot is not None and snapshot.slot is None)
        taken = self._reserve(num_pages, num_slots, keep_free)
        if taken is None:
            if snapshot is not None:
                content.unpin(path, snapshot)
            return None
        pages, slots = taken
        for node, page in zip(on_host, pages, strict=False):
            content.restore_page(node, page)
        live_slot = EMPTY_SLOT
        if snapshot is not None:
            live_slot = content.lend_slot(snapshot, *slots[1:])
            content.prove(path, snapshot)
        holding = Holding([*shared, *pages], len(path) * BLOCK, live_slot, slots[0])
        holding.num_hit_blocks = len(path)
        holding.tip = path[-1] if path else None
        return holding

    def _start_turn(self, request: Request, holding: Holding, path: list[Node], hit: Hit) -> None:
        """What the request wants ahead of it, and what it has use for behind it."""
        ids = request.known_ids(0, request.num_known)
        keys = self._lookup.extend(request, request.num_known)
        self._content.chances.looked_up(keys[: (request.num_known - 1) // BLOCK])
        branch_at = hit.num_matched if hit.num_matched > hit.num_tokens else 0
        config = self._config
        wanted = choose(ids, self._markers, config.retained_turns, config.snapshot_interval, branch_at)
        snapshot = path[-1].snapshot if path else None
        holding.is_donor = True
        holding.conversation, aged = self._conversations.start_turn(request, snapshot)
        self._publisher.forget(request)
        self._use(holding, path, [each for each in wanted if each.position <= hit.num_tokens])
        for old in aged:
            self._content.rank_anew(old)
        self._publisher.want(request, holding, [each for each in wanted if each.position > hit.num_tokens])

    def _use(self, holding: Holding, path: list[Node], wanted: list[Wanted]) -> None:
        """The hit's snapshot is used, those wanted on the way to it stay of use."""
        assert holding.conversation is not None
        nodes = {path[each.position // BLOCK - 1] for each in wanted}
        if path:
            nodes.add(path[-1])
        for node in nodes:
            if node.snapshot is not None:
                node.snapshot.last_use = self._content.now
                node.snapshot.num_uses += node is path[-1]
                holding.conversation.want(node.snapshot)
                self._content.rank_anew(node.snapshot)

    def _count(self, request: Request, hit: Hit) -> None:
        request.cache_record = CacheRecord(
            len(request.prompt_ids), hit.num_tokens, hit.num_matched, hit.num_restored, hit.note
        )
        stats = self._content.stats
        stats.num_looked_up += request.num_known
        stats.num_hit += hit.num_tokens
        stats.num_restored += hit.num_restored
        self._content.now += request.num_known

    def _reserve(
        self, num_pages: int, num_slots: int, keep_free: int = 0
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """All or nothing, and nothing is evicted in vain."""
        if num_pages + keep_free > self._pages.num_available or num_slots > self._slots.num_available:
            return None
        free_pages(self._content, num_pages)
        free_slots(self._content, num_slots)
        pages = self._pages.reserve(num_pages)
        slots = self._slots.reserve(num_slots) if pages is not None else None
        if pages is None or slots is None:
            self._pages.release(pages or ())
            return None
        for slot in slots:
            self._content.versions[slot] = None
        return pages, slots

    def _is_known(self, request: Request, position: int) -> bool:
        node = self._content.index.nodes.get(request.block_hashes[position // BLOCK - 1])
        return node is not None and node.snapshot is not None

    def _cut(self, request: Request, holding: Holding, wanted: Wanted) -> None:
        taken = self._reserve(0, 1) if self._num_cuts < self._max_cuts else None
        if taken is None:
            self._publisher.give_up(request, holding, wanted)
        else:
            self._num_cuts += 1
            holding.cuts.append(Cut(wanted.position, taken[1][0]))

    def _give_back_cuts(self, holding: Holding) -> None:
        for cut in holding.cuts:
            self._content.give_back_slot(cut.slot)
        self._num_cuts -= len(holding.cuts)
        holding.cuts.clear()

    def _give_back(self, slot: int) -> None:
        if slot != EMPTY_SLOT:
            self._content.give_back_slot(slot)
