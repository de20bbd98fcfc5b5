"""POST /v1/messages, the way out: a chat's answer as Anthropic's message, whole or as its named events.

| block   | content block | deltas                                                                                 |
| ------- | ------------- | -------------------------------------------------------------------------------------- |
| thought | `thinking`    | `thinking_delta`, then one `signature_delta`; nothing is signed, and nothing checks it |
| text    | `text`        | `text_delta`                                                                           |
| call    | `tool_use`    | `input_json_delta`; of a call cut off, `input` is what a client reads out of these     |

`input_tokens` are those that were not cached; `cache_read_input_tokens` are the rest. `max_tokens` beyond the context
is no mistake here, as clients send one number for every prompt: the answer then ends at the end of the context, with
the stop reason `model_context_window_exceeded`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pydantic_core
from starlette.responses import Response

from deltaserve.core.errors import ContextLengthError, RequestError
from deltaserve.server.anthropic_input import NAMES, CountTokensRequest, MessagesRequest, to_chat
from deltaserve.server.blocks import Block, Blocks, Change, Ending, Step
from deltaserve.server.chat import prepare_chat, render
from deltaserve.server.errors import ANTHROPIC_PATHS, anthropic_body, describe, error_response
from deltaserve.server.generation import Generation, Usage
from deltaserve.server.parsers.marks import THINK_END
from deltaserve.server.parsers.sink import Kind
from deltaserve.server.sampling import with_budget
from deltaserve.server.served import Head, Served
from deltaserve.server.stream import StreamForm, named_event
from deltaserve.server.turns import renamed

encode = msgspec.json.encode

SIGNATURE = "unsigned"
PING = named_event("ping", b'{"type":"ping"}')


async def prepare_message(served: Served, request: MessagesRequest) -> MessagesAnswer:
    """Check everything and render; nothing runs yet."""
    try:
        chat = to_chat(request)
        if not served.formats.has_thinking or served.tokenizer.token_to_id(THINK_END) is None:
            chat.thinking_token_budget = None  # agents send it whatever the model, also to one that cannot think
        generation = (await prepare_chat(served, chat)).generation
        (choice,) = generation.choices
        most = choice.params.max_tokens or request.max_tokens
        params = with_budget(choice.params, min(request.max_tokens, most))
    except ContextLengthError as error:
        raise ContextLengthError(f"prompt is too long: {error.message}", error.param) from None
    except RequestError as error:
        raise renamed(error, NAMES) from None
    generation.choices[0] = replace(choice, params=params)
    head = Head.make(served, "msg", request.model)
    is_short = params.max_tokens == served.limits.max_model_len - len(choice.prompt_ids) < request.max_tokens
    return MessagesAnswer(replace(head, id=head.id.replace("-", "_")), generation, is_short=is_short)


async def count_tokens(served: Served, request: CountTokensRequest) -> bytes:
    """The body of the answer."""
    served.resolve_name(request.model)
    try:
        prompt = await render(served, to_chat(request))
    except RequestError as error:
        raise renamed(error, NAMES) from None
    return encode({"input_tokens": len(prompt.ids)})


class MessagesAnswer:
    """Turns what the engine gives into the body or the events of one request. `is_short`: the context ends first."""

    def __init__(self, head: Head, generation: Generation, *, is_short: bool) -> None:
        self.generation = generation
        self.form = StreamForm(b"", _refusal, _failure)
        self._head = head
        self._is_short = is_short

    def begin(self) -> bytes:
        message = self._message([], None, None) | {"usage": _usage(self.generation.usage) | {"output_tokens": 0}}
        return _event("message_start", {"message": message}) + PING

    def write(self, change: Change) -> bytes:
        block = change.block
        place = {"index": block.index}
        if change.step is Step.OPEN:
            return _event("content_block_start", place | {"content_block": _opened(block)})
        if change.step is Step.GROW:
            return _event("content_block_delta", place | {"delta": _delta(block.kind, change.text)})
        stop = _event("content_block_stop", place)
        if block.kind is not Kind.REASONING:
            return stop
        return (
            _event("content_block_delta", place | {"delta": {"type": "signature_delta", "signature": SIGNATURE}}) + stop
        )

    def end(self, _: Blocks, ending: Ending) -> bytes:
        delta = {"stop_reason": self._stop_reason(ending), "stop_sequence": ending.stop}
        usage = _usage(self.generation.usage)
        return _event("message_delta", {"delta": delta, "usage": usage}) + _event("message_stop", {})

    def body(self, blocks: Blocks, ending: Ending) -> bytes:
        content = [_whole(block) for block in blocks.all]
        return encode(self._message(content, self._stop_reason(ending), ending.stop))

    def _stop_reason(self, ending: Ending) -> str:
        if ending.is_cut:
            return "model_context_window_exceeded" if self._is_short else "max_tokens"
        if ending.stop is not None:
            return "stop_sequence"
        return "tool_use" if ending.has_calls else "end_turn"

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(self.generation.usage),
        }


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return named_event(name, encode({"type": name, **fields}))


def _opened(block: Block) -> dict[str, Any]:
    if block.kind is Kind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(kind: Kind, text: str) -> dict[str, Any]:
    if kind is Kind.CALL:
        return {"type": "input_json_delta", "partial_json": text}
    return (
        {"type": "thinking_delta", "thinking": text} if kind is Kind.REASONING else {"type": "text_delta", "text": text}
    )


def _whole(block: Block) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    if block.kind is Kind.CALL:
        filled = {"input": _input(block.text)}
    elif block.kind is Kind.REASONING:
        filled = {"thinking": block.text, "signature": SIGNATURE}
    else:
        filled = {"text": block.text}
    return _opened(block) | filled


def _input(arguments: str) -> Any:
    """What clients make of all deltas. Of a call that was cut off, that is what the text surely says so far."""
    return pydantic_core.from_json(arguments, allow_partial=True) if arguments.strip() else {}


def _usage(usage: Usage) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
    }
    if usage.num_reasoning is not None:
        counts["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning}
    return counts


def _refusal(error: Exception) -> Response:
    return error_response(error, ANTHROPIC_PATHS)


def _failure(error: Exception) -> bytes:
    return named_event("error", encode(anthropic_body(*describe(error))))
