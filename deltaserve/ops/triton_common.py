"""What the Triton kernels of all ops share: where integers of a step get to the device, and how rows fall into chunks.

Kernels read positions, ring lengths and slots from the device tensors of `rows`, so that a step can be launched before
the host knows them. What only the host has (lengths of new tokens, cuts) is copied once a step, from pinned memory and
without waiting, and kept in `rows.memo` for the other layers.

Whoever replays a graph puts "num_new_R" and "fold_ends_F" (int32 tensors of its own) into the memo before the first op.

Letters: R rows, F folds, N chunks of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltaserve.ops.rows import ExtendRows, PrefillRows

CHUNK = 64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunks:
    """The prefill tokens in pieces of 64, each on the grid of its row. All int32.

    row_N, token_N, count_N, index_N   the row, its first token among the packed ones, 1..64 tokens, place in the row
    first_R1                           first chunk of each row, then N
    cut_first_N1, cut_slots            slots that want the window after chunk n: from cut_first[n] to cut_first[n + 1]
    stretch_first_R1                   a row's whole chunks are cut into stretches, first_R1 says which are the row's;
    stretch_end, stretch_slot          a stretch ends before chunk `end`, and its state goes to the slot (-1: nowhere)
    """

    row_N: Tensor
    token_N: Tensor
    count_N: Tensor
    index_N: Tensor
    first_R1: Tensor
    cut_first_N1: Tensor
    cut_slots: Tensor
    stretch_first_R1: Tensor
    stretch_end: Tensor
    stretch_slot: Tensor

    @property
    def num_chunks(self) -> int:
        return len(self.row_N)


def once(rows: ExtendRows | PrefillRows, name: str, make: Callable[[], T]) -> T:
    """`make()`, or what it gave earlier in this step."""
    if name not in rows.memo:
        rows.memo[name] = make()
    made: T = rows.memo[name]
    return made


def to_device(columns: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Each list of ints as an int32 tensor, in one copy that the host does not wait for."""
    flat = torch.tensor([value for column in columns for value in column], dtype=torch.int32)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return flat.split([len(column) for column in columns])


def num_new(rows: ExtendRows) -> Tensor:
    """[R] int32 on the rows' device."""
    return once(rows, "num_new_R", lambda: to_device([rows.num_new], rows.rows_R.device)[0])


def fold_ends(rows: ExtendRows) -> Tensor:
    """[F] int32 on the rows' device."""
    return once(rows, "fold_ends_F", lambda: to_device([rows.fold_ends], rows.rows_R.device)[0])


def chunks(rows: PrefillRows) -> Chunks:
    return once(rows, "chunks", lambda: _chunks(rows))


def _chunks(rows: PrefillRows) -> Chunks:
    row_N, token_N, count_N, index_N, first_R1 = [], [], [], [], [0]
    for row, (start, stop) in enumerate(zip(rows.offsets, rows.offsets[1:], strict=False)):
        for index, token in enumerate(range(start, stop, CHUNK)):
            row_N.append(row)
            token_N.append(token)
            count_N.append(min(CHUNK, stop - token))
            index_N.append(index)
        first_R1.append(len(row_N))
    slots: list[list[int]] = [[] for _ in row_N]
    for row, position, slot in rows.cuts:
        num_tokens = rows.offsets[row + 1] - rows.offsets[row]
        assert 0 < position <= num_tokens and position % CHUNK == 0, f"cut {position} of a row of {num_tokens} tokens"
        slots[first_R1[row] + position // CHUNK - 1].append(slot)
    cut_first_N1 = [0]
    for taken in slots:
        cut_first_N1.append(cut_first_N1[-1] + len(taken))
    cut_slots = [slot for taken in slots for slot in taken] or [0]
    columns = (
        row_N,
        token_N,
        count_N,
        index_N,
        first_R1,
        cut_first_N1,
        cut_slots,
        *_stretches(count_N, first_R1, slots),
    )
    return Chunks(*to_device(columns, rows.rows_R.device))


def _stretches(
    count_N: list[int], first_R1: list[int], slots: list[list[int]]
) -> tuple[list[int], list[int], list[int]]:
    """first_R1, end and slot of the stretches: one for each slot of each cut, and one for what is left."""
    stretch_first_R1, end, slot = [0], list[int](), list[int]()
    for first, stop in pairwise(first_R1):
        for chunk in range(first, stop):
            for wanted in slots[chunk]:
                end.append(chunk + 1)
                slot.append(wanted)
        end.append(stop if count_N[stop - 1] == CHUNK else stop - 1)
        slot.append(-1)
        stretch_first_R1.append(len(end))
    return stretch_first_R1, end, slot


def padded(size: int, least: int = 16) -> int:
    """The power of two that a tile of `size` takes, and at least what a matrix product takes."""
    return max(least, triton.next_power_of_2(size))


def check_rows(*tensors: Tensor) -> None:
    """Kernels take any distance between tokens, but a token's own numbers must lie together."""
    for x in tensors:
        if not x[0].is_contiguous():
            raise RuntimeError(
                f"a token's values must be contiguous, not of shape {tuple(x.shape)}, strides {x.stride()}"
            )


def matrix_descriptor(matrix: Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """A matrix [.., rows, columns], all but columns flattened, for bulk copies of [num_rows, num_columns] at a time."""
    rows = matrix.numel() // matrix.shape[-1]
    assert matrix.is_contiguous(), f"a weight must be contiguous, strides are {matrix.stride()}"
    shape = [rows, matrix.shape[-1]]
    return TensorDescriptor(matrix, shape, [matrix.shape[-1], 1], [num_rows, num_columns])


def takes_bulk_copies(x: Tensor) -> bool:
    """Whether the copy engine can read rows of x: there is one, and rows begin on 16 bytes."""
    return x.device.type == "cuda" and x.shape[-1] * x.dtype.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
