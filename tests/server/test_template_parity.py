"""Our rendering of a checkpoint's chat template is transformers' rendering, character for character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from deltaserve.server.template import ChatTemplate

SYSTEM = {"role": "system", "content": "  Be <brief> & kind.\n"}
USER = {"role": "user", "content": "Grüße! 'quoted' \"text\"\n\twith lines"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]}
ANSWER = {"role": "assistant", "content": "<think>\nold\n</think>\n\nAn answer."}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Ask.",
    "tool_calls": [
        {"function": {"name": "f", "arguments": {"text": "a < b", "list": [1, 2.5, None, True], "map": {"ü": "é"}}}},
        {"function": {"name": "g", "arguments": {}}},
    ],
}
RESULT = {"role": "tool", "content": "18 °C"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<&'\"> ü", "parameters": {"type": "object"}}}]

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, PARTS],
    "history": [SYSTEM, USER, ANSWER, PARTS, ANSWER],
    "tool loop": [SYSTEM, USER, CALL, RESULT, RESULT, ANSWER, USER],
    "open tool loop": [USER, CALL, RESULT],
}


@pytest.fixture(scope="module")
def tokenizer(sample_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(sample_checkpoint)


@pytest.fixture(scope="module")
def template(sample_checkpoint: Path) -> ChatTemplate:
    template = ChatTemplate.from_directory(sample_checkpoint)
    assert template is not None
    return template


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"preserve_thinking": True}], ids=str)
def test_same_text(name: str, tools: Any, kwargs: dict[str, Any], tokenizer: Any, template: ChatTemplate) -> None:
    for prompt in (True, False):
        theirs = tokenizer.apply_chat_template(
            CONVERSATIONS[name], tools=tools, tokenize=False, add_generation_prompt=prompt, **kwargs
        )
        ours = template.render(CONVERSATIONS[name], tools, add_generation_prompt=prompt, kwargs=kwargs)
        assert ours == theirs
