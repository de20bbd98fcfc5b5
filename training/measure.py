"""Checks the training maths on the GPU and times its variants, before time is spent on training.

    python -m training.measure

Prints the error of the GPU's gradients against the CPU's in float32, tokens/s of forward and backward for each variant,
and where the time of the chosen one goes.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from training.model import Model, Settings
from training.optimizer import Optimizer
from training.shape import Shape, new_weights, parse_shape
from training.train import Plan, combine

CHECK_SHAPE = "vocab=128,layers=4,experts=8"
FLOPS_PER_WEIGHT = 6


def gradients(settings: Settings, device: str, ids: Tensor, shape: Shape) -> Tensor:
    """All gradients, flat, on the CPU."""
    weights = {name: w.to(device).requires_grad_() for name, w in new_weights(shape, 0).items()}
    losses = Model(shape, weights, settings).losses(ids.to(device), 1, 3)
    combine(losses, torch.ones(ids.shape, device=device), Plan(draft_weight=0.5))[1].backward()
    return torch.cat([w.grad.flatten().cpu() for w in weights.values() if w.grad is not None])


def check() -> None:
    """The draft layer's flash kernels need 16-bit inputs, so the GPU is compared in bfloat16."""
    shape, ids = parse_shape(CHECK_SHAPE), torch.randint(0, 128, (2, 513), generator=torch.Generator().manual_seed(1))
    wanted = gradients(Settings(torch.float32), "cpu", ids, shape)
    for device in ("cpu", "cuda"):
        got = gradients(Settings(torch.bfloat16), device, ids, shape)
        error = ((got - wanted).norm() / wanted.norm()).item()
        print(f"gradients in bfloat16 on {device}: error {error:.4f} of float32's on the CPU", flush=True)


def time_variant(name: str, settings: Settings, tokens: int, contexts: tuple[int, ...], plan: Plan) -> None:
    """Tokens/s of whole steps (one batch and the update), after two that warm up; the first step's time apart."""
    shape = Shape()
    weights = {name: w.cuda().requires_grad_() for name, w in new_weights(shape, 0).items()}
    model, optimizer = Model(shape, weights, settings), Optimizer(weights, plan.lr, plan.adam_lr)
    for context in contexts:
        ids = torch.randint(0, shape.vocab, (tokens // context, context + 1), device="cuda", dtype=torch.int32)
        ones = torch.ones(ids.shape, device="cuda")

        def step(ids: Tensor = ids, ones: Tensor = ones) -> None:
            losses = model.losses(ids, max(int(len(ids) * plan.draft_share), 1), plan.draft_depths)
            combine(losses, ones, plan)[1].backward()
            optimizer.step(1e-3)

        first = _seconds(step, 1)
        _seconds(step, 1)
        seconds = _seconds(step, 4) / 4
        flops = FLOPS_PER_WEIGHT * sum(w.numel() for w in weights.values()) * tokens / seconds
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{name}, context {context}: {tokens / seconds:,.0f} tokens/s, {seconds * 1e3:.0f} ms, "
            f"first {first:.1f} s, {flops / 1e12:.0f} TFLOP/s of weights, {memory:.0f} GiB",
            flush=True,
        )
    if settings.compiled:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            step()
            torch.cuda.synchronize()
        print(profiled.key_averages().table(sort_by="self_device_time_total", row_limit=24, max_name_column_width=60))
    print(f"update alone: {_seconds(lambda: _update(optimizer, weights), 5) / 5 * 1e3:.1f} ms", flush=True)


def _update(optimizer: Optimizer, weights: dict[str, Tensor]) -> None:
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step(1e-3)


def _seconds(step: object, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()  # type: ignore[operator]
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    torch.set_float32_matmul_precision("high")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    check()
    bf16, plan = torch.bfloat16, Plan()
    time_variant("compiled, chunk 64", Settings(bf16, 64, True), arguments.tokens, (2048, 16384), plan)
    time_variant("eager, chunk 64", Settings(bf16, 64), arguments.tokens, (2048,), plan)
    time_variant("compiled, chunk 32", Settings(bf16, 32, True), arguments.tokens, (2048,), plan)


if __name__ == "__main__":
    main()
