"""A model directory: engines in this process, each set as a gate needs it, debug mode on.

Debug mode fills what nobody holds any more with NaN, recomputes every owner's books after each step, and proves that
restored bytes are those that were saved; what it finds ends the engine, and thereby the gate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from deltaserve.cache.layout import num_pages_for
from deltaserve.core.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from deltaserve.core.errors import ConfigError
from deltaserve.engine.build import Timeline, build_engine, size_pools
from deltaserve.engine.loop import Engine
from deltaserve.engine.machine import num_threads
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.model.config import ModelConfig
from deltaserve.runner.build import cache_spec
from deltaserve.runner.device import device_of
from deltaserve.server.template import ChatTemplate
from deltaserve.verify.book import SkippedError
from deltaserve.verify.compare import EXACT, GAPS, Level
from deltaserve.verify.engine_session import EngineSession
from deltaserve.verify.target import AS_IT_IS, About, Message, Session, Setup

ROWS = 8
CHUNK = 4096
LONGEST = 8192  # tokens that the engines of a run are sized for, unless told otherwise

Build = Callable[[EngineConfig], Engine]


def build(config: EngineConfig) -> Engine:
    return build_engine(config, Timeline(time.time()))


class EngineTarget:
    """`config` holds what the user chose; a session changes what its Setup names. `make` builds an engine."""

    def __init__(self, config: EngineConfig, name: str, make: Build = build) -> None:
        """Raises ConfigError or CheckpointError with what is wrong with the directory."""
        if config.speculative.synthetic_acceptance is not None:
            raise ConfigError("synthetic acceptance makes text that means nothing; verify without it")
        self._model_config = ModelConfig.from_directory(config.model)
        longest = min(config.max_model_len or LONGEST, self._model_config.max_position_embeddings)
        self._config = replace(config, max_model_len=longest, debug_checks=True)
        self._make = make
        self._tokenizer = Tokenizer(config.model)
        self._template = ChatTemplate.from_directory(config.model)
        self.about = self._describe(name)

    @contextmanager
    def session(self, setup: Setup = AS_IT_IS) -> Iterator[Session]:
        engine = self._make(self.engine_config(setup))
        try:
            yield EngineSession(engine, self._tokenizer)
        finally:
            engine.close()

    def engine_config(self, setup: Setup) -> EngineConfig:
        """The user's settings with those of the setup. A setup without drafts of its own has the user's."""
        config = self._config
        assert config.max_model_len is not None
        rows, chunk = setup.rows or ROWS, setup.chunk or max(CHUNK, config.scheduler.max_num_batched_tokens)
        num_pages = setup.num_pages or max(num_pages_for(config.max_model_len), 64 * rows)
        num_drafts = config.speculative.num_drafts if setup.num_drafts is None else setup.num_drafts
        if num_drafts and not self.about.has_draft_head:
            raise SkippedError("the checkpoint has no draft head (mtp.* tensors)")
        fitting = min(config.max_model_len, 64 * num_pages)
        scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=chunk, no_eviction=setup.no_eviction)
        cache = replace(
            config.cache,
            num_pages=num_pages,
            num_snapshots=setup.num_snapshots if setup.num_snapshots is not None else 4 * rows,
            enable_prefix_caching=setup.caching,
            host_cache_bytes=setup.host_pages * self._host_page_bytes() if setup.caching else 0,
        )
        return replace(
            config,
            max_model_len=fitting,
            cache=cache,
            scheduler=scheduler,
            speculative=SpeculativeConfig(num_drafts),
            tensor_parallel_size=setup.num_ranks,
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def render(self, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
        if self._template is None:
            raise SkippedError("the checkpoint has no chat template")
        return self.encode(self._template.render(messages, kwargs=template_kwargs))

    def close(self) -> None:
        """Every session closes its own engine."""

    def _host_page_bytes(self) -> int:
        """Bytes of host memory for one page and its share of the states kept there."""
        spec = cache_spec(self._config, self._model_config)
        return spec.page_bytes + spec.slot_bytes

    def _describe(self, name: str) -> About:
        config, model = self._config, self._model_config
        sizes = size_pools(replace(config, cache=replace(config.cache, num_pages=LONGEST // 64)), model)
        spec, device = sizes.spec, device_of(config).type
        return About(
            name=f"engines in this process, {config.model.name}",
            model=name,
            max_model_len=config.max_model_len or LONGEST,
            vocab_size=model.vocab_size,
            level=EXACT if device == "cpu" else Level(GAPS["bfloat16"]),
            is_engine=True,
            has_draft_head=model.num_mtp_layers > 0,
            num_drafts=config.speculative.num_drafts,
            facts={
                "device": device,
                "compute_dtype": spec.compute_dtype,
                "kv_dtype": spec.kv_dtype,
                "state_dtype": spec.state_dtype,
                "num_threads": num_threads(config.num_threads),
                "debug_checks": True,
            },
        )
