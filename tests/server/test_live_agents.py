"""One scripted agent over three APIs with their own clients, on the shipped model: the same thoughts, calls, answers.

The agent asks, runs the tools that are called, sends their results, and stops at an answer without calls.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anthropic
import httpx
import openai
import pytest

from tests.server.agent_forms import Said, of_chat, of_message, of_response
from tests.server.test_live_server import Live, running
from tests.server.test_live_tools import PARIS, TINY, TOOLS

KEY = "a-key"
QUESTION = "What is the weather in Paris in celsius?"
RESULT = '{"temperature": 21}'
MAX_TOKENS = 200
MAX_TURNS = 4
GREEDY = {"temperature": 0}  # not every client has the field


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    flags = ("--served-model-name", "tiny", "--max-model-len", "2K", "--max-num-seqs", "4", "--num-pages", "64")
    with running(TINY, *flags, "--api-key", KEY) as live:
        yield live


@dataclass
class Agent(ABC):
    """`tokens` are (prompt, completion, reasoning) of each turn."""

    url: str
    stream: bool
    thinks: bool
    history: list[Any] = field(default_factory=list)
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    @abstractmethod
    def ask(self) -> list[str]:
        """One turn, added to everything above; the ids of its calls."""

    @abstractmethod
    def answer_calls(self, call_ids: list[str]) -> None:
        """The result of each call into the history."""

    def run(self, question: str) -> Agent:
        self.history.append({"role": "user", "content": question})
        for _ in range(MAX_TURNS):
            call_ids = self.ask()
            if not call_ids:
                return self
            self.answer_calls(call_ids)
        raise AssertionError(f"the agent does not come to an end: {self.said}")


class ChatAgent(Agent):
    def ask(self) -> list[str]:
        extra = {"chat_template_kwargs": {"enable_thinking": self.thinks}}
        common: Any = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": MAX_TOKENS, "extra_body": extra}
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0) as client:
            if self.stream:
                usage: Any = {"include_usage": True}
                with client.chat.completions.stream(messages=self.history, stream_options=usage, **common) as stream:
                    answer: Any = stream.get_final_completion()
            else:
                answer = client.chat.completions.create(messages=self.history, **common)
        message = answer.choices[0].message.to_dict()
        self.history.append({name: value for name, value in message.items() if value is not None})
        self.said.append(of_chat({"tool_calls": None, "reasoning_content": None, "content": None} | message))
        used = answer.usage
        reasoning = used.completion_tokens_details.reasoning_tokens
        self.tokens.append((used.prompt_tokens, used.completion_tokens, reasoning))
        return [call["id"] for call in message.get("tool_calls") or ()]

    def answer_calls(self, call_ids: list[str]) -> None:
        self.history += [{"role": "tool", "tool_call_id": call_id, "content": RESULT} for call_id in call_ids]


class ResponsesAgent(Agent):
    tools: ClassVar[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]

    def ask(self) -> list[str]:
        extra = {"chat_template_kwargs": {"enable_thinking": self.thinks}}
        common: Any = {"model": "tiny", "tools": self.tools, "temperature": 0, "extra_body": extra, "store": False}
        common |= {"max_output_tokens": MAX_TOKENS, "input": self.history}
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0) as client:
            if self.stream:
                with client.responses.stream(**common) as stream:
                    answer: Any = stream.get_final_response()
            else:
                answer = client.responses.create(**common)
        items = [item.to_dict() for item in answer.output]
        for item in items:
            item.pop("parsed_arguments", None)
        self.history += items
        self.said.append(of_response(items))
        used = answer.usage
        self.tokens.append((used.input_tokens, used.output_tokens, used.output_tokens_details.reasoning_tokens))
        return [item["call_id"] for item in items if item["type"] == "function_call"]

    def answer_calls(self, call_ids: list[str]) -> None:
        results = ({"type": "function_call_output", "call_id": call_id, "output": RESULT} for call_id in call_ids)
        self.history += results


class MessagesAgent(Agent):
    def ask(self) -> list[str]:
        functions = [tool["function"] for tool in TOOLS]
        tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in functions
        ]
        thinking = {"type": "adaptive" if self.thinks else "disabled"}
        common: Any = {"model": "tiny", "tools": tools, "thinking": thinking, "extra_body": GREEDY}
        common |= {"max_tokens": MAX_TOKENS, "messages": self.history}
        with anthropic.Anthropic(base_url=self.url, api_key=KEY, max_retries=0) as client:
            if self.stream:
                with client.messages.stream(**common) as stream:
                    answer: Any = stream.get_final_message()
            else:
                answer = client.messages.create(**common)
        content = [block.to_dict() for block in answer.content]
        self.history.append({"role": "assistant", "content": content})
        self.said.append(of_message(content))
        used = answer.usage
        num_prompt = used.input_tokens + used.cache_read_input_tokens
        self.tokens.append((num_prompt, used.output_tokens, used.output_tokens_details.thinking_tokens))
        return [block["id"] for block in content if block["type"] == "tool_use"]

    def answer_calls(self, call_ids: list[str]) -> None:
        results = [{"type": "tool_result", "tool_use_id": call_id, "content": RESULT} for call_id in call_ids]
        self.history.append({"role": "user", "content": results})


@pytest.mark.parametrize("thinks", [False, True])
def test_the_same_agent_over_three_apis(live: Live, thinks: bool) -> None:
    first = ChatAgent(live.url, False, thinks).run(QUESTION)
    assert first.said[0].calls == (PARIS,)
    assert "21" in first.said[-1].text
    assert bool(first.said[0].thought) == thinks
    assert (first.tokens[0][2] > 0) == thinks
    for kind in (ChatAgent, ResponsesAgent, MessagesAgent):
        for stream in (False, True):
            agent = kind(live.url, stream, thinks).run(QUESTION)
            assert (agent.said, agent.tokens) == (first.said, first.tokens), (kind, stream)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_the_same_schema_over_three_apis(live: Live) -> None:
    common: Any = {"model": "tiny", "extra_body": GREEDY}
    asked: Any = [{"role": "user", "content": "Name a city."}]
    named: Any = {"name": "city", "schema": SCHEMA, "strict": True}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
        form: Any = {"type": "json_schema", "json_schema": named}
        chat = client.chat.completions.create(messages=asked, response_format=form, max_tokens=60, **common)
        text: Any = {"format": {"type": "json_schema", **named}}
        response = client.responses.create(input=asked, text=text, max_output_tokens=60, **common)
    with anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0) as messages:
        output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        message: Any = messages.messages.create(messages=asked, output_config=output, max_tokens=60, **common)
    assert set(json.loads(response.output_text)) == {"city"}
    assert response.output_text == chat.choices[0].message.content == message.content[0].text


def test_tokens_are_counted_before(live: Live) -> None:
    asked: Any = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0) as client:
        counted = client.messages.count_tokens(model="tiny", messages=asked)
        message = client.messages.create(model="tiny", messages=asked, max_tokens=1)
    used = message.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_clients_see_errors_as_their_own(live: Live) -> None:
    with anthropic.Anthropic(base_url=live.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1)
        with pytest.raises(anthropic.NotFoundError):
            client.with_options(api_key=KEY).messages.create(
                model="no", messages=[{"role": "user", "content": "a"}], max_tokens=1
            )
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError):
            other.responses.create(model="tiny", input="a")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            other.with_options(api_key=KEY).responses.create(model="tiny", input="a", previous_response_id="r")
    assert httpx.get(f"{live.url}/health").status_code == 200
