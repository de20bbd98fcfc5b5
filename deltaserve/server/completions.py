"""POST /v1/completions: one or several prompts, as text or token ids, continued; whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltaserve.core.errors import RequestError, shown
from deltaserve.core.types import FinishReason, SamplingParams, TokenChunk, TokenLogprob
from deltaserve.engine.text import TextStream
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.constraints import constrain
from deltaserve.server.generation import Finished, Generation, Piece, make_choices
from deltaserve.server.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from deltaserve.server.options import request_options
from deltaserve.server.sampling import OutputBudget, check_num_logprobs, check_token_ids, sampling_params, with_budget
from deltaserve.server.schema import MAX_CHOICES, CompletionRequest
from deltaserve.server.served import Head, Served
from deltaserve.server.writer import PLAIN, Frame, encode, members

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it stands before the answer. Token ids, offsets and the engine's prompt_logprobs are parallel."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, prompt_ids: tuple[int, ...], tokenizer: Tokenizer) -> Echo:
        stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=False))
        delta = stream.feed(TokenChunk(0, prompt_ids, finish_reason=FinishReason.LENGTH))
        return cls(delta.text, delta.token_ids, delta.offsets)


NO_ECHO = Echo()


async def prepare_completion(served: Served, request: CompletionRequest) -> CompletionAnswer:
    """Check everything and tokenise; nothing runs yet."""
    head, options = Head.make(served, "cmpl", request.model), request_options(request)
    num_logprobs = check_num_logprobs(request.logprobs, served.limits, "logprobs")
    params = sampling_params(request, served.defaults, served.limits, num_logprobs)
    if request.echo and request.logprobs is not None:
        params = replace(params, prompt_logprobs=max(request.logprobs, params.prompt_logprobs or 0))
    params = await constrain(served, request, params)
    prompts = [(ids, _budgeted(served, request, params, ids)) for ids in await _prompts(served, request)]
    num_each = request.n or 1
    if len(prompts) * num_each > MAX_CHOICES:
        sentence = f"{len(prompts)} prompts with n = {num_each} are more than {MAX_CHOICES} choices; send fewer at once"
        raise RequestError(sentence, "prompt" if num_each == 1 else "n")
    choices = make_choices(prompts, num_each)
    generation = Generation(served.engine, served.tokenizer, served.metrics, choices, options)
    echoes = [Echo.of(c.prompt_ids, served.tokenizer) if request.echo else NO_ECHO for c in generation.choices]
    return CompletionAnswer(head, request, generation, echoes, TokenNames.of(served.tokenizer, request))


class CompletionAnswer:
    """Turns what the engine gives into the body or the events of one completion request."""

    def __init__(
        self, head: Head, request: CompletionRequest, generation: Generation, echoes: list[Echo], names: TokenNames
    ) -> None:
        self.generation = generation
        self.frame = Frame(head, "text_completion", request, generation)
        self._head = head
        self._request = request
        self._echoes = echoes
        self._names = names
        self._unopened = set(range(len(generation.choices)))
        self._shows_ids = bool(request.return_token_ids)

    def body(self, finished: list[Finished]) -> bytes:
        return encode(
            {
                **self._head.fields("text_completion"),
                "choices": [self._choice(index, choice) for index, choice in enumerate(finished)],
                "usage": self.generation.usage.as_dict(),
            }
        )

    def write(self, piece: Piece) -> bytes:
        index, delta = piece.index, piece.delta
        is_first = index in self._unopened
        self._unopened.discard(index)
        echo = self._echoes[index] if is_first else NO_ECHO
        shows_tokens = delta.logprobs is not None or self._shows_ids
        if delta.finish_reason is None and not shows_tokens and not echo.text:
            return self.frame.chunk(index, b'"text":' + encode(delta.text) + PLAIN) if delta.text else b""
        part = Finished()
        part.add(piece)
        return self.frame.chunk(index, members(self._fields(index, part, echo))[1:])

    def _choice(self, index: int, finished: Finished) -> dict[str, Any]:
        fields = {"index": index, **self._fields(index, finished, self._echoes[index])}
        wanted = self._request.prompt_logprobs is not None and finished.prompt_logprobs is not None
        fields["prompt_logprobs"] = prompt_logprobs(finished.prompt_logprobs or (), self._names) if wanted else None
        if self._shows_ids:
            fields["prompt_token_ids"] = self.generation.choices[index].prompt_ids
        return fields

    def _fields(self, index: int, part: Finished, echo: Echo) -> dict[str, Any]:
        fields = {
            "text": echo.text + part.text,
            "logprobs": None if part.logprobs is None else self._logprobs(index, part, part.logprobs, echo),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        return fields | ({"token_ids": part.token_ids} if self._shows_ids else {})

    def _logprobs(self, index: int, part: Finished, logprobs: Sequence[TokenLogprob], echo: Echo) -> dict[str, Any]:
        shift = len(self._echoes[index].text)
        return completion_logprobs(
            (*(part.prompt_logprobs or () if echo.token_ids else ()), *logprobs),
            (*echo.token_ids, *part.token_ids),
            (*echo.offsets, *(shift + offset for offset in part.offsets)),
            self._names,
        )


def _budgeted(
    served: Served, request: CompletionRequest, params: SamplingParams, prompt_ids: tuple[int, ...]
) -> SamplingParams:
    budget = OutputBudget(request.max_tokens, "max_tokens", "prompt", DEFAULT_MAX_TOKENS)
    return with_budget(params, budget.resolve(len(prompt_ids), served.limits, served.defaults))


async def _prompts(served: Served, request: CompletionRequest) -> list[tuple[int, ...]]:
    """Every prompt as token ids; a list of numbers is one prompt, a list of texts or lists is several."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [await _prompt(served, request, prompt, "prompt")]
    if not prompt:
        raise RequestError("prompt must not be empty", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [await _prompt(served, request, prompt, "prompt")]
    if any(isinstance(item, int) for item in prompt):
        raise RequestError("prompt must be token ids or a list of prompts, not both in one list", "prompt")
    if len(prompt) > MAX_CHOICES:
        raise RequestError(f"prompt takes at most {MAX_CHOICES} prompts, not {len(prompt)}", "prompt")
    return [await _prompt(served, request, item, f"prompt[{index}]") for index, item in enumerate(prompt)]


async def _prompt(served: Served, request: CompletionRequest, prompt: Any, path: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids = await served.encode(prompt, add_special_tokens=request.add_special_tokens is not False)
    else:
        ids = check_token_ids(prompt, served.limits.vocab_size, path)
    if not ids:
        raise RequestError(f"{path} must hold at least one token, not {shown(prompt)}", path)
    return ids
