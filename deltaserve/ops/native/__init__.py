"""The CPU's kernels in C: the sources, their build, and how Python calls them.

`library` compiles and loads, `structs` mirrors the C structures. The ops' own `native.py` files are the callers; what a
kernel computes is said by the op's reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from deltaserve.ops.native.library import begin, load

__all__ = ["begin", "function", "is_ready", "load"]


@functools.cache
def is_ready() -> bool:
    """True where the library is there. The first call loads or builds it."""
    return load().library is not None


@functools.cache
def function(name: str) -> Callable[..., int]:
    """The exported function deltaserve_`name`; it returns 1 where memory ran out."""
    library = load().library
    assert library is not None, "ask is_ready first"
    found: Callable[..., int] = getattr(library, f"deltaserve_{name}")
    return found
