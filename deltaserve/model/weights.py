"""Fill a model with a checkpoint's weights, or with small random ones.

`load_plan` first settles from the headers what goes where, so that a checkpoint that does not fit is refused before
anything is read. Then each file is walked from front to back, one tensor at a time: the stored tensor is a view of the
mapped file, a quantised one is turned into float32, and this rank's part of each section is copied into the parameter,
which casts to the parameter's dtype. Nothing else is kept; a mapped view costs no memory, so there is no need to read
slices of a file by hand.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from deltaserve.core.errors import CheckpointError
from deltaserve.model.checkpoint import TensorInfo, read_checkpoint
from deltaserve.model.config import ModelConfig
from deltaserve.model.load_plan import Job, LoadPlan, plan_load
from deltaserve.model.names import Target, Transform
from deltaserve.model.params import Parameter, Section
from deltaserve.parallel.mesh import SINGLE, Mesh

Progress = Callable[[int, int], None]
_MAX_OPEN_FILES = 4


def load_weights(
    model: nn.Module,
    config: ModelConfig,
    directory: Path | str,
    mesh: Mesh = SINGLE,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> LoadPlan:
    """Fills every parameter of `model` (built on the meta device, or on `device`) with this rank's weights.

    `device` None is the CPU.
    `progress` is called with (bytes read, bytes in all) after each module. Returns the plan, whose `skipped` and
    `notes` are worth showing. Raises CheckpointError, naming the tensors, before the model is touched if the
    checkpoint does not fit it.
    """
    plan = plan_load(config, parameters_by_name(model), read_checkpoint(directory))
    plan.check()
    materialize(model, device)
    parameters = parameters_by_name(model)
    files = _Files()
    done, total = 0, plan.num_bytes
    for job in plan.jobs:
        weight = _transformed(files.weight(job), job.target, parameters[job.target.parameter], config.num_key_heads)
        if job.is_tied:
            _check_tied(job, weight, parameters[job.target.parameter], mesh)
        else:
            _fill(parameters[job.target.parameter], job.target, weight, mesh)
        done += job.num_bytes
        if progress is not None:
            progress(done, total)
    return plan


def fill_dummy(model: nn.Module, seed: int = 0, device: torch.device | None = None) -> None:
    """Random weights for timing a shape: the same for the same seed, parameter name, local shape and kind of device.

    Embeddings are N(0, 1) and what is added to the residual stream is small beside them, so hidden states of different
    tokens point in different directions; router rows have one length, so experts are chosen near uniformly. Norms lie
    near one, GDN decay between a few and a few thousand tokens.
    """
    materialize(model, device)
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()) ^ seed)
        parameter.copy_(_dummy(name, tuple(parameter.shape), generator))


def parameters_by_name(model: nn.Module) -> dict[str, Parameter]:
    """A tied parameter appears under each of its names."""
    found = dict(model.named_parameters(remove_duplicate=False))
    strays = [name for name, parameter in found.items() if not isinstance(parameter, Parameter)]
    assert not strays, f"parameters made without a split: {strays}"
    return {name: parameter for name, parameter in found.items() if isinstance(parameter, Parameter)}


def materialize(model: nn.Module, device: torch.device | None = None) -> None:
    """Replaces parameters on the meta device by empty ones on `device` (None: the CPU); tied ones stay tied."""
    made: dict[int, Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta or not isinstance(parameter, Parameter):
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device or "cpu")
                made[id(parameter)] = nn.Parameter.__new__(Parameter, empty, requires_grad=False)
                made[id(parameter)].placement = parameter.placement
            setattr(module, name, made[id(parameter)])


def ungroup(weight: Tensor, section_sizes: tuple[int, ...], num_groups: int) -> Tensor:
    """Rows [group][section][...] to rows [section][group][...]: Qwen3-Next's fused projections, made flat."""
    parts = weight.unflatten(0, (num_groups, -1)).split([size // num_groups for size in section_sizes], dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


class _Files:
    """Open safetensors files, the latest few: the parts of one module may lie in different files."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def weight(self, job: Job) -> Tensor:
        """The module's weight: as stored, or float32 if it is quantised."""
        tensors = {suffix: self._tensor(info) for suffix, info in job.tensors.items()}
        dequantize = job.format.dequantize
        return tensors[job.format.suffixes[0]] if dequantize is None else dequantize(tensors)

    def _tensor(self, info: TensorInfo) -> Tensor:
        try:
            if info.file not in self._open:
                while len(self._open) >= _MAX_OPEN_FILES:
                    del self._open[next(iter(self._open))]
                self._open[info.file] = safe_open(str(info.file), framework="pt", device="cpu")
            tensor: Tensor = self._open[info.file].get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.name} cannot be read from {info.file} ({error}); download it again") from None
        return tensor


def _sections(parameter: Parameter, target: Target) -> list[tuple[Section, int]]:
    """The target's sections, each with where it begins in the stored tensor."""
    assert parameter.placement is not None
    sections = [parameter.placement.sections[s] for s in target.sections]
    starts = [sum(section.size for section in sections[:i]) for i in range(len(sections))]
    return list(zip(sections, starts, strict=True))


def _transformed(weight: Tensor, target: Target, parameter: Parameter, num_key_heads: int) -> Tensor:
    match target.transform:
        case Transform.NONE:
            return weight
        case Transform.ADD_ONE:
            return weight.float() + 1
        case Transform.DROP_DIM_1:
            return weight.squeeze(1)
        case Transform.UNGROUP:
            sizes = tuple(section.size for section, _ in _sections(parameter, target))
            return ungroup(weight, sizes, num_key_heads)


def _fill(parameter: Parameter, target: Target, weight: Tensor, mesh: Mesh) -> None:
    """Copies this rank's part of each section, in the order the parameter keeps them."""
    destination = parameter.data if target.expert is None else parameter.data[target.expert]
    split = parameter.placement
    if split is None:
        destination.copy_(weight)
        return
    dim = split.dim - (target.expert is not None)
    for index, (section, begins) in zip(target.sections, _sections(parameter, target), strict=True):
        start, stop = section.local_range(mesh.rank, mesh.size)
        part = weight.narrow(dim, begins + start, stop - start)
        destination.narrow(dim, split.offset(index, mesh.rank, mesh.size), stop - start).copy_(part)


def _check_tied(job: Job, weight: Tensor, embedding: Parameter, mesh: Mesh) -> None:
    """A stored head beside tied embeddings must be the embeddings; a quantised one may differ by its rounding."""
    if job.format.dequantize is not None:
        return
    split = embedding.placement
    part = weight if split is None else split.take(0, weight, mesh.rank, mesh.size)
    if not torch.equal(part.to(embedding), embedding.data):
        raise CheckpointError(
            f"{job.stem}.weight differs from the embeddings, but config.json says tie_word_embeddings: true; "
            f"set it to false, or remove the tensor"
        )


def _dummy(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values for one parameter, by the last words of its name, on the generator's device."""
    device = generator.device
    if name.endswith(".A_log"):
        return torch.rand(shape, generator=generator, device=device).mul_(15).add_(1).log_()
    if name.endswith(".dt_bias"):
        steps = torch.exp(torch.rand(shape, generator=generator, device=device) * math.log(100) + math.log(0.001))
        return steps + torch.log(-torch.expm1(-steps))  # softplus of it is `steps`, 0.001 to 0.1
    noise = torch.randn(shape, generator=generator, device=device)
    if name.endswith(".scale"):
        return noise.mul_(0.05).add_(1)
    if name == "embed.weight":
        return noise
    if name.endswith(".router.weight"):
        return nn.functional.normalize(noise, dim=-1)
    is_output = name.endswith((".o_proj.weight", ".out_proj.weight", ".down_proj.weight", ".experts.down"))
    return noise.mul_((0.1 if is_output else 1.0) * shape[-1] ** -0.5)
