"""`bench fairness`: what running streams keep of their speed while one long prompt is computed.

Streams decode; then a long prompt arrives. From its arrival to its first token the streams' tokens are counted, and
the longest gap between two tokens of one stream. Once for each share that long prompts may take of the time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltaserve.bench import record
from deltaserve.bench.in_process import open_engine
from deltaserve.bench.work import Shape, random_prompts, read_vocab_size
from deltaserve.core.types import SamplingParams
from deltaserve.engine.loop import Engine
from deltaserve.engine.machine import num_usable_cores

console = Console(highlight=False)
ALONE_S = 2.0  # how long the streams are timed before the long prompt arrives


@dataclass(frozen=True, slots=True)
class Beside:
    """Of all streams together: tokens/s alone and beside the long prompt, the longest gap, its time to first token.

    `alone` is the mean of just before and just after, since streams slow down as their contexts grow.
    """

    alone: float
    beside: float
    longest_gap_s: float
    long_first_s: float


def fairness(
    model: Annotated[Path, typer.Argument(help="A checkpoint's directory.")],
    long_tokens: Annotated[int, typer.Option(min=65, help="Length of the long prompt.")] = 16_000,
    streams: Annotated[int, typer.Option(min=1)] = 8,
    shares: Annotated[str, typer.Option(help="Shares of the time for long prompts; 1 is no limit.")] = "0.3,1",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; none: all usable cores.")] = None,
    output: Annotated[Path | None, typer.Option(help="The result file.")] = None,
) -> None:
    """Speed of running streams beside a long prompt, with and without --long-prefill-share."""
    num_threads = threads or num_usable_cores()
    hardware = record.announce(model, num_threads, console)
    figures = []
    for share in (float(word) for word in shares.split(",")):
        engine = open_engine(model, num_threads=num_threads, max_num_seqs=streams + 1, long_prefill_share=share)
        found = _measure(engine, streams, long_tokens, read_vocab_size(model))
        engine.close()
        where = f"{streams} streams, a prompt of {long_tokens} tokens, share {share:g}"
        figures += [
            ("fairness.alone", found.alone, "tokens/s", where),
            ("fairness.beside", found.beside, "tokens/s", where),
            ("fairness.kept", 100 * found.beside / found.alone, "%", where),
            ("fairness.longest_gap", 1e3 * found.longest_gap_s, "ms", where),
            ("fairness.long_ttft", 1e3 * found.long_first_s, "ms", where),
        ]
    record.write_figures(output or record.result_path("fairness"), figures, hardware, model, console)


def _measure(engine: Engine, streams: int, long_tokens: int, vocab_size: int) -> Beside:
    shape = Shape(streams, 128, 1)
    endless = SamplingParams(max_tokens=engine.info.max_model_len - 256, temperature=0.0, ignore_eos=True)
    for prompt in random_prompts(shape, vocab_size, seed=1)[:streams]:
        engine.submit(prompt, endless)
    for _ in range(32):
        engine.step()
    before = _alone(engine)
    beside, longest_gap_s, long_first_s = _beside(
        engine, random_prompts(Shape(1, long_tokens, 1), vocab_size, seed=2)[0]
    )
    return Beside((before + _alone(engine)) / 2, beside, longest_gap_s, long_first_s)


def _alone(engine: Engine) -> float:
    """Tokens per second over ALONE_S."""
    start_s, num_tokens = time.perf_counter(), 0
    while time.perf_counter() - start_s < ALONE_S:
        num_tokens += sum(len(chunk.token_ids) for chunk in engine.step())
    return num_tokens / (time.perf_counter() - start_s)


def _beside(engine: Engine, long_prompt: list[int]) -> tuple[float, float, float]:
    """Tokens per second of the others, their longest gap and the long prompt's time to its first token, in seconds."""
    long_id = engine.submit(long_prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    start_s = now_s = time.perf_counter()
    num_tokens, longest_gap_s, last_s = 0, 0.0, start_s
    is_done = False
    while not is_done:
        chunks = engine.step()
        now_s = time.perf_counter()
        others = sum(len(chunk.token_ids) for chunk in chunks if chunk.request_id != long_id)
        if others:
            num_tokens += others
            longest_gap_s, last_s = max(longest_gap_s, now_s - last_s), now_s
        is_done = any(chunk.request_id == long_id for chunk in chunks)
    return num_tokens / (now_s - start_s), longest_gap_s, now_s - start_s
