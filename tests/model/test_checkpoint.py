"""Headers of safetensors files: what is whole is listed, what is not is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deltaserve.core.errors import CheckpointError
from deltaserve.model.checkpoint import first_ten, has_mtp, read_checkpoint
from tests.model.files import write_header

TENSORS = {"b": torch.zeros(3, 5, dtype=torch.bfloat16), "a": torch.ones(7), "mtp.c": torch.ones(2, 2).byte()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def error(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(directory)
    return str(caught.value)


def raw(directory: Path, header: str | bytes, data: bytes = b"") -> Path:
    text = header.encode() if isinstance(header, str) else header
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return directory


def test_tensors_are_listed_with_dtype_shape_and_size(directory: Path) -> None:
    checkpoint = read_checkpoint(directory)
    found = sorted((info.name, info.dtype, info.shape, info.num_bytes) for info in checkpoint.tensors.values())
    assert found == [("a", "F32", (7,), 28), ("b", "BF16", (3, 5), 30), ("mtp.c", "U8", (2, 2), 4)]
    assert checkpoint.num_bytes == 62
    assert has_mtp(directory)


def test_a_directory_without_weights_says_which_format_is_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "no .safetensors files" in error(tmp_path)


def test_a_file_cut_anywhere_is_an_error(directory: Path) -> None:
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert error(directory).count("model.safetensors") == 1
    file.write_bytes(whole + b"\0")
    assert "bytes of data" in error(directory)


def test_a_lfs_pointer_is_recognised(directory: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5368709120\n"
    (directory / "model.safetensors").write_bytes(pointer)
    message = error(directory)
    assert "Git LFS pointer" in message
    assert "git lfs pull" in message
    assert "cannot be read" not in message


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ("[1, 2]", b"", "not valid"),
        ("{nope", b"", "not valid"),
        (b"\xff\xfe{}", b"", "not valid"),
        ('{"a": {"dtype": "F32", "shape": [1]}}', b"", "not valid"),
        ('{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', b"1234", "not valid"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}', b"1234", "not valid"),
        ('{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}', b"1234", "not valid"),
        (b"[" * 100_000, b"", "not valid"),
        ('{"a": {"dtype": "F12", "shape": [1], "data_offsets": [0, 4]}}', b"1234", "'F12'"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234", "a in "),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', b"", "a in "),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', b"12345678", "begins at byte 4"),
        (
            '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            ' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            b"1234",
            "begins at byte 0",
        ),
        (
            '{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
            ' "a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}',
            b"12",
            "names twice: a",
        ),
    ],
)
def test_a_corrupt_header_is_an_error(tmp_path: Path, header: str | bytes, data: bytes, words: str) -> None:
    assert words in error(raw(tmp_path, header, data))


def test_a_tensor_in_two_files_is_an_error(directory: Path) -> None:
    save_file({"a": torch.ones(7)}, directory / "more.safetensors")
    message = error(directory)
    assert message.startswith("a is stored twice")
    assert "more.safetensors" in message


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_only_indexed_files_are_read_and_the_rest_is_told(directory: Path) -> None:
    write_index(directory, dict.fromkeys(TENSORS, "model.safetensors"))
    save_file({"a": torch.ones(7)}, directory / "consolidated.safetensors")
    checkpoint = read_checkpoint(directory)
    assert checkpoint.tensors.keys() == TENSORS.keys()
    assert [file.name for file in checkpoint.ignored_files] == ["consolidated.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (dict.fromkeys([*TENSORS, "d"], "model.safetensors"), "not in the files it names: d"),
        (dict.fromkeys(["a", "b"], "model.safetensors"), "missing from"),
        ({"a": "model-00002-of-00002.safetensors"}, "model-00002-of-00002.safetensors cannot be read"),
        ({"a": "../model.safetensors"}, "outside its own directory"),
        ({"a": "model\0.safetensors"}, "cannot be read"),
        (["a"], "not an index"),
        (None, "not an index"),
    ],
)
def test_an_index_that_disagrees_is_an_error(directory: Path, weight_map: object, words: str) -> None:
    write_index(directory, weight_map)
    assert words in error(directory)


def test_headers_are_enough(tmp_path: Path) -> None:
    """A file of 64 GiB, all hole."""
    write_header(tmp_path / "model.safetensors", {"a": ("F32", (1 << 17, 1 << 17))})
    assert read_checkpoint(tmp_path).num_bytes == 1 << 36


def test_ten_names_and_a_count() -> None:
    assert first_ten("abc") == "a, b, c"
    assert first_ten("abcdefghij") == "a, b, c, d, e, f, g, h, i, j"
    assert first_ten("abcdefghijkl") == "a, b, c, d, e, f, g, h, i, j and 2 more"
