"""`bench cache`: what the prefix cache keeps, policy against policy, on the same trace and the same memory.

A trace file or the generators of `make_trace` are replayed over the books alone (`cache_replay`). A memory size is what
pages and snapshots of cached and running requests share, on one device of a preset's shape; host memory is a second
tier. `unlimited` never evicts: no policy can hit more with snapshots at these places.

Hits are prompt tokens that need not be computed. FLOPs saved weigh them by what they would have cost: later tokens of a
long prompt cost more. The two slots of each row come on top of the memory stated, and hold snapshots while it is idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltaserve.bench import cache_replay, cache_scale, make_trace, record
from deltaserve.bench.cache_policies import POLICIES, UNLIMITED, make_manager
from deltaserve.bench.cache_replay import Arrival, Outcome
from deltaserve.bench.flops import PrefillFlops
from deltaserve.bench.traces import read_trace
from deltaserve.cache.layout import HostSizes, PoolSizes
from deltaserve.core.config import CacheConfig, CacheSpec
from deltaserve.core.errors import ConfigError
from deltaserve.core.types import BLOCK
from deltaserve.model.presets import preset

GIB = 1 << 30
HELD_OUT_SEEDS = "101,102"  # the defaults of retention were chosen with seeds 1 to 3
CONTEXTS = (12, 16, 24, 32, 48)  # default memory sizes: room for so many median prompts, each with a snapshot

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Memory:
    """What pages and snapshots may take, in bytes, on the device and beside it."""

    device_bytes: int
    host_bytes: int = 0

    def __str__(self) -> str:
        host = f" + {self.host_bytes / GIB:.3g} host" if self.host_bytes else ""
        return f"{self.device_bytes / GIB:.3g} GiB{host}"


@dataclass(frozen=True, slots=True)
class Setup:
    """What stays the same over all replays of a command."""

    name: str
    spec: CacheSpec
    flops: PrefillFlops
    config: CacheConfig
    num_rows: int
    policies: tuple[str, ...]

    def sizes(self, memory: Memory, longest: int) -> PoolSizes:
        num_pages, num_snapshots = self._split(memory.device_bytes)
        return PoolSizes(
            spec=self.spec,
            num_pages=1 + num_pages,
            num_slots=1 + 2 * self.num_rows + num_snapshots,
            num_rows=self.num_rows,
            max_model_len=longest,
            num_snapshots=num_snapshots,
            host=HostSizes(*self._split(memory.host_bytes)),
        )

    def _split(self, num_bytes: int) -> tuple[int, int]:
        """(pages, snapshots) of that memory."""
        snapshot_bytes = int(num_bytes * self.config.snapshot_memory_share)
        return (num_bytes - snapshot_bytes) // self.spec.page_bytes, snapshot_bytes // self.spec.slot_bytes


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace ready to be replayed. `about` says what it is, for table and file."""

    name: str
    about: str
    arrivals: list[Arrival]
    median_prompt: int
    longest: int


