"""Which requests may enter, and what their open settings become. One set of rules for Client, LLM and Engine.

A request is wrong for itself (RequestError, naming the field as the API writes it) or too long for this engine
(ContextLengthError). Whatever passes can be scheduled and sampled without an error, so one bad request stays one bad
request. The HTTP edge may refuse more than this; it may not let through less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deltaserve.core.errors import ContextLengthError, RequestError, shown
from deltaserve.core.types import RequestOptions, SamplingParams, Thinking

_SEEDS = (-(1 << 63), (1 << 64) - 1)
MAX_PRIORITY = (1 << 31) - 1
MAX_BAD_WORDS = 2048  # sequences
MAX_NAME_CHARS = 1024  # of a salt or a session id
_HOTTEST = 1e30  # logits are float32, and so is their quotient by the temperature

# field: (lowest, highest, is the lowest itself allowed)
_FLOAT_RANGES = {
    "temperature": (0.0, _HOTTEST, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (1e-6, 1e6, True),  # further out, logits overflow
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
_INT_RANGES = {
    "top_k": (0, (1 << 31) - 1),
    "min_tokens": (0, (1 << 31) - 1),
    "max_tokens": (1, (1 << 31) - 1),
    "seed": _SEEDS,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request meets: the context length in tokens, and the ids that the model has a row for."""

    max_model_len: int
    vocab_size: int


def admit(prompt_ids: Sequence[int], params: SamplingParams, limits: Limits) -> SamplingParams:
    """The params with `max_tokens` resolved (None: all that is left of the context); the seed may still be open."""
    _check_ranges(params, limits.vocab_size)
    _check_stops(params)
    _check_ids("prompt", prompt_ids, limits)
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_ids("logit_bias", tuple(params.logit_bias), limits)
    _check_ids("allowed_token_ids", params.allowed_token_ids, limits)
    _check_bad_words(params.bad_words, limits)
    _check_thinking(params.thinking, limits)
    if params.grammar is not None:
        _check_ids("grammar", params.grammar.exit_ids, limits)
    check_grammar(params)
    if not prompt_ids:
        raise RequestError("the prompt is empty; it must hold at least one token", "prompt")
    return _fit(len(prompt_ids), params, limits.max_model_len)


def check_options(options: RequestOptions) -> RequestOptions:
    """The same options. Raises RequestError naming the field."""
    priority: object = options.priority
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not (is_whole and -MAX_PRIORITY <= options.priority <= MAX_PRIORITY):
        sentence = f"priority must be a whole number between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {shown(priority)}"
        raise RequestError(sentence, "priority")
    if options.session_id is not None:
        if not options.session_id:
            raise RequestError("session_id must not be empty; leave it out", "session_id")
        _check_name("session_id", options.session_id)
    _check_name("cache_salt", options.cache_salt)
    if not isinstance(options.use_drafts, bool):
        raise RequestError(f"use_drafts must be true or false, not {options.use_drafts}", "use_drafts")
    return options


def _check_name(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{name} must be text, not {shown(text)}", name)
    if len(text) > MAX_NAME_CHARS:
        raise RequestError(f"{name} must have at most {MAX_NAME_CHARS} characters, not {len(text)}", name)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate, which no UTF-8 text can hold", name) from None


def _fit(num_prompt: int, params: SamplingParams, max_model_len: int) -> SamplingParams:
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but the context length is {max_model_len} tokens, output included; "
            f"shorten the prompt to at most {max_model_len - 1}",
            "prompt",
        )
    if params.max_tokens is None:
        params = replace(params, max_tokens=room)
    elif params.max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and max_tokens is {params.max_tokens}, together more than the context "
            f"length of {max_model_len} tokens; ask for at most {room}",
            "max_tokens",
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        sentence = f"min_tokens {params.min_tokens} is more than the {params.max_tokens} tokens that may be generated"
        raise RequestError(sentence, "min_tokens")
    return params


def _check_ranges(params: SamplingParams, vocab_size: int) -> None:
    for name, (low, high, with_low) in _FLOAT_RANGES.items():
        value = getattr(params, name)
        if not ((low <= value if with_low else low < value) and value <= high):
            raise RequestError(f"{name} must be {_interval(low, high, with_low)}, not {value}", name)
    ranges = _INT_RANGES | dict.fromkeys(("logprobs", "prompt_logprobs"), (0, vocab_size))
    for name, (lowest, highest) in ranges.items():
        number = getattr(params, name)
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_whole and lowest <= number <= highest):
            raise RequestError(
                f"{name} must be a whole number between {lowest} and {highest}, not {shown(number)}", name
            )
    for token_id, bias in params.logit_bias.items():
        if not math.isfinite(bias):
            raise RequestError(f"logit_bias of token {token_id} must be a finite number, not {bias}", "logit_bias")


def _interval(low: float, high: float, with_low: bool) -> str:
    return f"{'at least' if with_low else 'more than'} {low:g} and at most {high:g}"


def _check_stops(params: SamplingParams) -> None:
    stop: object = params.stop
    if isinstance(stop, str):
        raise RequestError(f"stop must be a tuple of strings, not the text {stop!r}", "stop")
    if "" in params.stop:
        raise RequestError("a stop string must not be empty", "stop")


def _check_bad_words(bad_words: Sequence[Sequence[int]], limits: Limits) -> None:
    if len(bad_words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words takes at most {MAX_BAD_WORDS} sequences, not {len(bad_words)}", "bad_words")
    for token_ids in bad_words:
        if not token_ids:
            raise RequestError("bad_words must not hold an empty sequence", "bad_words")
        _check_ids("bad_words", token_ids, limits)


def _check_thinking(thinking: Thinking | None, limits: Limits) -> None:
    if thinking is None:
        return
    marks = (thinking.end_id,) if thinking.start_id is None else (thinking.end_id, thinking.start_id)
    _check_ids("thinking", marks, limits)
    if thinking.budget is not None and not 0 <= thinking.budget < 1 << 31:
        sentence = f"thinking_token_budget must be between 0 and {(1 << 31) - 1}, not {thinking.budget}"
        raise RequestError(sentence, "thinking_token_budget")


def check_grammar(params: SamplingParams) -> None:
    """A grammar alone says where the answer ends. Raises RequestError."""
    if params.grammar is None:
        return
    for name in ("min_tokens", "ignore_eos"):
        if getattr(params, name):
            sentence = f"{name} cannot be combined with structured output, which alone says where the answer ends"
            raise RequestError(f"{sentence}; leave it out", name)


def _check_ids(name: str, token_ids: Sequence[int], limits: Limits) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < limits.vocab_size)
        sentence = f"token id {wrong} is outside the vocabulary, 0 to {limits.vocab_size - 1}"
        raise RequestError(f"{name}: {sentence}", name)
