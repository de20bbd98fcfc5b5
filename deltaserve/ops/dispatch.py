"""Which implementation of an op runs, and why.

Every op folder has a table of its implementations by name; the reference is always there. A kernel states the device
type and the types of numbers it is for, and whether it can run here at all. `choose` picks the kernel of the tensor's
device, else the reference; a caller that names an implementation gets exactly that one. There is nothing to register
and no global to set: a table is a dict literal in the op's `__init__.py`, and forcing is an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from deltaserve.core.errors import ConfigError
from deltaserve.ops import native

REFERENCE = "reference"

NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Where kernels of one name run: a device type, the types of the tensor that decides (None: any)."""

    device_type: str
    dtypes: frozenset[torch.dtype] | None = None
    is_ready: Callable[[], bool] = lambda: True


# The reference runs on every device.
KERNELS: Mapping[str, Kernel] = {
    "triton": Kernel("cuda"),
    NATIVE: Kernel("cpu", frozenset({torch.float32, torch.int64}), native.is_ready),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice:
    """`name` is a key of the op's table; `reason` a phrase for people, such as "no kernel for cpu"."""

    name: str
    reason: str


def explain(
    names: Mapping[str, object], device_type: str, force: str | None = None, dtype: torch.dtype = torch.float32
) -> Choice:
    """The choice that `choose` makes for tensors of `dtype` on `device_type`.

    Raises ConfigError where `force` names an implementation that the table lacks.
    """
    if force is not None:
        if force not in names:
            raise ConfigError(f"no implementation {force!r} of this op; there are: {', '.join(names)}")
        return Choice(force, "asked for by the caller")
    for name in names:
        kernel = KERNELS.get(name)
        if kernel is not None and kernel.device_type == device_type and _can_run(kernel, dtype):
            return Choice(name, f"kernel for {device_type}")
    return Choice(REFERENCE, f"no kernel for {device_type}")


def _can_run(kernel: Kernel, dtype: torch.dtype) -> bool:
    return (kernel.dtypes is None or dtype in kernel.dtypes) and kernel.is_ready()


def choose(table: Mapping[str, T], x: Tensor, force: str | None = None) -> T:
    """The implementation to call on x. Cheap where the reference is alone."""
    if force is None and len(table) == 1:
        return table[REFERENCE]
    return table[_name(tuple(table), x.device.type, force, x.dtype)]


def forget() -> None:
    """Choose anew: for tests that change which kernels there are."""
    _name.cache_clear()


@functools.lru_cache(maxsize=256)
def _name(names: tuple[str, ...], device_type: str, force: str | None, dtype: torch.dtype) -> str:
    return explain(dict.fromkeys(names), device_type, force, dtype).name
