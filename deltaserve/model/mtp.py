"""The draft head (MTP): one more attention layer that guesses the token after next.

At position t it consumes the token there and the main model's hidden of position t - 1, taken after the final norm:

    z = fc([norm_embedding(embed(token_t)) | norm_hidden(hidden_{t-1})]);   h_t = norm(layer(z))

and the main model's head turns h_t into logits for position t + 1. Its KV is stored at t, in the last layer of the
same pages, so a page depends only on tokens inside and before it. Position 0 has no hidden before it: its key is
hidden from attention and its output means nothing. To draft further, h_t takes the place of the hidden at t.

Letters: T tokens, D model width, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.model.config import ModelConfig
from deltaserve.model.inputs import BatchInputs
from deltaserve.model.layers import Attention, Block, DecoderLayer, Linear, Norm, Rope
from deltaserve.model.moe import feed_forward
from deltaserve.parallel.mesh import Mesh


class DraftHead(Block):
    """Shares the main model's token table and head; owns everything else."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.fc = Linear((hidden, 2 * hidden), mesh, dtype)
        self.norm_embedding = Norm(hidden, config, mesh)
        self.norm_hidden = Norm(hidden, config, mesh)
        mixer = Attention(config, mesh, dtype, layer=config.num_attention_layers, first_key=1)
        self.layer = DecoderLayer(mixer, feed_forward(config, config.is_moe, mesh, dtype), config, mesh)
        self.norm = Norm(hidden, config, mesh)

    def forward(self, embedded_TD: Tensor, before_TD: Tensor, inputs: BatchInputs, cos_sin: Rope) -> Tensor:
        """Hidden after the head's own norm. `before_TD` holds, for each token, the hidden of the position before."""
        both = torch.cat((self.norm_embedding(embedded_TD), self.norm_hidden(before_TD)), dim=-1)
        x_TD, residual_TD = self.layer(self.fc(both), None, inputs, cos_sin)
        return self.norm.add(x_TD, residual_TD)[0]


def keep_hiddens(hidden_TD: Tensor, inputs: BatchInputs) -> None:
    """Writes what later steps may ask for: each row's latest hiddens, and at every cut the hidden before it."""
    extend, prefill, ring = inputs.extend, inputs.prefill, inputs.caches.hidden_ring
    assert ring is not None
    n, width = inputs.num_extend_tokens, ring.shape[1]
    if extend is not None:
        entries_RW = inputs.positions_T[:n].view(-1, extend.width) % width
        ring[extend.rows_R[:, None], entries_RW] = hidden_TD[:n].view(-1, extend.width, hidden_TD.shape[1])
    if prefill is not None:
        lasts = torch.tensor(prefill.offsets[1:], device=hidden_TD.device) + (n - 1)
        ring[prefill.rows_R, inputs.positions_T[lasts] % width] = hidden_TD[lasts]
        for row, tokens, slot in prefill.cuts:
            inputs.caches.hiddens[slot] = hidden_TD[n + prefill.offsets[row] + tokens - 1]


def fold_hiddens(inputs: BatchInputs) -> None:
    """At a fold, the hidden before the new boundary goes to the new snapshot."""
    extend, ring = inputs.extend, inputs.caches.hidden_ring
    assert extend is not None and ring is not None
    entries_F = torch.tensor(extend.fold_ends, device=ring.device) - 1
    inputs.caches.hiddens[extend.fold_out_F] = ring[extend.fold_rows_F, entries_F % ring.shape[1]]


def hiddens_before(hidden_TD: Tensor, inputs: BatchInputs) -> Tensor:
    """[T, D]: the hidden of the position before each token, once `keep_hiddens` has run for the step.

    Within a row it is the neighbour's. Before its first token it is the ring's for an extend row, the snapshot's for
    a prefill row (zeros before position 0).
    """
    extend, prefill, caches = inputs.extend, inputs.prefill, inputs.caches
    assert caches.hidden_ring is not None
    before_TD = hidden_TD.roll(1, dims=0)
    n = inputs.num_extend_tokens
    if extend is not None:
        entries_R = (inputs.positions_T[: n : extend.width] - 1) % caches.hidden_ring.shape[1]
        before_TD[: n : extend.width] = caches.hidden_ring[extend.rows_R, entries_R]
    if prefill is not None:
        firsts = torch.tensor(prefill.offsets[:-1], device=hidden_TD.device) + n
        before_TD[firsts] = caches.hiddens[prefill.slots_in_R]
    return before_TD
