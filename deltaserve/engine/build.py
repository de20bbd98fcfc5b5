"""Makes a real Engine from an EngineConfig: reads the shape, sizes the pools, starts the other ranks, loads.

Rank 0 plans the pools once and tells the others, so every rank has equally many pages, slots and rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread

from deltaserve.cache.layout import PoolSizes, fit_model_len, plan_pools
from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import DTYPE_BYTES, CacheSpec, EngineConfig
from deltaserve.core.errors import ConfigError
from deltaserve.engine.identity import model_identity
from deltaserve.engine.info import EngineInfo
from deltaserve.engine.loop import Engine, Runner
from deltaserve.engine.machine import available_memory_bytes, keep_freed_memory, num_threads
from deltaserve.engine.team import Team
from deltaserve.engine.tokenizer import read_chat_markers, read_eos_ids, read_grammars
from deltaserve.grammar.compiler import Grammars
from deltaserve.model.config import ModelConfig
from deltaserve.model.sizes import parameter_counts
from deltaserve.parallel.mesh import SINGLE
from deltaserve.runner.build import cache_spec, load_runner, served_model
from deltaserve.runner.device import device_of, free_bytes, workspace_bytes
from deltaserve.scheduler.scheduler import Scheduler

Progress = Callable[[str, float], None]


class Timeline:
    """Where the time of a start goes: seconds per stage, in order."""

    def __init__(self, started_s: float) -> None:
        self.stages_s: dict[str, float] = {}
        self._last_s = started_s

    def mark(self, stage: str) -> None:
        """The time since the last mark belongs to `stage`."""
        now_s = time.time()
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now_s - self._last_s
        self._last_s = now_s


def build_engine(
    config: EngineConfig,
    timeline: Timeline,
    progress: Progress | None = None,
    directory: Path | None = None,
    on_rank_failure: Callable[[str], None] | None = None,
) -> Engine:
    """Load everything. `progress` is called with a stage and the share of it that is done.

    `directory` is where ranks meet (None: a new private one), `on_rank_failure` is called from a thread when one of
    them is gone. Raises ConfigError or CheckpointError for what the user can change, EngineDeadError if another rank
    failed.
    """
    keep_freed_memory()
    config = replace(config, num_threads=num_threads(config.num_threads))
    model_config = served_model(config, ModelConfig.from_directory(config.model))
    sizes = size_pools(config, model_config)
    manager = _cache_manager(config, sizes)
    timeline.mark("config")
    team = None
    if config.tensor_parallel_size > 1:
        team = Team(config, sizes, directory, on_rank_failure)
        timeline.mark("ranks")
    grammars = read_grammars(config.model, model_config.vocab_size)
    if grammars is not None:
        Thread(target=grammars.prepare, name="grammars", daemon=True).start()  # while the weights are read
    try:
        runner, notes = _load(config, model_config, sizes, team, timeline, progress, grammars)
    except BaseException:
        if team is not None:
            team.abandon()
        raise
    timeline.mark("pools" if "weights" in timeline.stages_s else "load")
    return Engine(
        Scheduler(config.scheduler, manager, sizes.max_model_len, config.speculative),
        manager,
        runner,
        _info(config, model_config, sizes, timeline, notes),
        seed=config.seed,
        debug_checks=config.debug_checks,
        on_close=None if team is None else team.close,
        grammars=grammars,
    )


def _cache_manager(config: EngineConfig, sizes: PoolSizes) -> CacheManager:
    has_cache = config.cache.enable_prefix_caching
    return CacheManager(
        sizes,
        config.cache,
        identity=model_identity(config) if has_cache else "",
        markers=read_chat_markers(config.model) if has_cache else None,
        debug=config.debug_checks,
    )


def _load(
    config: EngineConfig,
    model_config: ModelConfig,
    sizes: PoolSizes,
    team: Team | None,
    timeline: Timeline,
    progress: Progress | None,
    grammars: Grammars | None,
) -> tuple[Runner, tuple[str, ...]]:
    def report(num_done: int, num_all: int) -> None:
        if progress is not None:
            progress("weights", num_done / max(num_all, 1))
        if num_done >= num_all:
            timeline.mark("weights")

    mesh = SINGLE if team is None else team.mesh
    runner, notes = load_runner(config, model_config, sizes, mesh, report, grammars=grammars)
    return (runner if team is None else team.lead(runner)), notes


def _info(
    config: EngineConfig, model_config: ModelConfig, sizes: PoolSizes, timeline: Timeline, notes: tuple[str, ...]
) -> EngineInfo:
    return EngineInfo(
        model_type=model_config.model_type,
        max_model_len=sizes.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_ids=read_eos_ids(config.model),
        num_pages=sizes.num_pages - 1,
        num_slots=sizes.num_slots - 1,
        num_rows=sizes.num_rows,
        num_ranks=config.tensor_parallel_size,
        num_threads=config.num_threads or 1,
        pools=sizes.summary(),
        notes=notes + _context_note(config, model_config, sizes),
        timings_s=timeline.stages_s,
        has_prefix_cache=config.cache.enable_prefix_caching,
        num_snapshots=sizes.num_snapshots,
        num_host_pages=sizes.host.num_pages,
        num_host_slots=sizes.host.num_slots,
        num_drafts=config.speculative.num_drafts,
        synthetic_acceptance=config.speculative.synthetic_acceptance,
    )


def _context_note(config: EngineConfig, model_config: ModelConfig, sizes: PoolSizes) -> tuple[str, ...]:
    """That the pools hold less than the checkpoint's context, where nobody asked for less."""
    longest = model_config.max_position_embeddings
    if config.max_model_len is not None or sizes.max_model_len == longest:
        return ()
    return (
        f"the context is {sizes.max_model_len:,} of the checkpoint's {longest:,} tokens, which is what the pages hold; "
        f"they are sized by {sizes.sized_by}",
    )


