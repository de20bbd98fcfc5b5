"""Causal grouped-query attention over pages of 64 tokens.

A page of one layer is [G, 2, 64, D]: per KV head, 64 keys, then 64 values. Attention reads pages only, never the
fresh k and v: `write` comes first. What a page holds beyond a row's context is never read into a result, NaN included.
Keys before position `first_key` are not seen either (the draft head has none at 0); a token there sees itself alone.
Query heads are in consecutive groups: KV head g serves query heads g * H/G .. (g + 1) * H/G - 1.

Letters: T tokens, H query heads, G KV heads, D head size, P pages, R rows.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.attention import native, reference
from deltaserve.ops.attention.native import Mixer, MixerWeights
from deltaserve.ops.dispatch import choose
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.rows import ExtendRows, PrefillRows

__all__ = ["Mixer", "MixerWeights", "extend", "mix", "prefill", "write"]

IMPLEMENTATIONS = {"reference": reference, "native": native, "triton": Lazy("deltaserve.ops.attention.triton")}


def write(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, kv_slots_T: Tensor, force: str | None = None) -> None:
    """Store k and v of T tokens at kv_slots (page id * 64 + position % 64).

    pages [P, G, 2, 64, D] is one layer's view, float32, bfloat16 or float8_e4m3fn; values are cast, for float8 after
    clamping to its range.
    """
    choose(IMPLEMENTATIONS, pages, force).write(k_TGD, v_TGD, pages, kv_slots_T)


def prefill(
    q_THD: Tensor, pages: Tensor, rows: PrefillRows, scale: float, first_key: int = 0, force: str | None = None
) -> Tensor:
    """Attention of packed prefill rows -> [T, H, D] in q's dtype: position p of a row sees positions first_key .. p."""
    return choose(IMPLEMENTATIONS, q_THD, force).prefill(q_THD, pages, rows, scale, first_key)


def extend(
    q_THD: Tensor, pages: Tensor, rows: ExtendRows, scale: float, first_key: int = 0, force: str | None = None
) -> Tensor:
    """Attention of T = rows * width tokens -> [T, H, D] in q's dtype: token i sees positions first_key .. start + i.

    A token beyond num_new of its row gets a finite output that means nothing.
    """
    return choose(IMPLEMENTATIONS, q_THD, force).extend(q_THD, pages, rows, scale, first_key)


def mix(
    mixer: Mixer,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    scale_D: Tensor,
    pages: Tensor,
    kv_slots_T: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    extend: ExtendRows | None,
    prefill: PrefillRows | None,
) -> tuple[Tensor, Tensor]:
    """Norm and a whole layer by its prepared weights: (mixer(norm(x + residual)), x + residual), all [T, D].

    A residual of None is zero. The first output lacks the sum over ranks. Extend rows' tokens come first. Writes keys
    and values at kv_slots.
    """
    return mixer(x_TD, residual_TD, scale_D, pages, kv_slots_T, cos_sin, extend, prefill)
