"""Which tensors a model directory holds, read from the headers of its safetensors files alone. No torch.

A directory is in the Hub's layout: one file, or several with a `model.safetensors.index.json` that says which tensor
is where, or several without an index. Every header is checked against the length of its file, so a download that
stopped half way, or a Git LFS pointer in place of a file, is found before any weight is read.

File format: 8 bytes (little endian) of header length, a JSON object of name -> {dtype, shape, data_offsets}, the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaserve.core.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MTP_PREFIX = "mtp."
DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_LFS_MAGIC = b"version https://git-lfs"
_MAX_HEADER_BYTES = 1 << 29
_FETCH = "download it again"
# What JSON of the wrong shape makes of being read as the right one.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. `dtype` is safetensors' name (BF16, F8_E4M3, ...); `start` orders tensors inside a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a directory by name. `ignored_files` lie there too, but its index does not mention them."""

    directory: Path
    tensors: Mapping[str, TensorInfo]
    ignored_files: tuple[Path, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """Reads every header. CheckpointError names the file that is missing, cut short or not safetensors."""
    directory = Path(directory)
    present = sorted(directory.glob("*.safetensors"))
    index = directory / INDEX_NAME
    weight_map = _read_index(index) if index.exists() else None
    files = present if weight_map is None else [directory / name for name in sorted(set(weight_map.values()))]
    if not files:
        raise CheckpointError(f"{directory} holds no .safetensors files; only that format is read")
    tensors = _merge(_read_header(file) for file in files)
    if weight_map is not None:
        _check_index(index, weight_map, tensors)
    return Checkpoint(directory, tensors, tuple(file for file in present if file not in files))


def has_mtp(directory: Path | str) -> bool:
    """Whether the directory's files carry a draft head; ask before the model is built."""
    return any(name.startswith(MTP_PREFIX) for name in read_checkpoint(directory).tensors)


def first_ten(names: Iterable[str]) -> str:
    """For messages: the names, cut after ten, with the count of the rest."""
    names = list(names)
    rest = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + rest


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, *_MALFORMED) as error:
        raise CheckpointError(f"{index} is not an index with a weight_map ({error}); {_FETCH}") from None
    outside = [file for file in set(entries.values()) if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{index} names files outside its own directory: {first_ten(sorted(outside))}")
    return entries


def _check_index(index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    absent = [name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != file]
    if absent:
        raise CheckpointError(f"{index} lists tensors that are not in the files it names: {first_ten(absent)}")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"tensors in the files are missing from {index}: {first_ten(unlisted)}")


def _merge(headers: Iterable[list[TensorInfo]]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for info in header:
            other = tensors.setdefault(info.name, info)
            if other is not info:
                raise CheckpointError(f"{info.name} is stored twice, in {other.file} and in {info.file}")
    return tensors


def _read_header(file: Path) -> list[TensorInfo]:
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if _LFS_MAGIC.startswith(start) and len(start) == 8:
                raise CheckpointError(
                    f"{file} is a Git LFS pointer of {file_bytes} bytes, not the weights; "
                    f"fetch them with `git lfs pull`, or download the model again with `hf download`"
                )
            header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= header_bytes <= min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} ({file_bytes} bytes) has no whole safetensors header; {_FETCH}")
            header = stream.read(header_bytes)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise CheckpointError(f"{file} cannot be read ({error}); {_FETCH}") from None
    infos = _parse_header(file, header)
    _check_length(file, infos, file_bytes - 8 - header_bytes)
    return infos


def _parse_header(file: Path, header: bytes) -> list[TensorInfo]:
    try:
        entries = json.loads(header, object_pairs_hook=lambda pairs: _unique(file, pairs))
        return [_info(file, name, entry) for name, entry in entries.items() if name != "__metadata__"]
    except CheckpointError:
        raise
    except _MALFORMED as error:
        raise CheckpointError(f"the header of {file} is not valid ({error!r}); {_FETCH}") from None


def _unique(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        raise CheckpointError(f"the header of {file} holds names twice: {first_ten(twice)}")
    return fields


def _info(file: Path, name: str, entry: Mapping[str, Any]) -> TensorInfo:
    shape = tuple(int(size) for size in entry["shape"])
    start, stop = (int(offset) for offset in entry["data_offsets"])
    if entry["dtype"] not in DTYPE_BITS:
        raise CheckpointError(f"{name} in {file} has dtype {entry['dtype']!r}, which is not known")
    if math.prod(shape) * DTYPE_BITS[entry["dtype"]] != (stop - start) * 8 or start < 0:
        raise CheckpointError(
            f"{name} in {file} takes {stop - start} bytes, which a {entry['dtype']} tensor of shape {list(shape)} "
            f"does not; {_FETCH}"
        )
    return TensorInfo(name, entry["dtype"], shape, file, start, stop - start)


def _check_length(file: Path, infos: list[TensorInfo], data_bytes: int) -> None:
    """The tensors must lie end to end and fill the file."""
    end = 0
    for info in sorted(infos, key=lambda info: (info.start, info.num_bytes)):
        if info.start != end:
            raise CheckpointError(
                f"{info.name} in {file} begins at byte {info.start} of the data, not at {end}; {_FETCH}"
            )
        end += info.num_bytes
    if end != data_bytes:
        raise CheckpointError(f"{file} holds {data_bytes} bytes of data, but its header promises {end}; {_FETCH}")
