"""Writes a checkpoint as the Hub holds them: config, generation config, BF16 weights under the released names.

A_log and the gated norm of GDN stay float32, as in released Qwen3.5 files; everything else is rounded to BF16. The
tokenizer's files are copied from where the data was made.

    python -m training.export STATE TOKENIZER_DIRECTORY OUT_DIRECTORY

STATE is a folder of weights-*.safetensors parts that `training.train` left.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.shape import Shape, config_dict, parse_shape, weight_sizes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
FLOAT32_ENDS = ("A_log", "linear_attn.norm.weight")
PART_BYTES = 15 * 2**20


def write_parts(weights: dict[str, Tensor], directory: Path) -> None:
    """float32 weights in files of at most 15 MiB, whole tensors in each; enough to go on or to export from."""
    directory.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    room = PART_BYTES
    for name, weight in weights.items():
        if weight.nbytes > room and parts[-1]:
            parts.append({})
            room = PART_BYTES
        parts[-1][name] = weight.detach().float().cpu().contiguous()
        room -= weight.nbytes
    for number, part in enumerate(parts):
        save_file(part, directory / f"weights-{number}.safetensors")


def read_parts(directory: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(directory.glob("weights-*.safetensors")):
        weights |= load_file(file)
    return weights


def export(weights: dict[str, Tensor], shape: Shape, tokenizer_directory: Path, directory: Path) -> None:
    """The whole checkpoint. Refuses weights that are not those of the shape."""
    sizes = weight_sizes(shape)
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = sorted(name for name in sizes.keys() | found.keys() if sizes.get(name) != found.get(name))
    if wrong:
        raise ValueError(f"weights do not fit the shape: {wrong[:4]}; export with the shape they were trained in")
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_directory / name, directory / name)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end_of_text, end_of_turn = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)
    generation = {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.9,
    }
    for name, content in (("config.json", config_dict(shape, end_of_text)), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
    stored = {name: weights[name].to(stored_dtype(name)).contiguous() for name in sizes}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def stored_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(FLOAT32_ENDS) else torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="", help="sizes that differ from the default: hidden=64,layers=4")
    arguments = parser.parse_args()
    export(read_parts(arguments.state), parse_shape(arguments.shape), arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
