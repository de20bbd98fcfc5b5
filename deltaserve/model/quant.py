"""Formats of stored weights, as data: which tensors make up one module's weight, their types and shapes, its values.

The format of each module is decided by the tensors that are there, never by the config's word, so a file may mix them.
What the config declares is compared with what was found, and differences are reported (`Declared`).

| format         | tensors beside each other                                              | value of an element      |
| -------------- | ---------------------------------------------------------------------- | ------------------------ |
| bf16 fp16 fp32 | weight                                                                 | weight                   |
| fp8-block      | weight F8_E4M3 [O, I], weight_scale_inv or weight_scale [O/128, I/128] | weight * scale           |
| fp8-channel    | weight F8_E4M3 [O, I], weight_scale [O, 1]                             | weight * scale           |
| fp8-tensor     | weight F8_E4M3, weight_scale of one element                            | weight * scale           |
| nvfp4-modelopt | weight U8 [O, I/2], weight_scale F8_E4M3 [O, I/16], weight_scale_2 [1] | weight * scale * scale_2 |
| nvfp4-ct       | weight_packed U8, weight_scale as above, weight_global_scale [1]       | weight * scale / global  |

Letters: O rows (outputs), I columns (inputs); block counts round up. `ct` is compressed-tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from deltaserve.core.errors import CheckpointError
from deltaserve.model.checkpoint import TensorInfo
from deltaserve.ops import linear

Shape = tuple[int, ...]
ScaleShapes = dict[str, tuple[Shape, ...]]
Tensors = Mapping[str, Tensor]

_FP8 = ("F8_E4M3",)
_FLOATS = ("F32", "BF16", "F16")
_ONE: tuple[Shape, ...] = ((), (1,))


class Stored(NamedTuple):
    """What tells one format from another."""

    dtype: str
    shape: Shape


def _no_scales(shape: Shape) -> ScaleShapes:
    return {}


@dataclass(frozen=True, slots=True)
class Format:
    """`tensors`: suffix -> accepted dtypes; the first is the weight. `values_per_item`: weights in one stored item.

    `scale_shapes` gives, from the weight's shape, the accepted shapes of each other tensor. `dequantize` takes the
    tensors by suffix and returns float32; None where the stored weight is already a number.
    """

    name: str
    tensors: Mapping[str, tuple[str, ...]]
    scale_shapes: Callable[[Shape], ScaleShapes] = _no_scales
    dequantize: Callable[[Tensors], Tensor] | None = None
    values_per_item: int = 1

    @property
    def suffixes(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def has_types(self, stored: Mapping[str, Stored]) -> bool:
        return stored.keys() == self.tensors.keys() and all(
            tensor.dtype in self.tensors[suffix] for suffix, tensor in stored.items()
        )

    def weight_shape(self, stored: Shape) -> Shape:
        """Shape of the weight's values, from the shape of the stored weight."""
        return (*stored[:-1], stored[-1] * self.values_per_item) if stored else ()

    def wrong_scales(self, stored: Mapping[str, Stored]) -> ScaleShapes:
        """Suffixes whose tensors have the wrong shape, with the shapes that would be right."""
        right = self.scale_shapes(self.weight_shape(stored[self.suffixes[0]].shape))
        return {suffix: shapes for suffix, shapes in right.items() if stored[suffix].shape not in shapes}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A format that is recognised, by one tensor's suffix and dtypes, and not served."""

    name: str
    suffix: str
    dtypes: tuple[str, ...]


def _block_scales(suffix: str, shape: Shape) -> ScaleShapes:
    return {suffix: (tuple(math.ceil(size / linear.FP8_BLOCK) for size in shape),) if len(shape) == 2 else ()}


def _channel_scales(shape: Shape) -> ScaleShapes:
    return {"weight_scale": ((shape[0], 1), (shape[0],)) if len(shape) == 2 else ()}


