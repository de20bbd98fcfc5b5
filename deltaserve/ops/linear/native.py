"""Products with weights laid out for the C kernels: see `struct matrix` in ops/native/kernels.h.

A weight whose float32 values are all bfloat16 values (as those of bfloat16 checkpoints are) is kept in bfloat16 and
widened in registers: the same arithmetic, half the reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from deltaserve.ops import native
from deltaserve.ops.native.structs import KINDS, Matrix

BLOCK = 64  # outputs side by side
LANES = 16  # outputs are padded to whole vectors


class Packed:
    """A weight [outs, ins], or a stack of them, as the kernels read it. Calling it gives x W^T (of the first)."""

    __slots__ = ("_argument", "_function", "data", "matrix")

    def __init__(self, weights: Tensor, arrange: Callable[[Tensor], Tensor] = torch.Tensor.contiguous) -> None:
        """[O, I] or [E, O, I] float32 on the CPU; copied, after `arrange` has put each matrix in order."""
        stack = weights if weights.ndim == 3 else weights.unsqueeze(0)
        dtype = torch.bfloat16 if is_exact(stack, torch.bfloat16) else torch.float32
        num_outputs, num_inputs = arrange(stack[0]).shape
        first = _lay_out(arrange(stack[0]).to(dtype))
        self.data = first.new_empty(len(stack), len(first))
        for place, weight in zip(self.data, stack, strict=True):
            place.copy_(_lay_out(arrange(weight).to(dtype)))
        self.matrix = Matrix(self.data.data_ptr(), num_outputs, num_inputs, KINDS[dtype])
        self._argument = ctypes.byref(self.matrix)
        self._function = native.function("linear")

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] float32 -> [T, O]."""
        x_TI = x_TI.contiguous()
        num_rows = x_TI.shape[0]
        y_TO = x_TI.new_empty(num_rows, self.matrix.outs)
        if self._function(self._argument, num_rows, x_TI.data_ptr(), y_TO.data_ptr(), torch.get_num_threads()):
            raise MemoryError("no memory for a product's scratch")
        return y_TO


class Table:
    """Rows of a weight [V, D], kept as narrow as it is exact. Calling it with ids gives float32 rows."""

    __slots__ = ("_function", "data")

    def __init__(self, weight_VD: Tensor) -> None:
        dtype = torch.bfloat16 if is_exact(weight_VD, torch.bfloat16) else torch.float32
        self.data = weight_VD.to(dtype).contiguous()
        self._function = native.function("look_up")

    def __call__(self, ids_T: Tensor) -> Tensor:
        """int64 [T], each a row -> [T, D]."""
        num_rows, width = self.data.shape
        ids_T = ids_T.contiguous()
        y_TD = torch.empty(len(ids_T), width)
        table = (self.data.data_ptr(), KINDS[self.data.dtype], num_rows, width)
        if self._function(*table, ids_T.data_ptr(), len(ids_T), y_TD.data_ptr(), torch.get_num_threads()):
            raise IndexError(f"an id is not among the {num_rows} rows of the table")
        return y_TD


def is_exact(weight: Tensor, dtype: torch.dtype) -> bool:
    """True where no value of the weight changes when it is stored as `dtype`."""
    return all(bool((part.to(dtype).float() == part).all()) for part in weight)


def _lay_out(weight_OI: Tensor) -> Tensor:
    """One matrix in the order of the kernels, flat."""
    num_inputs = weight_OI.shape[1]
    step = 2 if weight_OI.dtype == torch.bfloat16 else 1
    padding = (0, -num_inputs % step, 0, -weight_OI.shape[0] % LANES)
    padded = torch.nn.functional.pad(weight_OI, padding)
    blocks = [rows.unflatten(1, (-1, step)).transpose(0, 1).flatten() for rows in padded.split(BLOCK)]
    return torch.cat(blocks)
