"""Everything one forward pass reads and writes. The runner fills it; the model never asks for more.

Letters: T tokens of the step, P pages, S slots, R rows of the ring tables,
LA attention layers (main, then draft), LG GDN layers, G KV heads, J GDN key heads, H GDN value heads, D model width,
K and V head sizes, C conv channels, W conv width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from deltaserve.ops.rows import ExtendRows, PrefillRows


@dataclass(frozen=True, slots=True)
class GdnLayer:
    """One GDN layer's views of the pools and rings below: the same letters without LG."""

    states: Tensor
    windows: Tensor
    ring_k: Tensor
    ring_u: Tensor
    ring_g: Tensor
    conv_ring: Tensor


@dataclass(frozen=True, slots=True)
class CacheTensors:
    """The pools and per-row tables, whole. Layers read theirs through `attention_layers` and `gdn_layers`, made once.

    pages       [P, LA, G, 2, 64, head_dim]  0 is K, after norm and rope; 1 is V
    states      [S, LG, H, K, V]             state at a boundary; slot 0 stays zero
    windows     [S, LG, W - 1, C]            conv inputs of the W - 1 positions before that boundary, oldest first
    hiddens     [S, D]                       final-norm hidden of the last position before it (for the draft head)
    ring_k      [R, LG, 64, J, K]            entry p % 64 belongs to absolute position p
    ring_u      [R, LG, 64, H, V]            float32
    ring_g      [R, LG, 64, H]               float32, log decay of each position, not summed
    conv_ring   [R, LG, W + drafts, C]       entry p % (W + drafts) is the conv input of position p
    last_hiddens [R, D]                      final-norm hidden of a row's last accepted position, written where that
                                             closes a block: the fold that comes next puts it into the snapshot. None
                                             where no draft head is used, and then `hiddens` is not written either
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
    attention_layers: tuple[Tensor, ...] = field(init=False, repr=False)
    gdn_layers: tuple[GdnLayer, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rings = (self.ring_k, self.ring_u, self.ring_g, self.conv_ring)
        views = zip(*(pool.unbind(1) for pool in (self.states, self.windows, *rings)), strict=True)
        object.__setattr__(self, "attention_layers", self.pages.unbind(1))
        object.__setattr__(self, "gdn_layers", tuple(GdnLayer(*view) for view in views))


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One step: extend rows' tokens first (rows * width of them), then the prefill rows' tokens, packed.

    token_ids_T, positions_T  int64 [T]
    kv_slots_T                int64 [T], page id * 64 + position % 64: where the token's KV goes (padding: dummy page)
    extend, prefill           None where the step has no such rows
    """

    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    extend: ExtendRows | None
    prefill: PrefillRows | None
    caches: CacheTensors

    @property
    def num_extend_tokens(self) -> int:
        return self.extend.num_tokens if self.extend is not None else 0


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """One pass of the draft head: T tokens whose keys and values are stored, N of which go on to guess the next token.

    token_ids_T, positions_T, kv_slots_T  as in BatchInputs
    before_TD                             the hidden of the position before each token
    lasts_N                               int64 [N]: which of the T; None: all of them, in order
    rows                                  either all T tokens, padded to a common width, or one of width 1 for each of
                                          the N; None where N is 0
    """

    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    before_TD: Tensor
    lasts_N: Tensor | None
    rows: ExtendRows | None
    caches: CacheTensors
