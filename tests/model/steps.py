"""A naive owner of pools and rows, to drive a model without cache, scheduler or runner.

It hands out pages and slots in rising order and never takes any back, and it builds every tensor with Python loops:
a second reading of the contract in `ops.rows` and `model.inputs`. Everything but the dummy page and the empty slot
starts as NaN, so that reading what was never written shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltaserve.core.types import BLOCK
from deltaserve.model.config import ModelConfig
from deltaserve.model.inputs import BatchInputs, CacheTensors, DraftInputs
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.ops.rows import ExtendRows, PrefillRows


@dataclass(eq=False)
class Sequence:
    """One request: `length` tokens computed, its pages, the slot of its latest boundary.

    `last` is the hidden of its last token, from the snapshot where it resumes; None before position 0.
    """

    row: int
    length: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    boundary: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)  # boundary -> slot
    last: Tensor | None = None

    @property
    def num_ring(self) -> int:
        return self.length - self.boundary


def empty_caches(
    config: ModelConfig,
    *,
    pages: int,
    slots: int,
    rows: int,
    tp: int = 1,
    drafts: int = 0,
    dtype: torch.dtype = torch.float32,
) -> CacheTensors:
    """Pools of this rank's sizes. KV, conv inputs, keys and hiddens have `dtype`; the rest is float32."""
    spec = config.cache_spec(tp_size=tp, num_drafts=drafts)
    layers, gdn = spec.num_attention_layers + spec.num_draft_layers, spec.num_gdn_layers
    keys, values = (spec.num_key_heads, spec.key_head_dim), (spec.num_value_heads, spec.value_head_dim)

    def pool(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=kind)

    caches = CacheTensors(
        pages=pool(pages, layers, spec.num_kv_heads, 2, BLOCK, spec.head_dim),
        states=pool(slots, gdn, values[0], keys[1], values[1], kind=torch.float32),
        windows=pool(slots, gdn, spec.conv_width - 1, spec.conv_channels),
        hiddens=pool(slots, spec.hidden_size),
        ring_k=pool(rows, gdn, BLOCK, *keys),
        ring_u=pool(rows, gdn, BLOCK, *values, kind=torch.float32),
        ring_g=pool(rows, gdn, BLOCK, values[0], kind=torch.float32),
        conv_ring=pool(rows, gdn, spec.conv_ring_width, spec.conv_channels),
        last_hiddens=pool(rows, spec.hidden_size) if config.num_mtp_layers else None,
    )
    for kept in (caches.pages, caches.states, caches.windows, caches.hiddens):
        kept[0] = 0
    return caches


