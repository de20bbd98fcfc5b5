"""The whole model of the family: token table, layers (three GDN to one attention), final norm, head, draft head.

One forward pass serves every row of a step. It first folds the rings that are full, so that each row starts from the
state of its latest boundary; nothing else about rows is decided here.

Letters: T tokens, D model width, N chosen tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltaserve.core.errors import ConfigError
from deltaserve.model.config import GDN, ModelConfig
from deltaserve.model.inputs import BatchInputs, DraftInputs
from deltaserve.model.layers import (
    Attention,
    Block,
    DecoderLayer,
    Embedding,
    GatedDeltaNet,
    Head,
    Norm,
)
from deltaserve.model.moe import feed_forward
from deltaserve.model.mtp import DraftHead, fold_hiddens, keep_cut_hiddens
from deltaserve.model.params import Parameter
from deltaserve.model.rope import Rotary
from deltaserve.ops import conv, gdn
from deltaserve.parallel.mesh import Mesh


class Qwen3_5(Block):
    """Build it under torch.device("meta"); the loader fills the parameters. `mtp` is None without a draft head."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        config.check_tensor_parallel(mesh.size)
        self.config = config
        self.rotary = Rotary(config)
        self.embed = Embedding(config, mesh, dtype)
        self.layers = nn.ModuleList(_layers(config, mesh, dtype))
        self.norm = Norm(config.hidden_size, config, mesh)
        self.lm_head = Head(_head_weight(config, self.embed, mesh, dtype), mesh)
        self.mtp = DraftHead(config, mesh, dtype) if config.num_mtp_layers else None

    def forward(self, inputs: BatchInputs) -> Tensor:
        """Hidden [T, D] after the final norm. Writes KV, rings, states at cuts; folds first."""
        self._fold(inputs)
        cos_sin = self.rotary.cos_sin(inputs.positions_T)
        x_TD, residual_TD = self.embed(inputs.token_ids_T), None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, inputs, cos_sin)
        hidden_TD = self.norm.add(x_TD, residual_TD)[0]
        if inputs.caches.last_hiddens is not None:
            keep_cut_hiddens(hidden_TD, inputs)
        return hidden_TD

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, vocabulary] float32, gathered over ranks. Takes the main model's hidden or the draft head's."""
        return self.lm_head(hidden_ND)

    def draft(self, inputs: DraftInputs) -> Tensor:
        """One pass of the draft head: hidden [N, D] of the tokens that guess; `logits` turns it into the guess.

        Writes the head's keys and values of all T tokens. Raises ConfigError where the checkpoint has no head.
        """
        if self.mtp is None:
            raise ConfigError("this checkpoint has no draft head (mtp.* tensors); run it without speculation")
        cos_sin = self.rotary.cos_sin(inputs.positions_T)
        return self.mtp(self.embed(inputs.token_ids_T), inputs, cos_sin)

    def _fold(self, inputs: BatchInputs) -> None:
        rows, caches = inputs.extend, inputs.caches
        if rows is None or not rows.fold_ends:
            return
        gdn.fold(caches.states, caches.ring_k, caches.ring_u, caches.ring_g, rows, self.force)
        conv.fold(caches.windows, caches.conv_ring, rows, self.force)
        if caches.last_hiddens is not None:
            fold_hiddens(caches.hiddens, caches.last_hiddens, rows)


def _layers(config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> list[DecoderLayer]:
    """Each mixer is told how many of its kind come before it."""
    layers = []
    for i, kind in enumerate(config.layer_types):
        mixer_type = GatedDeltaNet if kind == GDN else Attention
        mixer = mixer_type(config, mesh, dtype, layer=config.layer_types[:i].count(kind))
        layers.append(DecoderLayer(mixer, feed_forward(config, config.moe_layers[i], mesh, dtype), config, mesh))
    return layers


def _head_weight(config: ModelConfig, embed: Embedding, mesh: Mesh, dtype: torch.dtype) -> Parameter:
    if config.tie_word_embeddings:
        return embed.weight
    return Parameter((config.vocab_size, config.hidden_size), dtype, embed.weight.placement, mesh.rank, mesh.size)
