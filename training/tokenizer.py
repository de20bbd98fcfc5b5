"""The tokenizer of `models/tiny`.

    python -m training.tokenizer models/tiny      # trains it on a sample of every skill and writes its files

The rules, the added tokens and the file layout are those of the sample checkpoints (`deltaserve.model`): byte-level
BPE, digits one by one, the family's 33 added tokens at the end. Only the text that teaches the merges differs. The
same generators give the same file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from deltaserve.model.sample_tokenizer import ADDED_TOKENS, PLAIN_TOKENS, train_tokenizer, write_tokenizer
from training.data import tokenizer_text

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
# Rows of the embedding; the last ones belong to no token, as in released checkpoints.
NUM_ROWS = 4096
NUM_TOKENS = 4072
MAX_MODEL_LEN = 16384


def train() -> Tokenizer:
    """Of `NUM_TOKENS` ids, from a fixed sample of the training text."""
    sample = train_tokenizer(len(ADDED_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = sample.normalizer, sample.pre_tokenizer
    tokenizer.decoder = sample.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_text(), trainer)
    added = [AddedToken(text, special=text not in PLAIN_TOKENS, normalized=False) for text in ADDED_TOKENS]
    tokenizer.add_tokens(added)
    return tokenizer


def write(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(train(), directory, MAX_MODEL_LEN)
    (directory / TEMPLATE.name).write_text(TEMPLATE.read_text("utf-8"), "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
