"""The memory that is remembered between steps: page and slot pools, per-row rings, and the host tier, as plain tensors.

Zeroed once, here, and never again: a block handed out holds what its last owner left, and correct readers do not read
it. `poison` turns that promise into a test: in debug mode what was given back is filled with NaN, so that whoever still
reads it produces NaN instead of a plausible wrong token. The dummy page and the empty state stay zero.

On the CPU the zeros are the operating system's own (`torch.zeros` would write them): a pool takes memory only where it
has been used.

The host tier has blocks of the same layout, one tensor a field, so that a block moves by plain copies. Beside a GPU its
memory is pinned, which makes the copies asynchronous.

Letters: P pages, S slots, R rows, LA attention layers (main, then draft), LG GDN layers, G KV heads, J GDN key heads,
H GDN value heads, W conv width, C conv channels, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaserve.cache.layout import NO_HOST, HostSizes, PoolSizes
from deltaserve.core.config import CacheSpec
from deltaserve.core.plan import DUMMY_PAGE, EMPTY_SLOT
from deltaserve.core.types import BLOCK

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
CPU = torch.device("cpu")
_CACHE_LINE = 64
_Shapes = dict[str, tuple[str, tuple[int, ...]]]  # field: type, shape


@dataclass(frozen=True, slots=True)
class CachePools:
    """Field for field what `model.inputs.CacheTensors` describes; that one belongs to the model, this one to the cache.

    pages [P, LA, G, 2, 64, head_dim] kv dtype; states [S, LG, H, K, V] state dtype; windows [S, LG, W - 1, C],
    hiddens [S, D], ring_k [R, LG, 64, J, K], conv_ring [R, LG, W + drafts, C] compute dtype;
    ring_u [R, LG, 64, H, V], ring_g [R, LG, 64, H] float32; last_hiddens [R, D] compute dtype, None without
    drafts.
    """

    pages: Tensor
    states: Tensor
    windows: Tensor
    hiddens: Tensor
    ring_k: Tensor
    ring_u: Tensor
    ring_g: Tensor
    conv_ring: Tensor
    last_hiddens: Tensor | None = None

    def block_fields(self, is_slot: bool) -> tuple[Tensor, ...]:
        """The tensors that together hold a slot, or a page; block id first."""
        return (self.states, self.windows, self.hiddens) if is_slot else (self.pages,)

    def poison(self, pages: Sequence[int] = (), slots: Sequence[int] = (), rows: Sequence[int] = ()) -> None:
        """NaN into blocks that nobody holds any more."""
        assert DUMMY_PAGE not in pages and EMPTY_SLOT not in slots, (pages, slots)
        _fill_nan(self.block_fields(is_slot=False), pages)
        _fill_nan(self.block_fields(is_slot=True), slots)
        rings = (self.ring_k, self.ring_u, self.ring_g, self.conv_ring, self.last_hiddens)
        _fill_nan([ring for ring in rings if ring is not None], rows)


@dataclass(frozen=True, slots=True)
class HostPools:
    """Pages and slots in host memory: the shapes and types of the device's, but for their number."""

    pages: Tensor
    states: Tensor
    windows: Tensor
    hiddens: Tensor

    def block_fields(self, is_slot: bool) -> tuple[Tensor, ...]:
        return (self.states, self.windows, self.hiddens) if is_slot else (self.pages,)


def allocate(spec: CacheSpec, sizes: PoolSizes, device: torch.device | None = None) -> CachePools:
    """All pools of one rank, zero. `device` None is the CPU."""
    blocks = _block_shapes(spec, sizes.num_pages, sizes.num_slots)
    shapes = blocks | _ring_shapes(spec, sizes.num_rows)
    tensors = {name: _zeros(shape, TORCH_DTYPES[dtype], device or CPU) for name, (dtype, shape) in shapes.items()}
    return CachePools(**tensors)


def allocate_host(spec: CacheSpec, sizes: HostSizes, is_pinned: bool = False) -> HostPools | None:
    """The second tier of one rank, zero; block 0 of each kind is never used. None where there is no such tier."""
    if sizes == NO_HOST:
        return None
    shapes = _block_shapes(spec, 1 + sizes.num_pages, 1 + sizes.num_slots)
    make = _pinned_zeros if is_pinned else _zeros
    return HostPools(**{name: make(shape, TORCH_DTYPES[dtype], CPU) for name, (dtype, shape) in shapes.items()})


def _block_shapes(spec: CacheSpec, num_pages: int, num_slots: int) -> _Shapes:
    """Type and shape of each field of pages and slots, on either tier."""
    layers, compute = spec.num_gdn_layers, spec.compute_dtype
    num_attention = spec.num_attention_layers + spec.num_draft_layers
    state = (spec.num_value_heads, spec.key_head_dim, spec.value_head_dim)
    return {
        "pages": (spec.kv_dtype, (num_pages, num_attention, spec.num_kv_heads, 2, BLOCK, spec.head_dim)),
        "states": (spec.state_dtype, (num_slots, layers, *state)),
        "windows": (compute, (num_slots, layers, spec.conv_width - 1, spec.conv_channels)),
        "hiddens": (compute, (num_slots, spec.hidden_size)),
    }


def _ring_shapes(spec: CacheSpec, num_rows: int) -> _Shapes:
    layers, heads, compute = spec.num_gdn_layers, spec.num_value_heads, spec.compute_dtype
    shapes: _Shapes = {
        "ring_k": (compute, (num_rows, layers, BLOCK, spec.num_key_heads, spec.key_head_dim)),
        "ring_u": ("float32", (num_rows, layers, BLOCK, heads, spec.value_head_dim)),
        "ring_g": ("float32", (num_rows, layers, BLOCK, heads)),
        "conv_ring": (compute, (num_rows, layers, spec.conv_ring_width, spec.conv_channels)),
    }
    if spec.num_drafts:
        shapes["last_hiddens"] = (compute, (num_rows, spec.hidden_size))
    return shapes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU untouched pages of the operating system, from an address that suits vector loads."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size_bytes + _CACHE_LINE, np.uint8)
    offset = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[offset : offset + size_bytes]).view(dtype).view(shape)


def _pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device, pin_memory=True)


def _fill_nan(tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
    if blocks:
        for tensor in tensors:
            tensor[list(blocks)] = math.nan
