"""A module of kernels, imported at its first use: what it stands on (Triton) takes long to import, or is absent."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Lazy(ModuleType):
    """Stands in an op's table for the module of that name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # questions about the stand-in itself
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)
