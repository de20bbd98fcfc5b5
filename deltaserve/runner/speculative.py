"""Drafts: what the model's own draft head proposes after each step, on every rank alike.

The head's keys belong in every page, whatever a row's draft count, and only the main model's hiddens may make them.
So once the tokens of a step are chosen, one pass of the head follows over all rows. Its position t takes token t and
the hidden of position t - 1, which this very step computed:

| row                        | positions of the pass                 | hidden before the first one       |
| -------------------------- | ------------------------------------- | --------------------------------- |
| PREFILL                    | start .. end - 1, and end if sampled  | the snapshot's                    |
| DECODE, VERIFY             | start + 1 .. p + 1                    | this step's, of position start    |
| the same, on a boundary    | start .. p + 1                        | the snapshot's                    |

p is the last accepted position, so p + 1 is that of the newest token. Rejected drafts have no place in the pass. The
output at p + 1 is the first draft; each further one is a pass of one token a row, which takes the head's own hidden.
Keys that these leave at p + 2 and later are provisional: the next pass writes them anew before any accepted position
looks at them. A row drafts as far as its pages reach; what has no page is written to the dummy page. That can only be
the newest token's position, on a boundary, which is why a row that starts there computes its first position again.

A hidden outlives its step in two places only: a prefill row's cuts put it into snapshots, and where a row's last
accepted position closes a block it waits in `last_hiddens` for the fold.

Draft choice is greedy from gathered logits, ties to the lowest id: the ranks need to hear the step's tokens, nothing
else. No pass waits for the draft of the one before it; the host reads all drafts at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.core.plan import DUMMY_PAGE, Row, RowKind
from deltaserve.core.types import BLOCK
from deltaserve.model.inputs import CacheTensors, DraftInputs
from deltaserve.ops import sampling
from deltaserve.ops.rows import ExtendRows
from deltaserve.runner.staging import Ints, Staging

Tokens = tuple[int, ...]

_NONE = torch.empty(0, dtype=torch.int64)
_GOLDEN = 0.6180339887498949


class DraftModel(Protocol):
    """What drafting needs of a model: see `model.qwen3_5`."""

    def draft(self, inputs: DraftInputs) -> Tensor:
        """Hidden [N, D] of the tokens that guess; writes the head's keys and values of all T."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, vocabulary] float32 on every rank."""


@dataclass(frozen=True, slots=True)
class _Guesses:
    """N rows that want another draft: places in the row tables, position of the newest token, drafts still wanted."""

    indices_N: Ints  # among the plan's rows
    places_N: Ints
    positions_N: Ints
    num_left_N: Ints

    def after(self, lefts: Ints) -> _Guesses:
        """Those at `lefts`, one draft further."""
        return _Guesses(
            self.indices_N[lefts], self.places_N[lefts], self.positions_N[lefts] + 1, self.num_left_N[lefts] - 1
        )


