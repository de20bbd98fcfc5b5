"""What the feed gives depends on seed, number of workers and contexts alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.data import SHARES
from training.feed import Batch, Feed

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer.json"
NUM_TOKENS = 8192


def batches(seed: int, count: int = 4) -> list[Batch]:
    shares = dict.fromkeys(SHARES, 0.001) | {"sums": 1.0}
    feed = Feed(TOKENIZER, seed, 2, NUM_TOKENS, shares, ahead=1)
    try:
        return [feed.next(lambda index: 4096 if index == 2 else 2048, index) for index in range(count)]
    finally:
        feed.close()


def test_equal_seeds_feed_equal_batches_in_order() -> None:
    one, same, other = batches(1), batches(1), batches(2)
    sizes = [ids.shape for ids, _, _ in one]
    assert sizes == [(4, 2049), (4, 2049), (2, 4097), (4, 2049)]
    for batch, again in zip(one, same, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(batch, again, strict=True))
    assert not np.array_equal(one[0][0], other[0][0])
    assert not np.array_equal(one[0][0], one[1][0])
    skills = np.concatenate([skills.ravel() for _, _, skills in one])
    assert (skills == list(SHARES).index("sums")).mean() > 0.4
