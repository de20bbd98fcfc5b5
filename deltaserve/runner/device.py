"""Which device an engine computes on, in what type, and how much of its memory is there to be shared out.

One rank on a GPU so far: the exchange between ranks goes through host memory.
"""

from __future__ import annotations

import torch

from deltaserve.core.config import EngineConfig, SchedulerConfig
from deltaserve.core.errors import ConfigError
from deltaserve.model.config import ModelConfig

CPU = torch.device("cpu")
_LIBRARIES_BYTES = 1 << 30  # what CUDA, cuBLAS and loaded kernels take beside our tensors
_NUM_WIDE = 12  # vectors of the widest layer that one token has at a time, with what the allocator keeps of old ones


def device_of(config: EngineConfig) -> torch.device:
    """The device of `config.device`; "auto" is the GPU where torch sees one and there is one rank.

    Raises ConfigError where a GPU is asked for that is not there, or for several ranks.
    """
    if config.device == "cpu":
        return CPU
    is_there = torch.cuda.is_available()
    if config.device == "cuda":
        if not is_there:
            raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu, or install a torch with CUDA")
        if config.tensor_parallel_size > 1:
            raise ConfigError(
                f"--tensor-parallel-size {config.tensor_parallel_size}: ranks share the layers of a model on CPUs "
                f"only; use 1, or --device cpu"
            )
    return torch.device("cuda", 0) if is_there and config.tensor_parallel_size == 1 else CPU


def compute_dtype(config: EngineConfig) -> str:
    """The key of DTYPE_BYTES in which the model computes. Raises ConfigError for a type that this device lacks."""
    if device_of(config).type == "cuda":
        return "bfloat16" if config.dtype == "auto" else config.dtype
    if config.dtype == "bfloat16":
        raise ConfigError(
            "--dtype bfloat16 needs a GPU: on the CPU the model computes in float32, from bfloat16 weights too; "
            "use --dtype float32 or auto"
        )
    return "float32"


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that nobody holds now, those in torch's own store for reuse included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def workspace_bytes(model: ModelConfig, scheduler: SchedulerConfig, num_drafts: int, size: int) -> int:
    """What a step may need on a GPU beside weights and pools, of numbers of `size` bytes: an estimate from above.

    The widest part of a layer for all tokens of a step, several times over, and float32 logits of every position that
    can be sampled, twice.
    """
    widths = [
        2 * model.num_heads * model.head_dim + 2 * model.num_kv_heads * model.head_dim,
        2 * model.key_size + 2 * model.value_size,
        model.num_experts_per_token * (2 * model.moe_intermediate_size + model.hidden_size),
        2 * model.intermediate_size,
    ]
    step_bytes = scheduler.max_num_batched_tokens * max(widths) * size * _NUM_WIDE
    logits_bytes = 2 * 4 * scheduler.max_num_seqs * (1 + num_drafts) * model.vocab_size
    return _LIBRARIES_BYTES + step_bytes + logits_bytes
