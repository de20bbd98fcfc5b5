"""The draft head against `transformers`, and the hiddens it is given on every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.core.errors import ConfigError
from deltaserve.core.types import BLOCK
from deltaserve.model.qwen3_5 import Qwen3_5
from tests.model import tiny
from tests.model.pairs import MAX_ERROR, driver, load
from tests.model.steps import Driver, Sequence

LENGTH = 132


@pytest.fixture(scope="module", params=["dense", "moe", "next"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3_5, Tensor]:
    """Our model with a draft head, and the oracle's draft hidden at positions 1, 2, ... of `ids()`."""
    directory = tmp_path_factory.mktemp("mtp")
    tiny.save(tiny.hf_model(request.param), directory, mtp=True)
    return load(directory), tiny.hf_draft_hidden(directory, ids())


def ids() -> list[int]:
    return tiny.random_ids(LENGTH, seed=7)


def run_all(run: Driver, sequence: Sequence, chunks: tuple[int, ...]) -> Tensor:
    """Draft hidden of every position from the sequence's own length on: the chunks, then token by token."""
    known, drafts = ids(), []
    for chunk in chunks:
        run.step(prefill=[(sequence, known[sequence.length :][:chunk])])
        drafts += run.draft()
    for token in known[sequence.length :]:
        run.step(extend=[(sequence, [token])])
        drafts += run.draft()
    return torch.cat(drafts)


@pytest.mark.parametrize("chunks", [(LENGTH,), (64, 64, 4), (1,), (64,)])
def test_every_path_gives_the_oracles_drafts(drafter: tuple[Qwen3_5, Tensor], chunks: tuple[int, ...]) -> None:
    model, expected = drafter
    run = driver(model)
    drafts = run_all(run, run.open(), chunks)
    assert drafts.isfinite().all()
    assert (drafts[1:] - expected).abs().max() <= MAX_ERROR


def test_resumed_rows_draft_alike(drafter: tuple[Qwen3_5, Tensor]) -> None:
    """From a snapshot made by a cut and one made by a fold: its last hidden is there too."""
    model, expected = drafter
    run = driver(model)
    sequence = run.open()
    run_all(run, sequence, (100,))
    assert sorted(sequence.snapshots) == [64, 128]
    for boundary in (64, 128):
        drafts = run_all(run, run.resume(sequence, boundary), (LENGTH,))
        assert (drafts - expected[boundary - 1 :]).abs().max() <= MAX_ERROR


def test_rejected_drafts_leave_no_hidden(drafter: tuple[Qwen3_5, Tensor]) -> None:
    """Verify rows of two right tokens and two wrong ones beside a row of one token; then the row goes back by two."""
    model, expected = drafter
    known = ids()
    run = driver(model, drafts=3)
    sequence, other = run.open(), run.open()
    run.step(prefill=[(sequence, known[:61]), (other, known[:70])])
    drafts = [run.draft()[0]]
    while sequence.length < LENGTH:
        right = known[sequence.length :][: min(2, BLOCK - sequence.num_ring % BLOCK)]
        wrong = [(token + 1) % 490 for token in right][: BLOCK - sequence.num_ring % BLOCK - len(right)]
        hidden = run.step(extend=[(sequence, right + wrong), (other, [5])], width=4)[0]
        sequence.length -= len(wrong)
        run.keep(sequence, hidden[len(right) - 1])
        drafts.append(run.draft()[0][: len(right)])
    assert (torch.cat(drafts)[1:] - expected).abs().max() <= MAX_ERROR


def test_position_0_is_not_attended(drafter: tuple[Qwen3_5, Tensor]) -> None:
    """Another token at position 0, under the same hiddens, changes no later draft."""
    model, _ = drafter
    run = driver(model)
    run.step(prefill=[(run.open(), ids()[:70])])
    (drafts,) = run.draft()
    run.inputs.token_ids_T[0] += 1
    (changed,) = run.draft()
    assert not torch.equal(changed[0], drafts[0])
    assert torch.equal(changed[1:], drafts[1:])


def test_tokens_that_guess_nothing_store_the_same_keys(drafter: tuple[Qwen3_5, Tensor]) -> None:
    """Without attention and FFN, and without writing anything but the draft layer."""
    model, _ = drafter
    run, other = driver(model), driver(model)
    for each in (run, other):
        each.step(prefill=[(each.open(), ids()[:70])])
    run.draft()
    other.store()
    found, expected = (caches.pages.nan_to_num(nan=-1.0) for caches in (other.caches, run.caches))
    assert torch.equal(found, expected)
    assert (found[1, -1] != -1).all()


def test_a_checkpoint_without_a_head_says_so(tmp_path: Path) -> None:
    tiny.save(tiny.hf_model("next"), tmp_path)
    model = load(tmp_path)
    run = driver(model)
    run.step(prefill=[(run.open(), [1, 2, 3])])
    with pytest.raises(ConfigError, match="no draft head"):
        run.draft()
