"""POST /v1/chat/completions: messages in, one or several assistant messages out, whole or streamed.

What a model writes becomes thinking, text and tool calls in `parsers`, the same way streamed and whole. A choice that
the model ended, and that has a call, finishes with `tool_calls`; one that was cut off says by what, call or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deltaserve.core.errors import RequestError
from deltaserve.core.types import FinishReason
from deltaserve.server.chat_message import deltas, whole_message, without_reasoning
from deltaserve.server.constraints import constrain
from deltaserve.server.generation import Finished, Generation, Piece, Usage, make_choices
from deltaserve.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from deltaserve.server.messages import check_tools, normalize_messages
from deltaserve.server.options import request_options
from deltaserve.server.parsers.formats import reveal
from deltaserve.server.parsers.message import MessageReader
from deltaserve.server.parsers.reasoning import State, continued_state, start_state
from deltaserve.server.sampling import Limits, OutputBudget, check_num_logprobs, sampling_params, with_budget
from deltaserve.server.schema import ChatRequest, TokenizeRequest
from deltaserve.server.served import Head, Served
from deltaserve.server.tool_choice import ToolPlan, plan_tools
from deltaserve.server.writer import PLAIN, Frame, encode, members

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation: its token ids, where the answer begins, and what it may call."""

    ids: tuple[int, ...]
    state: State
    plan: ToolPlan

    def reader(self) -> MessageReader:
        return self.plan.reader(self.state)


async def render(served: Served, request: ChatRequest | TokenizeRequest) -> ChatPrompt:
    """The prompt of a chat, or of the messages form of /tokenize."""
    messages = normalize_messages(request.messages or ())
    check_tools(request.tools)
    plan = plan_tools(request, served.formats)
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise RequestError("continue_final_message excludes add_generation_prompt", "continue_final_message")
    text = served.chat_template().render(
        messages,
        plan.shown,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        kwargs={**_effort(request.reasoning_effort), **(request.chat_template_kwargs or {})},
    )
    text = plan.begin(text)
    ids = await served.encode(text, add_special_tokens=bool(request.add_special_tokens))
    if plan.opening or not served.formats.has_thinking:
        return ChatPrompt(ids, State.ANSWER, plan)
    return ChatPrompt(ids, continued_state(messages[-1]["content"]) if continues else start_state(text), plan)


async def prepare_chat(served: Served, request: ChatRequest) -> ChatAnswer:
    """Check everything and render; nothing runs yet."""
    head, options = Head.make(served, "chatcmpl", request.model), request_options(request)
    params = sampling_params(request, served.defaults, served.limits, _num_logprobs(request, served.limits))
    prompt = await render(served, request)
    params = await constrain(served, request, params, prompt.state, prompt.plan)
    max_tokens = _budget(request).resolve(len(prompt.ids), served.limits, served.defaults)
    choices = make_choices([(prompt.ids, with_budget(params, max_tokens))], request.n or 1)
    formats = served.formats
    vocabulary = reveal(served.tokenizer, formats.marks(with_calls=prompt.plan.reads_calls))
    readers = [prompt.reader() for _ in choices]
    usage = Usage(num_reasoning=0 if formats.has_thinking else None)
    generation = Generation(served.engine, vocabulary, served.metrics, choices, options, readers, usage)
    return ChatAnswer(head, request, prompt, generation, TokenNames.of(served.tokenizer, request))


class ChatAnswer:
    """Turns what the engine gives into the body or the events of one chat request."""

    def __init__(
        self, head: Head, request: ChatRequest, prompt: ChatPrompt, generation: Generation, names: TokenNames
    ) -> None:
        self.generation = generation
        self.frame = Frame(head, "chat.completion.chunk", request, generation)
        self._head = head
        self._prompt = prompt
        self._names = names
        self._unopened = set(range(len(generation.choices)))
        self._shows_reasoning = request.include_reasoning is not False
        self._shows_ids = bool(request.return_token_ids)

    def body(self, finished: list[Finished]) -> bytes:
        answer = {
            **self._head.fields("chat.completion"),
            "choices": [self._choice(index, choice) for index, choice in enumerate(finished)],
            "usage": self.generation.usage.as_dict(),
            "prompt_logprobs": None,
        }
        if finished[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(finished[0].prompt_logprobs, self._names)
        if self._shows_ids:
            answer["prompt_token_ids"] = self._prompt.ids
        return encode(answer)

    def write(self, piece: Piece) -> bytes:
        """The events of one piece: none while all its text is held back."""
        index = piece.index
        *bodies, last = deltas(piece.parts if self._shows_reasoning else without_reasoning(piece.parts)) or [b""]
        ending = self._ending(piece)
        if index in self._unopened:
            self._unopened.remove(index)
            bodies.insert(0, b'"delta":{"role":"assistant","content":""}')
        events = [self.frame.chunk(index, body + PLAIN) for body in bodies]
        if last or ending is not PLAIN:
            events.append(self.frame.chunk(index, (last or b'"delta":{"content":""}') + ending))
        return b"".join(events)

    def _ending(self, piece: Piece) -> bytes:
        delta = piece.delta
        shows_tokens = bool(delta.token_ids) and (delta.logprobs is not None or self._shows_ids)
        if delta.finish_reason is None and not shows_tokens:
            return PLAIN
        fields: dict[str, Any] = {
            "logprobs": None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._names),
            "finish_reason": self._finish_reason(piece.index, delta.finish_reason),
        }
        if delta.finish_reason is not None:
            fields["stop_reason"] = delta.stop_reason
        if self._shows_ids:
            fields["token_ids"] = delta.token_ids
        return members(fields)

    def _choice(self, index: int, finished: Finished) -> dict[str, Any]:
        parts = finished.parts if self._shows_reasoning else without_reasoning(finished.parts)
        choice = {
            "index": index,
            "message": whole_message(parts, has_answer=self.generation.readers[index].has_answer),
            "logprobs": None if finished.logprobs is None else chat_logprobs(finished.logprobs, self._names),
            "finish_reason": self._finish_reason(index, finished.finish_reason),
            "stop_reason": finished.stop_reason,
        }
        return choice | ({"token_ids": finished.token_ids} if self._shows_ids else {})

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        calls = self.generation.readers[index].num_calls
        return TOOL_CALLS if calls and reason is FinishReason.STOP else reason


def _budget(request: ChatRequest) -> OutputBudget:
    if request.max_completion_tokens is not None:
        return OutputBudget(request.max_completion_tokens, "max_completion_tokens", "messages")
    return OutputBudget(request.max_tokens, "max_tokens", "messages")


def _num_logprobs(request: ChatRequest, limits: Limits) -> int | None:
    if request.logprobs:
        return check_num_logprobs(request.top_logprobs or 0, limits, "top_logprobs")
    if request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def _effort(effort: str | None) -> dict[str, Any]:
    """`reasoning_effort` as templates know it: a switch for thinking, and for those that read it how much."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"enable_thinking": True, "reasoning_effort": effort}
