"""Checkpoints made wrong, or only as headers: for tests of the loader's books."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltaserve.model.checkpoint import DTYPE_BITS
from deltaserve.model.config import ModelConfig
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.model.weights import load_weights
from deltaserve.parallel.mesh import SINGLE, Mesh

Tensors = dict[str, Tensor]
WEIGHTS = "model.safetensors"


def build(directory: Path, mesh: Mesh = SINGLE, *, mtp: bool = True, dtype: torch.dtype = torch.float32) -> Qwen3_5:
    """The model of a directory's config, on the meta device."""
    config = ModelConfig.from_directory(directory)
    with torch.device("meta"):
        model = Qwen3_5(config, mesh, dtype)
    if not mtp:
        model.mtp = None
    return model


def load(directory: Path, mesh: Mesh = SINGLE, dtype: torch.dtype = torch.float32) -> Qwen3_5:
    model = build(directory, mesh, dtype=dtype)
    load_weights(model, model.config, directory, mesh)
    return model


def changed(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of a one-file checkpoint with its tensors changed."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = change(load_file(source / WEIGHTS))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target / WEIGHTS)
    return target


def sharded(source: Path, target: Path, num_files: int, *, index: bool) -> Path:
    """The same tensors dealt out over several files in turn, so that the parts of a module lie apart."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / WEIGHTS)
    files = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    weight_map = {name: files[i % num_files] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, target / file)
    if index:
        (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def write_header(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A whole safetensors file with its header and a hole where the data would be: name -> (dtype, shape)."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
