"""The training data: rendered as the template renders, encoded as the tokenizer encodes, kept apart, repeatable."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from deltaserve.server.template import ChatTemplate
from training.chat import Conversation
from training.data import MAKERS, SHARES, Sampler, Source
from training.draw import Draw, Split, is_heldout
from training.encoder import Encoder

TINY = Path(__file__).parents[2] / "models" / "tiny"
TOKENIZER = TINY / "tokenizer.json"


def conversations(split: Split, count: int = 20) -> list[Conversation]:
    source = Source(Draw(split, 7), longest=300)
    return [source.conversation(skill) for skill in MAKERS for _ in range(count)]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(TOKENIZER)


def test_renders_as_the_template_does() -> None:
    template = ChatTemplate.from_directory(TINY)
    assert template is not None
    for made in conversations("train"):
        kwargs = {"enable_thinking": made.thinking, "preserve_thinking": made.preserve}
        tools = [json.loads(tool) for tool in made.tools]
        whole = template.render(made.messages(), tools, add_generation_prompt=False, kwargs=kwargs)
        assert "".join(text for text, _ in made.parts()) == whole
        assert made.prompt() == template.render(made.messages()[:-1], tools, kwargs=kwargs)
        assert whole == made.prompt() + made.expected() + "<|im_end|>\n"


def test_thinks_only_when_asked_to() -> None:
    template = ChatTemplate.from_directory(TINY)
    assert template is not None
    question = [{"role": "user", "content": "What is 1 + 1?"}]
    assert template.render(question).endswith("<think>\n\n</think>\n\n")
    assert template.render(question, kwargs={"enable_thinking": True}).endswith("assistant\n<think>\n")


def test_encodes_as_the_tokenizer_does(encoder: Encoder) -> None:
    texts = ["".join(text for text, _ in made.parts()) for made in conversations("train", 5)]
    texts += ["it's  two   blanks \n\n and\ttabs...\n<|im_end|>?<think>", "naïve café", " <tool_call>\n<x>", ""]
    for text in texts:
        assert encoder(text) == encoder.tokenizer.encode(text, add_special_tokens=False).ids


def test_parts_encode_as_their_whole(encoder: Encoder) -> None:
    for made in conversations("train", 5):
        parts = [encoder(text) for text, _ in made.parts()]
        assert list(itertools.chain(*parts)) == encoder("".join(text for text, _ in made.parts()))


def test_equal_arguments_give_equal_sequences() -> None:
    first = Sampler(TOKENIZER, "train", 5, 700).packed(3)
    again = Sampler(TOKENIZER, "train", 5, 700).packed(3)
    other = Sampler(TOKENIZER, "train", 6, 700).packed(3)
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_sequences_have_every_skill_in_its_share(encoder: Encoder) -> None:
    sampler = Sampler(TOKENIZER, "heldout", 1, 1000)
    ids, weights = sampler.packed(60)
    assert ids.shape == weights.shape == (60, 1001)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    assert ids.min() >= 0
    assert ids.max() < encoder.tokenizer.get_vocab_size()
    total = sum(sampler._taken.values())
    for skill, share in SHARES.items():
        assert sampler._taken[skill] / total == pytest.approx(share / sum(SHARES.values()), abs=0.05)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_words_to_recall_belong_to_one_split(split: Split) -> None:
    source = Source(Draw(split, 3), longest=300)
    for _ in range(50):
        answer = source.conversation("needle").turns[-1].text
        assert is_heldout(answer.removesuffix(".").rpartition(" is ")[2]) == (split == "heldout")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_operands_belong_to_one_split(split: Split) -> None:
    source = Source(Draw(split, 3), longest=300)
    for _ in range(50):
        a, _, b, *_ = source.conversation("sums").turns[-1].text.split()
        assert is_heldout(f"{a} {b}") == (split == "heldout")


def test_long_texts_fit_and_fill_the_room_they_get() -> None:
    sampler = Sampler(TOKENIZER, "train", 2, 4096)
    for room in (900, 4096):
        lengths = [len(sampler.document("needle", room)[0]) for _ in range(40)]
        assert np.mean([0.85 * room < length for length in lengths]) > 0.3
        assert np.mean([length <= room for length in lengths]) > 0.9
