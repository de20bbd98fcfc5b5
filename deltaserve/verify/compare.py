"""One answer, at two levels: what may differ between two answers to the same question.

| level | for               | a split (the first differing token) is                                               |
| ----- | ----------------- | ------------------------------------------------------------------------------------ |
| exact | CPU, float32      | a failure                                                                            |
| near  | GPU, narrow types | allowed if the other token was the reference's second choice, less than `gap` behind |

At the near level splits may also be no more frequent than between two cold runs in different batches (the control).
The gap is fixed before anything is measured. "No more frequent" is Fisher's exact test, one-sided, at 5 %: with equal
true rates a plain comparison of counts would fail every second run.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from deltaserve.verify.ask import Answer, Top

GAPS = {"bfloat16": 0.5, "fp8": 1.0}
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class Level:
    """`gap` None is the exact level; else the largest top-2 gap, in natural-log units, at which a split is a tie."""

    gap: float | None = None

    @property
    def is_exact(self) -> bool:
        return self.gap is None

    def __str__(self) -> str:
        return "exact" if self.gap is None else f"near (top-2 gap under {self.gap:g})"


EXACT = Level()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`position` of the split, None where the answers agree; `gap` between the reference's first and second choice."""

    passed: bool
    position: int | None = None
    gap: float | None = None
    detail: str = ""

    @property
    def is_split(self) -> bool:
        return self.position is not None


def compare(reference: Answer, answer: Answer, level: Level) -> Verdict:
    """Whether `answer` is the reference's, as far as the level asks."""
    for name, one in (("the reference", reference), ("the answer", answer)):
        if one.error is not None:
            return Verdict(False, detail=f"{name} failed: {one.error}")
    position = _split(reference.token_ids, answer.token_ids)
    if position is not None:
        return _judge_split(reference, answer, position, level)
    if reference.finish_reason != answer.finish_reason:
        sentence = f"equal tokens, but one ended by {reference.finish_reason!r} and one by {answer.finish_reason!r}"
        return Verdict(False, detail=sentence)
    return Verdict(True)


def largest_difference(reference: Answer, answer: Answer) -> float:
    """Between logprobs of the likeliest token, up to the first split."""
    position = _split(reference.token_ids, answer.token_ids)
    pairs = list(zip(reference.tops, answer.tops, strict=False))[:position]
    return max((abs(one[0][1] - other[0][1]) for one, other in pairs if one and other), default=0.0)


def is_more_frequent(splits: int, count: int, control_splits: int, control_count: int) -> bool:
    """Whether `splits` of `count` are significantly more than the control's, by Fisher's exact test."""
    total, drawn = count + control_count, splits + control_splits
    ways = comb(total, drawn)
    tail = sum(comb(count, k) * comb(control_count, drawn - k) for k in range(splits, min(count, drawn) + 1))
    return splits > 0 and tail / ways < SIGNIFICANT


def _split(one: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    """The first position at which they differ; the end of the shorter one counts as a difference."""
    differing = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, None if len(one) == len(other) else min(len(one), len(other)))


def _judge_split(reference: Answer, answer: Answer, position: int, level: Level) -> Verdict:
    top = reference.tops[position] if position < len(reference.tops) else ()
    gap = top[0][1] - top[1][1] if len(top) > 1 else None
    said, other = _at(reference.token_ids, position), _at(answer.token_ids, position)
    gap_text = "unknown" if gap is None else f"{gap:.4f}"
    detail = f"token {position} is {other} instead of {said}; top-2 gap {gap_text}"
    if level.gap is None:
        return Verdict(False, position, gap, detail)
    if not _is_second_choice(top, said, other):
        return Verdict(False, position, gap, f"{detail}; {other} is not the reference's second choice")
    is_tie = gap is not None and gap < level.gap
    return Verdict(is_tie, position, gap, f"{detail}; a tie" if is_tie else f"{detail}; no tie")


def _is_second_choice(top: Top, said: int | None, other: int | None) -> bool:
    return {said, other} == {token_id for token_id, _ in top[:2]}


def _at(token_ids: tuple[int, ...], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None
