"""Request bodies: types, ranges, and what is refused by name.

A body is decoded once (strict JSON: no NaN, no Infinity, no lone surrogates, bounded depth) and converted into one of
the structs below. Unknown fields are ignored, as OpenAI's and vLLM's servers do; fields that are known, change the
meaning of the answer and are not offered are refused by name. Every refusal is a RequestError whose `param` is the
path the client wrote, such as `messages[1].content` or `stop[2]`.

None means "not given" for every field; the values then used are those of the tables in `sampling`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from deltaserve.core.errors import RequestError, shown
from deltaserve.server.errors import NotOfferedError

MAX_STOP_STRINGS = 4
MAX_CHOICES = 128
MAX_SEARCHED_BYTES = 1 << 18  # of a body that is not JSON, for the field that makes it so


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(msgspec.Struct):
    """What the answer must be, by one of these; vLLM's names. See `server.constraints`."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    speculative: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions. `messages` are looked into by `server.messages`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


# Fields that would change the answer and that nothing here honours, each with the values that ask for nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_request": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# Fields that have gone, and what says the same now.
RENAMED = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}


@dataclass(frozen=True, slots=True)
class Range:
    """Closed at `high`; closed at `low` unless `above`. None is no bound."""

    low: float
    high: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        inside = value > self.low if self.above else value >= self.low
        return inside and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"{'above' if self.above else 'at least'} {self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


# The same as vLLM's, so that a client sees the same refusals; but no repetition penalty that makes logits overflow.
RANGES: dict[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(1e-6, 1e6),
    "n": Range(1, MAX_CHOICES),
    "max_tokens": Range(1),
    "max_completion_tokens": Range(1),
    "min_tokens": Range(0),
    "thinking_token_budget": Range(0, (1 << 31) - 1),
    "prompt_logprobs": Range(0),
    "top_logprobs": Range(0),
}

# Fields for scheduler and cache: a body that runs no request has no use for them.
ENGINE_FIELDS = ("priority", "cache_salt", "session_id", "speculative")


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(kind: type[Body], raw: bytes) -> Body:
    """Bytes to a checked struct."""
    values = decode(raw)
    _refuse_not_offered(values)
    if not issubclass(kind, GenerationRequest):
        _refuse_engine_fields(values)
    try:
        body = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), values) from None
    check_ranges({name: getattr(body, name) for name in RANGES if name in kind.__struct_fields__})
    if isinstance(body, GenerationRequest) and body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    return body


def decode(raw: bytes) -> dict[str, Any]:
    """Strict JSON, which must be an object."""
    try:
        values = msgspec.json.decode(raw)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _json_error(raw, error) from None
    if not isinstance(values, dict):
        raise RequestError(f"the body must be a JSON object, not {shown(values)}")
    return values


def _json_error(raw: bytes, error: Exception) -> RequestError:
    """Names the field, where a laxer reader gets through the body and finds one that JSON has no value for."""
    try:
        field = _unfit_field(json.loads(raw)) if len(raw) <= MAX_SEARCHED_BYTES else None
    except (ValueError, RecursionError):
        field = None
    if field is None:
        return RequestError(f"the body is not valid JSON: {error}")
    return RequestError(f"{field} must be a finite number, or text without lone surrogates", field)


def _unfit_field(value: Any, path: str = "") -> str | None:
    """The path of the first NaN, infinity, or text that is no Unicode."""
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else name, item) for name, item in value.items() if _is_fit(name)]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None if _is_fit(value) else path
    return next(filter(None, (_unfit_field(item, place) for place, item in parts)), None)


def _is_fit(value: object) -> bool:
    if isinstance(value, str):
        return not re.search("[\ud800-\udfff]", value)
    return not isinstance(value, float) or math.isfinite(value)


def check_ranges(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is not None and not RANGES[name].holds(value):
            raise RequestError(f"{name} must be {RANGES[name]}, not {shown(value)}", name)


def _refuse_not_offered(values: dict[str, Any]) -> None:
    for name in NOT_OFFERED.keys() & values.keys():
        value = values[name]
        if value is not None and value not in NOT_OFFERED[name]:
            raise NotOfferedError(f"{name} is not offered yet, and was {shown(value)}; leave it out", name)
    for name in RENAMED.keys() & values.keys():
        if values[name] is not None:
            raise NotOfferedError(f"{name} is not offered: use {RENAMED[name]}", name)


def _refuse_engine_fields(values: dict[str, Any]) -> None:
    for name in ENGINE_FIELDS:
        if values.get(name) is not None:
            raise RequestError(f"{name} is for requests that generate; leave it out here", name)


def _type_error(sentence: str, values: dict[str, Any]) -> RequestError:
    """From msgspec's sentence ("Expected `int`, got `str` - at `$.stop[1]`") to ours."""
    missing = re.search(r"missing required field `(\w+)`", sentence)
    if missing:
        return RequestError(f"{missing[1]} is required", missing[1])
    place = re.search(r" - at `\$\.?(.*)`$", sentence)
    param = place[1].replace("[...]", "") if place else None
    expected = re.match(r"Expected `(.+?)`", sentence)
    if param is None or place is None:
        return RequestError(sentence, param)
    if expected is None:
        return RequestError(f"{param} is not accepted: {sentence[: place.start()]}", param)
    kinds = expected[1].replace(" | null", "").replace(" | ", " or ").replace("array", "list")
    return RequestError(f"{param} must be {kinds}, not {shown(_value_at(values, param))}", param)


def _value_at(values: Any, path: str) -> Any:
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        values = values[name] if name else values[int(index)]
    return values
