"""Choosing tokens. See `reference` for the rules and their order; on a GPU the same rules run there (`triton`)."""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.dispatch import choose
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.sampling import reference
from deltaserve.ops.sampling.noise import seed_keys, stream_keys
from deltaserve.ops.sampling.reference import Ids, Logprobs, Peaks, Rules, logprobs

__all__ = ["Logprobs", "Rules", "greedy", "greedy_ids", "logprobs", "sample", "seed_keys", "stream_keys"]

IMPLEMENTATIONS = {"reference": reference, "triton": Lazy("deltaserve.ops.sampling.triton")}


def greedy(logits_NV: Tensor, force: str | None = None) -> tuple[Ids, Peaks]:
    """Ids [N] of the highest logit (ties: lowest id; NaN counts as highest) and that logit [N]. float32 logits."""
    found: tuple[Ids, Peaks] = choose(IMPLEMENTATIONS, logits_NV, force).greedy(logits_NV)
    return found


def greedy_ids(logits_NV: Tensor, force: str | None = None) -> Tensor:
    """The ids of `greedy`, int64 [N] on the logits' device: nothing waits for them."""
    ids_N: Tensor = choose(IMPLEMENTATIONS, logits_NV, force).greedy_ids(logits_NV)
    return ids_N


def sample(logits_NV: Tensor, rules: Rules, force: str | None = None) -> tuple[Ids, Peaks]:
    """Ids [N] drawn under the rules, and the highest logit [N] of each row. float32 logits, not changed.

    On a GPU a row of temperature 0 is greedy.
    """
    found: tuple[Ids, Peaks] = choose(IMPLEMENTATIONS, logits_NV, force).sample(logits_NV, rules)
    return found
