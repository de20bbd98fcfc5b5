"""Paged attention by the C kernels (ops/native/attention.c), alone and as a whole gated attention layer.

Float32 on the CPU; pages of any kind. See the package for shapes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaserve.ops import native
from deltaserve.ops.attention.reference import write
from deltaserve.ops.linear.native import Packed
from deltaserve.ops.native.structs import (
    KINDS,
    AttentionLayer,
    AttentionSizes,
    PagePool,
    entry_arguments,
    extend_argument,
    prefill_argument,
)
from deltaserve.ops.rows import ExtendRows, PrefillRows

__all__ = ["Mixer", "MixerWeights", "extend", "prefill", "write"]


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """qkv (per head D outputs of q and D of its gate; then k; then v) and out as packed; norms [D] float32."""

    qkv: Packed
    out: Packed
    q_norm_D: Tensor
    k_norm_D: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float
    first_key: int


class Mixer:
    """A gated attention layer from its normed input to its output product, in one call."""

    def __init__(self, weights: MixerWeights) -> None:
        kept = (weights.q_norm_D.contiguous(), weights.k_norm_D.contiguous())
        head_dim = len(kept[0])
        sizes = AttentionSizes(weights.num_heads, weights.num_kv_heads, head_dim, head_dim**-0.5, weights.first_key)
        pointers = (tensor.data_ptr() for tensor in kept)
        self._struct = AttentionLayer(sizes, weights.qkv.matrix, weights.out.matrix, *pointers, weights.eps)
        self._kept = (weights, kept)
        self._function = native.function("attention_mixer")
        self._layer = ctypes.byref(self._struct)
        self._pages: Tensor | None = None
        self._pages_argument: object = None

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        scale_D: Tensor,
        pages: Tensor,
        kv_slots_T: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        extend: ExtendRows | None,
        prefill: PrefillRows | None,
    ) -> tuple[Tensor, Tensor]:
        if pages is not self._pages:
            self._pages, self._pages_argument = pages, ctypes.byref(_page_pool(pages))
        cos_TR, sin_TR = cos_sin
        entry, y_TD, total_TD = entry_arguments(x_TD, residual_TD, scale_D)
        outputs = (total_TD.data_ptr(), y_TD.data_ptr())
        positions = (kv_slots_T.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr(), cos_TR.shape[1])
        rows = (extend_argument(extend), prefill_argument(prefill), torch.get_num_threads())
        if self._function(self._layer, self._pages_argument, len(x_TD), *entry, *outputs, *positions, *rows):
            raise MemoryError("no memory for a layer's scratch")
        return y_TD, total_TD


def extend(q_THD: Tensor, pages: Tensor, rows: ExtendRows, scale: float, first_key: int) -> Tensor:
    return _run(q_THD, pages, scale, first_key, extend_argument(rows), None)


def prefill(q_THD: Tensor, pages: Tensor, rows: PrefillRows, scale: float, first_key: int) -> Tensor:
    return _run(q_THD, pages, scale, first_key, None, prefill_argument(rows))


def _run(q_THD: Tensor, pages: Tensor, scale: float, first_key: int, *rows: object) -> Tensor:
    q_THD = q_THD.contiguous()
    sizes = AttentionSizes(q_THD.shape[1], pages.shape[1], q_THD.shape[2], scale, first_key)
    o_THD = torch.empty_like(q_THD)
    pointers = (q_THD.data_ptr(), o_THD.data_ptr())
    if native.function("attention")(
        ctypes.byref(sizes), ctypes.byref(_page_pool(pages)), *pointers, *rows, torch.get_num_threads()
    ):
        raise MemoryError("no memory for attention's scratch")
    return o_THD


def _page_pool(pages: Tensor) -> PagePool:
    """One layer's view [P, G, 2, 64, D], dense but for the first dimension."""
    return PagePool(pages.data_ptr(), KINDS[pages.dtype], pages.stride(0))
