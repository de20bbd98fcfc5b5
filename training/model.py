"""The whole model for training: hidden states, and the losses of the main head and of the draft head.

Weights are a dictionary of float32 tensors by their released names. `Model` runs the layers over packed sequences that
start from an empty state; documents in one sequence see each other.

The draft layer is trained as it is used, on its own drafts. At depth 1 position t takes token t and the main hidden of
t - 1 and guesses token t + 1. At depth s it takes the depth s - 1 output of t - 1 in place of the hidden, and sees what
a request would see then: keys from main hiddens up to t - s + 1 and keys of the drafts since. Position 0 has no hidden
before it and is left out: entry i of the draft layer's sequences is position i + 1 (rotary angles are relative).

Letters as in `training.layers`; B sequences of S tokens, T = B * S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from training import attention, gdn, layers
from training.layers import Weights
from training.shape import Shape, read_shape


@dataclass(frozen=True, slots=True)
class Settings:
    """How the maths is run: dtype of products, chunk of the recurrence, compiled or not."""

    dtype: torch.dtype = torch.bfloat16
    chunk: int = 64
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Losses:
    """Per-token losses [B, S] float32 and hits, of the main head and of each draft depth; the experts' balance.

    Entry i of `drafts` is for the first B' sequences: [B', S]; [:, t] judges the guess of token t + 2 (t >= depth - 1).
    """

    main: Tensor
    hits: Tensor
    drafts: list[Tensor]
    draft_hits: list[Tensor]
    balance: Tensor


class Model:
    """The weights with the functions that use them."""

    def __init__(self, shape: Shape, weights: Weights, settings: Settings = Settings()) -> None:
        self.shape, self.weights, self.settings = shape, weights, settings
        self.layers = [_part(weights, f"model.layers.{i}.") for i in range(shape.layers)]
        self.draft_layer = _part(weights, "mtp.layers.0.")
        self.draft_weights = {n: w for n, w in weights.items() if n.startswith("mtp.") and "layers" not in n}
        self.embed = weights["model.embed_tokens.weight"]
        self.ropes: dict[int, tuple[Tensor, Tensor]] = {}
        self._enter_gdn = self._compile(layers.enter_gdn)
        self._leave_gdn = self._compile(layers.leave_gdn)
        self._enter_attention = self._compile(layers.enter_attention)
        self._leave_attention = self._compile(layers.leave_attention)
        self._enter_draft = self._compile(layers.enter_draft)
        self._final_norm = self._compile(layers.final_norm)
        self._token_losses = self._compile(layers.token_losses)

    def hidden(self, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden [B * S, D] after the final norm, and the balance loss summed over layers. S: a multiple of chunk."""
        num_sequences = ids_BS.shape[0]
        positions_T, rope = self._places(*ids_BS.shape)
        x_TD, balances = F.embedding(ids_BS.flatten(), self.embed), []
        for kind, w in zip(self.shape.layer_types, self.layers, strict=True):
            if kind == "linear_attention":
                x_TD, balance = self._gdn(w, x_TD, positions_T, num_sequences)
            else:
                x_TD, balance = self._attention(w, x_TD, rope, num_sequences)
            balances.append(balance)
        return self._final_norm(x_TD, self.weights["model.norm.weight"], self.shape), torch.stack(balances).sum()

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return layers.linear(hidden_TD.to(self.settings.dtype), self.embed).float()

    def losses(self, ids_BS1: Tensor, num_draft_sequences: int, num_depths: int) -> Losses:
        """`ids_BS1` [B, S + 1]: inputs and their next tokens. The draft layer runs on the first sequences only."""
        inputs, targets = ids_BS1[:, :-1], ids_BS1[:, 1:]
        hidden_TD, balance = self.hidden(inputs)
        main, hits = self._judge(hidden_TD, targets)
        if num_draft_sequences == 0 or num_depths == 0:
            return Losses(main, hits, [], [], balance)
        kept = ids_BS1[:num_draft_sequences]
        before = hidden_TD[: num_draft_sequences * inputs.shape[1]]
        after_next = F.pad(kept[:, 2:], (0, 1))
        judged = []
        for draft_TD, extra in self.draft(kept[:, 1:], before, num_depths):
            judged.append(self._judge(draft_TD, after_next))
            balance = balance + extra / num_depths
        return Losses(main, hits, [loss for loss, _ in judged], [hit for _, hit in judged], balance)

    def draft(self, ids_BS: Tensor, before_TD: Tensor, num_depths: int) -> list[tuple[Tensor, Tensor]]:
        """Outputs after the draft layer's norm, and balance losses, of depths 1, 2 ... on tokens from position 1 on.

        `before_TD` holds the main hidden of the position before each token.
        """
        num_sequences, length = ids_BS.shape
        _, rope = self._places(num_sequences, length)
        embedded_TD = F.embedding(ids_BS.flatten(), self.embed)
        outputs: list[tuple[Tensor, Tensor]] = []
        caches: list[tuple[Tensor, Tensor]] = []
        for _ in range(num_depths):
            z_TD = self._enter_draft(self.draft_weights, embedded_TD, before_TD, self.shape, self.settings.dtype)
            q, k, v, gate = self._enter_attention(self.draft_layer, z_TD, *rope, self.shape, self.settings.dtype)
            q, k, v = (attention.by_head(x, num_sequences, self.shape.heads) for x in (q, k, v))
            caches.append((k, v))
            if len(caches) == 1:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                o = attention.attend_drafts(q, *caches[0], caches[1:])
            x_TD, balance = self._leave_attention(self.draft_layer, z_TD, attention.flat(o), gate, self.shape)
            out_TD = self._final_norm(x_TD, self.weights["mtp.norm.weight"], self.shape)
            outputs.append((out_TD, balance))
            before_TD = torch.roll(out_TD, 1, dims=0)
        return outputs

    def _judge(self, hidden_TD: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        targets_T = targets_BS.flatten().long()
        losses, hits = self._token_losses(hidden_TD, self.embed, targets_T, self.settings.dtype)
        return losses.view(targets_BS.shape), hits.view(targets_BS.shape)

    def _gdn(self, w: Weights, x_TD: Tensor, positions_T: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        settings = self.settings
        move, add, *rest = self._enter_gdn(w, x_TD, positions_T, self.shape, settings.dtype, settings.chunk)
        states = gdn.scan(move, add, num_sequences)
        return self._leave_gdn(w, x_TD, states, *rest, self.shape)

    def _attention(self, w: Weights, x_TD: Tensor, rope: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
        q, k, v, gate = self._enter_attention(w, x_TD, *rope, self.shape, self.settings.dtype)
        return self._leave_attention(w, x_TD, attention.attend(q, k, v, count), gate, self.shape)

    def _places(self, num_sequences: int, length: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Position of each token in its sequence, and its rotary cos and sin."""
        device = self.embed.device
        if length not in self.ropes:
            self.ropes[length] = layers.rope_tables(length, self.shape, device)
        cos, sin = self.ropes[length]
        positions_T = torch.arange(length, device=device).repeat(num_sequences)
        return positions_T, (cos.repeat(num_sequences, 1), sin.repeat(num_sequences, 1))

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False, fullgraph=True) if self.settings.compiled else function


def load_checkpoint(directory: Path | str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """A checkpoint of ours, for evaluation without the engine."""
    directory = Path(directory)
    weights: Weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file, device=device)
    weights = {name: weight.float() for name, weight in weights.items()}
    return Model(read_shape(directory), weights, Settings(dtype=dtype))


def _part(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
