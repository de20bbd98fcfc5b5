"""Offline use: the engine in this process, driven to the end of a list of prompts.

    with LLM("model-directory", max_num_seqs=8) as llm:
        for output in llm.generate(["Once upon a time", "In a distant land"], SamplingParams(max_tokens=64)):
            print(output.text)

The same loop, scheduler and text rules as behind the server, so the same tokens; no server library is needed. With
`tensor_parallel_size` above 1 the other ranks are child processes, which `close` (or leaving the `with` block) ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from deltaserve.core.errors import CheckpointError, RequestError
from deltaserve.core.types import CacheRecord, FinishReason, RequestOptions, SamplingParams, TokenChunk, TokenLogprob
from deltaserve.engine.build import Timeline, build_engine
from deltaserve.engine.loop import Engine
from deltaserve.engine.settings import engine_config
from deltaserve.engine.text import TextStream
from deltaserve.engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Each = TypeVar("Each", SamplingParams, RequestOptions)


@dataclass(slots=True)
class Completion:
    """What one prompt gave. `token_ids` and, where asked for, `logprobs` are cut at a stop string like `text`.

    `stop_reason` is the stop string or stop token id that ended it. `num_cached` counts prompt tokens that were not
    computed, and `cache` says why not more; neither counts when completions are compared. `error` is set when
    `finish_reason` is ERROR.
    """

    prompt_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached: int = field(default=0, compare=False)
    cache: CacheRecord | None = field(default=None, compare=False)
    error: str | None = None


class LLM:
    """A model that is ready to generate. `settings` are the fields of EngineConfig and of the configs inside it."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """Raises ConfigError for a setting, CheckpointError for a file that cannot be used."""
        config = engine_config(model, settings)
        if not config.model.is_dir():
            raise CheckpointError(f"{model} is no directory; give a checkpoint directory in the Hub's layout")
        self.tokenizer = Tokenizer(config.model)
        self.engine: Engine = build_engine(config, Timeline(time.time()))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        show_progress: bool = False,
    ) -> list[Completion]:
        """One completion per prompt, in order. A prompt is text or token ids; `params` and `options` are one for all
        or one for each.

        Raises RequestError if any of them cannot be served, before any is run. `show_progress` needs `rich`.
        """
        all_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        runs: dict[int, _Run] = {}
        try:
            each_params = _one_for_each("params", params, SamplingParams, len(all_ids))
            each_options = _one_for_each("options", options, RequestOptions, len(all_ids))
            for prompt_ids, own, its in zip(all_ids, each_params, each_options, strict=True):
                run = _Run(Completion(prompt_ids), TextStream(self.tokenizer, own))
                runs[self.engine.submit(prompt_ids, own, options=its)] = run
            completions = [run.completion for run in runs.values()]
            with _progress_bar(len(runs), show_progress) as advance:
                self._run(runs, advance)
        finally:
            for request_id in runs:
                self.engine.abort(request_id)
        return completions

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: object) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Sequence) or not all(isinstance(token_id, int) for token_id in prompt):
            raise RequestError(f"a prompt must be text or a list of token ids, not {prompt!r:.80}", "prompt")
        return tuple(prompt)

    def _run(self, runs: dict[int, _Run], advance: Callable[[], None]) -> None:
        """Step until all have finished; finished ones leave `runs`."""
        while runs:
            for chunk in self.engine.step():
                if runs[chunk.request_id].feed(chunk):
                    del runs[chunk.request_id]
                    self.engine.abort(chunk.request_id)  # a stop string ends it before the engine does
                    advance()


@dataclass(frozen=True, slots=True)
class _Run:
    completion: Completion
    stream: TextStream

    def feed(self, chunk: TokenChunk) -> bool:
        """Whether this was the end."""
        out, delta = self.completion, self.stream.feed(chunk)
        out.text += delta.text
        out.token_ids += delta.token_ids
        if delta.logprobs is not None:
            out.logprobs = [*(out.logprobs or ()), *delta.logprobs]
        if chunk.prompt_logprobs is not None:
            out.prompt_logprobs = chunk.prompt_logprobs
        out.num_cached = max(out.num_cached, chunk.num_cached)  # every chunk of tokens says it
        out.cache = out.cache or chunk.cache
        out.finish_reason, out.stop_reason, out.error = delta.finish_reason, delta.stop_reason, chunk.error
        return delta.finish_reason is not None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be text, token ids, or a list of these, not {prompts!r:.80}", "prompts")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _one_for_each(name: str, given: object, kind: type[Each], count: int) -> Sequence[Each]:
    if given is None or isinstance(given, kind):
        return [given or kind()] * count
    if not isinstance(given, Sequence) or not all(isinstance(item, kind) for item in given):
        raise RequestError(f"{name} must be {kind.__name__} or a list of them, not {given!r:.80}", name)
    if len(given) != count:
        raise RequestError(f"{count} prompts but {len(given)} {name}; give one for all, or one each", name)
    return given


@contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Gives a function to call at each step of `total`."""
    if not is_shown:
        yield lambda: None
        return
    from rich.progress import Progress  # noqa: PLC0415 - an optional library

    with Progress() as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