def cache(
    trace: Annotated[Path | None, typer.Argument(help="A Mooncake-format trace; none: the generators.")] = None,
    generators: Annotated[str, typer.Option(help="Which generators, by comma.")] = ",".join(make_trace.GENERATORS),
    seeds: Annotated[str, typer.Option(help="Of the generators, by comma.")] = HELD_OUT_SEEDS,
    requests: Annotated[int, typer.Option(min=1, help="Of each generated trace.")] = 1000,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Median prompt to generate.")] = 8192,
    output_tokens: Annotated[int, typer.Option(min=1, help="Median answer to generate.")] = 400,
    model: Annotated[str, typer.Option(help="The preset whose bytes and FLOPs are counted.")] = "qwen3.5-35b-a3b",
    memory_gib: Annotated[str | None, typer.Option(help="Sizes by comma; none: by the trace's median prompt.")] = None,
    host_gib: Annotated[float, typer.Option(min=0, help="Host tier beside each size.")] = 0.0,
    snapshot_share: Annotated[float | None, typer.Option(help="Of memory, for snapshots.")] = None,
    retained_turns: Annotated[int | None, typer.Option(min=0)] = None,
    policies: Annotated[str, typer.Option(help="By comma.")] = ",".join(POLICIES),
    rows: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 32,
    blocks: Annotated[int, typer.Option(min=0, help="Instead: what a request costs with so many blocks known.")] = 0,
    output: Annotated[Path | None, typer.Option(help="The result file.")] = None,
) -> None:
    """Replay a trace over the prefix cache's books: LRU, ours and an oracle at several memory sizes."""
    shape = preset(model)
    defaults = CacheConfig()
    setup = Setup(
        name=model,
        spec=shape.cache_spec(compute_dtype="bfloat16"),
        flops=PrefillFlops.of(shape),
        config=CacheConfig(
            snapshot_memory_share=defaults.snapshot_memory_share if snapshot_share is None else snapshot_share,
            retained_turns=defaults.retained_turns if retained_turns is None else retained_turns,
        ),
        num_rows=rows,
        policies=_known(policies.split(","), POLICIES, "--policies"),
    )
    result_rows: list[record.Row] = []
    if blocks:
        result_rows += _scale(setup, blocks)
    else:
        made = make_trace.Shape(requests, prompt_tokens, output_tokens)
        named = _numbers(seeds, "--seeds")
        for workload in [_from_file(trace)] if trace is not None else _generate(generators, named, made):
            result_rows += _compare(setup, workload, _memories(setup, workload, memory_gib, host_gib))
    path = output or record.result_path("cache-sim")
    record.write_rows(path, result_rows)
    console.print(f"commit {record.describe_commit()}, {record.describe_command()}; written to {path.name}")


def _scale(setup: Setup, num_blocks: int) -> list[record.Row]:
    cost = cache_scale.measure(setup.spec, num_blocks)
    console.print(
        f"{cost.num_blocks:,} blocks, {cost.blocks_per_request} a request, ms a request inside the books: "
        f"{cost.empty_ms:.2f} at first, {cost.nearly_full_ms:.2f} nearly full, {cost.evicting_ms:.2f} evicting"
    )
    commit, command, hardware = record.describe_commit(), record.describe_command(), record.describe_hardware(1)
    where = f"{cost.blocks_per_request} blocks a request, hashing included"
    values = {"empty": cost.empty_ms, "nearly full": cost.nearly_full_ms, "evicting": cost.evicting_ms}
    return [
        record.Row(f"books of {num_blocks} blocks, {name}", round(value, 2), "ms", where, hardware, commit, command)
        for name, value in values.items()
    ]


def _known(names: Sequence[str], known: Sequence[str], flag: str) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ConfigError(f"{flag} knows {', '.join(known)}, not {name!r}")
    return tuple(names)


def _numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} must be whole numbers parted by commas, not {text!r}") from None


