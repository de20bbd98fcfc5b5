"""The contract between scheduler and runner: one frozen plan a step down, one output up.

What a row means depends on its kind, never on its token count (a prompt of two tokens is still a prefill):

| kind    | starts                           | reads              | writes                                         |
| ------- | -------------------------------- | ------------------ | ---------------------------------------------- |
| PREFILL | on a boundary, ring empty        | state at `slot_in` | state at every cut; the tail goes to the ring  |
| DECODE  | anywhere, `num_ring` tokens past | state, ring        | one ring entry                                 |
| VERIFY  | as DECODE, with drafts after it  | state, ring        | ring entries, of which the accepted ones count |

Before the rows, the plan's `block_ops` are carried out in order: pages and snapshots that move between device and host,
and what debug mode asks for.

A row whose ring is full (`num_ring` == BLOCK) is folded first: state of `slot_in` and the ring go to `slot_out`,
and the row continues with an empty ring on `slot_out`. Slot EMPTY_SLOT is the snapshot of the empty prefix (all
zeros, never written), so a cold request is a hit of length 0.

`Plan.encode()` gives one flat int32 array for the other ranks; sampling parameters stay on rank 0, which samples.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltaserve.core.types import SamplingParams, TokenLogprob

EMPTY_SLOT = 0
DUMMY_PAGE = 0  # where padding reads and writes; never owned by a request
_ID_BITS = (1 << 31) - 1


class RowKind(enum.IntEnum):
    PREFILL = 0
    DECODE = 1
    VERIFY = 2


class Logits(enum.IntEnum):
    """Which positions of a row need logits."""

    NONE = 0  # a chunk in the middle of a prompt
    LAST = 1  # the next token is sampled
    ALL = 2  # prompt logprobs, or drafts to verify


class OpKind(enum.IntEnum):
    """What to do with one page or one slot (state, conv window and hidden together)."""

    SAVE = 0  # device `source` -> host `target`
    RESTORE = 1  # host `source` -> device `target`
    POISON = 2  # debug mode: nobody holds device block `source` any more; fill it with NaN
    SEAL = 3  # debug mode: device block `source` is published; remember what its bytes are
    PROVE = 4  # debug mode: device block `source` is used by a hit; its bytes must be those of its last SEAL


@dataclass(frozen=True, slots=True)
class BlockOp:
    """One copy or check, on every rank. Ops of a plan run in order, before its rows: a block may be named twice.

    The runner carries a SEAL along with SAVE and RESTORE. `target` is 0 where the kind has none.
    """

    kind: OpKind
    is_slot: bool
    source: int
    target: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """A boundary inside a prefill row whose state is kept: absolute `position` (a multiple of BLOCK), into `slot`."""

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Row:
    """One request in one step: compute `token_ids` at absolute positions start, start + 1, ...

    `row` is the request's place in the runner's per-request tables (rings, page table, sampler). The page table keeps
    what earlier steps sent: `new_pages` go to entries page_offset, page_offset + 1, ...; a request that (re)starts
    sends page_offset 0. `num_ring` is start minus the boundary of `slot_in`. `is_last` says that this row reaches the
    end of the known tokens, so that its last logits give a new token. `num_drafts` is how many drafts to propose after
    that token.
    """

    request_id: int
    row: int
    kind: RowKind
    start: int
    token_ids: tuple[int, ...]
    page_offset: int
    new_pages: tuple[int, ...]
    slot_in: int
    slot_out: int
    num_ring: int
    cuts: tuple[Cut, ...]
    logits: Logits
    is_last: bool
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """What the sampler must know of a request that takes a row in this step: sent once, before its first Row.

    `output_ids` is empty for a new request and holds the accepted output of one that was preempted.
    """

    request_id: int
    row: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `retired` rows were given back since the last plan; their table entries mean nothing any more.

    Rows are ordered: DECODE and VERIFY first, then PREFILL. `admitted` may reuse a row that `retired` names.
    """

    step_id: int
    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    retired: tuple[int, ...] = ()
    block_ops: tuple[BlockOp, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    def encode(self) -> npt.NDArray[np.int32]:
        """[n] int32: step id, op and row counts; four numbers an op; for each row ten, three counts and their contents.

        Of ids that grow for as long as the engine lives the lowest 31 bits: they only name things.
        """
        flat: list[int] = [self.step_id & _ID_BITS, len(self.block_ops), len(self.rows)]
        for op in self.block_ops:
            flat += (op.kind, op.is_slot, op.source, op.target)
        for row in self.rows:
            flat += (row.request_id & _ID_BITS, row.row, row.kind, row.start, row.page_offset)
            flat += (row.slot_in, row.slot_out, row.num_ring, row.logits * 2 + row.is_last, row.num_drafts)
            flat += (len(row.token_ids), len(row.new_pages), len(row.cuts))
            flat += row.token_ids
            flat += row.new_pages
            for cut in row.cuts:
                flat += (cut.position, cut.slot)
        return np.array(flat, dtype=np.int32)

    @classmethod
    def decode(cls, flat: npt.NDArray[np.int32]) -> StepPlan:
        """The inverse of `encode`, but for `admitted` and `retired`, and for ids that had more bits."""
        numbers = iter(flat.tolist())
        step_id, num_ops, num_rows = next(numbers), next(numbers), next(numbers)
        ops = tuple(_decode_op(numbers.__next__) for _ in range(num_ops))
        return cls(step_id, tuple(_decode_row(numbers.__next__) for _ in range(num_rows)), block_ops=ops)


def _decode_op(take: Callable[[], int]) -> BlockOp:
    return BlockOp(OpKind(take()), bool(take()), take(), take())


def _decode_row(take: Callable[[], int]) -> Row:
    request_id, row, kind, start, page_offset, slot_in, slot_out, num_ring, flags, num_drafts = (
        take() for _ in range(10)
    )
    num_tokens, num_pages, num_cuts = take(), take(), take()
    return Row(
        request_id=request_id,
        row=row,
        kind=RowKind(kind),
        start=start,
        token_ids=tuple(take() for _ in range(num_tokens)),
        page_offset=page_offset,
        new_pages=tuple(take() for _ in range(num_pages)),
        slot_in=slot_in,
        slot_out=slot_out,
        num_ring=num_ring,
        cuts=tuple(Cut(take(), take()) for _ in range(num_cuts)),
        logits=Logits(flags // 2),
        is_last=bool(flags % 2),
        num_drafts=num_drafts,
    )


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What one row of the plan gave. `token_ids` is empty unless the row was `is_last`.

    A VERIFY row gives its accepted drafts and one token more, so 1 to 1 + drafts; any other row that is_last gives one.
    `draft_ids` are proposals for what comes after, at most the row's `num_drafts`.

    `logprobs` is parallel to `token_ids` where asked for. `prompt_logprobs` holds, for a row with Logits.ALL, one
    entry per computed position p whose successor p + 1 is a prompt token: the probability of that successor.
    `error` is a sentence for the client where the model gave this row nothing to sample from (NaN or infinite logits,
    a rule that leaves no token): the row then has no tokens, its request must end, and other rows are untouched.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    draft_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Parallel to the plan's rows."""

    step_id: int
    rows: tuple[RowOutput, ...]
