"""Muon for the matrices of the layers, AdamW for everything else.

Muon turns each matrix's momentum into the nearest matrix with equal singular values (a few Newton-Schulz steps) and
scales it so that an entry moves by 0.2 * lr in the root mean square, whatever the size. Matrices of one size, all
experts' and all layers', are worked on as one stack. Embeddings, norms, gates, the router and the convolution are no
maps between wide spaces, and go to AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training.layers import Weights

ADAM_PARTS = ("embed_tokens", "conv1d", "mlp.gate.weight", "shared_expert_gate", "in_proj_a", "in_proj_b")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


class Optimizer:
    """`step(scale)` takes the gradients, multiplies both learning rates by scale, and clears the gradients."""

    def __init__(self, weights: Weights, lr: float, adam_lr: float, decay: float = 0.1, momentum: float = 0.95) -> None:
        self.lr, self.adam_lr, self.decay, self.momentum = lr, adam_lr, decay, momentum
        self.weights = list(weights.values())
        self.stacks: dict[tuple[int, int], list[Tensor]] = {}
        rest: list[Tensor] = []
        for name, weight in weights.items():
            size = _matrix_size(name, weight)
            if size is None:
                rest.append(weight)
            else:
                self.stacks.setdefault(size, []).append(weight)
        self.buffers = {
            size: torch.zeros(sum(w.numel() for w in stack) // (size[0] * size[1]), *size, device=stack[0].device)
            for size, stack in self.stacks.items()
        }
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """The norm of all gradients, before they are clipped to 1."""
        norm = torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        for size, stack in self.stacks.items():
            self._step_stack(size, stack, self.lr * scale)
        for weight in self.weights:
            weight.grad = None
        return norm

    def state(self) -> dict[str, Any]:
        buffers = {f"{r}x{c}": buffer for (r, c), buffer in self.buffers.items()}
        return {"buffers": buffers, "adam": self.adam.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        for (r, c), buffer in self.buffers.items():
            buffer.copy_(state["buffers"][f"{r}x{c}"])
        self.adam.load_state_dict(state["adam"])

    def _step_stack(self, size: tuple[int, int], stack: list[Tensor], lr: float) -> None:
        grads, buffer = torch.cat([w.grad.view(-1, *size) for w in stack if w.grad is not None]), self.buffers[size]
        buffer.lerp_(grads, 1.0 - self.momentum)
        update = orthogonal(grads.lerp(buffer, self.momentum)) * (-0.2 * lr * max(size) ** 0.5)
        counts = [w.numel() // (size[0] * size[1]) for w in stack]
        torch._foreach_mul_(stack, 1.0 - lr * self.decay)
        torch._foreach_add_(stack, [u.view(w.shape) for u, w in zip(update.split(counts), stack, strict=True)])


def orthogonal(x: Tensor) -> Tensor:
    """[n, r, c] with singular values brought near 1, float32."""
    a, b, c = COEFFICIENTS
    turned = x.shape[1] > x.shape[2]
    y = (x.transpose(1, 2) if turned else x).bfloat16()
    y = y / (y.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(NUM_ITERATIONS):
        square = torch.bmm(y, y.transpose(1, 2))
        y = torch.baddbmm(y, torch.baddbmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return (y.transpose(1, 2) if turned else y).float()


def _matrix_size(name: str, weight: Tensor) -> tuple[int, int] | None:
    """Rows and columns of the matrices in a weight, None where AdamW takes it. Gate and up are two matrices."""
    if weight.dim() < 2 or any(part in name for part in ADAM_PARTS):
        return None
    rows, columns = weight.shape[-2:]
    return (rows // 2 if name.endswith("experts.gate_up_proj") else rows, columns)
