"""Which boundaries of a request get a snapshot, and when a written one may be believed. Pure functions.

A snapshot weighs as much as thousands of tokens of KV, so it is kept only where a later prompt is likely to leave this
one's path or to continue it. Chosen from token ids before prefill, at most MAX_WANTED a request:

| kind      | where                                              | who comes back to it                               |
| --------- | -------------------------------------------------- | -------------------------------------------------- |
| PROMPT    | the prompt's last boundary                         | the same prompt again                              |
| USER      | ends of the last two real user messages            | the next prompt: its template dropped the thinking |
|           |                                                    | of the tool loop behind them                       |
| SYSTEM    | end of the system message, which holds the tools   | every conversation of that application             |
| TURN      | ends of the last answers in the prompt; at finish, | the next turn                                      |
|           | the last boundary of the accepted output           |                                                    |
| BRANCH    | where this prompt leaves a path already known      | the third prompt that shares that much             |
| PERIODIC  | every so many tokens, off by default               | whoever edits something in the middle              |
| PREEMPTED | not chosen: where a request had to give way        | that request                                       |

"End" of a message is just behind its `<|im_end|>` and the newline after it, rounded down to a multiple of 64. The table
is in order of precedence. Nothing else than ids is looked at, so that text, chat and raw ids are treated alike.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deltaserve.core.chat import ChatMarkers
from deltaserve.core.types import BLOCK

MAX_WANTED = 8
NUM_USER_MESSAGES = 2


class BoundaryKind(enum.IntEnum):
    """In order of precedence, but for the last."""

    PROMPT = 0
    USER = 1
    SYSTEM = 2
    TURN = 3
    BRANCH = 4
    PERIODIC = 5
    PREEMPTED = 6


# Of several kinds at one position the first here names it: the one that most others come back to.
_NAMING = (
    BoundaryKind.SYSTEM,
    BoundaryKind.USER,
    BoundaryKind.TURN,
    BoundaryKind.BRANCH,
    BoundaryKind.PROMPT,
    BoundaryKind.PERIODIC,
)


@dataclass(frozen=True, slots=True, order=True)
class Wanted:
    """A boundary whose state is to be kept: `position` is a multiple of BLOCK."""

    position: int
    kind: BoundaryKind


def choose(
    token_ids: Sequence[int],
    markers: ChatMarkers | None,
    retained_turns: int = 3,
    interval: int = 0,
    branch_at: int = 0,
) -> tuple[Wanted, ...]:
    """The wanted boundaries in (0, len(token_ids) - 1], ascending, at most MAX_WANTED.

    `branch_at`: how far the path was known (0: nowhere). `interval`: tokens between periodic ones (0: none).
    """
    last = (len(token_ids) - 1) // BLOCK * BLOCK
    kinds_at: dict[int, list[BoundaryKind]] = {}

    def want(kind: BoundaryKind, ends: Sequence[int]) -> None:
        for end in ends:
            position = end // BLOCK * BLOCK
            if 0 < position <= last and (position in kinds_at or len(kinds_at) < MAX_WANTED):
                kinds_at.setdefault(position, []).append(kind)

    want(BoundaryKind.PROMPT, (last,))
    if markers is not None:
        ends = _message_ends(token_ids, markers)
        want(BoundaryKind.USER, ends.user[: -NUM_USER_MESSAGES - 1 : -1])
        want(BoundaryKind.SYSTEM, ends.system)
        want(BoundaryKind.TURN, ends.assistant[: -retained_turns - 1 : -1])
    want(BoundaryKind.BRANCH, (branch_at,))
    if interval:
        want(BoundaryKind.PERIODIC, _periodic(last, interval, MAX_WANTED - len(kinds_at)))
    return tuple(Wanted(position, min(kinds, key=_NAMING.index)) for position, kinds in sorted(kinds_at.items()))


@dataclass(frozen=True, slots=True)
class _Ends:
    """Just behind the messages of each kind, ascending. Answers of tools are in none of them."""

    system: list[int]
    user: list[int]
    assistant: list[int]


def _message_ends(token_ids: Sequence[int], markers: ChatMarkers) -> _Ends:
    """One pass over the messages. One that is not closed, the pre-opened answer for one, has no end."""
    ends = _Ends([], [], [])
    for number, (start, end) in enumerate(_messages(token_ids, markers)):
        if _reads(token_ids, start, markers.user):
            body = start + len(markers.user)
            if _reads(token_ids, body, markers.newline):
                body += len(markers.newline)
            if not _reads(token_ids, body, markers.tool_response):
                ends.user.append(end)
        elif _reads(token_ids, start, markers.assistant):
            ends.assistant.append(end)
        elif _reads(token_ids, start, markers.system) and number == 0:
            ends.system.append(end)
    return ends


def _messages(token_ids: Sequence[int], markers: ChatMarkers) -> Iterator[tuple[int, int]]:
    """For each closed message, where its role starts and the position behind it and its newline."""
    position = 0
    while True:
        try:
            start = token_ids.index(markers.im_start, position) + 1
            end = token_ids.index(markers.im_end, start) + 1
        except ValueError:
            return
        if _reads(token_ids, end, markers.newline):
            end += len(markers.newline)
        yield start, end
        position = end


def _reads(token_ids: Sequence[int], position: int, expected: tuple[int, ...]) -> bool:
    return bool(expected) and tuple(token_ids[position : position + len(expected)]) == expected


def _periodic(last: int, interval: int, room: int) -> range:
    """Multiples of `interval`, or of twice, four times ... as much, no more than `room` of them."""
    while room and last // interval > room:
        interval *= 2
    return range(interval, last + 1, interval)


@dataclass(frozen=True, slots=True)
class SlotVersion:
    """The last finished write of a slot: the state after the first `boundary` tokens of the path that `key` closes."""

    key: bytes
    boundary: int


def may_publish(num_accepted: int, boundary: int, version: SlotVersion | None) -> bool:
    """Whether a slot may enter the cache as the state at `boundary` of a request with that many accepted tokens.

    The one gate of the cache: what no finished step has written, was written for another boundary, or lies behind
    tokens that are not accepted, stays out.
    """
    return version is not None and version.boundary == boundary and 0 < boundary <= num_accepted
