"""Deltaserve: a serving engine for the Qwen3.5 family of hybrid language models.

The public surface is LLM (offline use), EngineConfig, SamplingParams and RequestOptions. They are fetched when first
used, so that `import deltaserve` costs nothing and a server process never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from deltaserve.core.version import VERSION

if TYPE_CHECKING:
    from deltaserve.core.config import EngineConfig
    from deltaserve.core.types import RequestOptions, SamplingParams
    from deltaserve.engine.llm import LLM

__version__ = VERSION
__all__ = ["LLM", "EngineConfig", "RequestOptions", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "deltaserve.engine.llm",
    "EngineConfig": "deltaserve.core.config",
    "SamplingParams": "deltaserve.core.types",
    "RequestOptions": "deltaserve.core.types",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'deltaserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
