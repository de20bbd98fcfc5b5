"""The tokenizer of sample checkpoints: byte-level BPE with the family's rules, trained on a text beside this file.

It has what the released tokenizers have, at a fraction of the size: NFC, the family's pre-tokeniser, 33 added tokens
at the end of the vocabulary in the released order, and the flags that decide what `skip_special_tokens` hides. The
same text and size give the same file.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

DATA = Path(__file__).parent / "sample_data"

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# In the order of the released vocabularies. Plain ones are kept by `skip_special_tokens`: parsers need their text.
PLAIN_TOKENS = frozenset(
    ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    + ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
)
ADDED_TOKENS = (
    END_OF_TEXT, "<|im_start|>", END_OF_TURN,
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>",
    "<|audio_pad|>",
)  # fmt: skip

# Words are runs of letters and combining marks, digits stand alone.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(num_tokens: int) -> Tokenizer:
    """A tokenizer of at most `num_tokens` ids (fewer where the text has no more merges), added tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(DATA / "corpus.txt").read_text("utf-8")], trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=text not in PLAIN_TOKENS, normalized=False) for text in ADDED_TOKENS]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_model_len: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as the Hub holds them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text((DATA / "chat_template.jinja").read_text("utf-8"), "utf-8")
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": max_model_len,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "Qwen3_5Tokenizer",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
