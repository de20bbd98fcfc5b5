"""Depthwise causal convolution of width W, then SiLU, over the input q | k | v of a GDN layer.

The convolution of a token needs the W - 1 inputs before it. At a boundary they are the slot's *window*; a running row
keeps its last inputs in a *conv ring*: entry p % ring width belongs to absolute position p. Rejected drafts are rolled
back by moving the row's position; their entries are simply overwritten.

Letters: T tokens, C channels, W conv width, S slots, R rows of the ring table, LG GDN layers.

| who     | reads                        | writes                                                        |
| ------- | ---------------------------- | ------------------------------------------------------------- |
| prefill | windows[slots_in]            | windows of every cut; ring: the last W - 1 inputs of the row  |
| extend  | ring: W - 1 inputs before    | ring: the row's real tokens                                   |
| fold    | ring: W - 1 inputs before    | windows[fold_out], all layers                                 |
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.conv import reference
from deltaserve.ops.dispatch import choose
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.rows import ExtendRows, PrefillRows

IMPLEMENTATIONS = {
    "reference": reference,
    "native": reference,  # the C kernels convolve inside gdn.mix; what is left here are copies
    "triton": Lazy("deltaserve.ops.conv.triton"),
}


def prefill(
    x_TC: Tensor, weight_CW: Tensor, windows: Tensor, conv_ring: Tensor, rows: PrefillRows, force: str | None = None
) -> Tensor:
    """silu(conv(x)) [T, C] of packed prefill rows.

    windows [S, W-1, C] and conv_ring [R, ring width, C] are one layer's views, written in place. Positions before 0
    are what the window of slot 0 holds: zeros.
    """
    return choose(IMPLEMENTATIONS, x_TC, force).prefill(x_TC, weight_CW, windows, conv_ring, rows)


def extend(x_TC: Tensor, weight_CW: Tensor, conv_ring: Tensor, rows: ExtendRows, force: str | None = None) -> Tensor:
    """silu(conv(x)) [T, C] of T = rows * width tokens; conv_ring [R, ring width, C], written in place.

    Tokens beyond num_new of a row get a finite output and leave the ring alone. The ring width must be at least
    W - 1 + width.
    """
    return choose(IMPLEMENTATIONS, x_TC, force).extend(x_TC, weight_CW, conv_ring, rows)


def fold(windows: Tensor, conv_ring: Tensor, rows: ExtendRows, force: str | None = None) -> None:
    """windows[fold_out] <- the last W - 1 inputs before fold_ends, for all layers at once.

    windows [S, LG, W-1, C], conv_ring [R, LG, ring width, C].
    """
    choose(IMPLEMENTATIONS, windows, force).fold(windows, conv_ring, rows)