class Driver:
    """Runs steps of one model over sequences that it opens. Rows of a step: extend first, prefill after."""

    def __init__(self, model: Qwen3_5, caches: CacheTensors) -> None:
        self.model, self.caches = model, caches
        self.next_page, self.next_slot, self.next_row = 1, 1, 0
        # Of the latest step: what went in, what came out flat, and how many tokens each row has, padded and real.
        self.inputs: BatchInputs
        self.hidden: Tensor
        self.sizes: list[tuple[int, int]]
        self.rows: list[tuple[Sequence, int, Tensor | None]]  # sequence, first position, the hidden before it
        self.before: Tensor | None = None  # takes the place of the hiddens before each token

    def open(self) -> Sequence:
        self.next_row += 1
        return Sequence(self.next_row - 1)

    def resume(self, other: Sequence, boundary: int) -> Sequence:
        """A new sequence on another's snapshot and pages up to there."""
        sequence = self.open()
        sequence.length = sequence.boundary = boundary
        sequence.slot = other.snapshots[boundary]
        sequence.pages = other.pages[: boundary // BLOCK]
        sequence.last = self.caches.hiddens[sequence.slot].clone()
        return sequence

    @torch.no_grad()
    def step(
        self,
        extend: list[tuple[Sequence, list[int]]] | None = None,
        prefill: list[tuple[Sequence, list[int]]] | None = None,
        *,
        width: int | None = None,
        every_cut: bool = True,
    ) -> list[Tensor]:
        """Hidden of each row's real tokens, [n, D] a row, in the order given."""
        extend, prefill = extend or [], prefill or []
        self.rows = [(s, s.length, s.last) for s, _ in extend + prefill]
        width = width or max((len(ids) for _, ids in extend), default=0)
        folds = [self._fold(s) for s, _ in extend if s.num_ring == BLOCK]
        tokens, positions, kv_slots = self._flat(extend, prefill, width)
        extend_rows = self._extend_rows(extend, width, folds) if extend else None
        prefill_rows = self._prefill_rows(prefill, every_cut) if prefill else None
        as_tensors = (torch.tensor(x, dtype=torch.int64) for x in (tokens, positions, kv_slots))
        self.inputs = BatchInputs(*as_tensors, extend_rows, prefill_rows, self.caches)
        self.hidden = self.model(self.inputs)
        self.sizes = [(width, len(ids)) for _, ids in extend] + [(len(ids), len(ids)) for _, ids in prefill]
        hiddens = self._by_row(self.hidden)
        for (sequence, _, _), hidden in zip(self.rows, hiddens, strict=True):
            self.keep(sequence, hidden[-1])
        return hiddens

    def keep(self, sequence: Sequence, last: Tensor) -> None:
        """What the runner does once it knows which token of the row was the last accepted one."""
        sequence.last = last
        if self.caches.last_hiddens is not None:
            self.caches.last_hiddens[sequence.row] = last

    @torch.no_grad()
    def draft(self) -> list[Tensor]:
        """The draft head on the latest step's tokens, each of which guesses: hidden of each row, as `step` gives it."""
        inputs, contexts, sequences, real = self.inputs, [], [], []
        first = 0
        for (sequence, start, _), (padded, count) in zip(self.rows, self.sizes, strict=True):
            real += range(first, first + count)
            contexts += range(start + 1, start + count + 1)
            sequences += [sequence] * count
            first += padded
        numbers, none = torch.tensor([sequence.row for sequence in sequences]), torch.empty(0, dtype=torch.int64)
        starts = torch.tensor(contexts) - 1
        table = _table(sequences)
        rows = ExtendRows(
            1, numbers, numbers, starts, numbers, (1,) * len(real), tuple(contexts), table, none, none, none, ()
        )
        tokens = (inputs.token_ids_T, inputs.positions_T, inputs.kv_slots_T)
        drafted = self.model.draft(DraftInputs(*tokens, self._before(), torch.tensor(real), rows, self.caches))
        return list(drafted.split([count for _, count in self.sizes]))

    @torch.no_grad()
    def store(self) -> None:
        """The draft head's keys and values of the latest step's tokens, and nothing else."""
        tokens = (self.inputs.token_ids_T, self.inputs.positions_T, self.inputs.kv_slots_T)
        self.model.draft(DraftInputs(*tokens, self._before(), None, None, self.caches))

    def _before(self) -> Tensor:
        """[T, D]: the hidden of the position before each token of the latest step."""
        if self.before is not None:
            return self.before
        before = self.hidden.roll(1, dims=0)
        first = 0
        for (_, _, last), (padded, _) in zip(self.rows, self.sizes, strict=True):
            before[first] = 0 if last is None else last
            first += padded
        return before

    def _by_row(self, hidden: Tensor) -> list[Tensor]:
        parts = hidden.split([padded for padded, _ in self.sizes])
        return [part[:real] for part, (_, real) in zip(parts, self.sizes, strict=True)]

    def _fold(self, sequence: Sequence) -> tuple[int, int, int, int]:
        old, sequence.slot = sequence.slot, self._new_slot()
        sequence.boundary = sequence.length
        sequence.snapshots[sequence.boundary] = sequence.slot
        return sequence.row, old, sequence.slot, sequence.boundary

    def _new_slot(self) -> int:
        self.next_slot += 1
        return self.next_slot - 1

    def _grow(self, sequence: Sequence, length: int) -> None:
        while len(sequence.pages) * BLOCK < length:
            sequence.pages.append(self.next_page)
            self.next_page += 1

    def _flat(self, extend: list, prefill: list, width: int) -> tuple[list[int], list[int], list[int]]:
        tokens, positions, kv_slots = [], [], []
        for is_extend, rows in ((True, extend), (False, prefill)):
            for sequence, ids in rows:
                self._grow(sequence, sequence.length + len(ids))
                for i in range(width if is_extend else len(ids)):
                    position, is_real = sequence.length + i, i < len(ids)
                    tokens.append(ids[i] if is_real else 0)
                    positions.append(position)
                    page = sequence.pages[position // BLOCK] if is_real else 0
                    kv_slots.append(page * BLOCK + position % BLOCK)
        return tokens, positions, kv_slots

    def _extend_rows(self, extend: list, width: int, folds: list[tuple[int, int, int, int]]) -> ExtendRows:
        sequences = [sequence for sequence, _ in extend]
        rows = ExtendRows(
            width=width,
            rows_R=torch.tensor([s.row for s in sequences]),
            slots_R=torch.tensor([s.slot for s in sequences]),
            starts_R=torch.tensor([s.length for s in sequences]),
            num_ring_R=torch.tensor([s.num_ring for s in sequences]),
            num_new=tuple(len(ids) for _, ids in extend),
            contexts=tuple(s.length + len(ids) for s, ids in extend),
            page_table_RP=_table(sequences),
            fold_rows_F=torch.tensor([fold[0] for fold in folds], dtype=torch.int64),
            fold_in_F=torch.tensor([fold[1] for fold in folds], dtype=torch.int64),
            fold_out_F=torch.tensor([fold[2] for fold in folds], dtype=torch.int64),
            fold_ends=tuple(fold[3] for fold in folds),
        )
        for sequence, ids in extend:
            sequence.length += len(ids)
            assert sequence.num_ring <= BLOCK
        return rows

    def _prefill_rows(self, prefill: list, every_cut: bool) -> PrefillRows:
        offsets, starts, slots_in, cuts = [0], [], [], []
        for r, (sequence, ids) in enumerate(prefill):
            start, end = sequence.length, sequence.length + len(ids)
            assert start == sequence.boundary, "a prefill row starts on a boundary"
            offsets.append(offsets[-1] + len(ids))
            starts.append(start)
            slots_in.append(sequence.slot)
            boundaries = range(start + BLOCK, end + 1, BLOCK)
            for boundary in boundaries if every_cut else boundaries[-1:]:
                sequence.slot, sequence.boundary = self._new_slot(), boundary
                sequence.snapshots[boundary] = sequence.slot
                cuts.append((r, boundary - start, sequence.slot))
            sequence.length = end
        return PrefillRows(
            offsets=tuple(offsets),
            starts=tuple(starts),
            rows_R=torch.tensor([sequence.row for sequence, _ in prefill]),
            slots_in_R=torch.tensor(slots_in),
            cuts=tuple(cuts),
            page_table_RP=_table([sequence for sequence, _ in prefill]),
        )


def _table(sequences: list[Sequence]) -> Tensor:
    width = max(len(s.pages) for s in sequences)
    return torch.tensor([s.pages + [0] * (width - len(s.pages)) for s in sequences])
