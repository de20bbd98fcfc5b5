"""`bench cpu`: output tokens per second on this machine's cores, beside transformers on the same checkpoint.

Engines take turns within each round (so that a busy minute hurts all of them), medians over rounds are reported. Every
time includes prefill: a run is the whole work of `bench.work`, from the first submit to the last token.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltaserve.bench import record, step_times
from deltaserve.bench.baseline import TransformersTarget
from deltaserve.bench.http import HttpTarget, ServerTarget
from deltaserve.bench.in_process import EngineTarget
from deltaserve.bench.work import Measured, Shape, Target, random_prompts, read_vocab_size
from deltaserve.core.errors import ConfigError
from deltaserve.engine.machine import num_usable_cores
from deltaserve.model.sample import BENCH_SIZES, write_sample_checkpoint

ENGINES = ("deltaserve", "http", "transformers-float32", "transformers-bfloat16")
Runs = dict[tuple[str, Shape], list[Measured]]

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, on what. `engines` are names of ENGINES; `url` adds a server that already runs."""

    model: Path
    engines: tuple[str, ...]
    shapes: tuple[Shape, ...]
    num_rounds: int
    num_threads: int
    url: str | None

    @property
    def max_streams(self) -> int:
        return max(shape.num_streams for shape in self.shapes)


def cpu(
    model: Annotated[Path | None, typer.Argument(help="A checkpoint's directory; none: a 22 M random sample.")] = None,
    streams: Annotated[str, typer.Option(help="Requests in flight, several by comma.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    engines: Annotated[
        str, typer.Option(help=f"Of {', '.join(ENGINES)}.")
    ] = "deltaserve,transformers-float32,transformers-bfloat16",
    url: Annotated[str | None, typer.Option(help="Measure the server at this address too.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine; none: all usable cores.")] = None,
    step_times_: Annotated[
        bool, typer.Option("--step-times", help="Where a decode step's time goes, instead.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="The result file.")] = None,
) -> None:
    """Tokens per second on CPU cores, at several numbers of streams, beside transformers."""
    with _checkpoint(model) as directory:
        shapes = tuple(Shape(count, prompt_tokens, output_tokens) for count in _counts(streams))
        names = tuple(name for name in engines.split(",") if name)
        options = Options(directory, names, shapes, rounds, threads or num_usable_cores(), url)
        if step_times_:
            step_times.report(options.model, options.shapes, options.num_threads, console)
        else:
            _measure_and_write(options, output or record.result_path("cpu"))


@contextmanager
def _checkpoint(model: Path | None) -> Iterator[Path]:
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "sample-22M"
        write_sample_checkpoint(directory, kind="moe", sizes=BENCH_SIZES)
        yield directory


def _counts(streams: str) -> list[int]:
    words = streams.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--streams must be positive numbers parted by commas, such as 1,8,32, not {streams!r}")
    return [int(word) for word in words]


def _measure_and_write(options: Options, path: Path) -> None:
    hardware = record.announce(options.model, options.num_threads, console)
    with ExitStack() as stack:
        targets = list(_open(options, stack))
        runs = _measure(options, targets)
    rows = _rows(options, runs, hardware)
    record.write_rows(path, rows)
    console.print(_table(options, runs))
    console.print(f"commit {record.describe_commit()}, {record.describe_command()}; written to {path.name}")


def _open(options: Options, stack: ExitStack) -> Iterator[Target]:
    for name in options.engines:
        target = _open_one(name, options)
        stack.callback(target.close)
        yield target
    if options.url is not None:
        yield HttpTarget(options.url)


def _open_one(name: str, options: Options) -> Target:
    if name == "deltaserve":
        return EngineTarget(options.model, num_threads=options.num_threads, max_streams=options.max_streams)
    if name == "http":
        server = ServerTarget(options.model, num_threads=options.num_threads, max_streams=options.max_streams)
        console.print(f"deltaserve serve: ready after {server.ready_s:.1f} s")
        return server
    if name in ENGINES:
        return TransformersTarget(options.model, name.removeprefix("transformers-"))
    raise ConfigError(f"--engines knows {', '.join(ENGINES)}, not {name!r}")


def _measure(options: Options, targets: Sequence[Target]) -> Runs:
    vocab_size = read_vocab_size(options.model)
    warm_up = Shape(2, 65, 4)
    for target in targets:
        target.run(random_prompts(warm_up, vocab_size, seed=-1), warm_up)
    runs: Runs = {(target.name, shape): [] for target in targets for shape in options.shapes}
    for number in range(options.num_rounds):
        for shape in options.shapes:
            prompts = random_prompts(shape, vocab_size, seed=number)
            for target in targets:
                measured = target.run(prompts, shape)
                runs[target.name, shape].append(measured)
                figure = f"{measured.tokens_per_s:7.1f} tok/s"
                console.print(f"round {number + 1}  {shape.streams:>10}  {figure}  {target.name}")
    return runs


def _rows(options: Options, runs: Runs, hardware: str) -> list[record.Row]:
    commit, command = record.describe_commit(), record.describe_command()
    rows = []
    for (name, shape), measured in runs.items():
        where = f"{options.model.name}, {shape}, median of {len(measured)}"
        for metric, value, unit in _figures(measured):
            rows.append(record.Row(f"{name}: {metric}", value, unit, where, hardware, commit, command))
    return rows


def _figures(runs: Sequence[Measured]) -> Iterator[tuple[str, float, str]]:
    """(metric, value, unit), medians over the runs; what an engine cannot tell is left out."""
    yield "output", round(statistics.median(run.tokens_per_s for run in runs), 1), "tokens/s"
    per_cpu_s = [run.tokens_per_cpu_s for run in runs if run.tokens_per_cpu_s is not None]
    if per_cpu_s:
        yield "output per processor second", round(statistics.median(per_cpu_s), 1), "tokens/s"
    first_s = [run.median_first_token_s for run in runs if run.median_first_token_s is not None]
    if first_s:
        yield "first token", round(1e3 * statistics.median(first_s), 1), "ms"


def _table(options: Options, runs: Runs) -> Table:
    table = Table("tokens/s", *(shape.streams for shape in options.shapes))
    for name in dict.fromkeys(name for name, _ in runs):
        medians = [statistics.median(run.tokens_per_s for run in runs[name, shape]) for shape in options.shapes]
        table.add_row(name, *(f"{median:.0f}" for median in medians))
    return table
