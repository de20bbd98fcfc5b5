"""Which boundaries are wanted, from token ids alone, and which written states may be published."""

from __future__ import annotations

import pytest

from deltaserve.cache.boundaries import MAX_WANTED, BoundaryKind, SlotVersion, Wanted, choose, may_publish
from deltaserve.core.chat import ChatMarkers

M = ChatMarkers(900, 901, (902,), (910,), (911,), (912,), (920,))
SYSTEM, USER, ASSISTANT = M.system, M.user, M.assistant
OPENED = (900, 912, 902, 930, 902)  # the answer, its thinking pre-opened


def message(role: tuple[int, ...], length: int, opener: tuple[int, ...] = ()) -> tuple[int, ...]:
    """`length` tokens in all, its end and newline included."""
    head = (M.im_start, *role, 902, *opener)
    return (*head, *([5] * (length - len(head) - 2)), M.im_end, 902)


def tool_answer(length: int) -> tuple[int, ...]:
    return message(USER, length, opener=M.tool_response)


def chosen(ids: tuple[int, ...], **options: int) -> dict[int, BoundaryKind]:
    return {wanted.position: wanted.kind for wanted in choose(ids, M, **options)}


def test_a_first_turn() -> None:
    ids = message(SYSTEM, 200) + message(USER, 100) + OPENED
    assert chosen(ids) == {192: BoundaryKind.SYSTEM, 256: BoundaryKind.USER}


@pytest.mark.parametrize(("length", "end"), [(127, 64), (128, 128), (129, 128), (191, 128), (192, 192)])
def test_an_end_is_behind_the_newline_and_rounded_down(length: int, end: int) -> None:
    assert end in chosen(message(SYSTEM, length) + message(USER, 500) + OPENED)


def test_a_tool_loop_ends_where_its_user_message_ended() -> None:
    """However long the loop, the next prompt leaves the path behind the last two real user messages."""
    ids = message(SYSTEM, 64) + message(USER, 64) + message(ASSISTANT, 64) + message(USER, 64)
    for _ in range(12):
        ids += message(ASSISTANT, 64) + tool_answer(64)
    wanted = chosen(ids + OPENED)
    assert {position for position, kind in wanted.items() if kind is BoundaryKind.USER} == {128, 256}
    turns = {position for position, kind in wanted.items() if kind is BoundaryKind.TURN}
    assert turns == {len(ids) - 64 - 128 * back for back in range(3)}
    assert wanted[64] is BoundaryKind.SYSTEM
    assert wanted[len(ids)] is BoundaryKind.PROMPT


def test_an_answer_that_mentions_tools_in_its_text_is_a_user_message() -> None:
    quoting = (900, 911, 902, 5, 920, *[5] * 58, 901, 902)
    assert len(quoting) == 65
    assert chosen(quoting + OPENED) == {64: BoundaryKind.USER}


def test_a_tool_answer_without_a_newline_before_it_is_one_too() -> None:
    answer = (900, 911, 920, *[5] * 60, 901, 902)
    assert chosen(answer + OPENED) == {64: BoundaryKind.PROMPT}


def test_messages_that_are_not_closed_have_no_end() -> None:
    ids = (900, 911, 902, *[5] * 300)
    assert chosen(ids) == {256: BoundaryKind.PROMPT}


def test_a_later_system_message_is_not_the_shared_start() -> None:
    ids = message(USER, 64) + message(SYSTEM, 64) + message(USER, 64)
    assert BoundaryKind.SYSTEM not in chosen(ids + OPENED).values()


def test_raw_ids() -> None:
    assert choose(tuple(range(200)), None) == (Wanted(192, BoundaryKind.PROMPT),)
    assert choose(tuple(range(192)), None) == (Wanted(128, BoundaryKind.PROMPT),)
    assert choose(tuple(range(64)), None) == ()
    assert choose(message(USER, 128) + OPENED, None) == (Wanted(128, BoundaryKind.PROMPT),)


def test_a_branch_is_wanted_where_the_known_path_ends() -> None:
    wanted = choose(tuple(range(500)), None, branch_at=192)
    assert wanted == (Wanted(192, BoundaryKind.BRANCH), Wanted(448, BoundaryKind.PROMPT))
    assert choose(tuple(range(192)), None, branch_at=192) == (Wanted(128, BoundaryKind.PROMPT),)


@pytest.mark.parametrize(("length", "interval", "step"), [(1000, 128, 128), (10_000, 128, 2048), (10_000, 4096, 4096)])
def test_periodic_ones_spread_over_the_prompt(length: int, interval: int, step: int) -> None:
    wanted = choose(tuple(range(length)), None, interval=interval)
    assert len(wanted) <= MAX_WANTED
    periodic = [each.position for each in wanted if each.kind is BoundaryKind.PERIODIC]
    assert periodic == list(range(step, length - 64, step))


def test_over_eight_the_periodic_go_first_then_branch_then_turns() -> None:
    ids = message(SYSTEM, 64)
    for _ in range(6):
        ids += message(USER, 64) + message(ASSISTANT, 64)
    ids += message(USER, 64)
    wanted = chosen(ids + OPENED + (5,) * 100, retained_turns=6, branch_at=128, interval=192)
    kinds = sorted(wanted.values())
    assert len(wanted) == MAX_WANTED
    assert kinds == [BoundaryKind.PROMPT, *[BoundaryKind.USER] * 2, BoundaryKind.SYSTEM, *[BoundaryKind.TURN] * 4]
    turns = [position for position, kind in wanted.items() if kind is BoundaryKind.TURN]
    assert min(turns) == 64 + 128 * 3, "the last ones"


def test_the_last_two_users_and_retained_turns() -> None:
    ids = message(SYSTEM, 64)
    for _ in range(4):
        ids += message(USER, 64) + message(ASSISTANT, 64)
    ids += message(USER, 64) + OPENED
    none = chosen(ids, retained_turns=0)
    assert none == {64: BoundaryKind.SYSTEM, 512: BoundaryKind.USER, 640: BoundaryKind.USER}
    assert chosen(ids, retained_turns=1) == none | {576: BoundaryKind.TURN}


@pytest.mark.parametrize(
    ("num_accepted", "boundary", "version", "expected"),
    [
        (64, 64, SlotVersion(b"k", 64), True),
        (130, 64, SlotVersion(b"k", 64), True),
        (63, 64, SlotVersion(b"k", 64), False),  # behind a token that is not accepted
        (130, 128, SlotVersion(b"k", 64), False),  # written for another boundary
        (130, 64, SlotVersion(b"k", 128), False),
        (130, 64, None, False),  # nobody wrote it
        (130, 0, SlotVersion(b"k", 0), False),
    ],
)
def test_may_publish(num_accepted: int, boundary: int, version: SlotVersion | None, expected: bool) -> None:
    assert may_publish(num_accepted, boundary, version) is expected
