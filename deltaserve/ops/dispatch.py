"""Which implementation of an op runs, and why.

Every op folder has a table of its implementations by name; the reference is always there. A kernel states the device
type it is for. `choose` picks the kernel of the tensors' device, else the reference; a caller that names an
implementation gets exactly that one. There is nothing to register and no global to set: a table is a dict literal in
the op's `__init__.py`, and forcing is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from deltaserve.core.errors import ConfigError

REFERENCE = "reference"

# Device types that a kernel of this name is for. The reference runs on every device.
KERNEL_DEVICES: Mapping[str, str] = {"triton": "cuda"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice:
    """`name` is a key of the op's table; `reason` a phrase for people, such as "no kernel for cpu"."""

    name: str
    reason: str


def explain(names: Mapping[str, object], device_type: str, force: str | None = None) -> Choice:
    """The choice that `choose` makes for tensors on `device_type`.

    Raises ConfigError where `force` names an implementation that the table lacks.
    """
    if force is not None:
        if force not in names:
            raise ConfigError(f"no implementation {force!r} of this op; there are: {', '.join(names)}")
        return Choice(force, "asked for by the caller")
    for name in names:
        if KERNEL_DEVICES.get(name) == device_type:
            return Choice(name, f"kernel for {device_type}")
    return Choice(REFERENCE, f"no kernel for {device_type}")


def choose(table: Mapping[str, T], x: Tensor, force: str | None = None) -> T:
    """The implementation to call on x. Cheap where the reference is alone: a decode step makes hundreds of choices."""
    if force is None and len(table) == 1:
        return table[REFERENCE]
    return table[explain(table, x.device.type, force).name]
