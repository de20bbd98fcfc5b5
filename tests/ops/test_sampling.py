"""Sampling against a plain implementation: whole-vocabulary sorts, Python integers for the hash, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
import torch
from torch import Tensor

from deltaserve.ops import sampling
from deltaserve.ops.sampling import noise, order

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
# One setting of each kind of path, and combinations: temperature, top_k, top_p, min_p.
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.9, 0, 0.8, 0.02),
    (1.0, 20, 0.95, 0.0),
    (2.0, 5, 1.0, 0.1),
    (1.0, 64, 0.5, 0.0),
    (1.0, 65, 0.9, 0.01),
    (0.01, 300, 0.99, 0.0),
    (5.0, 1, 1.0, 0.0),
]


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_noise(seed: int, position: int, token_id: int) -> float:
    key = mix((mix(seed) + (position + 1) * GOLDEN) & MASK)
    bits = mix((key + (token_id + 1) * GOLDEN) & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def plain_kept(logits: npt.NDArray[np.float32], setting: tuple[float, int, float, float]) -> dict[int, float]:
    """Scaled logit of each token that survives the rules."""
    temperature, top_k, top_p, min_p = setting
    z = logits.astype(np.float64) / temperature
    ranked = sorted(range(len(z)), key=lambda token_id: (-logits[token_id], token_id))
    weights = np.exp(z - z.max())
    ranked = [token_id for token_id in ranked if weights[token_id] >= min_p * weights.max()]
    ranked = ranked[:top_k] if top_k else ranked
    total, held, kept = sum(weights[token_id] for token_id in ranked), 0.0, {}
    for token_id in ranked:
        if kept and held >= top_p * total and top_p < 1:
            break
        kept[token_id] = z[token_id]
        held += weights[token_id]
    return kept


def plain_sample(
    logits: npt.NDArray[np.float32], setting: tuple[float, int, float, float], seed: int, position: int
) -> int:
    kept = plain_kept(logits, setting)
    return max(kept, key=lambda token_id: kept[token_id] + plain_noise(seed, position, token_id))


def make_rules(
    settings: list[tuple[float, int, float, float]], seeds: list[int], positions: list[int]
) -> sampling.Rules:
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*settings, strict=True))
    keys = sampling.stream_keys(sampling.seed_keys(np.array(seeds, np.uint64)), np.array(positions))
    return sampling.Rules(temperature.astype(np.float64), top_k, top_p.astype(np.float64), min_p, keys)


def random_logits(num_rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def test_noise_is_the_published_splitmix64_sequence() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as its users publish them."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = [-math.log(-math.log(((bits >> 12) + 0.5) / 2**52)) for bits in outputs]
    found = noise.gumbel(np.array([1234567], np.uint64), np.arange(4))
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions, ids = [0, 1, MASK, 7 << 40], [0, 1, 63, 262143], np.array([0, 1, 248319])
    keys = sampling.stream_keys(sampling.seed_keys(np.array(seeds, np.uint64)), np.array(positions))
    expected = [[plain_noise(s, p, int(t)) for t in ids] for s, p in zip(seeds, positions, strict=True)]
    np.testing.assert_allclose(noise.gumbel(keys[:, None], ids), expected, rtol=1e-13)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_noise_is_gumbel_along_every_axis(axis: str) -> None:
    """Kolmogorov-Smirnov over 20,000 neighbours, and no correlation from one to the next."""
    run, still = np.arange(20_000), np.zeros(20_000, np.int64)
    seeds = (run if axis == "seed" else still).astype(np.uint64)
    keys = sampling.stream_keys(sampling.seed_keys(seeds), run if axis == "position" else still)
    found = noise.gumbel(keys, run if axis == "token" else still)
    assert scipy.stats.kstest(found, "gumbel_r").pvalue > 1e-3
    ranks = scipy.stats.gumbel_r.cdf(found)
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 4 / math.sqrt(len(run))


@pytest.mark.parametrize("vocab", [1, 2, 17, 515, 4096, 33_001])
@pytest.mark.parametrize("k", [1, 2, 20, 64, 400])
def test_top_is_the_order_by_logit_then_id(vocab: int, k: int) -> None:
    """Values rounded to quarters, so that most of the first tokens have equals, at the k-th place too."""
    k = min(k, vocab)
    for scale in (4, 1e6):
        logits = (random_logits(9, vocab) * scale).round() / scale
        logits[1] = 0.0
        logits[2, : vocab // 2] = -0.0
        logits[3, -2:] = 50.0
        ids, values = order.top(logits, k)
        for row in range(len(logits)):
            expected = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:k]
            np.testing.assert_array_equal(ids[row], expected)
            np.testing.assert_array_equal(values[row], logits[row].numpy()[expected])


@pytest.mark.parametrize("vocab", [1, 3, 50, 515, 4096, 33_001])
@pytest.mark.parametrize("is_tied", [False, True])
def test_tokens_equal_a_plain_implementation(vocab: int, is_tied: bool) -> None:
    repeats = 3 if vocab < 4000 else 1
    settings = SETTINGS * repeats
    logits = random_logits(len(settings), vocab, seed=vocab)
    if is_tied:
        logits = (logits * 2).round() / 2
    seeds, positions = list(range(len(settings))), [row * 37 for row in range(len(settings))]
    before = logits.clone()
    ids, peaks = sampling.sample(logits, make_rules(settings, seeds, positions))
    expected = [
        plain_sample(logits[row].numpy(), setting, seeds[row], positions[row]) for row, setting in enumerate(settings)
    ]
    assert ids.tolist() == expected
    np.testing.assert_array_equal(peaks, logits.max(dim=1).values)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_have_the_law_of_the_filtered_softmax(setting: tuple[float, int, float, float]) -> None:
    """Chi-square over 20,000 positions of one seed and a vocabulary of 12; removed tokens never appear.

    A sound sampler fails one of all the settings with probability 1e-3, hence the division by their number.
    """
    num_draws = 20_000
    logits = random_logits(1, 12, seed=5, scale=1.5)
    kept = plain_kept(logits[0].numpy(), setting)
    weights = {token_id: math.exp(z - max(kept.values())) for token_id, z in kept.items()}
    rules = make_rules([setting] * num_draws, [99] * num_draws, list(range(num_draws)))
    counts = np.bincount(sampling.sample(logits.expand(num_draws, -1).contiguous(), rules)[0], minlength=12)
    assert set(np.flatnonzero(counts)) <= kept.keys()
    expected = {token_id: num_draws * weight / sum(weights.values()) for token_id, weight in weights.items()}
    common = [token_id for token_id, count in expected.items() if count >= 5]
    rare = [token_id for token_id in expected if token_id not in common]
    if len(common) < 2:
        assert counts[common].sum() >= num_draws - 30
        return
    observed = [*counts[common], counts[rare].sum()]
    wanted = [*(expected[token_id] for token_id in common), sum(expected[token_id] for token_id in rare)]
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    wanted = [count * sum(observed) / sum(wanted) for count in wanted]
    assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-3 / len(SETTINGS)


@pytest.mark.parametrize("vocab", [515, 40_000])
def test_a_row_does_not_depend_on_its_neighbours(vocab: int) -> None:
    settings = SETTINGS * 3
    logits = random_logits(len(settings), vocab, seed=3)
    seeds, positions = list(range(100, 100 + len(settings))), [row % 4 for row in range(len(settings))]
    together = sampling.sample(logits, make_rules(settings, seeds, positions))[0]
    for num_rows in (1, 2, 7):
        order_of_rows = np.random.default_rng(num_rows).permutation(len(settings))
        for part in np.array_split(order_of_rows, len(settings) // num_rows):
            rules = make_rules(*([column[row] for row in part] for column in (settings, seeds, positions)))
            np.testing.assert_array_equal(sampling.sample(logits[part], rules)[0], together[part])


def test_each_rule_narrows_the_choice_as_it_should() -> None:
    """Over many positions of a flat row of four likely tokens and 60 others."""
    logits = torch.cat((torch.tensor([3.0, 2.9, 2.8, 2.7]), torch.zeros(60))).expand(2000, -1).contiguous()

    def chosen(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
        rules = make_rules([(temperature, top_k, top_p, min_p)] * 2000, [4] * 2000, list(range(2000)))
        return set(sampling.sample(logits, rules)[0].tolist())

    assert len(chosen()) > 50
    assert chosen(top_k=3) == {0, 1, 2}
    assert chosen(min_p=0.5) == {0, 1, 2, 3}
    assert chosen(min_p=1.0) == {0}
    assert chosen(top_p=0.3) == {0, 1, 2}
    assert chosen(top_p=1e-9) == {0}
    assert chosen(temperature=0.001) == {0}
    assert len(chosen(temperature=50.0, top_k=64)) == 64
    assert chosen(min_p=0.5, top_k=10, top_p=0.4) == {0, 1}


def test_top_p_counts_the_mass_of_tokens_too_light_to_be_kept() -> None:
    """Weights 0.5, 0.26, 0.15 and a tail of 0.09: the third begins at 0.76, below 0.8 of all but not of the heavy."""
    weights = torch.cat((torch.tensor([0.5, 0.26, 0.15]), torch.full((1997,), 0.09 / 1997)))
    logits = weights.log().expand(400, -1).contiguous()
    rules = make_rules([(1.0, 0, 0.8, 0.0)] * 400, [6] * 400, list(range(400)))
    assert set(sampling.sample(logits, rules)[0].tolist()) == {0, 1, 2}


def test_top_k_of_the_vocabulary_or_more_is_off() -> None:
    logits = random_logits(40, 100)
    off = sampling.sample(logits, make_rules([(1.0, 0, 1.0, 0.0)] * 40, [1] * 40, list(range(40))))[0]
    for top_k in (100, 101, 2**31 - 1, -1):
        rules = make_rules([(1.0, top_k, 1.0, 0.0)] * 40, [1] * 40, list(range(40)))
        np.testing.assert_array_equal(sampling.sample(logits, rules)[0], off)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(3, 4097)
    logits[0, [4000, 17, 300]] = 2.5
    logits[1] = -1.0
    logits[2, [4096, 4095]] = 1.0
    ids, peaks = sampling.greedy(logits)
    assert ids.tolist() == [17, 0, 4095]
    assert peaks.tolist() == [2.5, -1.0, 1.0]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocab", [515, 40_000])
def test_a_row_that_is_not_finite_shows_in_its_peak_and_nowhere_else(
    setting: tuple[float, int, float, float], vocab: int
) -> None:
    logits = random_logits(6, vocab)
    rules = make_rules([setting] * 6, list(range(6)), [5] * 6)
    healthy = sampling.sample(logits, rules)[0]
    logits[0, vocab - 1] = math.nan
    logits[1, 3] = -math.nan
    logits[2, 200] = math.inf
    logits[3] = -math.inf
    ids, peaks = sampling.sample(logits, rules)
    assert np.isfinite(peaks).tolist() == [False] * 4 + [True] * 2
    assert ids[4:].tolist() == healthy[4:].tolist()
    assert np.isfinite(sampling.greedy(logits)[1]).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("setting", SETTINGS)
def test_forbidden_tokens_are_never_drawn(setting: tuple[float, int, float, float]) -> None:
    logits = random_logits(200, 700)
    logits[:, 3:] = -math.inf
    ids, peaks = sampling.sample(logits, make_rules([setting] * 200, [8] * 200, list(range(200))))
    assert set(ids.tolist()) <= {0, 1, 2}
    assert np.isfinite(peaks).all()


@pytest.mark.parametrize("vocab", [1, 515, 40_000])
def test_logprobs_equal_torch(vocab: int) -> None:
    logits = random_logits(5, vocab)
    logits[3, vocab // 2] = -math.inf
    token_ids = np.array([0, vocab - 1, vocab // 3, vocab - 1, 0])
    expected = torch.log_softmax(logits.double(), dim=-1)
    found = sampling.logprobs(logits, token_ids, 20)
    np.testing.assert_allclose(found.chosen_N, expected.numpy()[np.arange(5), token_ids], atol=2e-6)
    ranked = expected.numpy().argsort(axis=1)[:, ::-1]
    assert found.rank_N.tolist() == [int(np.flatnonzero(ranked[n] == token_ids[n])[0]) + 1 for n in range(5)]
    np.testing.assert_array_equal(found.top_ids_NM, ranked[:, : min(20, vocab)])
    np.testing.assert_allclose(found.top_NM, np.take_along_axis(expected.numpy(), found.top_ids_NM, 1), atol=2e-6)
    assert sampling.logprobs(logits, token_ids, 0).top_ids_NM.shape == (5, 0)