class Drafter:
    """`pages` is the runner's page table, [rows, pages of the longest], which plans extend (`runner.batch`)."""

    def __init__(self, model: DraftModel, caches: CacheTensors, pages: Ints) -> None:
        self._model = model
        self._caches = caches
        self._pages = pages
        self._staging = Staging(caches.pages.device)

    def draft(
        self, rows: Sequence[Row], firsts: Sequence[int], hidden_TD: Tensor, tokens: Sequence[Tokens]
    ) -> list[Tokens]:
        """Drafts for what follows each row's new tokens, at most its `num_drafts`; writes the head's keys.

        Everything is parallel to the plan's rows: firsts[i] is where row i's tokens begin among the step's T, and
        tokens[i] what it was given: nothing where it stopped short of its known tokens, or failed.
        """
        self._keep_lasts(rows, firsts, hidden_TD, tokens)
        guesses = self._guesses(rows, tokens)
        inputs = self._first_pass(rows, firsts, hidden_TD, tokens, guesses)
        indices: list[int] = []
        drafts: list[Tensor] = []
        while inputs is not None:
            hidden_ND, inputs = self._model.draft(inputs), None
            if len(guesses.indices_N):
                ids_N = sampling.greedy_ids(self._model.logits(hidden_ND))
                indices += guesses.indices_N.tolist()
                drafts.append(ids_N)
                inputs, guesses = self._next_pass(guesses, ids_N, hidden_ND)
        return _by_row(len(rows), indices, drafts)

    def _keep_lasts(
        self, rows: Sequence[Row], firsts: Sequence[int], hidden_TD: Tensor, tokens: Sequence[Tokens]
    ) -> None:
        """The hiddens that folds of the next step will ask for."""
        assert self._caches.last_hiddens is not None
        for row, first, new in zip(rows, firsts, tokens, strict=True):
            if row.kind != RowKind.PREFILL and new and (row.start + len(new)) % BLOCK == 0:
                self._caches.last_hiddens[row.row] = hidden_TD[first + len(new) - 1]

    def _guesses(self, rows: Sequence[Row], tokens: Sequence[Tokens]) -> _Guesses:
        numbers = []
        for index, (row, new) in enumerate(zip(rows, tokens, strict=True)):
            position = row.start + (len(new) if row.kind != RowKind.PREFILL else len(row.token_ids))
            num_drafts = self._reach(row.row, position, row.num_drafts) if new else 0
            if num_drafts:
                numbers.append((index, row.row, position, num_drafts))
        return _Guesses(*np.array(numbers, np.int64).reshape(-1, 4).T.copy())

    def _reach(self, place: int, position: int, num_drafts: int) -> int:
        """How many drafts can be computed, at `position` and behind it, in pages that the row has."""
        pages = self._pages[place]
        while num_drafts:
            block = (position + num_drafts - 1) // BLOCK
            if block < len(pages) and pages[block] != DUMMY_PAGE:
                break
            num_drafts -= 1
        return num_drafts

    def _first_pass(
        self,
        rows: Sequence[Row],
        firsts: Sequence[int],
        hidden_TD: Tensor,
        tokens: Sequence[Tokens],
        guesses: _Guesses,
    ) -> DraftInputs | None:
        """All tokens whose keys this step can make; the newest ones of rows that draft go on to guess.

        Without prefill rows the tokens are few, and all go through the head, each row padded to the longest. With
        them, or if nobody drafts, they lie packed, and only those that guess go on behind their keys.
        """
        limit = self._pages.shape[1] * BLOCK
        runs = {n: _run(rows[n], firsts[n], new, limit) for n, new in enumerate(tokens)}
        runs = {n: run for n, run in runs.items() if len(run)}
        if not runs:
            return None
        is_wide = len(guesses.indices_N) > 0 and rows[-1].kind != RowKind.PREFILL
        width = max(map(len, runs.values())) if is_wide else 0
        begins = dict(zip(runs, accumulate((width or len(run) for run in runs.values()), initial=0), strict=False))
        numbers_T4 = np.concatenate([_padded(run, width) for run in runs.values()])
        places_T, positions_T, token_ids_T, sources_T = numbers_T4.T.copy()
        put = self._staging.put
        token_ids, positions, sources = put(token_ids_T), put(positions_T), put(sources_T)
        kv_slots = self._kv_slots(places_T, positions_T)
        resumed = self._resumed([(rows[n], begin) for n, begin in begins.items()])
        lasts_N = np.array([begins[n] + len(runs[n]) - 1 for n in guesses.indices_N.tolist()], np.int64)
        lasts = None if len(lasts_N) == len(numbers_T4) else put(lasts_N)
        extend = self._wide_rows(list(runs.values()), width) if is_wide else self._single_rows(guesses)
        self._staging.send()
        before_TD = hidden_TD[sources]
        if resumed is not None:
            before_TD[resumed[0]] = self._caches.hiddens[resumed[1]]
        return DraftInputs(token_ids, positions, kv_slots, before_TD, lasts, extend, self._caches)

    def _resumed(self, begins: Sequence[tuple[Row, int]]) -> tuple[Tensor, ...] | None:
        """Where rows begin that start on a boundary, and the slots of their snapshots, which hold the hidden before."""
        resumed = [
            (begin, row.slot_out if row.num_ring == BLOCK else row.slot_in)
            for row, begin in begins
            if row.start % BLOCK == 0
        ]
        return self._staging.put(np.array(resumed, np.int64).T.copy()).unbind() if resumed else None

    def _next_pass(self, guesses: _Guesses, ids_N: Tensor, hidden_ND: Tensor) -> tuple[DraftInputs | None, _Guesses]:
        """One token a row that drafts on: the draft, behind the head's own hidden."""
        lefts = np.flatnonzero(guesses.num_left_N > 1)
        is_all = len(lefts) == len(guesses.indices_N)
        guesses = guesses.after(lefts)
        if not len(lefts):
            return None, guesses
        put = self._staging.put
        left_N = None if is_all else put(lefts)
        positions_N, kv_slots_N = put(guesses.positions_N), self._kv_slots(guesses.places_N, guesses.positions_N)
        extend = self._single_rows(guesses)
        self._staging.send()
        if left_N is not None:
            ids_N, hidden_ND = ids_N[left_N], hidden_ND[left_N]
        return DraftInputs(ids_N, positions_N, kv_slots_N, hidden_ND, None, extend, self._caches), guesses

    def _kv_slots(self, places_T: Ints, positions_T: Ints) -> Tensor:
        """Padding, whose place is negative, goes to the dummy page, as does what has no page."""
        pages_T = np.where(places_T >= 0, self._pages[places_T, positions_T // BLOCK], DUMMY_PAGE)
        return self._staging.put(pages_T * BLOCK + positions_T % BLOCK)

    def _single_rows(self, guesses: _Guesses) -> ExtendRows | None:
        if not len(guesses.indices_N):
            return None
        return self._rows(guesses.places_N, guesses.positions_N, 1, (1,) * len(guesses.indices_N))

    def _wide_rows(self, runs: Sequence[Ints], width: int) -> ExtendRows:
        places_R, starts_R = np.array([run[0, :2] for run in runs]).T.copy()
        return self._rows(places_R, starts_R, width, tuple(map(len, runs)))

    def _rows(self, places_R: Ints, starts_R: Ints, width: int, num_new: tuple[int, ...]) -> ExtendRows:
        """Rows for attention; they have no recurrent state."""
        contexts = tuple(start + count for start, count in zip(starts_R.tolist(), num_new, strict=True))
        table_RP = self._staging.put(self._pages[places_R, : -(-max(contexts) // BLOCK)])
        places, starts = self._staging.put(places_R), self._staging.put(starts_R)
        zeros = torch.zeros_like(starts)
        return ExtendRows(width, places, zeros, starts, zeros, num_new, contexts, table_RP, _NONE, _NONE, _NONE, ())


def _run(row: Row, first: int, new: Tokens, limit: int) -> Ints:
    """[n, 4] of the tokens that a row has in the first pass: place, position, token, where its hidden before is.

    Where a row starts on a boundary the last number of its first token means nothing. A token at position `limit` ends
    its request and nothing will ask for it.
    """
    if row.kind == RowKind.PREFILL:
        token_ids = row.token_ids + new
    else:
        token_ids = row.token_ids[:1] + new if new else ()
    token_ids = token_ids[: limit - row.start]
    skipped = min(row.start % BLOCK, 1)
    run = np.empty((max(len(token_ids) - skipped, 0), 4), np.int64)
    run[:, 0] = row.row
    run[:, 1] = np.arange(row.start + skipped, row.start + len(token_ids))
    run[:, 2] = token_ids[skipped:]
    run[:, 3] = np.arange(first + skipped - 1, first + len(token_ids) - 1)
    run[:1, 3] = np.maximum(run[:1, 3], 0)
    return run


def _by_row(num_rows: int, indices: Sequence[int], drafts: Sequence[Tensor]) -> list[Tokens]:
    """Each row's drafts, from what all passes guessed in turn; here the host waits for them."""
    found: list[list[int]] = [[] for _ in range(num_rows)]
    if drafts:
        for index, token_id in zip(indices, torch.cat(list(drafts)).tolist(), strict=True):
            found[index].append(token_id)
    return [tuple(ids) for ids in found]


def _padded(run: Ints, width: int) -> Ints:
    """The run, made as long as `width` (0: as it is) by its last token, which then has no place."""
    if len(run) >= width:
        return run
    padded = run[np.minimum(np.arange(width), len(run) - 1)]
    padded[len(run) :, 0] = -1
    return padded


def encode_tokens(tokens: Sequence[Tokens]) -> npt.NDArray[np.int32]:
    """What the other ranks need of a step's outcome, flat: for each row how many tokens it was given, then these."""
    flat: list[int] = []
    for new in tokens:
        flat.append(len(new))
        flat += new
    return np.array(flat, np.int32)


def decode_tokens(flat: npt.NDArray[np.int32]) -> list[Tokens]:
    """The inverse of `encode_tokens`."""
    numbers = iter(flat.tolist())
    return [tuple(next(numbers) for _ in range(count)) for count in numbers]


class SyntheticAcceptance:
    """Decides how many drafts are accepted, by schedule: for benchmarks, whose text means nothing.

    A verify row of a request keeps `tokens_per_step` tokens on average, the one that is always chosen included. What
    a step could not give as a whole token, or because it had too few drafts, is owed to the next one, so that the
    mean over n steps of a request is off by less than 1 / n. Requests begin at different fractions, so short ones are
    right on average too.
    """

    def __init__(self, num_rows: int, tokens_per_step: float) -> None:
        self._num_drafts = tokens_per_step - 1
        self._owed = [0.0] * num_rows

    def admit(self, row: int, request_id: int) -> None:
        self._owed[row] = (request_id + 1) * _GOLDEN % 1

    def next(self, row: int, num_drafts: int) -> int:
        """How many of this step's `num_drafts` drafts are accepted."""
        owed = self._owed[row] + self._num_drafts
        num_accepted = min(int(owed), num_drafts)
        self._owed[row] = owed - num_accepted
        return num_accepted
