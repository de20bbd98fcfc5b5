"""`bench drafts`: decoding with the model's own draft head, for several draft counts.

Short chats, so that the text is natural to the model and its drafts are worth something; greedy. Rounds go through all
draft counts in turn. Only decoding is timed: from a request's first token to its last.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltaserve.bench import record
from deltaserve.bench.in_process import open_engine
from deltaserve.bench.prefix import Figures
from deltaserve.cache.layout import SLOTS_PER_ROW
from deltaserve.core.types import SamplingParams
from deltaserve.engine.loop import Engine
from deltaserve.engine.machine import num_usable_cores
from deltaserve.engine.settings import engine_config
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.model.config import ModelConfig
from deltaserve.runner.build import cache_spec, served_model

console = Console(highlight=False)
QUESTIONS = (
    "What is the capital of France?",
    "Count from one to forty.",
    "Name the planets of the solar system.",
    "Say the days of the week, then the months of the year.",
    "Write a JSON object with the fields name, age and city.",
    "What is 17 plus 25? Think step by step.",
)


def drafts(
    model: Annotated[Path, typer.Argument(help="A checkpoint's directory, with a draft head.")],
    counts: Annotated[str, typer.Option(help="Draft counts, 0 to 7.")] = "0,1,2,3,5",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the medians are reported.")] = 5,
    output_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 128,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; none: all usable cores.")] = None,
    output: Annotated[Path | None, typer.Option(help="The result file.")] = None,
) -> None:
    """Tokens per second of one stream by number of drafts, what was accepted, and the memory of a running sequence."""
    num_threads = threads or num_usable_cores()
    hardware = record.announce(model, num_threads, console)
    engines = {
        int(k): open_engine(model, num_threads=num_threads, num_drafts=int(k), max_num_seqs=1)
        for k in counts.split(",")
    }
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n") for text in QUESTIONS]
    speeds: dict[int, list[float]] = {k: [] for k in engines}
    for number in range(rounds + 1):
        for k, engine in engines.items():
            speed = _decode_speed(engine, prompts, output_tokens)
            if number:
                speeds[k].append(speed)
    figures = []
    where = f"1 stream, {len(prompts)} chats of at most {output_tokens} tokens, greedy, median of {rounds}"
    for k, engine in engines.items():
        figures += _figures(engine, f"{k} drafts; {where}", statistics.median(speeds[k]))
        figures += _memory(model, k)
        engine.close()
    record.write_figures(output or record.result_path("drafts"), figures, hardware, model, console)


def _figures(engine: Engine, where: str, speed: float) -> Figures:
    counts = engine.stats().drafts
    figures = [("drafts.decode", speed, "tokens/s", where)]
    if counts.num_rows:
        figures.append(("drafts.tokens_per_step", 1 + counts.num_accepted / counts.num_rows, "tokens", where))
    return figures


def _memory(model: Path, num_drafts: int) -> Figures:
    """Of one running sequence: two states and the ring, the conv ring and last hidden, the draft head's KV a token."""
    config = engine_config(model, {"num_drafts": num_drafts})
    spec = cache_spec(config, served_model(config, ModelConfig.from_directory(model)))
    draft_share = spec.num_draft_layers / (spec.num_attention_layers + spec.num_draft_layers)
    where = f"{num_drafts} drafts, one running sequence"
    return [
        ("drafts.state_bytes", SLOTS_PER_ROW * spec.slot_bytes + spec.ring_bytes, "bytes", where),
        ("drafts.conv_ring_bytes", spec.row_bytes - spec.ring_bytes, "bytes", where),
        ("drafts.kv_bytes_per_token", spec.kv_bytes_per_token * draft_share, "bytes", where),
    ]


def _decode_speed(engine: Engine, prompts: list[list[int]], output_tokens: int) -> float:
    """Tokens per second from a request's first token to its last."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0)
    num_tokens, took_s = 0, 0.0
    for prompt in prompts:
        engine.submit(prompt, params)
        has_started = False
        while engine.has_work:
            start_s = time.perf_counter()
            num_new = sum(len(chunk.token_ids) for chunk in engine.step())
            if has_started:
                took_s += time.perf_counter() - start_s
                num_tokens += num_new
            has_started = has_started or num_new > 0
    return num_tokens / took_s
