"""How many drafts a row verifies and how many it proposes for the next one: pure functions and what they learn from.

A running request's last known token is computed next, and with it the drafts that its last row proposed:

    positions   start = num_known - 1 | num_known ... num_known + d - 1 | ... up to p - 1 more
    what        last known token      | d drafts to verify              | the draft head's own steps, p proposals

1. Nothing crosses a boundary inside a step: d <= 63 - (ring after the fold), and boundaries are absolute, so the ring
   after the fold holds start % 64 tokens.
2. What the request may still say bounds both: with `num_left` tokens to come the step gives at most num_left, so
   d <= num_left - 1, and no position at or after the request's end is ever written: d + p <= num_left - 1. So drafts
   never need a page that the request without drafts would not come to need.
3. A proposal that the next step cannot use, whatever it accepts, is not asked for.

How many are worth it (`choose_num_drafts`) depends on how often the request's drafts were accepted lately. Let q_i be
the chance that draft i is accepted once those before it were. k drafts give 1 + q_1 + q_1 q_2 + ... tokens for the
time of 1 + k * DRAFT_COST steps; the best k has the best quotient. No choice changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK

# One draft more costs this part of a decode step: a layer and the head to propose it, a row's experts to verify it.
DRAFT_COST = 0.15
# A request is thought to be of this kind until its own drafts say otherwise.
EXPECTED_ACCEPTANCE = 0.8
LEARNING_RATE = 0.1
# A position that is not tried drifts back to what is expected: a request whose drafts all failed tries one again after
# some dozen steps, and one whose drafts are worth it again is back at all of them after a dozen tries.
FORGETTING_RATE = 0.002


def num_to_verify(num_known: int, num_left: int, num_kept: int, num_spare: int) -> int:
    """How many of `num_kept` drafts the next row carries if `num_spare` tokens of budget are left for them."""
    num_ring = (num_known - 1) % BLOCK
    return max(0, min(num_kept, BLOCK - 1 - num_ring, num_left - 1, num_spare))


def num_to_propose(num_known: int, num_left: int, num_verified: int, num_wanted: int) -> int:
    """How many drafts to propose after a row that verifies `num_verified`: at most what the next row can use."""
    most = min(num_wanted, num_left - 1 - num_verified)
    if most <= 0:
        return 0
    # The more of this row is accepted, the less is left to say; but a boundary may be reached, and with it a new ring.
    num_ring = num_known % BLOCK
    num_usable = max(
        min(BLOCK - 1 - (num_ring + num_more) % BLOCK, num_left - 2 - num_more)
        for num_more in ((0, BLOCK - num_ring) if num_ring + num_verified >= BLOCK else (0,))
    )
    return max(0, min(most, num_usable))


def choose_num_drafts(acceptance: Sequence[float], draft_cost: float = DRAFT_COST) -> int:
    """The k in 0 .. len(acceptance) with the most tokens for the time; the smaller one of equals."""
    best, best_rate = 0, 1.0
    num_tokens = chance = 1.0
    for k, accepted in enumerate(acceptance, 1):
        chance *= accepted
        num_tokens += chance
        rate = num_tokens / (1 + k * draft_cost)
        if rate > best_rate:
            best, best_rate = k, rate
    return best


class Acceptance:
    """How often a request's drafts were accepted lately, by position and given that those before were."""

    def __init__(self, num_drafts: int) -> None:
        self.rates = [EXPECTED_ACCEPTANCE] * num_drafts

    def record(self, num_verified: int, num_accepted: int) -> None:
        for position in range(len(self.rates)):
            if position < min(num_accepted + 1, num_verified):
                self._move(position, float(position < num_accepted), LEARNING_RATE)
            else:
                self._move(position, EXPECTED_ACCEPTANCE, FORGETTING_RATE)

    def _move(self, position: int, target: float, rate: float) -> None:
        self.rates[position] += rate * (target - self.rates[position])


@dataclass(slots=True)
class DraftCounts:
    """Over the engine's life. Position 0 is a row's first draft; a row gives 1 + num_accepted / num_rows tokens."""

    num_rows: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, num_drafts: int) -> DraftCounts:
        return cls(verified_by_position=[0] * num_drafts, accepted_by_position=[0] * num_drafts)

    def record(self, num_verified: int, num_accepted: int) -> None:
        self.num_rows += 1
        self.num_verified += num_verified
        self.num_accepted += num_accepted
        for position in range(num_verified):
            self.verified_by_position[position] += 1
            self.accepted_by_position[position] += position < num_accepted


class Speculation:
    """The settings applied to requests, and what all of their drafts came to."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.counts = DraftCounts.of(config.num_drafts)

    def acceptance_for(self, request: Request) -> Acceptance | None:
        """What a request that takes a row learns from; None: it has no drafts."""
        if not self._config.num_drafts or not request.options.use_drafts:
            return None
        return Acceptance(self._config.num_drafts)

    def num_wanted(self, acceptance: Acceptance | None) -> int:
        if acceptance is None:
            return 0
        return choose_num_drafts(acceptance.rates) if self._config.is_adaptive else self._config.num_drafts

    def record(self, acceptance: Acceptance | None, num_verified: int, num_accepted: int) -> None:
        """A row came back. Rows without drafts count for the request, which learns that nothing was tried."""
        if acceptance is not None:
            acceptance.record(num_verified, num_accepted)
        if num_verified:
            self.counts.record(num_verified, num_accepted)
