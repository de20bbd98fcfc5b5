"""The draft head (MTP): one more attention layer that guesses the token after next.

At position t it consumes the token there and the main model's hidden of position t - 1, taken after the final norm:

    z = fc([norm_embedding(embed(token_t)) | norm_hidden(hidden_{t-1})]);   h_t = norm(layer(z))

and the main model's head turns h_t into logits for position t + 1. Its KV is stored at t, in the last layer of the
same pages, so a page depends only on tokens inside and before it. Position 0 has no hidden before it: its key is
hidden from attention and its output means nothing. To draft further, h_t takes the place of the hidden at t.

Keys and values depend on z alone, so a token that guesses nothing costs two products at most: a long prompt passes
through the head for the price of its keys, and its last token alone goes through attention and FFN. A few tokens a row
are sooner computed whole, and then dropped.

Letters: T tokens, N of them that guess, D model width, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.model.config import ModelConfig
from deltaserve.model.inputs import BatchInputs, DraftInputs
from deltaserve.model.layers import Attention, Block, DecoderLayer, Linear, Norm, Rope
from deltaserve.model.moe import feed_forward
from deltaserve.ops.rows import ExtendRows
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

    def forward(self, embedded_TD: Tensor, inputs: DraftInputs, cos_sin: Rope) -> Tensor:
        """Hidden [N, D] after the head's own norm; writes keys and values of all T tokens."""
        both = torch.cat((self.norm_embedding(embedded_TD), self.norm_hidden(inputs.before_TD)), dim=-1)
        z_TD = self.fc(both)
        if inputs.rows is None or inputs.rows.num_tokens < len(embedded_TD):
            return self._guess(z_TD, inputs, cos_sin)
        x_TD, residual_TD = self.layer(z_TD, None, _as_batch(inputs), cos_sin)
        if inputs.lasts_N is not None:
            x_TD, residual_TD = x_TD[inputs.lasts_N], residual_TD[inputs.lasts_N]
        return self.norm.add(x_TD, residual_TD)[0]

    def _guess(self, z_TD: Tensor, inputs: DraftInputs, cos_sin: Rope) -> Tensor:
        """Keys and values of all tokens; attention and what follows for those alone that guess, one a row."""
        layer, mixer, lasts_N = self.layer, self.layer.mixer, inputs.lasts_N
        assert isinstance(mixer, Attention)
        h_TD, residual_TD = layer.input_norm.add(z_TD, None)
        q_TNA, gate_TNA = mixer.project(h_TD, inputs.kv_slots_T, inputs.caches, cos_sin)
        if inputs.rows is None:
            return z_TD[:0]
        o_NNA = mixer.extend(inputs.caches, inputs.rows, q_TNA[lasts_N])
        h_ND, residual_ND = layer.post_norm.add(mixer.output(o_NNA, gate_TNA[lasts_N]), residual_TD[lasts_N])
        return self.norm.add(layer.mesh.all_reduce(layer.mlp(h_ND)), residual_ND)[0]


def _as_batch(inputs: DraftInputs) -> BatchInputs:
    """A pass whose rows hold all of its tokens is like a decode or verify step."""
    tokens = (inputs.token_ids_T, inputs.positions_T, inputs.kv_slots_T)
    return BatchInputs(*tokens, extend=inputs.rows, prefill=None, caches=inputs.caches)


def keep_cut_hiddens(hidden_TD: Tensor, inputs: BatchInputs) -> None:
    """At every cut of a prefill row, the hidden before it goes to the snapshot."""
    prefill = inputs.prefill
    if prefill is None:
        return
    for row, tokens, slot in prefill.cuts:
        inputs.caches.hiddens[slot] = hidden_TD[inputs.num_extend_tokens + prefill.offsets[row] + tokens - 1]


def fold_hiddens(hiddens: Tensor, last_hiddens: Tensor, rows: ExtendRows) -> None:
    """At a fold, the hidden before the new boundary goes to the new snapshot."""
    hiddens[rows.fold_out_F] = last_hiddens[rows.fold_rows_F]