def _from_file(path: Path) -> Workload:
    rows = read_trace(path)
    lengths = sorted(row.input_length for row in rows)
    median = lengths[len(lengths) // 2]
    longest = max(row.input_length + row.output_length for row in rows)
    about = f"{path.name}, {len(rows)} requests, median prompt {median}"
    return Workload(path.name, about, cache_replay.from_rows(rows), median, longest)


def _generate(generators: str, seeds: Sequence[int], shape: make_trace.Shape) -> Iterator[Workload]:
    for name in _known(generators.split(","), tuple(make_trace.GENERATORS), "--generators"):
        for seed in seeds:
            turns, made = make_trace.make(name, shape, seed)
            about = (
                f"{name} seed {seed}, {made.num_requests} requests of {made.num_sessions} sessions, median prompt "
                f"{made.prompt_tokens:.0f}, answer {made.output_tokens:.0f}, {made.seen_share:.1%} seen before"
            )
            longest = max(turn.num_tokens for turn in turns)
            arrivals = cache_replay.from_turns(turns)
            yield Workload(f"{name} seed {seed}", about, arrivals, round(made.prompt_tokens), longest)


def _memories(setup: Setup, workload: Workload, memory_gib: str | None, host_gib: float) -> list[Memory]:
    host_bytes = int(host_gib * GIB)
    if memory_gib is None:
        context_bytes = workload.median_prompt * setup.spec.kv_bytes_per_token + setup.spec.slot_bytes
        return [Memory(math.ceil(count * context_bytes), host_bytes) for count in CONTEXTS]
    try:
        return [Memory(int(float(word) * GIB), host_bytes) for word in memory_gib.split(",")]
    except ValueError:
        raise ConfigError(f"--memory-gib must be numbers parted by commas, not {memory_gib!r}") from None


def _compare(setup: Setup, workload: Workload, memories: Sequence[Memory]) -> list[record.Row]:
    """Replay under every policy and size, print the table, and give the rows to keep."""
    unlimited = _run(setup, workload, UNLIMITED, _endless(setup, workload))
    outcomes = {
        (memory, policy): _run(setup, workload, policy, setup.sizes(memory, workload.longest))
        for memory in memories
        for policy in setup.policies
    }
    console.print(f"{workload.about}; {setup.name}")
    console.print(_table(setup, outcomes, unlimited))
    num_blocks = sum(-(-num_prompt // BLOCK) for num_prompt, _ in unlimited.hits)
    count = len(workload.arrivals)
    again = [outcome.books_s for (_, policy), outcome in outcomes.items() if policy == "value"]
    console.print(
        f"books: {1e3 * unlimited.books_s / count:.2f} ms a request with hashing, "
        f"{1e3 * min(again, default=math.nan) / count:.2f} ms without; {num_blocks / count:.0f} blocks a request\n"
    )
    return _rows(setup, workload, outcomes, unlimited)


def _run(setup: Setup, workload: Workload, policy: str, sizes: PoolSizes) -> Outcome:
    manager, on_start = make_manager(policy, sizes, setup.config, setup.flops, workload.arrivals)
    return cache_replay.replay(workload.arrivals, manager, setup.num_rows, on_start)


def _endless(setup: Setup, workload: Workload) -> PoolSizes:
    """Pools in which nothing ever has to go."""
    num_pages = 1 + sum(-(-workload.longest // BLOCK) for _ in workload.arrivals)
    num_snapshots = 10 * len(workload.arrivals)
    num_slots = 1 + 2 * setup.num_rows + num_snapshots
    return PoolSizes(setup.spec, num_pages, num_slots, setup.num_rows, workload.longest, num_snapshots=num_snapshots)


def _saved(setup: Setup, outcome: Outcome) -> float:
    """Share of all prompts' FLOPs that hits made needless."""
    between = setup.flops.between
    total = sum(between(0, num_prompt) for num_prompt, _ in outcome.hits)
    return sum(between(0, num_cached) for _, num_cached in outcome.hits) / total


def _table(setup: Setup, outcomes: dict[tuple[Memory, str], Outcome], unlimited: Outcome) -> Table:
    """Hit tokens of every policy, then FLOPs saved, then how ours compares in hit tokens."""
    table = Table("memory", *(f"hits {name}" for name in setup.policies), *(f"saved {name}" for name in setup.policies))
    table.add_column("value / lru")
    table.add_column("value / oracle")
    for memory in dict.fromkeys(memory for memory, _ in outcomes):
        hits = {policy: outcomes[memory, policy].hit_share for policy in setup.policies}
        saved = [_saved(setup, outcomes[memory, policy]) for policy in setup.policies]
        cells = [f"{share:.1%}" for share in (*hits.values(), *saved)]
        table.add_row(str(memory), *cells, _ratio(hits, "value", "lru"), _ratio(hits, "value", "oracle"))
    blank = [""] * (len(setup.policies) - 1)
    table.add_row("unlimited", f"{unlimited.hit_share:.1%}", *blank, f"{_saved(setup, unlimited):.1%}", *blank)
    return table


def _ratio(hits: dict[str, float], one: str, other: str) -> str:
    if one not in hits or not hits.get(other):
        return "-"
    return f"{hits[one] / hits[other]:.3f}"


def _rows(
    setup: Setup, workload: Workload, outcomes: dict[tuple[Memory, str], Outcome], unlimited: Outcome
) -> list[record.Row]:
    commit, command = record.describe_commit(), record.describe_command()
    where = f"{workload.about}; {setup.name}, {setup.num_rows} rows"
    measured = [(f"{policy}, {memory}", outcome) for (memory, policy), outcome in outcomes.items()]
    rows = []
    for name, outcome in [*measured, ("unlimited", unlimited)]:
        for metric, value in (("hit tokens", outcome.hit_share), ("FLOPs saved", _saved(setup, outcome))):
            rows.append(
                record.Row(f"{name}: {metric}", round(value, 4), "share", where, "bookkeeping only", commit, command)
            )
    return rows
