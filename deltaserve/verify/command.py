"""`deltaserve verify`: from arguments to a target, a level and gates; exit code 0 only if all that ran passed."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltaserve.core.config import CacheConfig, EngineConfig, SpeculativeConfig
from deltaserve.core.errors import ConfigError
from deltaserve.server.checkpoint import find_checkpoint
from deltaserve.server.settings import parse_size
from deltaserve.verify.compare import EXACT, GAPS, Level
from deltaserve.verify.engine_target import EngineTarget
from deltaserve.verify.gates import GATES, Gate, choose
from deltaserve.verify.http_target import HttpTarget
from deltaserve.verify.lab import Lab, Options
from deltaserve.verify.prompts import Writer
from deltaserve.verify.report import check_writable, print_book, print_header, print_summary, write_json
from deltaserve.verify.run import Outcome, run_gates
from deltaserve.verify.target import Target

FAILED, INTERRUPTED = 1, 130
URL = re.compile(r"https?://.*|[\w.-]+:\d+/?")
LEVELS = ("auto", "exact", "near")

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command("verify")
def verify(
    target: Annotated[str | None, typer.Argument(help="A server's URL, a checkpoint directory or a Hub id.")] = None,
    gate: Annotated[list[str] | None, typer.Option(help="Run this gate alone; may be repeated.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave this gate out; may be repeated.")] = None,
    level: Annotated[
        str, typer.Option(help="exact, near, or auto: exact for an engine on the CPU, else near.")
    ] = "auto",
    gap: Annotated[
        float, typer.Option(help="Top-2 gap below which a split is a tie, at the near level; FP8: 1.0.")
    ] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Write every case to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter cases.")] = False,
    seed: Annotated[int | None, typer.Option(help="Prompts of this seed; left out: new ones each time.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Drafts a step in every gate (MODEL).")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Run the parallel gate with so many ranks (MODEL).")] = 1,
    max_model_len: Annotated[str | None, typer.Option(help="Longest context to verify, such as 16K.")] = None,
    device: Annotated[str, typer.Option(help="As for serve (MODEL).")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for serve (MODEL).")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As for serve (MODEL).")] = "auto",
    mamba_ssm_cache_dtype: Annotated[str, typer.Option(help="As for serve (MODEL).")] = "auto",
    num_threads: Annotated[int | None, typer.Option(help="CPU threads (MODEL).")] = None,
    min_free_memory: Annotated[str, typer.Option(help="Floor of the memory gate (MODEL).")] = "256M",
    api_key: Annotated[
        str | None, typer.Option(help="For a server that asks for one.", envvar="DELTASERVE_API_KEY")
    ] = None,
    show_gates: Annotated[bool, typer.Option("--list", help="Say what gates there are, and leave.")] = False,
) -> None:
    """Show that every way to an answer gives the same answer: cached or cold, alone or in company, disturbed or not."""
    console = Console()
    if show_gates:
        return _print_gates(console)
    gates = choose(tuple(gate or ()), tuple(without or ()))
    if json is not None:
        check_writable(json)
    longest = None if max_model_len is None else parse_size(max_model_len, "max_model_len")
    options = Options(
        is_quick=quick,
        seed=seed,
        num_drafts=num_speculative_tokens,
        num_ranks=tensor_parallel_size,
        min_free_bytes=parse_size(min_free_memory, "min_free_memory"),
        max_tokens=longest,
    )
    if target is not None and URL.fullmatch(target):
        opened = _open_server(target, api_key, options)
    else:
        cache = CacheConfig(kv_cache_dtype=_kv_dtype(kv_cache_dtype), state_dtype=_state_dtype(mamba_ssm_cache_dtype))
        opened = _open_engine(target, options, EngineSettings(device, dtype, num_threads, cache))
    lab = Lab(opened, choose_level(level, gap, opened.about.level), options, Writer(opened, seed))
    sys.exit(verify_target(lab, gates, console, json))


def _open_server(url: str, api_key: str | None, options: Options) -> Target:
    if options.num_drafts is not None:
        raise ConfigError("--num-speculative-tokens is for a model directory; a server drafts as it was started")
    return HttpTarget(url, api_key)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built from, beside the gates' own options."""

    device: str
    dtype: str
    num_threads: int | None
    cache: CacheConfig


def _open_engine(model: str | None, options: Options, settings: EngineSettings) -> Target:
    """Raises ConfigError for settings that no engine of this checkpoint can have."""
    SpeculativeConfig(options.num_drafts or 0)
    checkpoint = find_checkpoint(model)
    config = EngineConfig(
        checkpoint.directory,
        max_model_len=options.max_tokens,
        device=settings.device,
        dtype=settings.dtype,
        num_threads=settings.num_threads,
        cache=settings.cache,
    )
    target = EngineTarget(config, checkpoint.name)
    if options.num_drafts and not target.about.has_draft_head:
        raise ConfigError(
            f"--num-speculative-tokens: {checkpoint.name} has no draft head (mtp.* tensors); leave it out"
        )
    return target


def verify_target(lab: Lab, gates: list[Gate], console: Console, json: Path | None) -> int:
    """Run the gates, print and write what came out; the exit code."""
    print_header(console, lab)
    with console.status("") as status:
        outcome = run_gates(
            lab, gates, lambda gate: status.update(f"{gate.name}: {gate.claim}"), lambda book: print_book(console, book)
        )
    print_summary(console, outcome)
    lab.target.close()
    if json is not None:
        write_json(json, lab, outcome)
    return _exit_code(outcome)


def choose_level(name: str, gap: float, own: Level) -> Level:
    """The level of that name; `auto` is the target's own. Raises ConfigError."""
    if name not in LEVELS:
        raise ConfigError(f"--level must be one of {', '.join(LEVELS)}, not {name!r}")
    if not 0 < gap <= max(GAPS.values()):
        raise ConfigError(f"--gap must be above 0 and at most {max(GAPS.values()):g}, not {gap:g}")
    is_exact = name == "exact" or (name == "auto" and own.is_exact)
    return EXACT if is_exact else Level(gap)


def _exit_code(outcome: Outcome) -> int:
    if outcome.interrupted:
        return INTERRUPTED
    return 0 if outcome.passed else FAILED


def _print_gates(console: Console) -> None:
    for gate in GATES:
        console.print(f"{gate.name:10} {gate.claim}", highlight=False, soft_wrap=True)


def _kv_dtype(name: str) -> str:
    return "fp8_e4m3" if name == "fp8" else name


def _state_dtype(name: str) -> str:
    return "float32" if name == "auto" else name
