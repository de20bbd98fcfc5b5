"""The tokenizer against the library it wraps, and the sources of end-of-sequence ids."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaserve.core.errors import CheckpointError, ConfigError, RequestError
from deltaserve.core.types import FinishReason, SamplingParams, TokenChunk
from deltaserve.engine.text import TextStream
from deltaserve.engine.tokenizer import Tokenizer, read_chat_markers, read_eos_ids

TEXTS = [
    "hello world",
    "日本語テキスト",
    "👩‍👩‍👧 family",
    "na\u0308ive\n\n  x",
    "<|im_start|>user\n<think>",
    "a\x00b\t\r",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(sample_checkpoint: Path) -> Tokenizer:
    return Tokenizer(sample_checkpoint)


@pytest.fixture(scope="module")
def library(sample_checkpoint: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(sample_checkpoint / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_encode_is_the_librarys_and_decode_gives_the_text_back(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == library.normalizer.normalize_str(text)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), max_size=20))
def test_any_ids_decode_as_the_library_does_at_once_and_in_a_stream(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    expected = library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    stream, text, start = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip)), "", 0
    for size in sizes:
        text += stream.feed(TokenChunk(1, tuple(ids[start : start + size]))).text
        start += size
    text += stream.feed(TokenChunk(1, tuple(ids[start:]), finish_reason=FinishReason.LENGTH)).text
    assert text == expected


def test_token_bytes_of_the_whole_vocabulary_join_to_what_the_library_says(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    for token_id in range(tokenizer.vocab_size):
        expected = library.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_bytes(token_id).decode(errors="replace") == expected


@pytest.mark.parametrize("token_id", [-1, 1 << 31, 1 << 70, 10**6])
def test_ids_without_a_token_have_no_bytes(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.id_to_token(token_id) is None
    assert tokenizer.decode([token_id]) == ""


def test_thinking_marks_are_ordinary_tokens(tokenizer: Tokenizer) -> None:
    think, turn_end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("<|im_end|>")
    assert think not in tokenizer.special_ids and turn_end in tokenizer.special_ids
    assert tokenizer.decode([think, turn_end]) == "<think>"


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    thread = threading.Thread(target=tokenizer.encode, args=("word " * 300_000,))
    ticks = [time.perf_counter()]
    thread.start()
    while thread.is_alive():
        time.sleep(0.005)
        ticks.append(time.perf_counter())
    longest = max(after - before for before, after in itertools.pairwise(ticks))
    assert longest < (ticks[-1] - ticks[0]) / 2


def test_text_that_is_not_unicode_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800c")


def write(directory: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


TURN_END = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}, "8": {"content": "x"}}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [7, 3]}, "config": {"eos_token_id": 5}}, (7, 3)),
        ({"generation_config": {"eos_token_id": 7}, "tokenizer_config": TURN_END}, (7,)),
        ({"generation_config": {}, "config": {"eos_token_id": 5}}, (5,)),
        ({"config": {"generation_config": {"eos_token_id": [1, 2]}, "eos_token_id": 5}}, (1, 2)),
        ({"config": {"text_config": {"eos_token_id": 4}, "eos_token_id": 5}}, (4,)),
        ({"config": {"text_config": {}, "eos_token_id": [5, 6]}}, (5, 6)),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": TURN_END}, (5, 7)),
        ({"config": {"eos_token_id": 7}, "tokenizer_config": TURN_END}, (7,)),
        ({"config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": None}}, (5,)),
        ({"config": {"eos_token_id": None}}, ()),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 5}}, (0,)),
        ({}, ()),
    ],
)
def test_eos_ids_come_from_the_first_file_that_has_them(
    tmp_path: Path, files: dict[str, dict[str, Any]], expected: tuple[int, ...]
) -> None:
    assert read_eos_ids(write(tmp_path, **files)) == expected


@pytest.mark.parametrize("value", ["151645", [1, None], -1, 1.5, True, {"id": 1}])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_eos_ids_that_are_none_are_named(tmp_path: Path, file: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"eos_token_id in {file}\.json must be a token id or a list of them"):
        read_eos_ids(write(tmp_path, **{file: {"eos_token_id": value}}))


def test_the_sample_ends_with_its_turn(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path, sample_checkpoint: Path) -> None:
    shutil.copy(sample_checkpoint / "tokenizer.json", tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="decoder Fuse"):
        Tokenizer(tmp_path)


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json must hold a JSON object, not list"):
        read_eos_ids(tmp_path)


def test_chat_markers_are_the_ids_of_their_texts(sample_checkpoint: Path, tmp_path: Path) -> None:
    markers, tokenizer = read_chat_markers(sample_checkpoint), Tokenizer(sample_checkpoint)
    assert markers is not None
    assert (markers.im_start, markers.im_end) == tuple(map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>")))
    turn = (markers.im_start, *markers.user, *markers.newline, *markers.tool_response)
    assert list(turn) == tokenizer.encode("<|im_start|>user\n<tool_response>")
    assert read_chat_markers(tmp_path) is None, "a directory without a tokenizer"
