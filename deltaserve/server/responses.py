"""POST /v1/responses, the way out: a chat's answer as OpenAI's response, whole or as its named events.

| block   | item            | while it grows                                               |
| ------- | --------------- | ------------------------------------------------------------ |
| thought | `reasoning`     | `response.reasoning_text.delta`, in one content part         |
| text    | `message`       | `response.output_text.delta`, in one content part            |
| call    | `function_call` | `response.function_call_arguments.delta`                     |

Every event has a running `sequence_number`. The response in `response.completed` is the one that a request without
`stream` gets. `incomplete` is an answer that was cut off at its token limit; `failed` one that the engine gave up on
after the first event was out (before that, it is an error with a status of its own).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec

from deltaserve.core.errors import RequestError
from deltaserve.server.blocks import Block, Blocks, Change, Ending, Step
from deltaserve.server.chat import prepare_chat
from deltaserve.server.errors import describe, error_response
from deltaserve.server.generation import Generation, Usage
from deltaserve.server.parsers.sink import Kind
from deltaserve.server.responses_input import ENCRYPTED, NAMES, ResponsesRequest, is_left_out, pack, to_chat
from deltaserve.server.served import Head, Served
from deltaserve.server.stream import StreamForm, named_event
from deltaserve.server.turns import renamed

encode = msgspec.json.encode

ITEM_PREFIX = {Kind.REASONING: "rs", Kind.CONTENT: "msg", Kind.CALL: "fc"}
DELTA = {
    Kind.REASONING: "response.reasoning_text",
    Kind.CONTENT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}


async def prepare_response(served: Served, request: ResponsesRequest) -> ResponsesAnswer:
    """Check everything and render; nothing runs yet."""
    try:
        chat = await prepare_chat(served, to_chat(request))
    except RequestError as error:
        raise renamed(error, NAMES) from None
    head = Head.make(served, "resp", request.model)
    return ResponsesAnswer(replace(head, id=head.id.replace("-", "_")), request, chat.generation)


class ResponsesAnswer:
    """Turns what the engine gives into the body or the events of one request."""

    def __init__(self, head: Head, request: ResponsesRequest, generation: Generation) -> None:
        self.generation = generation
        self.form = StreamForm(b"", error_response, self.fail)
        self._head = head
        self._request = request
        self._num_events = 0
        self._packs = ENCRYPTED in (request.include or ())

    def begin(self) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", {"response": response})
        return created + self._event("response.in_progress", {"response": response})

    def write(self, change: Change) -> bytes:
        block = change.block
        if change.step is Step.OPEN:
            item = self._item(block, "in_progress")
            added = self._event("response.output_item.added", {"output_index": block.index, "item": item})
            return added + self._part_event("response.content_part.added", block)
        if change.step is Step.GROW:
            fields = self._place(block) | {"delta": change.text} | _no_logprobs(block)
            return self._event(f"{DELTA[block.kind]}.delta", fields)
        return self._close(block)

    def end(self, blocks: Blocks, ending: Ending) -> bytes:
        name = "response.incomplete" if ending.is_cut else "response.completed"
        return self._event(name, {"response": self._ended(blocks, ending)})

    def body(self, blocks: Blocks, ending: Ending) -> bytes:
        return encode(self._ended(blocks, ending))

    def fail(self, error: Exception) -> bytes:
        """The last event of a stream that broke."""
        told = describe(error)[1]["error"]
        response = self._response("failed")
        response["error"] = {"code": told["code"] or told["type"], "message": told["message"]}
        return self._event("response.failed", {"response": response})

    def _close(self, block: Block) -> bytes:
        place, text = self._place(block), block.text
        if block.kind is Kind.CALL:
            done = self._event(f"{DELTA[block.kind]}.done", place | {"name": block.name, "arguments": text})
        else:
            done = self._event(f"{DELTA[block.kind]}.done", place | {"text": text} | _no_logprobs(block))
        done += self._part_event("response.content_part.done", block)
        return done + self._event(
            "response.output_item.done", {"output_index": block.index, "item": self._item(block, _status(block))}
        )

    def _part_event(self, name: str, block: Block) -> bytes:
        """A call has no parts."""
        return b"" if block.kind is Kind.CALL else self._event(name, self._place(block) | {"part": _part(block)})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = encode({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return named_event(name, body)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind is Kind.CALL else place | {"content_index": 0}

    def _item_id(self, block: Block) -> str:
        return f"{ITEM_PREFIX[block.kind]}_{self._head.id.removeprefix('resp_')}{block.index:02x}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        parts = [] if status == "in_progress" else [_part(block)]
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind is Kind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return item | {"type": "function_call"} | call
        if block.kind is Kind.CONTENT:
            return item | {"type": "message", "role": "assistant", "content": parts}
        packed = pack(block.text) if self._packs else None
        return item | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": packed}

    def _ended(self, blocks: Blocks, ending: Ending) -> dict[str, Any]:
        response = self._response("incomplete" if ending.is_cut else "completed")
        response["output"] = [self._item(block, _status(block)) for block in blocks.all]
        response["usage"] = _usage(self.generation.usage)
        response["completed_at"] = int(time.time())
        if ending.is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """A response without output, with what was asked for beside it."""
        request, params = self._request, self.generation.choices[0].params
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._head.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool for tool in request.tools or () if not is_left_out(tool)],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }


def _status(block: Block) -> str:
    return "incomplete" if block.is_cut else "completed"


def _no_logprobs(block: Block) -> dict[str, Any]:
    """What clients want in the events of a text, asked for or not."""
    return {"logprobs": []} if block.kind is Kind.CONTENT else {}


def _part(block: Block) -> dict[str, Any]:
    """The one content part of a text or a thought."""
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached},
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning or 0},
        "total_tokens": usage.num_prompt + usage.num_completion,
    }
