"""Prefill and decode on one GPU at a published shape with random weights, and where a step's time goes there.

    python -m deltaserve.bench.gpu [--shape NAME] [--output FILE.json]

The engine runs in this process as it does behind a server, without graphs. A decode figure is the median step of
requests that are all past their prompts, the copy of tokens to the host included, so that a kernel compiled on the way
does not show; a prefill figure is one prompt alone,
from submitting it to its first token. Kernel times are torch's, over a few steps that are not among those timed. With
drafts their number is what a schedule accepts, since random weights agree on nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from deltaserve.bench.in_process import open_engine
from deltaserve.bench.record import Row, describe_commit, result_path, write_rows
from deltaserve.bench.stopwatch import Stopwatch
from deltaserve.core.types import SamplingParams
from deltaserve.engine.loop import Engine
from deltaserve.model.presets import PRESETS
from deltaserve.runner.batch import BatchBuilder
from deltaserve.runner.sampler import Sampler
from deltaserve.runner.speculative import Drafter
from deltaserve.scheduler.scheduler import Scheduler

NUM_TIMED, NUM_PROFILED, NUM_KERNELS = 24, 3, 16
ROOM = 256  # output tokens that a request of a decode figure may come to
LONG = 32768  # prompts from this length on take so long that compiling kernels does not show
ACCEPTANCE = 2.5  # tokens a step with drafts, the sampled one included


@dataclass(frozen=True, slots=True)
class Decode:
    in_flight: int
    context: int
    is_profiled: bool = False


HOST_PARTS: dict[str, tuple[Any, str]] = {
    "schedule": (Scheduler, "schedule"),
    "update": (Scheduler, "update"),
    "build tensors": (BatchBuilder, "build"),
    "sample": (Sampler, "sample"),
    "drafts": (Drafter, "draft"),
}
PREFILLS = (1024, 8192, 65536)
DECODES = (Decode(1, 1024, True), Decode(32, 1024, True), Decode(32, 32768, True))
DRAFTED = (Decode(1, 1024), Decode(32, 1024))


class Bench:
    """Figures of one engine."""

    def __init__(self, shape: str, num_drafts: int, begin_s: float, budget_s: float, console: Console) -> None:
        self.shape, self.num_drafts, self.console = shape, num_drafts, console
        self.stop_s = begin_s + budget_s
        self.rows: list[Row] = []
        self._rng = Random(0)
        config = PRESETS[shape]
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            drafts = {"num_drafts": num_drafts, "synthetic_acceptance": ACCEPTANCE} if num_drafts else {}
            started_s = time.perf_counter()
            self._engine: Engine = open_engine(
                Path(directory), device="cuda", load_format="dummy", enable_prefix_caching=False,
                max_model_len=max(PREFILLS) + ROOM, max_num_seqs=32, max_num_batched_tokens=8192,
                long_prefill_share=1.0, memory_utilization=0.9, **drafts,
            )  # fmt: skip
        torch.cuda.synchronize()
        self.console.print(f"engine ready in {time.perf_counter() - started_s:.1f} s; {self._engine.info.pools}")

    def close(self) -> None:
        self._engine.close()
        del self._engine
        gc.collect()
        torch.cuda.empty_cache()

    def record(self, name: str, value: float, unit: str, shape: str) -> None:
        what = f"{self.shape} bfloat16 dummy, mtp {self.num_drafts}, {shape}"
        hardware = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        command = "python -m deltaserve.bench.gpu"
        self.rows.append(Row(name, round(value, 4), unit, what, hardware, describe_commit(), command))
        self.console.print(f"{name:24} {value:12,.3f} {unit:8} {what}", soft_wrap=True, highlight=False)

    def prefill(self, length: int) -> None:
        """Twice; the first time kernels are compiled."""
        for _ in range(2):
            started_s = time.perf_counter()
            self._finish({self._submit(length, 1)})
            wall_s = time.perf_counter() - started_s
        self.record("prefill.tok_s", length / wall_s, "tok/s", f"1 prompt of {length}")

    def decode(self, case: Decode) -> None:
        what = f"{case.in_flight} in flight, context {case.context}"
        started_s = time.perf_counter()
        ids = {self._submit(case.context, ROOM) for _ in range(case.in_flight)}
        waiting = set(ids)
        while waiting:
            waiting -= {chunk.request_id for chunk in self._engine.step() if chunk.token_ids}
        if case.context >= LONG:
            tok_s = case.in_flight * case.context / (time.perf_counter() - started_s)
            self.record("prefill.tok_s", tok_s, "tok/s", f"{case.in_flight} prompts of {case.context}")
        self._steps(3)
        times, num_tokens = self._timed_steps()
        step_s = statistics.median(times)
        self.record("decode.ms_per_step", 1e3 * step_s, "ms", what)
        self.record("decode.tok_s", num_tokens / NUM_TIMED / step_s, "tok/s", what)
        self._watch_host(what)
        if case.is_profiled:
            self._profile(what)
        for request_id in ids:
            self._engine.abort(request_id)
        self._engine.step()

    def _timed_steps(self) -> tuple[list[float], int]:
        times, num_tokens = [], 0
        for _ in range(NUM_TIMED):
            started_s = time.perf_counter()
            num_tokens += sum(len(chunk.token_ids) for chunk in self._engine.step())
            times.append(time.perf_counter() - started_s)
        return times, num_tokens

    def _watch_host(self, what: str) -> None:
        """What a step takes on the host outside the model; `sample` and `drafts` include waiting for the device."""
        stopwatch = Stopwatch()
        with stopwatch.watching(HOST_PARTS):
            self._steps(NUM_TIMED // 3)
        for part, self_s in stopwatch.self_s.items():
            self.record("decode.host_ms_per_step", 3e3 * self_s / NUM_TIMED, "ms", f"{what}, {part}")

    def _profile(self, what: str) -> None:
        """The kernels by their time, a step; and how long the device worked at all."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self._steps(NUM_PROFILED)
            torch.cuda.synchronize()
        busy_s: dict[str, tuple[float, int]] = {}
        for event in profiler.events():
            if str(event.device_type).endswith("CUDA"):
                total_s, count = busy_s.get(event.name, (0.0, 0))
                busy_s[event.name] = total_s + event.device_time_total / 1e6, count + 1
        launches = sum(count for _, count in busy_s.values()) / NUM_PROFILED
        self.record("decode.device_ms_per_step", 1e3 * _total(busy_s) / NUM_PROFILED, "ms", what)
        self.record("decode.launches_per_step", launches, "launches", what)
        for name, (seconds, count) in sorted(busy_s.items(), key=lambda item: -item[1][0])[:NUM_KERNELS]:
            kernel = f"{what}, {name[:60]}, {count / NUM_PROFILED:.0f} times"
            self.record("decode.kernel_ms_per_step", 1e3 * seconds / NUM_PROFILED, "ms", kernel)

    def _submit(self, length: int, max_tokens: int) -> int:
        prompt = tuple(self._rng.choices(range(1000, self._engine.info.vocab_size - 1000), k=length))
        return self._engine.submit(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))

    def _finish(self, waiting: set[int]) -> None:
        while waiting:
            waiting -= {chunk.request_id for chunk in self._engine.step() if chunk.finish_reason is not None}

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._engine.step()

    def run(self, prefills: tuple[int, ...], decodes: tuple[Decode, ...]) -> Iterator[list[Row]]:
        """The rows so far, after each figure; no figure begins after `stop_s`."""
        for length in prefills:
            if time.monotonic() < self.stop_s:
                self.prefill(length)
                yield self.rows
        for case in decodes:
            if time.monotonic() < self.stop_s:
                self.decode(case)
                yield self.rows
        self.record("memory.peak_gib", torch.cuda.max_memory_allocated() / 2**30, "GiB", "all figures")
        yield self.rows


def _total(busy_s: dict[str, tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in busy_s.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-35b-a3b", choices=list(PRESETS))
    parser.add_argument("--output", type=Path, default=None, help="where the rows go; rows that are there stay")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further figure is begun")
    options = parser.parse_args()
    console, output = Console(width=int(os.environ.get("COLUMNS", "150"))), options.output or result_path("gpu-eager")
    begin_s = time.monotonic()
    for num_drafts, prefills, decodes in ((0, PREFILLS, DECODES), (3, (), DRAFTED)):
        if time.monotonic() - begin_s > options.budget:
            break
        bench = Bench(options.shape, num_drafts, begin_s, options.budget, console)
        for rows in bench.run(prefills, decodes):
            write_rows(output, rows)
        bench.close()


if __name__ == "__main__":
    main()