def _nvfp4_scales(global_suffix: str, shape: Shape) -> ScaleShapes:
    fits = len(shape) == 2 and shape[1] % linear.NVFP4_GROUP == 0
    return {"weight_scale": ((shape[0], shape[1] // linear.NVFP4_GROUP),) if fits else (), global_suffix: _ONE}


def _plain(name: str, dtype: str) -> Format:
    return Format(name, {"weight": (dtype,)})


def _fp8_block(suffix: str) -> Format:
    return Format(
        "fp8-block",
        {"weight": _FP8, suffix: _FLOATS},
        partial(_block_scales, suffix),
        lambda t: linear.dequantize_fp8_block(t["weight"], t[suffix]),
    )


PLAIN = (_plain("bf16", "BF16"), _plain("fp16", "F16"), _plain("fp32", "F32"))
FP8_BLOCK_FORMAT = _fp8_block("weight_scale_inv")
FP8_TENSOR = Format(
    "fp8-tensor",
    {"weight": _FP8, "weight_scale": _FLOATS},
    lambda shape: {"weight_scale": _ONE},
    lambda t: linear.dequantize_fp8_tensor(t["weight"], t["weight_scale"]),
)
FP8_CHANNEL = Format(
    "fp8-channel",
    {"weight": _FP8, "weight_scale": _FLOATS},
    _channel_scales,
    lambda t: linear.dequantize_fp8_channel(t["weight"], t["weight_scale"]),
)
NVFP4_MODELOPT = Format(
    "nvfp4-modelopt",
    {"weight": ("U8",), "weight_scale": _FP8, "weight_scale_2": ("F32",)},
    partial(_nvfp4_scales, "weight_scale_2"),
    lambda t: linear.dequantize_nvfp4(t["weight"], t["weight_scale"], t["weight_scale_2"]),
    values_per_item=2,
)
NVFP4_CT = Format(
    "nvfp4-ct",
    {"weight_packed": ("U8",), "weight_scale": _FP8, "weight_global_scale": ("F32",)},
    partial(_nvfp4_scales, "weight_global_scale"),
    lambda t: linear.dequantize_nvfp4(t["weight_packed"], t["weight_scale"], t["weight_global_scale"], divide=True),
    values_per_item=2,
)
FORMATS = (
    *PLAIN,
    FP8_BLOCK_FORMAT,
    FP8_TENSOR,
    FP8_CHANNEL,
    _fp8_block("weight_scale"),
    NVFP4_MODELOPT,
    NVFP4_CT,
)
REFUSED = (
    Refusal("INT4 pack-quantized (compressed-tensors)", "weight_packed", ("I32",)),
    Refusal("INT4 of GPTQ or AWQ", "qweight", ("I32",)),
    Refusal("INT8", "weight", ("I8",)),
    Refusal("FP8 E5M2", "weight", ("F8_E5M2",)),
    Refusal("MXFP4 or MXFP8 (scales are powers of two)", "weight_scale", ("U8", "F8_E8M0")),
)
_REFUSED_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx")
SUFFIXES = frozenset(_REFUSED_SUFFIXES).union(*(format.suffixes for format in FORMATS))


class FormatError(CheckpointError):
    """The tensors of one module are no format we serve. `refused` names the format where it is a known one."""

    def __init__(self, message: str, refused: str | None = None) -> None:
        super().__init__(message)
        self.refused = refused


def split_name(name: str) -> tuple[str, str]:
    """A stored name into stem and suffix; the suffix is empty for names that have none of those we know."""
    stem, _, suffix = name.rpartition(".")
    return (stem, suffix) if suffix in SUFFIXES else (name, "")


def detect(stem: str, tensors: Mapping[str, TensorInfo]) -> Format:
    """The format of a module's tensors (by suffix). FormatError says what is there and what would fit."""
    stored = tuple((suffix, Stored(info.dtype, info.shape)) for suffix, info in tensors.items())
    format = _fitting(stored)
    if format is None:
        raise _refusal(stem, dict(stored))
    return format


@lru_cache(maxsize=4096)
def _fitting(stored: tuple[tuple[str, Stored], ...]) -> Format | None:
    """Cached, because a checkpoint has a few dozen kinds of modules and up to hundreds of thousands of modules."""
    tensors = dict(stored)
    fitting = (format for format in FORMATS if format.has_types(tensors) and not format.wrong_scales(tensors))
    return next(fitting, None)


def _refusal(stem: str, stored: Mapping[str, Stored]) -> FormatError:
    for refusal in REFUSED:
        if refusal.suffix in stored and stored[refusal.suffix].dtype in refusal.dtypes:
            return FormatError(f"{stem} is {refusal.name}, which is not served", refusal.name)
    found = ", ".join(f"{suffix} {tensor.dtype} {list(tensor.shape)}" for suffix, tensor in sorted(stored.items()))
    wrong = [format.wrong_scales(stored) for format in FORMATS if format.has_types(stored)]
    if not wrong:
        return FormatError(f"{stem} has tensors that together are no known format: {found}")
    return FormatError(f"{stem} has {found}; expected {_expected(wrong)}")


def _expected(wrong: list[ScaleShapes]) -> str:
    """The shapes that any candidate would have taken, by suffix."""
    right: dict[str, list[str]] = {}
    for mistakes in wrong:
        for suffix, shapes in mistakes.items():
            right.setdefault(suffix, []).extend(str(list(shape)) for shape in shapes)
    none = "(none fits: the weight must be a matrix with columns in whole groups)"
    return ", ".join(f"{suffix} {' or '.join(shapes) or none}" for suffix, shapes in right.items())


@dataclass(frozen=True, slots=True)
class Declared:
    """What config.json and hf_quant_config.json say about quantisation; empty strings where they say nothing."""

    method: str = ""
    block: str = ""
    kv_cache: str = ""

    def notes(self, found: set[str]) -> list[str]:
        """Sentences on where the files' word and the formats found (names of Formats) differ, and on the KV cache."""
        quantised = sorted(found - {format.name for format in PLAIN})
        notes = []
        if self.method and not quantised:
            notes.append(f"config declares quant_method {self.method!r}, but no tensor is quantised")
        if quantised and not self.method:
            notes.append(f"config declares no quantisation, but the tensors are {', '.join(quantised)}")
        if self.kv_cache:
            notes.append(f"config declares {self.kv_cache} for the KV cache; choose it with --kv-cache-dtype")
        return notes

    def refusal(self, found: set[str]) -> str | None:
        """Blocks of another size: the shapes of scales alone cannot tell them apart on small matrices."""
        if FP8_BLOCK_FORMAT.name in found and self.block not in ("", str([linear.FP8_BLOCK, linear.FP8_BLOCK])):
            return f"weight_block_size {self.block} is not served; it must be [{linear.FP8_BLOCK}, {linear.FP8_BLOCK}]"
        return None


def declared(directory: Path | str) -> Declared:
    """Reads both files; one that is missing says nothing, one that is not JSON raises CheckpointError."""
    config = _read_object(Path(directory) / "config.json")
    modelopt = _object(_read_object(Path(directory) / "hf_quant_config.json").get("quantization"))
    quant = _object(config.get("quantization_config") or _object(config.get("text_config")).get("quantization_config"))
    scheme = _object(quant.get("kv_cache_scheme"))
    kv_cache = modelopt.get("kv_cache_quant_algo") or quant.get("kv_cache_quant_algo")
    if not kv_cache and scheme:
        kv_cache = f"{scheme.get('type', 'float')}{scheme.get('num_bits', '')}"
    method = quant.get("quant_method") or (modelopt and f"modelopt {modelopt.get('quant_algo', '')}".strip())
    return Declared(
        method=str(method or ""),
        block=str(quant.get("weight_block_size") or ""),
        kv_cache=str(kv_cache or ""),
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
