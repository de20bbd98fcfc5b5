"""From settings, a checkpoint and an engine to the application. `serve` imports it while the engine loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from fastapi import FastAPI

from deltaserve.core.version import VERSION
from deltaserve.engine.client import Client
from deltaserve.engine.tokenizer import Tokenizer, grammar_vocabulary
from deltaserve.grammar.compiler import Grammars
from deltaserve.server.app import create_app
from deltaserve.server.checkpoint import Checkpoint
from deltaserve.server.metrics import Metrics
from deltaserve.server.parsers.formats import Formats
from deltaserve.server.sampling import Limits, load_defaults
from deltaserve.server.served import Served
from deltaserve.server.settings import Settings
from deltaserve.server.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Edge:
    """What the server reads from the checkpoint without the engine. Raises ConfigError where a file is wrong."""

    names: tuple[str, ...]
    root: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None
    formats: Formats
    defaults: dict[str, float]
    max_logprobs: int
    grammars: Grammars
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, settings: Settings, checkpoint: Checkpoint) -> Edge:
        override = None if settings.chat_template is None else Path(settings.chat_template)
        template = ChatTemplate.from_directory(checkpoint.directory, override)
        source = "" if template is None else template.source
        tokenizer = Tokenizer(checkpoint.directory)
        grammars = Grammars(lambda: grammar_vocabulary(tokenizer, tokenizer.vocab_size))
        Thread(target=grammars.prepare, name="grammars", daemon=True).start()  # while the engine loads
        return cls(
            names=settings.served_model_name or (checkpoint.name,),
            root=checkpoint.directory,
            tokenizer=tokenizer,
            template=template,
            formats=Formats.choose(settings.tool_call_parser, settings.reasoning_parser, source),
            defaults=load_defaults(settings.generation_config, checkpoint.directory),
            max_logprobs=settings.max_logprobs,
            grammars=grammars,
            api_keys=settings.api_key,
        )

    def application(self, client: Client) -> FastAPI:
        served = Served(
            names=self.names,
            root=str(self.root),
            version=VERSION,
            engine=client,
            tokenizer=self.tokenizer,
            template=self.template,
            formats=self.formats,
            defaults=self.defaults,
            limits=Limits(client.info.max_model_len, client.info.vocab_size, self.max_logprobs),
            metrics=Metrics(self.names[0], client.info.synthetic_acceptance),
            api_keys=self.api_keys,
            synthetic_acceptance=client.info.synthetic_acceptance,
            grammars=self.grammars,
        )
        return create_app(served)
