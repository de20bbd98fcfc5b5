"""From a request's fields to SamplingParams: the request first, then the model's defaults, then neutral values.

Defaults come from the checkpoint's `generation_config.json` as in vLLM: temperature, top_k, top_p, min_p,
repetition_penalty, and max_new_tokens, which also caps what a request may ask for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltaserve.core.errors import ConfigError, ContextLengthError, RequestError, shown
from deltaserve.core.types import SamplingParams
from deltaserve.server.schema import MAX_STOP_STRINGS, RANGES, GenerationRequest

GENERATION_CONFIG_FILE = "generation_config.json"
NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
BIAS_LIMIT = 100.0
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model can take. `max_logprobs` is the most alternatives per token a client may ask for."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True)
class OutputBudget:
    """How many tokens a request may produce: `asked`, else `fallback`, else all the room there is.

    `field` is where the client wrote `asked`, `prompt_field` where it wrote the prompt.
    """

    asked: int | None
    field: str
    prompt_field: str
    fallback: int | None = None

    def resolve(self, num_prompt: int, limits: Limits, defaults: Mapping[str, float]) -> int:
        """Raises ContextLengthError when prompt and output do not fit."""
        room = limits.max_model_len - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens; the context length is {limits.max_model_len}, and at least one "
                "token must be left for the output",
                self.prompt_field,
            )
        cap = int(defaults.get("max_tokens", room))
        if self.asked is None:
            return min(room if self.fallback is None else self.fallback, room, cap)
        if self.asked > room:
            raise ContextLengthError(
                f"{self.field} is {shown(self.asked)} and the prompt has {num_prompt} tokens; together they exceed the "
                f"context length of {limits.max_model_len} tokens",
                self.field,
            )
        return min(self.asked, cap)


def load_defaults(source: str, model: Path) -> dict[str, float]:
    """Default values by field. `source` is `auto` (the checkpoint's own), `vllm` (none), or a directory."""
    if source == "vllm":
        return {}
    path = (model if source == "auto" else Path(source)) / GENERATION_CONFIG_FILE
    if not path.is_file():
        if source == "auto":
            return {}
        raise ConfigError(f"--generation-config: {path} does not exist; give auto, vllm or a directory that holds it")
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return _defaults(config, path)


def sampling_params(
    request: GenerationRequest, defaults: Mapping[str, float], limits: Limits, num_logprobs: int | None
) -> SamplingParams:
    """All but `max_tokens` (see OutputBudget) and what is said of the answer (`server.constraints`)."""

    def value(name: str) -> float:
        given: float | None = getattr(request, name)
        return defaults.get(name, NEUTRAL[name]) if given is None else given

    return SamplingParams(
        min_tokens=request.min_tokens or 0,
        temperature=float(value("temperature")),
        top_k=min(max(int(value("top_k")), 0), limits.vocab_size),
        top_p=float(value("top_p")),
        min_p=float(value("min_p")),
        seed=_seed(request.seed),
        repetition_penalty=float(value("repetition_penalty")),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias, limits.vocab_size),
        stop=_stop_strings(request.stop),
        stop_token_ids=check_token_ids(request.stop_token_ids or (), limits.vocab_size, "stop_token_ids"),
        ignore_eos=bool(request.ignore_eos),
        logprobs=num_logprobs,
        prompt_logprobs=_num_prompt_logprobs(request, limits),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        allowed_token_ids=_allowed_ids(request.allowed_token_ids, limits.vocab_size),
    )


def with_budget(params: SamplingParams, max_tokens: int) -> SamplingParams:
    if params.min_tokens > max_tokens:
        sentence = f"min_tokens is {shown(params.min_tokens)}, more than the {max_tokens} tokens that may be generated"
        raise RequestError(sentence, "min_tokens")
    return replace(params, max_tokens=max_tokens)


def check_num_logprobs(count: int | None, limits: Limits, field: str) -> int | None:
    if count is not None and not 0 <= count <= limits.max_logprobs:
        sentence = f"{field} must be in [0, {limits.max_logprobs}] (--max-logprobs), not {shown(count)}"
        raise RequestError(sentence, field)
    return count


def check_token_ids(ids: list[int] | tuple[int, ...], vocab_size: int, path: str) -> tuple[int, ...]:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        index = next(index for index, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise RequestError(f"{path}[{index}] must be in [0, {vocab_size}), not {shown(ids[index])}", f"{path}[{index}]")
    return tuple(ids)


def _defaults(config: Any, path: Path) -> dict[str, float]:
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    names = {name: name for name in NEUTRAL} | {"max_new_tokens": "max_tokens"}
    given = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    for name, value in given.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not RANGES[name].holds(value):
            raise ConfigError(f"{name} in {path} must be {RANGES[name]}, not {shown(value)}")
    return given


def _seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not -(2**SEED_BITS) <= seed < 2**SEED_BITS:
        raise RequestError(f"seed must fit in 64 bits, signed, not {shown(seed)}", "seed")
    return seed


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Values beyond +-100 are clamped."""
    result = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
            raise RequestError(f"logit_bias: {shown(key)} is not a token id below {vocab_size}", "logit_bias")
        result[int(key)] = min(max(value, -BIAS_LIMIT), BIAS_LIMIT)
    return result


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(strings)}", "stop")
    if "" in strings:
        raise RequestError("stop must not hold an empty string", "stop")
    return strings


def _allowed_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not ids:
        raise RequestError(
            "allowed_token_ids must hold at least one id; leave it out to allow all", "allowed_token_ids"
        )
    return check_token_ids(tuple(dict.fromkeys(ids)), vocab_size, "allowed_token_ids")


def _num_prompt_logprobs(request: GenerationRequest, limits: Limits) -> int | None:
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    return check_num_logprobs(request.prompt_logprobs, limits, "prompt_logprobs")
