"""A model without a model: random logits with a liking for what ends strings, numbers and lists."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.grammar.compiler import Matcher

LIMIT = 400
ENDS = ('"', "}", "]", ",", '"}', "null")


def sample(matcher: Matcher, tokenizer: Tokenizer, seed: int) -> str:
    """An answer drawn by Gumbel noise at temperature 1 until it ends; it must within LIMIT tokens."""
    generator = np.random.default_rng(seed)
    liked = [tokenizer.encode(text)[0] for text in ENDS]
    token_ids: list[int] = []
    for _ in range(LIMIT):
        mask_V = matcher.mask()
        logits_V = generator.gumbel(size=len(mask_V))
        logits_V[liked] += 6
        logits_V[list(matcher.eos_ids)] += 6
        logits_V[~mask_V] = -np.inf
        token_id = int(logits_V.argmax())
        assert mask_V[token_id]
        if token_id in matcher.eos_ids:
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        assert matcher.accept(token_id)
        token_ids.append(token_id)
    raise AssertionError(f"no end: {tokenizer.decode(token_ids)}")


def spell(matcher: Matcher, tokenizer: Tokenizer, text: str, seed: int = 0) -> bool:
    """Whether the grammar takes `text` as a whole, by some tokens that its masks allow."""
    rng, rest = random.Random(seed), text.encode()
    while rest:
        allowed = [int(i) for i in np.flatnonzero(matcher.mask()) if int(i) not in matcher.eos_ids]
        fitting = [i for i in allowed if rest.startswith(tokenizer.token_bytes(i))]
        if not fitting:
            return False
        token_id = rng.choice(fitting)
        assert matcher.accept(token_id)
        rest = rest[len(tokenizer.token_bytes(token_id)) :]
    return bool(matcher.mask()[list(matcher.eos_ids)].all())


@contextmanager
def unchanged(matcher: Matcher) -> Iterator[None]:
    """What happens inside leaves the next mask as it was."""
    before = matcher.mask()
    yield
    assert np.array_equal(matcher.mask(), before)
