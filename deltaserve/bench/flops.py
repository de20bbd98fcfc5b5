"""Floating-point operations of computing a prompt, from a model's shape: what a prefix hit saves.

A multiplication and its addition are two. Counted: every weight that a token meets (its experts only; not the output
head, which a prompt needs once), the two products of causal attention, and the recurrent update of the states. Norms,
rotations and softmax are left out: they are under one in a hundred.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltaserve.model.config import ModelConfig
from deltaserve.model.sizes import parameter_counts

_STATE_PRODUCTS = 3  # a state is multiplied with the key, with the update and with the query


@dataclass(frozen=True, slots=True)
class PrefillFlops:
    """`per_token` whatever its position, and `per_pair` of a token with each one before it and itself."""

    per_token: int
    per_pair: int

    @classmethod
    def of(cls, config: ModelConfig) -> PrefillFlops:
        weights = parameter_counts(config).active - config.vocab_size * config.hidden_size
        states = config.num_gdn_layers * config.num_value_heads * config.key_head_dim * config.value_head_dim
        queries = config.num_attention_layers * config.num_heads * config.head_dim
        return cls(per_token=2 * weights + 2 * _STATE_PRODUCTS * states, per_pair=4 * queries)

    def between(self, start: int, end: int) -> int:
        """Of the tokens at positions [start, end), all those before them being there."""
        num_pairs = (end * (end + 1) - start * (start + 1)) // 2
        return self.per_token * (end - start) + self.per_pair * num_pairs
