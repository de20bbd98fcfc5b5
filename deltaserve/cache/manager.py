"""Who owns which pages and slots: the scheduler's only door to the cache.

A running request has a `Holding`: the pages of its tokens in order, the live slot (the state at its last boundary)
and a spare slot, into which the next boundary's state is written. The live slot is only read: it may be shared, and
for a cold request it is EMPTY_SLOT, which nobody owns.

| moment                            | pages               | live slot                   | spare slot                 |
| --------------------------------- | ------------------- | --------------------------- | -------------------------- |
| first `reserve`, after `match`    | hit's shared + own  | hit's, shared               | own                        |
| later `reserve`                   | grows               | unchanged                   | own (a new one if missing) |
| a step cuts or folds at b         | unchanged           | read                        | written                    |
| `commit(b)`, once the step is back| unchanged           | the former spare; old given | none                       |
|                                   |                     | back                        |                            |
| `release`                         | all given back      | given back                  | given back                 |

Guaranteed: a request writes only pages and slots that it alone holds; a refused `reserve` changes nothing; `check`
recomputes every count from the holdings. Prefix reuse enters by `match`, which today knows only the empty prefix.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.layout import PoolSizes, num_pages_for
from deltaserve.core.plan import EMPTY_SLOT
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK


@dataclass(frozen=True, slots=True)
class Hit:
    """A resumable prefix: the first `num_tokens` (a multiple of BLOCK) in full `pages`, and the state after them."""

    num_tokens: int
    pages: tuple[int, ...]
    slot: int


EMPTY_HIT = Hit(num_tokens=0, pages=(), slot=EMPTY_SLOT)


@dataclass(slots=True, eq=False)
class Holding:
    """What one running request holds. Only the manager changes it; `boundary` is the position of the live state."""

    pages: list[int]
    boundary: int
    live_slot: int
    spare_slot: int | None = None


class CacheManager:
    """The books of one pair of pools. `make_pool` is how tests put in a pool that refuses at will."""

    def __init__(self, sizes: PoolSizes, make_pool: Callable[[int], BlockPool] = BlockPool) -> None:
        self._pages = make_pool(sizes.num_pages)
        self._slots = make_pool(sizes.num_slots)
        self._holdings: dict[int, Holding] = {}

    @property
    def num_usable_pages(self) -> int:
        return self._pages.num_usable

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    @property
    def num_free_slots(self) -> int:
        return self._slots.num_free

    @property
    def holders(self) -> KeysView[int]:
        """Ids of the requests that hold anything."""
        return self._holdings.keys()

    def match(self, request: Request) -> Hit:
        """The longest prefix of the request's known tokens that can be resumed, one token short of all at most."""
        assert request.num_known > 0
        return EMPTY_HIT

    def reserve(self, request_id: int, num_tokens: int, hit: Hit = EMPTY_HIT, keep_free: int = 0) -> Holding | None:
        """Make the request hold the pages of its first `num_tokens` tokens and a spare slot: all, or None and nothing.

        `hit` counts in the first call only, which opens the holding. Refused too if fewer than `keep_free` pages
        would stay free.
        """
        opened = self._holdings.get(request_id)
        holding = opened or Holding(list(hit.pages), hit.num_tokens, hit.slot)
        num_missing = num_pages_for(num_tokens) - len(holding.pages)
        if num_missing > 0:
            pages = self._pages.reserve(num_missing) if num_missing + keep_free <= self._pages.num_free else None
            if pages is None:
                return None
        else:
            pages = ()
        if holding.spare_slot is None:
            slots = self._slots.reserve(1)
            if slots is None:
                self._pages.release(pages)
                return None
            holding.spare_slot = slots[0]
        if opened is None:
            self._open(request_id, holding)
        if pages:
            holding.pages += pages
        return holding

    def commit(self, request_id: int, boundary: int) -> None:
        """A finished step has written the state at `boundary` to the spare slot, which now is the live one."""
        holding = self._holdings[request_id]
        assert boundary > holding.boundary and boundary % BLOCK == 0, (boundary, holding)
        assert holding.spare_slot is not None, holding
        self._give_back_slot(holding.live_slot)
        holding.live_slot, holding.spare_slot, holding.boundary = holding.spare_slot, None, boundary

    def release(self, request_id: int) -> None:
        """The request holds nothing any more."""
        holding = self._holdings.pop(request_id)
        self._pages.release(holding.pages)
        self._give_back_slot(holding.live_slot)
        if holding.spare_slot is not None:
            self._give_back_slot(holding.spare_slot)

    def check(self) -> None:
        """Recompute both pools from the holdings; AssertionError where the books differ."""
        holdings = self._holdings.values()
        self._pages.check(page for holding in holdings for page in holding.pages)
        slots = [slot for holding in holdings for slot in (holding.live_slot, holding.spare_slot)]
        self._slots.check(slot for slot in slots if slot is not None and slot != EMPTY_SLOT)
        spares = [holding.spare_slot for holding in holdings if holding.spare_slot is not None]
        assert len(set(spares)) == len(spares), f"spare slots shared: {spares}"
        for request_id, holding in self._holdings.items():
            assert len(set(holding.pages)) == len(holding.pages), f"request {request_id} holds a page twice: {holding}"
            assert holding.boundary % BLOCK == 0, (request_id, holding)
            assert holding.live_slot != holding.spare_slot, (request_id, holding)
            assert (holding.boundary == 0) == (holding.live_slot == EMPTY_SLOT), (request_id, holding)

    def _open(self, request_id: int, holding: Holding) -> None:
        """The holding shares what its hit gave: at this moment, its pages and its live slot."""
        self._pages.share(holding.pages)
        if holding.live_slot != EMPTY_SLOT:
            self._slots.share((holding.live_slot,))
        self._holdings[request_id] = holding

    def _give_back_slot(self, slot: int) -> None:
        if slot != EMPTY_SLOT:
            self._slots.release((slot,))
