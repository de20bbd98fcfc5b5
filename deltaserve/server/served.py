"""The served model as the edge sees it: names, tokenizer, template, defaults, limits, and the engine behind it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from deltaserve.core.errors import ModelNotFoundError, RequestError, shown
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.grammar.compiler import Grammars
from deltaserve.server.generation import EngineClient
from deltaserve.server.metrics import Metrics
from deltaserve.server.parsers.formats import Formats
from deltaserve.server.sampling import Limits
from deltaserve.server.template import ChatTemplate

# Longer texts are tokenised in a thread (the library lets go of the interpreter), so that streams go on meanwhile.
INLINE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Served:
    """`names` are what clients may call the model, the first being the one that answers carry.

    `synthetic_acceptance` (tokens a step) is said wherever the model is named: its texts then mean nothing.
    """

    names: tuple[str, ...]
    root: str
    version: str
    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    formats: Formats
    defaults: Mapping[str, float]
    limits: Limits
    metrics: Metrics
    synthetic_acceptance: float | None = None
    grammars: Grammars | None = None
    grammar_thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar"))
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def fingerprint(self) -> str:
        return f"deltaserve-{self.version}"

    def resolve_name(self, name: str | None) -> str:
        """The name to answer with; a client that names no model gets the one there is."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            aliases = ", ".join(self.names)
            raise ModelNotFoundError(f"the model {shown(name)} does not exist; this server has {aliases}", "model")
        return name

    def chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise RequestError(
                "this checkpoint has no chat template; use /v1/completions, or start with --chat-template FILE",
                "messages",
            )
        return self.template

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        if len(text) <= INLINE_CHARS:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return tuple(await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens))


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk and answer of one HTTP request begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def make(cls, served: Served, prefix: str, name: str | None) -> Head:
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        return cls(answer_id, int(time.time()), served.resolve_name(name), served.fingerprint)

    def fields(self, kind: str) -> dict[str, Any]:
        """`kind` is OpenAI's name of the object."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "service_tier": None,
        }
