"""How the tokens of a step are laid out, for ops that need more than a flat [T, ...] tensor.

A step's T tokens are: the extend rows (decode and verify), `num_new` tokens each, padded to a common width; then the
prefill rows, packed. Host values are plain ints, so that a reference can loop over them; tensors are int64 on the
model's device. R counts rows of one kind. `memo` is for kernels: what one derives from the rows it keeps there, so that
the layers of a step share it; a runner that replays graphs puts tensors of its own into it beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Decode and verify rows: `width` tokens each, of which the first num_new[r] are real.

    rows_R      place of the request in the ring tables
    slots_R     slot of the state at the row's boundary (after this step's fold)
    starts_R    absolute position of the row's first token
    num_ring_R  ring entries before this step (after the fold), start - boundary, 0..63
    num_new     [R] host ints, 1..width; num_ring + num_new <= 64
    contexts    [R] host ints: start + num_new, the tokens attention sees from the last real token
    page_table_RP  page ids of each row, padded with the dummy page
    fold_*      the rows (indices into the ring tables) whose ring is full: state of fold_in and ring go to fold_out
    """

    width: int
    rows_R: Tensor
    slots_R: Tensor
    starts_R: Tensor
    num_ring_R: Tensor
    num_new: tuple[int, ...]
    contexts: tuple[int, ...]
    page_table_RP: Tensor
    fold_rows_F: Tensor
    fold_in_F: Tensor
    fold_out_F: Tensor
    fold_ends: tuple[int, ...]  # absolute position of each fold's new boundary
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return len(self.num_new)

    @property
    def num_tokens(self) -> int:
        return self.width * len(self.num_new)


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Prefill rows: row r owns tokens [offsets[r], offsets[r + 1]) of the prefill part, from absolute starts[r].

    starts are multiples of 64, rings are empty. `cuts` are (row index r, tokens after starts[r], slot): a multiple of
    64 tokens into the row, the state there (and its conv window) goes to the slot. The tokens after the last multiple
    of 64 go to the ring. slots_in_R holds the state (and conv window) before the row's first token.
    """

    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    rows_R: Tensor
    slots_in_R: Tensor
    cuts: tuple[tuple[int, int, int], ...]
    page_table_RP: Tensor
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]
