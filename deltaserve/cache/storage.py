"""The memory that is remembered between steps: page and slot pools and the per-row rings, as plain tensors.

Zeroed once, here, and never again: a block handed out holds what its last owner left, and correct readers do not read
it. `poison` turns that promise into a test: in debug mode what was given back is filled with NaN, so that whoever still
reads it produces NaN instead of a plausible wrong token. The dummy page and the empty state stay zero.

On the CPU the zeros are the operating system's own (`torch.zeros` would write them): a pool takes memory only where it
has been used.

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

from deltaserve.cache.layout import PoolSizes
from deltaserve.core.config import CacheSpec
from deltaserve.core.plan import DUMMY_PAGE, EMPTY_SLOT
from deltaserve.core.types import BLOCK

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
}
_CACHE_LINE = 64


@dataclass(frozen=True, slots=True)
class CachePools:
    """Field for field what `model.inputs.CacheTensors` describes; that one belongs to the model, this one to the cache.

    pages [P, LA, G, 2, 64, head_dim] kv dtype; states [S, LG, H, K, V] state dtype; windows [S, LG, W - 1, C],
    hiddens [S, D], ring_k [R, LG, 64, J, K], conv_ring [R, LG, W + drafts, C] compute dtype;
    ring_u [R, LG, 64, H, V], ring_g [R, LG, 64, H] float32.
    """

    pages: Tensor
    states: Tensor
    windows: Tensor
    hiddens: Tensor
    ring_k: Tensor
    ring_u: Tensor
    ring_g: Tensor
    conv_ring: Tensor

    def poison(self, pages: Sequence[int] = (), slots: Sequence[int] = (), rows: Sequence[int] = ()) -> None:
        """NaN into blocks that nobody holds any more."""
        assert DUMMY_PAGE not in pages and EMPTY_SLOT not in slots, (pages, slots)
        _fill_nan((self.pages,), pages)
        _fill_nan((self.states, self.windows, self.hiddens), slots)
        _fill_nan((self.ring_k, self.ring_u, self.ring_g, self.conv_ring), rows)


def allocate(spec: CacheSpec, sizes: PoolSizes, device: torch.device | None = None) -> CachePools:
    """All pools of one rank, zero. `device` None is the CPU."""
    layers = spec.num_gdn_layers
    compute, heads = spec.compute_dtype, spec.num_value_heads
    num_attention = spec.num_attention_layers + spec.num_draft_layers

    def zeros(dtype: str, *shape: int) -> Tensor:
        return _zeros(shape, TORCH_DTYPES[dtype], device or torch.device("cpu"))

    return CachePools(
        pages=zeros(spec.kv_dtype, sizes.num_pages, num_attention, spec.num_kv_heads, 2, BLOCK, spec.head_dim),
        states=zeros(spec.state_dtype, sizes.num_slots, layers, heads, spec.key_head_dim, spec.value_head_dim),
        windows=zeros(compute, sizes.num_slots, layers, spec.conv_width - 1, spec.conv_channels),
        hiddens=zeros(compute, sizes.num_slots, spec.hidden_size),
        ring_k=zeros(compute, sizes.num_rows, layers, BLOCK, spec.num_key_heads, spec.key_head_dim),
        ring_u=zeros("float32", sizes.num_rows, layers, BLOCK, heads, spec.value_head_dim),
        ring_g=zeros("float32", sizes.num_rows, layers, BLOCK, heads),
        conv_ring=zeros(compute, sizes.num_rows, layers, spec.conv_ring_width, spec.conv_channels),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU untouched pages of the operating system, from an address that suits vector loads."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size_bytes + _CACHE_LINE, np.uint8)
    offset = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[offset : offset + size_bytes]).view(dtype).view(shape)


def _fill_nan(tensors: Sequence[Tensor], blocks: Sequence[int]) -> None:
    if blocks:
        for tensor in tensors:
            tensor[list(blocks)] = math.nan
