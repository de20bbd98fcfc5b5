"""The sample checkpoint is what it claims: transformers reads it whole, and its numbers are not degenerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltaserve.model.sample import UNUSED_ROWS, write_sample_checkpoint
from deltaserve.model.sample_tokenizer import ADDED_TOKENS, PLAIN_TOKENS
from tests.conftest import MakeCheckpoint

KINDS = [
    {"kind": "moe"},
    {"kind": "moe", "packed_experts": True},
    {"kind": "dense", "tied": True},
    {"kind": "next"},
]
USER = {"role": "user", "content": "How warm is it?"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def load(directory: Path) -> tuple[Any, dict[str, Any]]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)


def render(directory: Path, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    text = AutoTokenizer.from_pretrained(directory).apply_chat_template(messages, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("arguments", KINDS, ids=str)
def test_transformers_loads_every_tensor(arguments: dict[str, Any], make_checkpoint: MakeCheckpoint) -> None:
    model, info = load(make_checkpoint(**arguments))
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert (model.config.rope_parameters or {})["rope_theta"] == 10_000_000


@pytest.mark.parametrize("arguments", KINDS, ids=str)
def test_logits_are_spread_and_decided(arguments: dict[str, Any], make_checkpoint: MakeCheckpoint) -> None:
    model, _ = load(make_checkpoint(**arguments))
    ids = torch.randint(0, 900, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model(ids).logits[0]
    best = logits.topk(2, dim=-1).values
    assert 1.5 < logits[:, :900].std() < 6
    assert (best[:, 0] - best[:, 1]).median() > 0.2
    assert (logits[:, -UNUSED_ROWS:] == 0).all()


def test_early_tokens_reach_late_logits(sample_checkpoint: Path) -> None:
    """A lost recurrent state must be visible hundreds of tokens later."""
    model, _ = load(sample_checkpoint)
    ids = torch.randint(0, 900, (2, 300), generator=torch.Generator().manual_seed(1))
    ids[1, 50:] = ids[0, 50:]
    with torch.inference_mode():
        logits = model(ids).logits[:, -1]
    assert (logits[0] - logits[1]).abs().max() > 0.02


def test_packed_experts_are_the_same_model(make_checkpoint: MakeCheckpoint) -> None:
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        apart, packed = (load(make_checkpoint(kind="moe", packed_experts=p))[0](ids).logits for p in (False, True))
    torch.testing.assert_close(packed, apart, rtol=0, atol=0)


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_sample_checkpoint(tmp_path / name, layers=4, seed=seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    vocabularies = {(tmp_path / name / "tokenizer.json").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    assert len(vocabularies) == 1


def test_stored_types(make_checkpoint: MakeCheckpoint) -> None:
    with safe_open(make_checkpoint(kind="moe") / "model.safetensors", "pt") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    wide = {name for name, dtype in types.items() if dtype == "F32"}
    assert wide == {name for name in types if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))}
    assert set(types.values()) == {"F32", "BF16"}
    assert sum(name.startswith("mtp.") for name in types) == 4 + 2 + 6 + 5 + 3 * 8


def test_tokenizer_is_the_familys(sample_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sample_checkpoint)
    config = json.loads((sample_checkpoint / "config.json").read_text())
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer)))[-len(ADDED_TOKENS) :] == list(ADDED_TOKENS)
    assert len(tokenizer) == config["vocab_size"] - UNUSED_ROWS
    text = "Grüße, हूँ 1234's\r\n\t🙂 e\u0301 <think>x</think><|im_end|>"
    ids = tokenizer(text).input_ids
    hidden = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    assert tokenizer.decode(ids) == text.replace("e\u0301", "é")
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("<think>x</think>")
    assert hidden == set(ADDED_TOKENS) - PLAIN_TOKENS


def test_chat_stops_by_generation_config_only(sample_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sample_checkpoint)
    config = json.loads((sample_checkpoint / "config.json").read_text())
    generation = json.loads((sample_checkpoint / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation["eos_token_id"] == [tokenizer.eos_token_id, config["eos_token_id"]]


def test_template_opens_and_closes_thinking(sample_checkpoint: Path) -> None:
    head = "<|im_start|>user\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n"
    thinking = render(sample_checkpoint, [USER], add_generation_prompt=True)
    silent = render(sample_checkpoint, [USER], add_generation_prompt=True, enable_thinking=False)
    assert thinking == head + "<think>\n"
    assert silent == head + "<think>\n\n</think>\n\n"


def test_template_renders_tools_calls_and_results(sample_checkpoint: Path) -> None:
    assistant = {"role": "assistant", "reasoning_content": "Ask.", "content": "One moment.", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "18"}, {"role": "tool", "content": [{"type": "text", "text": "17"}]}]
    system = {"role": "developer", "content": " Be short. "}
    text = render(sample_checkpoint, [system, USER, assistant, *results], tools=[TOOL])
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    call += "</function>\n</tool_call>"
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.index("</tool_call>\n\nBe short.<|im_end|>\n") < text.index("<|im_start|>user\nHow warm")
    assert f"<think>\nAsk.\n</think>\n\nOne moment.\n\n{call}\n{call}<|im_end|>\n" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n18\n</tool_response>\n<tool_response>\n17\n</tool_response><|im_end|>\n"
    )


def test_template_drops_thoughts_before_the_last_question(sample_checkpoint: Path) -> None:
    old = {"role": "assistant", "content": "<think>\nold thought\n</think>\n\nWarm."}
    dropped = render(sample_checkpoint, [USER, old, USER])
    kept = render(sample_checkpoint, [USER, old, USER], preserve_thinking=True)
    assert "<|im_start|>assistant\nWarm.<|im_end|>" in dropped
    assert "<think>\nold thought\n</think>\n\nWarm.<|im_end|>" in kept


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "system", "content": "x"}], "no user message"),
        ([USER, {"role": "system", "content": "x"}], "must come first"),
        ([USER, {"role": "critic", "content": "x"}], "Unknown message role: critic"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "text parts only"),
    ],
)
def test_template_refuses(messages: list[dict[str, Any]], reason: str, sample_checkpoint: Path) -> None:
    with pytest.raises(Exception, match=reason):
        render(sample_checkpoint, messages)
