"""Our engine in this process, driven through the loop that serves HTTP requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from deltaserve.bench.work import Measured, Prompts, Shape
from deltaserve.core.types import SamplingParams
from deltaserve.engine.build import Timeline, build_engine
from deltaserve.engine.loop import Engine
from deltaserve.engine.settings import engine_config


def open_engine(directory: Path, **settings: Any) -> Engine:
    """An engine from flat settings, as LLM takes them."""
    return build_engine(engine_config(directory, settings), Timeline(time.time()))


class EngineTarget:
    """Keeps `num_streams` requests in flight and steps the engine until all are done."""

    def __init__(self, directory: Path, *, num_threads: int, max_streams: int, **settings: Any) -> None:
        self.engine = open_engine(directory, num_threads=num_threads, max_num_seqs=max_streams, **settings)
        self.name = "deltaserve in process"
        self._threads = num_threads

    def run(self, prompts: Prompts, shape: Shape) -> Measured:
        params = SamplingParams(max_tokens=shape.output_tokens, temperature=0.0, ignore_eos=True)
        torch.set_num_threads(self._threads)
        waiting = list(reversed(prompts))
        submitted_s: dict[int, float] = {}
        first_s: dict[int, float] = {}
        running, num_tokens = 0, 0
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        while waiting or running:
            while waiting and running < shape.num_streams:
                submitted_s[self.engine.submit(waiting.pop(), params)] = time.perf_counter()
                running += 1
            chunks = self.engine.step()
            now_s = time.perf_counter()
            for chunk in chunks:
                num_tokens += len(chunk.token_ids)
                first_s.setdefault(chunk.request_id, now_s - submitted_s[chunk.request_id])
                running -= chunk.finish_reason is not None
        assert num_tokens == len(prompts) * shape.output_tokens, num_tokens
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        return Measured(num_tokens, wall_s, cpu_s, tuple(first_s.values()))

    def close(self) -> None:
        self.engine.close()
