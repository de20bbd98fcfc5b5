"""How much of the wall time long prompts may take from others, and how much of it one of their chunks may take at once.

A prompt of 250,000 tokens keeps a device busy for a minute. Without a limit everybody who decodes meanwhile gets one
token per chunk of it. So while others have rows in a step, long prompts pay for their chunks:

- Every step of others earns long prompts `share` of its time, and a chunk may start when, after it, they will have
  taken no more than they earned. So the share holds from the first step on, not only in the long run. Where a chunk
  took longer than foreseen, the debt is worked off first. Credit is worth one chunk and what one step earns at most:
  nobody saves for a burst.
- A step in which only long prompts can do anything costs them nothing, and their chunks fill the whole token budget.
- A chunk beside others is so small that it takes about as long as STALL_STEPS steps without it, as far as MIN_CHUNK
  allows. Beside decode rows these are decode steps; where short prompts fill the steps anyway, it may be larger.

The scheduler has no clock. It is told what each step took and divides it: the decode rows' part is what recent steps
of decode rows alone took, the rest belongs to prefill, by tokens. Estimates are medians of a few recent steps, so that
one step that compiled something does not count. Without times (None) nothing is limited.

Progress: a step of others takes time, so credit grows until the next chunk is paid, which costs finitely much.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from deltaserve.core.types import BLOCK

# A chunk takes about this many steps of the others: at a share of a half a stream then sees one gap of 5 steps and 3 of
# one, over and over, which a reader does not notice (60 ms at 12 ms a step). Fewer would cut chunks for nothing: each
# has a price of its own, on a mixture-of-experts model the reading of most experts.
STALL_STEPS = 4
# Reading all experts costs the 122B model 13 ms, as much as computing some 260 tokens; on a CPU the products reach
# their speed at about as many rows. With less than this the price of a chunk is mostly not its tokens.
MIN_CHUNK = 256
# What one chunk may leave to be worked off. A step that took a minute to compile is not paid for in full.
MAX_DEBT_S = 5.0
NUM_SAMPLES = 7


@dataclass(frozen=True, slots=True)
class StepMix:
    """What a step consisted of. `is_contended`: others had rows in it. `has_long`: a long prompt ran or waited."""

    num_decode_rows: int
    num_short_tokens: int
    num_long_tokens: int
    is_contended: bool
    has_long: bool

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_short_tokens + self.num_long_tokens


class LongPrefillShare:
    """The account of all long prompts together. `budget` is the most tokens of a step.

    `contended_s` and `long_s` count, over the engine's life, the time of steps that long prompts shared or waited for,
    and their part of it.
    """

    def __init__(self, share: float, min_tokens: int, budget: int) -> None:
        self._share = share
        self._min_tokens = min_tokens
        self._budget = budget
        self._decode_steps_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._tokens_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._others_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._tokens_are_long = False
        self._is_timed = True
        self._credit_s = 0.0
        self.contended_s = 0.0
        self.long_s = 0.0

    def is_long(self, num_left: int) -> bool:
        """Whether a prompt with `num_left` tokens to compute is held to the share."""
        return self._is_timed and self._share < 1 and num_left >= self._min_tokens

    def allowance(self, num_decode_rows: int) -> int:
        """Tokens that long prompts may compute in a step beside others; 0: not in this one."""
        if not self._is_timed:
            return self._budget
        num_tokens = self._chunk_tokens()
        earned_meanwhile_s = self._share * _typical(self._decode_steps_s) if num_decode_rows else 0.0
        return num_tokens if self._credit_s + earned_meanwhile_s >= self._price_s(num_tokens) else 0

    def record(self, mix: StepMix, elapsed_s: float | None) -> None:
        """A step came back after `elapsed_s` seconds; None: nobody looked at the clock."""
        self._is_timed = elapsed_s is not None
        if elapsed_s is None:
            self._credit_s = 0.0
            return
        prefill_s = self._prefill_part(mix, elapsed_s)
        self._learn(mix, elapsed_s, prefill_s)
        if mix.is_contended:
            long_s = prefill_s * mix.num_long_tokens / mix.num_prefill_tokens if mix.num_long_tokens else 0.0
            if mix.num_decode_rows or mix.num_short_tokens:
                self._others_s.append(elapsed_s - long_s)
            self.contended_s += elapsed_s if mix.has_long or mix.num_long_tokens else 0.0
            self.long_s += long_s
            self._settle(self._share * elapsed_s - long_s)
        if not mix.has_long:
            self._credit_s = min(self._credit_s, 0.0)

    def _chunk_tokens(self) -> int:
        """A multiple of BLOCK between MIN_CHUNK and half of the budget, so that short prompts find room beside it."""
        num_tokens, token_s = 0.0, _typical(self._tokens_s)
        if token_s > 0:
            num_tokens = min(STALL_STEPS * _typical(self._others_s) / token_s, self._budget / 2)
        return max(int(min(max(num_tokens, MIN_CHUNK), self._budget)) // BLOCK * BLOCK, BLOCK)

    def _price_s(self, num_tokens: int) -> float:
        """What has to be earned beside the chunk itself, which earns its own share."""
        return (1 - self._share) * num_tokens * _typical(self._tokens_s)

    def _prefill_part(self, mix: StepMix, elapsed_s: float) -> float:
        if not mix.num_prefill_tokens:
            return 0.0
        return max(elapsed_s - _typical(self._decode_steps_s), 0.0) if mix.num_decode_rows else elapsed_s

    def _learn(self, mix: StepMix, elapsed_s: float, prefill_s: float) -> None:
        """A token of a long prompt costs more than one of a short prompt, which serves as a first guess only."""
        if not mix.num_prefill_tokens:
            self._decode_steps_s.append(elapsed_s)
            return
        is_long = mix.num_long_tokens > 0
        if is_long and not self._tokens_are_long:
            self._tokens_s.clear()
            self._tokens_are_long = True
        if is_long or (not self._tokens_are_long and mix.num_prefill_tokens >= BLOCK):
            self._tokens_s.append(prefill_s / mix.num_prefill_tokens)

    def _settle(self, earned_s: float) -> None:
        most_s = self._price_s(self._chunk_tokens()) + self._share * _typical(self._others_s)
        self._credit_s = min(max(self._credit_s + earned_s, -MAX_DEBT_S), most_s)


def _typical(samples: deque[float]) -> float:
    return median(samples) if samples else 0.0
