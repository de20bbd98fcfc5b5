"""The C structures of this folder's headers, field for field, and how tensors and rows become them.

A structure holds addresses only: whoever makes one keeps the tensors it points into.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaserve.ops.rows import ExtendRows, PrefillRows

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_MADE = "native"


class Matrix(Structure):
    _fields_ = [("data", c_void_p), ("outs", c_int64), ("ins", c_int64), ("kind", c_int64)]


class GdnSizes(Structure):
    _fields_ = [(name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim")]


class GdnPool(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("states", "windows", "ring_k", "ring_u", "ring_g", "conv_ring")),
        *((name, c_int64) for name in ("state_kind", "ring_width", "state_stride", "window_stride")),
        *((name, c_int64) for name in ("k_stride", "u_stride", "g_stride", "conv_stride")),
    ]


class GdnLayer(Structure):
    _fields_ = [
        ("sizes", GdnSizes),
        *((name, Matrix) for name in ("qkvz", "ba", "out")),
        *((name, c_void_p) for name in ("conv", "rates", "dt_bias", "norm")),
        ("taps", c_int64),
        ("eps", c_double),
    ]


class AttentionSizes(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim")),
        ("scale", c_double),
        ("first_key", c_int64),
    ]


class PagePool(Structure):
    _fields_ = [("pages", c_void_p), ("kind", c_int64), ("stride", c_int64)]


class AttentionLayer(Structure):
    _fields_ = [
        ("sizes", AttentionSizes),
        ("qkv", Matrix),
        ("out", Matrix),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_double),
    ]


class Ffn(Structure):
    _fields_ = [
        *((name, Matrix) for name in ("router", "shared_gate", "gate_up", "down", "shared_up", "shared_down")),
        *((name, c_int64) for name in ("num_experts", "top_k", "renormalize")),
    ]


class _ExtendRows(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "width")),
        *((name, c_void_p) for name in ("rows", "slots", "starts", "num_ring", "num_new", "pages")),
        ("max_pages", c_int64),
    ]


class _PrefillRows(Structure):
    _fields_ = [
        ("num_rows", c_int64),
        *((name, c_void_p) for name in ("offsets", "starts", "rows", "slots_in", "pages")),
        *((name, c_int64) for name in ("max_pages", "num_cuts")),
        ("cuts", c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class Made:
    """A structure with what it points into; `argument` is its address as C takes it."""

    struct: Structure
    kept: tuple[Tensor, ...]
    argument: object


def extend_argument(rows: ExtendRows | None) -> object:
    """The address of the rows' structure, made once a step; None for no rows."""
    if rows is None:
        return None
    made = rows.memo.get(_MADE)
    if made is None:
        made = rows.memo[_MADE] = _extend(rows)
    return made.argument


def prefill_argument(rows: PrefillRows | None) -> object:
    if rows is None:
        return None
    made = rows.memo.get(_MADE)
    if made is None:
        made = rows.memo[_MADE] = _prefill(rows)
    return made.argument


def _extend(rows: ExtendRows) -> Made:
    num_new = torch.tensor(rows.num_new, dtype=torch.int64)
    kept = (rows.rows_R, rows.slots_R, rows.starts_R, rows.num_ring_R, num_new, rows.page_table_RP)
    return _rows(_ExtendRows(rows.num_rows, rows.width), kept, rows.page_table_RP.shape[1])


def _prefill(rows: PrefillRows) -> Made:
    offsets, starts = (torch.tensor(x, dtype=torch.int64) for x in (rows.offsets, rows.starts))
    cuts = torch.tensor(rows.cuts, dtype=torch.int64)
    struct = _PrefillRows(rows.num_rows, num_cuts=len(rows.cuts), cuts=cuts.data_ptr())
    made = _rows(
        struct, (offsets, starts, rows.rows_R, rows.slots_in_R, rows.page_table_RP), rows.page_table_RP.shape[1]
    )
    return Made(made.struct, (*made.kept, cuts), made.argument)


def _rows(struct: Structure, tensors: tuple[Tensor, ...], max_pages: int) -> Made:
    """Fill the pointers of `struct`, which follow one another in the order of `tensors`."""
    kept = tuple(tensor.contiguous() for tensor in tensors)
    pointers = [field[0] for field in struct._fields_ if field[1] is c_void_p and field[0] != "cuts"]
    for name, tensor in zip(pointers, kept, strict=True):
        assert tensor.dtype == torch.int64, (name, tensor.dtype)
        setattr(struct, name, tensor.data_ptr())
    struct.max_pages = max_pages
    return Made(struct, kept, ctypes.byref(struct))


def entry_arguments(
    x_TD: Tensor, residual_TD: Tensor | None, scale_D: Tensor | None
) -> tuple[tuple[int, int | None, int | None], Tensor, Tensor]:
    """How half a layer begins (`struct entry`): arguments x, residual and scale, then a fresh y and total.

    total is x itself where no residual is added.
    """
    scale = None if scale_D is None else scale_D.data_ptr()
    y_TD = torch.empty_like(x_TD)
    if residual_TD is None:
        return (x_TD.data_ptr(), None, scale), y_TD, x_TD
    return (x_TD.data_ptr(), residual_TD.data_ptr(), scale), y_TD, torch.empty_like(x_TD)
