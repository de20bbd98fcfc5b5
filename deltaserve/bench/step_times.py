"""Where a decode step's time goes: deciding, building tensors, each op, sampling, keeping books; then torch's own view.

All streams are past their prompts and none ends while we look, so every step is the same: one token a stream. Times
are exclusive (`bench.stopwatch`); what no named function took stands under the function around it. On the CPU's C
kernels half a layer is one op: `ops.gdn.mix` and `ops.attention.mix` are a norm and a mixer with its products,
`ops.moe.feed_forward` a norm, the routing and the experts.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from deltaserve.bench.in_process import EngineTarget
from deltaserve.bench.stopwatch import Stopwatch
from deltaserve.bench.work import Shape, random_prompts, read_vocab_size
from deltaserve.core.types import SamplingParams
from deltaserve.engine.loop import Engine
from deltaserve.model.layers import Linear
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.ops import attention, conv, gdn, linear, moe, norm, rope, sampling
from deltaserve.runner.batch import BatchBuilder
from deltaserve.runner.runner import ModelRunner
from deltaserve.runner.sampler import Sampler
from deltaserve.scheduler.scheduler import Scheduler

OPS = (attention, conv, gdn, linear, moe, norm, rope, sampling)
NUM_PROFILED = 8
NUM_OPERATORS = 15


def report(directory: Path, shapes: Sequence[Shape], num_threads: int, console: Console) -> None:
    """Print two tables for each shape: exclusive time per part of a step, and torch's operators by their own time."""
    target = EngineTarget(directory, num_threads=num_threads, max_streams=max(shape.num_streams for shape in shapes))
    try:
        for shape in shapes:
            stopwatch, step_s, operators = _observe(target.engine, directory, shape)
            console.print(_parts_table(shape, stopwatch, step_s, shape.output_tokens))
            console.print(operators)
    finally:
        target.close()


def _observe(engine: Engine, directory: Path, shape: Shape) -> tuple[Stopwatch, float, Table]:
    """Stopwatch over `output_tokens` decode steps, the mean step without it, and torch's operators in a table."""
    prompts = random_prompts(shape, read_vocab_size(directory), seed=0)[: shape.num_streams]
    length = 2 * shape.output_tokens + NUM_PROFILED + shape.prompt_tokens
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
    request_ids = {engine.submit(prompt, params) for prompt in prompts}
    waiting = set(request_ids)
    while waiting:
        waiting -= {chunk.request_id for chunk in engine.step() if chunk.token_ids}
    start_s = time.perf_counter()
    _steps(engine, shape.output_tokens)
    step_s = (time.perf_counter() - start_s) / shape.output_tokens
    stopwatch = Stopwatch()
    with stopwatch.watching(_places(engine)):
        _steps(engine, shape.output_tokens)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _steps(engine, NUM_PROFILED)
    for request_id in request_ids:
        engine.abort(request_id)
    return stopwatch, step_s, _operators_table(profiler)


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _places(engine: Engine) -> dict[str, tuple[Any, str]]:
    places: dict[str, tuple[Any, str]] = {
        "step, the rest": (Engine, "step"),
        "schedule": (Scheduler, "schedule"),
        "update": (Scheduler, "update"),
        "build tensors": (BatchBuilder, "build"),
        "sample": (Sampler, "sample"),
        "execute, the rest": (ModelRunner, "execute"),
        "model, the rest": (Qwen3_5, "forward"),
        "logits": (Qwen3_5, "logits"),
        "products": (Linear, "__call__"),
    }
    for module in OPS:
        for name in _functions(module):
            places[f"{module.__name__.removeprefix('deltaserve.')}.{name}"] = (module, name)
    return places


def _functions(module: ModuleType) -> Iterator[str]:
    """The module's own public functions."""
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name


def _parts_table(shape: Shape, stopwatch: Stopwatch, step_s: float, num_steps: int) -> Table:
    watched_s = sum(stopwatch.self_s.values())
    title = f"{shape.streams}, about {shape.prompt_tokens} tokens each, {torch.get_num_threads()} threads: "
    title += f"{1e3 * step_s:.2f} ms a step ({1e3 * watched_s / num_steps:.2f} ms while watched)"
    table = Table("part", "ms a step", "share", "calls a step", title=title, title_justify="left")
    for label, self_s in sorted(stopwatch.self_s.items(), key=lambda item: -item[1]):
        calls = stopwatch.calls[label] / num_steps
        table.add_row(label, f"{1e3 * self_s / num_steps:.3f}", f"{self_s / watched_s:.1%}", f"{calls:.0f}")
    return table


def _operators_table(profiler: profile) -> Table:
    table = Table("torch operator", "ms a step", "calls a step")
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    for event in events[:NUM_OPERATORS]:
        self_ms = event.self_cpu_time_total / 1e3 / NUM_PROFILED
        table.add_row(event.key, f"{self_ms:.3f}", f"{event.count / NUM_PROFILED:.0f}")
    return table
