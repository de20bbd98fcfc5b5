"""`bench prefix`: what the prefix cache gives on a hit, and what it costs where there is none.

A hit: the time to the first token of a prompt that nobody has seen, then of the same prompt again. No hit: the closed
loop of `bench.work` with the cache on and off, rounds in turn, so that a busy minute hurts both.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltaserve.bench import record
from deltaserve.bench.in_process import EngineTarget
from deltaserve.bench.work import Shape, random_prompts, read_vocab_size
from deltaserve.core.types import SamplingParams
from deltaserve.engine.loop import Engine
from deltaserve.engine.machine import num_usable_cores

console = Console(highlight=False)
Figures = list[tuple[str, float, str, str]]  # name, value, unit, shape


def prefix(
    model: Annotated[Path, typer.Argument(help="A checkpoint's directory.")],
    prompt_tokens: Annotated[int, typer.Option(min=65, help="Length of the prompt that is sent twice.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 5,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight where nothing hits.")] = 8,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; none: all usable cores.")] = None,
    output: Annotated[Path | None, typer.Option(help="The result file.")] = None,
) -> None:
    """Time to the first token cold and cached; speed without hits, cache on and off."""
    num_threads = threads or num_usable_cores()
    hardware = record.announce(model, num_threads, console)
    vocab_size = read_vocab_size(model)
    targets = {
        name: EngineTarget(model, num_threads=num_threads, max_streams=streams, enable_prefix_caching=is_on)
        for name, is_on in (("on", True), ("off", False))
    }
    figures = _hits(targets["on"].engine, Shape(1, prompt_tokens, 1), vocab_size, rounds)
    figures += _no_hits(targets, Shape(streams, 512, 64), vocab_size, rounds)
    for target in targets.values():
        target.close()
    record.write_figures(output or record.result_path("prefix"), figures, hardware, model, console)


def _hits(engine: Engine, shape: Shape, vocab_size: int, rounds: int) -> Figures:
    cold_s, cached_s = [], []
    for number in range(rounds + 1):
        prompt = random_prompts(shape, vocab_size, seed=number)[0]
        cold_s.append(first_token_s(engine, prompt))
        cached_s.append(first_token_s(engine, prompt))
    cold, cached = statistics.median(cold_s[1:]), statistics.median(cached_s[1:])
    where = f"one prompt of {shape.prompt_tokens} tokens, median of {rounds}"
    return [
        ("prefix.cold_ttft", 1e3 * cold, "ms", where),
        ("prefix.cached_ttft", 1e3 * cached, "ms", where),
        ("prefix.ratio", cold / cached, "times", where),
    ]


def first_token_s(engine: Engine, prompt: list[int]) -> float:
    """From submit to the end of a request of one token."""
    start_s = time.perf_counter()
    engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start_s


def _no_hits(targets: dict[str, EngineTarget], shape: Shape, vocab_size: int, rounds: int) -> Figures:
    speeds: dict[str, list[float]] = {name: [] for name in targets}
    for number in range(rounds):
        prompts = random_prompts(shape, vocab_size, seed=1000 + number)
        order = list(targets) if number % 2 else list(reversed(targets))
        for name in order:
            speeds[name].append(targets[name].run(prompts, shape).tokens_per_s)
    where = f"{shape}, median of {rounds}"
    figures = [(f"prefix.no_hits.{name}", statistics.median(each), "tokens/s", where) for name, each in speeds.items()]
    pairs = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
    spread = f"{where}; rounds {min(pairs):.3f} to {max(pairs):.3f}"
    return [*figures, ("prefix.no_hits.on_over_off", statistics.median(pairs), "times", spread)]
