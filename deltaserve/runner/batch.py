"""From a plan to the tensors of one step.

The builder keeps one thing between steps: the page table, which plans only extend. Everything else is made anew from
the plan, in plan order, so nothing can be left over from rows that came, went or changed places.

All integers of a step are made in numpy and reach the device in one copy (`staging.py`): a tensor operation per row
would cost more than the rest of this file. The tokens of padded extend rows continue the row's positions, and their KV
goes to the dummy page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from deltaserve.core.plan import DUMMY_PAGE, Logits, Row, RowKind, StepPlan
from deltaserve.core.types import BLOCK
from deltaserve.model.inputs import BatchInputs, CacheTensors
from deltaserve.ops.rows import ExtendRows, PrefillRows
from deltaserve.runner.sampler import num_logits
from deltaserve.runner.staging import Ints, Staging

_TOKENS, _POSITIONS, _KV_SLOTS = range(3)
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Scored:
    """A prefill row all of whose positions need logits: tokens [first, stop) of the step's T."""

    row: Row
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The model's inputs, and which of the T outputs are wanted.

    `firsts` says where each row's tokens begin among the T. `sampled` are the rows that give tokens, in plan order,
    from the outputs `sampled_tokens_N` (int64 [N]): those of a VERIFY row's every token, of another's last.
    """

    inputs: BatchInputs
    firsts: tuple[int, ...]
    scored: tuple[Scored, ...]
    sampled: tuple[Row, ...]
    sampled_tokens_N: Tensor


class BatchBuilder:
    """Rows 0 .. num_rows - 1, each of at most `max_pages` pages. `pages` [rows, max_pages] is the page table."""

    def __init__(self, num_rows: int, max_pages: int, caches: CacheTensors) -> None:
        self.pages = np.full((num_rows, max_pages), DUMMY_PAGE, np.int64)
        self._caches = caches
        self._staging = Staging(caches.pages.device)

    def build(self, plan: StepPlan) -> Batch:
        """O(rows + tokens + pages that the rows see). The batch's tensors can be used at once."""
        for row in plan.rows:
            if row.new_pages or row.page_offset == 0:
                self._take_pages(row)
        num_extend = sum(row.kind != RowKind.PREFILL for row in plan.rows)
        extend, prefill = plan.rows[:num_extend], plan.rows[num_extend:]
        assert all(row.kind == RowKind.PREFILL for row in prefill), "prefill rows come last"
        width = max((len(row.token_ids) for row in extend), default=0)
        offsets = tuple(accumulate((len(row.token_ids) for row in prefill), initial=0))
        num_extend_tokens = width * num_extend
        flat_3T = np.empty((3, num_extend_tokens + offsets[-1]), np.int64)
        extend_rows = self._extend(extend, width, flat_3T[:, :num_extend_tokens]) if extend else None
        prefill_rows = self._prefill(prefill, offsets, flat_3T[:, num_extend_tokens:]) if prefill else None
        token_ids_T, positions_T, kv_slots_T = self._staging.put(flat_3T).unbind()
        inputs = BatchInputs(token_ids_T, positions_T, kv_slots_T, extend_rows, prefill_rows, self._caches)
        starts = [width * place for place in range(num_extend)]
        starts += [num_extend_tokens + offset for offset in offsets[:-1]]
        batch = self._choose(plan.rows, starts, inputs)
        self._staging.send()
        return batch

    def _take_pages(self, row: Row) -> None:
        """A request that starts clears what the row's last one left."""
        if row.page_offset == 0:
            self.pages[row.row] = DUMMY_PAGE
        self.pages[row.row, row.page_offset : row.page_offset + len(row.new_pages)] = row.new_pages

    def _page_table(self, rows_R: Ints, num_tokens: int) -> Tensor:
        """[R, pages of the longest], the dummy page beyond a row's own."""
        return self._staging.put(self.pages[rows_R, : -(-num_tokens // BLOCK)])

    def _extend(self, rows: Sequence[Row], width: int, flat_3T: Ints) -> ExtendRows:
        numbers = [(row.row, row.slot_in, row.slot_out, row.start, row.num_ring) for row in rows]
        columns = np.array(numbers, np.int64).T.copy()
        rows_R, slots_in_R, slots_out_R, starts_R, num_ring_R = columns
        num_new = tuple(len(row.token_ids) for row in rows)
        contexts = tuple(row.start + count for row, count in zip(rows, num_new, strict=True))
        self._lay_out(rows, width, rows_R, starts_R, num_new, flat_3T)
        folds = np.flatnonzero(num_ring_R == BLOCK)
        fold_rows_F = fold_in_F = fold_out_F = _NONE
        if folds.size:
            fold_rows_F, fold_in_F, fold_out_F = self._staging.put(columns[:3, folds]).unbind()
            slots_in_R[folds] = slots_out_R[folds]
            num_ring_R[folds] = 0
        rows_tensor, slots_tensor, _, starts_tensor, num_ring_tensor = self._staging.put(columns).unbind()
        return ExtendRows(
            width,
            rows_tensor,
            slots_tensor,
            starts_tensor,
            num_ring_tensor,
            num_new,
            contexts,
            self._page_table(rows_R, max(contexts)),
            fold_rows_F,
            fold_in_F,
            fold_out_F,
            tuple(rows[place].start for place in folds.tolist()),
        )

    def _lay_out(
        self,
        rows: Sequence[Row],
        width: int,
        rows_R: Ints,
        starts_R: Ints,
        num_new: tuple[int, ...],
        flat_3T: Ints,
    ) -> None:
        """Tokens, positions and KV places of extend rows."""
        if width == 1:
            flat_3T[_TOKENS] = [row.token_ids[0] for row in rows]
            flat_3T[_POSITIONS] = starts_R
            flat_3T[_KV_SLOTS] = self.pages[rows_R, starts_R // BLOCK] * BLOCK + starts_R % BLOCK
            return
        tokens_RW = [row.token_ids + (0,) * (width - count) for row, count in zip(rows, num_new, strict=True)]
        positions_RW = starts_R[:, None] + np.arange(width)
        places_RW = np.minimum(positions_RW // BLOCK, self.pages.shape[1] - 1)
        is_real_RW = np.arange(width) < np.array(num_new)[:, None]
        pages_RW = np.where(is_real_RW, self.pages[rows_R[:, None], places_RW], DUMMY_PAGE)
        flat_3T[_TOKENS] = np.array(tokens_RW, np.int64).reshape(-1)
        flat_3T[_POSITIONS] = positions_RW.reshape(-1)
        flat_3T[_KV_SLOTS] = (pages_RW * BLOCK + positions_RW % BLOCK).reshape(-1)

    def _prefill(self, rows: Sequence[Row], offsets: tuple[int, ...], flat_3T: Ints) -> PrefillRows:
        for row, first, stop in zip(rows, offsets, offsets[1:], strict=False):
            assert row.start % BLOCK == 0 and row.num_ring == 0, row
            positions = np.arange(row.start, row.start + stop - first)
            flat_3T[_TOKENS, first:stop] = row.token_ids
            flat_3T[_POSITIONS, first:stop] = positions
            flat_3T[_KV_SLOTS, first:stop] = self.pages[row.row, positions // BLOCK] * BLOCK + positions % BLOCK
        rows_R = np.array([row.row for row in rows], np.int64)
        slots_in_R = np.array([row.slot_in for row in rows], np.int64)
        cuts = ((place, cut.position - row.start, cut.slot) for place, row in enumerate(rows) for cut in row.cuts)
        longest = max(row.start + len(row.token_ids) for row in rows)
        return PrefillRows(
            offsets,
            tuple(row.start for row in rows),
            self._staging.put(rows_R),
            self._staging.put(slots_in_R),
            tuple(cuts),
            self._page_table(rows_R, longest),
        )

    def _choose(self, rows: tuple[Row, ...], starts: Sequence[int], inputs: BatchInputs) -> Batch:
        """`starts`: where the tokens of each row begin among the step's."""
        scored, sampled = [], []
        sampled_tokens: list[int] = []
        for row, first in zip(rows, starts, strict=True):
            stop = first + len(row.token_ids)
            if row.logits == Logits.ALL and row.kind == RowKind.PREFILL:
                scored.append(Scored(row, first, stop))
            if row.is_last:
                sampled.append(row)
                sampled_tokens += range(stop - num_logits(row), stop)
        sampled_tokens_N = self._staging.put(np.array(sampled_tokens, np.int64))
        return Batch(inputs, tuple(starts), tuple(scored), tuple(sampled), sampled_tokens_N)
