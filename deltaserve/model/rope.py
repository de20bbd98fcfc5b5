"""Rotary angles of a step's positions, plain or stretched by YaRN.

YaRN (arXiv 2309.00071, section 3.2) keeps the fast frequencies, divides the slow ones by `factor`, blends between,
and scales cos and sin by `attention_factor`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltaserve.model.config import ModelConfig, Yarn
from deltaserve.ops import rope


class Rotary:
    """cos and sin for any positions of one model; the frequencies are made once."""

    def __init__(self, config: ModelConfig) -> None:
        self.rotary_dim, self.theta, self.yarn = config.rotary_dim, config.rope_theta, config.yarn
        self.frequencies: Tensor | None = None

    def cos_sin(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """[T, rotary_dim // 2] float32 each."""
        if self.yarn is None:
            return rope.cos_sin(positions_T, self.rotary_dim, self.theta)
        if self.frequencies is None:
            frequencies = yarn_frequencies(self.rotary_dim, self.theta, self.yarn)
            self.frequencies = torch.tensor(frequencies, dtype=torch.float64, device=positions_T.device)
        angles_TR, factor = torch.outer(positions_T.double(), self.frequencies), self.yarn.attention_factor
        return (angles_TR.cos() * factor).float(), (angles_TR.sin() * factor).float()


def yarn_frequencies(rotary_dim: int, theta: float, yarn: Yarn) -> list[float]:
    """Radians per position of each pair of dims, fastest first."""

    def dim_turning(turns: float) -> float:
        """Where the pair lies that turns this often over the trained context."""
        return rotary_dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_turning(yarn.beta_fast), dim_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = max(high - low, 0.001)
    frequencies = []
    for pair in range(rotary_dim // 2):
        plain = theta ** (-2 * pair / rotary_dim)
        slow = min(max((pair - low) / width, 0.0), 1.0)
        frequencies.append(plain / yarn.factor * slow + plain * (1 - slow))
    return frequencies