def size_pools(config: EngineConfig, model_config: ModelConfig) -> PoolSizes:
    """The pools of each rank: what is free now, less weights and host tier, shared by the ranks of this host.

    On a GPU they lie in its memory, less what a step works in, and the host tier in the host's. `host_cache_bytes` is
    the budget of all ranks together.
    """
    spec = cache_spec(config, model_config)
    available_bytes = _available_bytes(config, model_config, spec)
    longest = model_config.max_position_embeddings
    num_ranks = config.tensor_parallel_size
    cache = replace(config.cache, host_cache_bytes=config.cache.host_cache_bytes // num_ranks)
    arguments = (spec, cache, config.scheduler)
    if config.max_model_len is None:
        max_model_len = fit_model_len(*arguments, longest, available_bytes)
    elif config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions of the checkpoint "
            f"(max_position_embeddings in config.json); lower it"
        )
    else:
        max_model_len = config.max_model_len
    return plan_pools(*arguments, max_model_len, available_bytes)


def _available_bytes(config: EngineConfig, model_config: ModelConfig, spec: CacheSpec) -> int:
    """For the pools of one rank."""
    device, host_bytes = device_of(config), config.cache.host_cache_bytes
    weights_bytes = _num_weights(model_config, device.type == "cpu") * DTYPE_BYTES[spec.compute_dtype]
    if device.type == "cpu":
        free = available_memory_bytes()
        _check_fits(config, spec, weights_bytes, free)
        _check_host_tier(host_bytes, free - weights_bytes)
        return (free - weights_bytes - host_bytes) // config.tensor_parallel_size
    size = DTYPE_BYTES[spec.compute_dtype]
    free = free_bytes(device) - workspace_bytes(model_config, config.scheduler, spec.num_drafts, size)
    _check_fits(config, spec, weights_bytes, free)
    _check_host_tier(host_bytes, available_memory_bytes())
    return free - weights_bytes


def _check_fits(config: EngineConfig, spec: CacheSpec, weights_bytes: int, free_bytes: int) -> None:
    if weights_bytes >= free_bytes:
        raise ConfigError(
            f"the weights of {config.model} take {weights_bytes / 2**30:.1f} GiB as {spec.compute_dtype}, but only "
            f"{free_bytes / 2**30:.1f} GiB of memory are free; free some memory or choose a smaller model"
        )


def _check_host_tier(host_bytes: int, free_bytes: int) -> None:
    if host_bytes and host_bytes >= free_bytes:
        raise ConfigError(
            f"--host-cache-bytes {host_bytes} ({host_bytes / 2**30:.1f} GiB) is more than the host has beside the "
            f"weights: {free_bytes / 2**30:.1f} GiB of memory are free; lower it"
        )


def _num_weights(model_config: ModelConfig, is_laid_out: bool = True) -> int:
    """Numbers that stay in memory: a tied head that is laid out for the CPU's products has its own copy."""
    copied = model_config.vocab_size * model_config.hidden_size if model_config.tie_word_embeddings else 0
    return parameter_counts(model_config).total + copied * is_laid_out
