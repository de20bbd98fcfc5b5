"""What a request asks for and what it gets back, as plain frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

# The unit of the hybrid: KV pages, prefix hashes, recurrent-state boundaries and prefill chunks all use it.
BLOCK = 64


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's, plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How thinking shows in the tokens of an answer, for the rules that must know where it ends.

    `end_id` is the token that ends it, `start_id` the one that opens it. `is_open`: the prompt has opened it; else the
    answer may, by its first token. After `budget` tokens of thinking, marks not counted, its end is forced.
    """

    end_id: int
    start_id: int | None = None
    is_open: bool = True
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class GrammarRule:
    """The answer, after its thinking, fits the grammar `text` (of `deltaserve.grammar`) and ends where that may end.

    A token of `exit_ids` in the place of the answer's first token leaves the grammar: a tool call instead of an answer.
    """

    text: str
    exit_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens for one request. Ranges are checked at the edge (`server.schema`) and by `check()`.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `seed` None: the engine draws one at admission.
    `logprobs` is how many alternatives to report beside each chosen token (0: the chosen one alone; None: nothing);
    `prompt_logprobs` the same for the prompt. `stop_token_ids` end the request and are kept in the ids, not in the
    text; end-of-sequence ids are added by the engine from the checkpoint unless `ignore_eos`. `stop` strings are
    watched where text is made (`engine.text`).

    `bad_words` are sequences of tokens that do not come; of a longer one, its last token does not come after the
    others. `allowed_token_ids`, unless empty, are all the tokens there are. `thinking` None: the answer has none.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    thinking: Thinking | None = None
    grammar: GrammarRule | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks of scheduler and cache; nothing here changes a token of its answer.

    `priority`: lower goes first; equal ones in order of arrival. Requests share cached prefixes only within one
    `cache_salt`. `session_id` names a conversation whose turns are kept together; None: the shared path of tokens
    says which conversation it is. `use_drafts` False: no speculation for this request.
    """

    priority: int = 0
    cache_salt: str = ""
    session_id: str | None = None
    use_drafts: bool = True


class CacheNote(enum.StrEnum):
    """Why a prefix hit was not longer."""

    FULL = "full"  # it could not have been: only the last, partial block was left
    OFF = "off"  # the prefix cache is switched off
    PROMPT_LOGPROBS = "prompt_logprobs"  # every position was asked for, so every one is computed
    COLD = "cold"  # no other request shares the first block (in this salt)
    DIVERGED = "diverged"  # known up to where this prompt leaves every known path
    NO_SNAPSHOT = "no_snapshot"  # the pages go further, the nearest state does not


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """How a request met the prefix cache when it last took a row.

    `num_cached` tokens were not computed: the boundary it resumed from. `num_matched` >= num_cached is how far its
    pages are known. `num_restored` of the cached tokens came back from host memory.
    """

    num_prompt: int
    num_cached: int
    num_matched: int
    num_restored: int
    note: CacheNote


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position: the token there, its natural-log probability and rank (1 = likeliest), and the likeliest others.

    Probabilities are those of the model itself, before temperature, penalties and filters. `top` holds
    (token id, logprob) pairs, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one step added to one request. The last chunk has a `finish_reason`.

    `stop_token_id` is the id that ended it, if one did. `logprobs` is parallel to `token_ids` where asked for.
    `prompt_logprobs` comes once, in the first chunk, with None for position 0. `num_cached` counts prompt tokens
    that were not computed because a prefix hit held them; `cache` says more, once, in the first chunk. `error` is a
    sentence for the client when `finish_reason` is ERROR.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached: int = 0
    cache: CacheRecord | None = None
    error: str | None = None
