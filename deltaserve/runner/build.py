"""Makes a rank's runner from settings: threads, model, weights, pools.

On the CPU the model computes in float32, and 16-bit weights are widened when they are read; on a GPU in bfloat16,
unless float32 is asked for. A 16-bit state type is fine: the GDN ops round the state at every boundary, on every path.
Without drafts there is no draft head: its weights are not loaded, and neither its KV nor hidden vectors are kept.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deltaserve.cache.layout import PoolSizes
from deltaserve.cache.storage import TORCH_DTYPES, allocate, allocate_host
from deltaserve.core.config import CacheSpec, EngineConfig
from deltaserve.core.errors import CheckpointError
from deltaserve.grammar.compiler import Grammars
from deltaserve.model.config import ModelConfig
from deltaserve.model.names import BARE_ROWS, MTP_LAYER
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.model.weights import Progress, fill_dummy, load_weights
from deltaserve.ops import native
from deltaserve.parallel.mesh import SINGLE, Mesh
from deltaserve.runner.device import compute_dtype, device_of
from deltaserve.runner.runner import ModelRunner


def served_model(config: EngineConfig, model_config: ModelConfig) -> ModelConfig:
    """The model as it will be built. Raises CheckpointError if drafts are asked for and there is no head for them."""
    if not config.speculative.num_drafts:
        return replace(model_config, num_mtp_layers=0)
    if not model_config.num_mtp_layers:
        names = [f"{row.file}.weight" for row in BARE_ROWS if row.part == "mtp"]
        raise CheckpointError(
            f"--speculative-config asks for {config.speculative.num_drafts} drafts, but {config.model} has no draft "
            f"head: {', '.join(names)} and {MTP_LAYER[0]}* are missing; leave the flag out, or fetch a checkpoint "
            f"that has them"
        )
    return model_config


def cache_spec(config: EngineConfig, model_config: ModelConfig) -> CacheSpec:
    """Sizes of pages, slots and rows on one rank, for `cache.layout.plan_pools`."""
    return served_model(config, model_config).cache_spec(
        kv_dtype=config.cache.kv_cache_dtype,
        state_dtype=config.cache.state_dtype,
        compute_dtype=compute_dtype(config),
        tp_size=config.tensor_parallel_size,
        num_drafts=config.speculative.num_drafts,
    )


def load_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    sizes: PoolSizes,
    mesh: Mesh = SINGLE,
    progress: Progress | None = None,
    ops: str | None = None,
    grammars: Grammars | None = None,
) -> tuple[ModelRunner, tuple[str, ...]]:
    """The runner of this rank, ready for its first plan, and what is worth saying of its checkpoint.

    `progress` is told (bytes read, bytes in all). `ops` names the implementation that the ops run, such as
    "reference"; None is the best there is.

    Threads are shared evenly by the ranks: `config.num_threads` counts them all. Raises ConfigError or
    CheckpointError, as sentences for the user.
    """
    dtype, device = TORCH_DTYPES[compute_dtype(config)], device_of(config)
    model_config = served_model(config, model_config)
    torch.set_num_threads(max(1, (config.num_threads or torch.get_num_threads()) // mesh.size))
    if device.type == "cpu":
        native.begin()
    with torch.device("meta"):
        model = Qwen3_5(model_config, mesh, dtype)
    if config.load_format == "dummy":
        fill_dummy(model, config.seed, device)
        notes: tuple[str, ...] = ("weights are random (--load-format dummy)",)
    else:
        notes = load_weights(model, model_config, config.model, mesh, progress, device).summary()
    model.prepare(ops)
    if device.type == "cpu":
        missing = native.load().note
        notes = notes if missing is None else (*notes, missing)
    else:
        torch.cuda.empty_cache()  # what loading used, in pieces that the pools do not fit
    pools = allocate(sizes.spec, sizes, device)
    host = allocate_host(sizes.spec, sizes.host, is_pinned=device.type == "cuda")
    synthetic = config.speculative.synthetic_acceptance
    runner = ModelRunner(
        model, pools, sizes, model_config.vocab_size, mesh, config.debug_checks, host, synthetic, grammars
    )
    return runner, notes
