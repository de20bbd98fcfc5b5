"""The second half of a layer by the C kernels (ops/native/ffn.c): experts with a shared one, or a dense SwiGLU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaserve.ops import native
from deltaserve.ops.linear.native import LANES, Packed
from deltaserve.ops.native.structs import Ffn, Matrix, entry_arguments


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """router [E, D], shared_gate [1, D], gate_up [E, 2F, D] (gate, then up) and down [E, D, F]; float32 on the CPU."""

    router_ED: Tensor
    shared_gate_1D: Tensor
    gate_up_E2FD: Tensor
    down_EDF: Tensor
    top_k: int
    renormalize: bool


class FeedForward:
    """y = the routed experts, if any, plus the (gated) shared one; see `moe.feed_forward`."""

    def __init__(self, gate_up_2SD: Tensor, down_DS: Tensor, experts: ExpertWeights | None) -> None:
        shared = (Packed(gate_up_2SD, _interleaved), Packed(down_DS, _padded))
        packed: tuple[Packed, ...] = shared
        self._struct = Ffn(shared_up=shared[0].matrix, shared_down=shared[1].matrix)
        if experts is not None:
            routing = (Packed(experts.router_ED), Packed(experts.shared_gate_1D))
            stacks = (Packed(experts.gate_up_E2FD, _interleaved), Packed(experts.down_EDF, _padded))
            packed = (*shared, *routing, *stacks)
            matrices: list[Matrix] = [weight.matrix for weight in packed[2:]]
            numbers = (len(experts.router_ED), experts.top_k, int(experts.renormalize))
            self._struct = Ffn(*matrices, shared[0].matrix, shared[1].matrix, *numbers)
        self._kept = packed
        self._ffn = ctypes.byref(self._struct)
        self._function = native.function("ffn")

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, scale_D: Tensor | None, eps: float, num_extend: int
    ) -> tuple[Tensor, Tensor]:
        x_TD = x_TD.contiguous()
        entry, y_TD, total_TD = entry_arguments(x_TD, residual_TD, scale_D)
        outputs = (total_TD.data_ptr(), y_TD.data_ptr())
        if self._function(self._ffn, len(x_TD), num_extend, *entry, eps, *outputs, torch.get_num_threads()):
            raise MemoryError("no memory for a layer's scratch")
        return y_TD, total_TD


def _interleaved(gate_up: Tensor) -> Tensor:
    """[..., 2F, D] -> 16 gate rows, their 16 up rows, and so on; F is padded to a multiple of 16."""
    halves = gate_up.unflatten(-2, (2, -1))
    padded = torch.nn.functional.pad(halves, (0, 0, 0, -halves.shape[-2] % LANES))
    return padded.unflatten(-2, (-1, LANES)).transpose(-4, -3).flatten(-4, -2)


def _padded(down: Tensor) -> Tensor:
    """[..., D, F] with zero columns up to a multiple of 16."""
    return torch.nn.functional.pad(down, (0, -down.shape[-1] % LANES))
