"""Log-probabilities in the forms clients know: OpenAI's chat form, OpenAI's older list form, vLLM's prompt form.

JSON has no infinity: a probability of zero is written as -9999, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deltaserve.core.types import TokenLogprob
from deltaserve.engine.text import Vocabulary
from deltaserve.server.schema import GenerationRequest

LOWEST = -9999.0


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written in answers: as their text, or as `token_id:N` where the client asked for that."""

    vocabulary: Vocabulary
    as_ids: bool = False

    @classmethod
    def of(cls, vocabulary: Vocabulary, request: GenerationRequest) -> TokenNames:
        return cls(vocabulary, bool(request.return_tokens_as_token_ids))

    def __call__(self, token_id: int) -> str:
        if self.as_ids:
            return f"token_id:{token_id}"
        return self.vocabulary.token_bytes(token_id).decode(errors="replace")

    def raw(self, token_id: int) -> list[int]:
        return list(self.vocabulary.token_bytes(token_id))


def chat_logprobs(entries: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    content = [
        {
            **_entry(entry.token_id, entry.logprob, names),
            "top_logprobs": [_entry(token_id, logprob, names) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], offsets: Sequence[int], names: TokenNames
) -> dict[str, Any]:
    """`entries` holds None where there is no probability: at the first token of an echoed prompt."""
    return {
        "tokens": [names(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _alternatives(entry, names) for entry in entries],
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """Per prompt position: token id -> logprob, rank (1 = likeliest) and text; the likeliest and the token itself."""
    return [None if entry is None else _ranked(entry, names) for entry in entries]


def _entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names(token_id), "logprob": _finite(logprob), "bytes": names.raw(token_id)}


def _alternatives(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The likeliest tokens, and the chosen one if it is not among them."""
    pairs = {names(token_id): _finite(logprob) for token_id, logprob in entry.top}
    return pairs | {names(entry.token_id): _finite(entry.logprob)}


def _ranked(entry: TokenLogprob, names: TokenNames) -> dict[str, dict[str, Any]]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
    if all(token_id != entry.token_id for token_id, _, _ in ranked):
        ranked.insert(0, (entry.token_id, entry.logprob, entry.rank))
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names(token_id)}
        for token_id, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
