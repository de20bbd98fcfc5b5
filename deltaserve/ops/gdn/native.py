"""The gated delta rule by the C kernels (ops/native/gdn.c, gdn_mixer.c), op by op and as a whole layer.

Float32 on the CPU; states may be 16-bit. See the package for shapes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deltaserve.ops import native
from deltaserve.ops.gdn.reference import gates, normalize
from deltaserve.ops.linear.native import Packed
from deltaserve.ops.native.structs import (
    KINDS,
    GdnLayer,
    GdnPool,
    GdnSizes,
    entry_arguments,
    extend_argument,
    prefill_argument,
)
from deltaserve.ops.rows import ExtendRows, PrefillRows

__all__ = ["Mixer", "MixerWeights", "Pool", "extend", "fold", "gates", "normalize", "prefill"]

MAX_TAPS = 8  # of the convolution; as in gdn_mixer.c


class Pool(Protocol):
    """One layer's views of the pools."""

    @property
    def states(self) -> Tensor: ...
    @property
    def windows(self) -> Tensor: ...
    @property
    def ring_k(self) -> Tensor: ...
    @property
    def ring_u(self) -> Tensor: ...
    @property
    def ring_g(self) -> Tensor: ...
    @property
    def conv_ring(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """qkvz (outputs q | k | v | z), ba (b | a) and out as packed; conv_CW; A_log and dt_bias [H]; norm [V]; float32."""

    qkvz: Packed
    ba: Packed
    out: Packed
    conv_CW: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    norm_V: Tensor
    num_key_heads: int
    key_dim: int
    eps: float


class Mixer:
    """A GDN layer from its normed input to its output product, in one call."""

    def __init__(self, weights: MixerWeights) -> None:
        sizes = (weights.num_key_heads, len(weights.A_log_H), weights.key_dim, len(weights.norm_V))
        kept = (
            weights.conv_CW.t().contiguous(),
            weights.A_log_H.exp().neg(),
            weights.dt_bias_H.contiguous(),
            weights.norm_V.contiguous(),
        )
        taps = kept[0].shape[0]
        assert taps <= MAX_TAPS, taps
        matrices = (weights.qkvz.matrix, weights.ba.matrix, weights.out.matrix)
        pointers = (tensor.data_ptr() for tensor in kept)
        self._struct = GdnLayer(GdnSizes(*sizes), *matrices, *pointers, taps, weights.eps)
        self._kept = (weights, kept)
        self._function = native.function("gdn_mixer")
        self._layer = ctypes.byref(self._struct)
        self._pool: Pool | None = None
        self._pool_argument: object = None

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        scale_D: Tensor,
        pool: Pool,
        extend: ExtendRows | None,
        prefill: PrefillRows | None,
    ) -> tuple[Tensor, Tensor]:
        if pool is not self._pool:
            self._pool, self._pool_argument = pool, ctypes.byref(_pool_struct(pool))
        entry, y_TD, total_TD = entry_arguments(x_TD, residual_TD, scale_D)
        rows = (extend_argument(extend), prefill_argument(prefill), torch.get_num_threads())
        if self._function(
            self._layer, self._pool_argument, len(x_TD), *entry, total_TD.data_ptr(), y_TD.data_ptr(), *rows
        ):
            raise MemoryError("no memory for a layer's scratch")
        return y_TD, total_TD


def _pool_struct(pool: Pool) -> GdnPool:
    return _struct(pool.states, pool.ring_k, pool.ring_u, pool.ring_g, pool.windows, pool.conv_ring)


def _struct(
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    windows: Tensor | None = None,
    conv_ring: Tensor | None = None,
) -> GdnPool:
    """Raises RuntimeError unless dimensions but the first lie densely in memory, as views of whole pools do."""
    for pool in (states, ring_k, ring_u, ring_g, windows, conv_ring):
        if pool is not None and not pool[0].is_contiguous():
            raise RuntimeError(f"pools lie densely within a slot or row; this one has strides {pool.stride()}")
    struct = GdnPool(
        states=states.data_ptr(),
        ring_k=ring_k.data_ptr(),
        ring_u=ring_u.data_ptr(),
        ring_g=ring_g.data_ptr(),
        state_kind=KINDS[states.dtype],
        state_stride=states.stride(0),
        k_stride=ring_k.stride(0),
        u_stride=ring_u.stride(0),
        g_stride=ring_g.stride(0),
    )
    if windows is not None and conv_ring is not None:
        struct.windows, struct.window_stride = windows.data_ptr(), windows.stride(0)
        struct.conv_ring, struct.conv_stride, struct.ring_width = (
            conv_ring.data_ptr(),
            conv_ring.stride(0),
            conv_ring.shape[1],
        )
    return struct


def extend(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: ExtendRows,
) -> Tensor:
    return _run("gdn_extend", (q_TJK, k_TJK, v_THV, g_TH, beta_TH), (states, ring_k, ring_u, ring_g), rows)


def prefill(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: PrefillRows,
) -> Tensor:
    return _run("gdn_prefill", (q_TJK, k_TJK, v_THV, g_TH, beta_TH), (states, ring_k, ring_u, ring_g), rows)


def _run(name: str, inputs: tuple[Tensor, ...], pools: tuple[Tensor, ...], rows: ExtendRows | PrefillRows) -> Tensor:
    q_TJK, k_TJK, v_THV, g_TH, beta_TH = (x.contiguous() for x in inputs)
    sizes = GdnSizes(q_TJK.shape[1], v_THV.shape[1], q_TJK.shape[2], v_THV.shape[2])
    o_THV = torch.empty_like(v_THV)
    argument = extend_argument(rows) if isinstance(rows, ExtendRows) else prefill_argument(rows)
    pointers = [x.data_ptr() for x in (q_TJK, k_TJK, v_THV, g_TH, beta_TH, o_THV)]
    if native.function(name)(
        ctypes.byref(sizes), ctypes.byref(_struct(*pools)), argument, *pointers, torch.get_num_threads()
    ):
        raise MemoryError("no memory for the gated delta rule's scratch")
    return o_THV


def fold(states: Tensor, ring_k: Tensor, ring_u: Tensor, ring_g: Tensor, rows: ExtendRows) -> None:
    num_layers, num_heads, key_dim, value_dim = states.shape[1:]
    sizes, count = GdnSizes(ring_k.shape[3], num_heads, key_dim, value_dim), len(rows.fold_ends)
    slots = [x.contiguous() for x in (rows.fold_rows_F, rows.fold_in_F, rows.fold_out_F)]
    structs = (ctypes.byref(sizes), ctypes.byref(_struct(states, ring_k, ring_u, ring_g)))
    pointers = (x.data_ptr() for x in slots)
    if native.function("gdn_fold")(*structs, num_layers, count, *pointers, torch.get_num_threads()):
        raise MemoryError("no memory for a fold's scratch")
