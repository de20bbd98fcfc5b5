"""What tests of ops share: odd sizes, rows and pools to run an op on, one comparison, one table of tolerances.

Sizes are unequal wherever two could be mixed up (K and V, key and value heads), lengths sit around the 64-token grid,
pools hold NaN wherever nobody may read, and `nan_empty` makes every fresh tensor NaN, so that an output that is not
written, or a stale entry that leaks, cannot pass. The same builders serve a reference and its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deltaserve.ops.rows import ExtendRows, PrefillRows

LENGTHS = (1, 63, 64, 65, 130, 1000)

# Largest |actual - expected| / |expected| (norms of the whole tensor), by the coarsest dtype the values went through.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float8_e4m3fn: 6e-2,
}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; NaN where either holds one; shapes must agree."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def compare(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail unless the relative error is within the tolerance of `dtype` (by default actual's). NaN never passes."""
    tolerance = TOLERANCES[actual.dtype if dtype is None else dtype]
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} above {tolerance:.0e}"


@contextmanager
def nan_empty() -> Iterator[None]:
    """While it lasts, torch.empty, torch.empty_like and Tensor.new_empty give NaN in floating-point tensors."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make_filled(*args: Any, **kwargs: Any) -> Tensor:
            return fill_nan(make(*args, **kwargs))

        return make_filled

    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, filled(getattr(owner, name))))
        yield


def fill_nan(x: Tensor) -> Tensor:
    """x with NaN in every element, in place; x as it is where its dtype has no NaN."""
    if x.dtype == torch.float8_e4m3fn:
        x.view(torch.uint8).fill_(0x7F)
    elif x.dtype.is_floating_point:
        x.fill_(torch.nan)
    return x


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def page_table(contexts: Sequence[int], seed: int = 0) -> tuple[Tensor, int]:
    """Disjoint pages in random order for rows of these contexts, padded with the dummy page 0.

    Returns the table [R, P] and the number of pages, the dummy included.
    """
    counts = [-(-context // 64) for context in contexts]
    ids = (1 + torch.randperm(sum(counts), generator=generator(seed))).split(counts)
    return torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True), 1 + sum(counts)


def kv_slots(table_RP: Tensor, row: int, positions: Sequence[int]) -> Tensor:
    """Where the KV of a row's positions goes: page id * 64 + position % 64."""
    at = torch.tensor(positions)
    return table_RP[row, at // 64] * 64 + at % 64


def prefill_rows(
    lengths: Sequence[int],
    *,
    starts: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    slots_in: Sequence[int] | None = None,
    cuts: Sequence[tuple[int, int, int]] = (),
    table_RP: Tensor | None = None,
) -> PrefillRows:
    """Packed rows of these lengths; by default from position 0 and slot 0, in ring rows 1, 2, ..."""
    count = len(lengths)
    return PrefillRows(
        offsets=(0, *(sum(lengths[: row + 1]) for row in range(count))),
        starts=tuple(starts or [0] * count),
        rows_R=torch.tensor(rows or range(1, count + 1)),
        slots_in_R=torch.tensor(slots_in or [0] * count),
        cuts=tuple(cuts),
        page_table_RP=torch.zeros(count, 1, dtype=torch.int64) if table_RP is None else table_RP,
    )


def extend_rows(
    starts: Sequence[int],
    num_new: Sequence[int],
    *,
    width: int | None = None,
    rows: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    folds: Sequence[tuple[int, int, int, int]] = (),
    table_RP: Tensor | None = None,
) -> ExtendRows:
    """Rows that add num_new tokens at starts; by default in ring rows and on slots 1, 2, ...

    folds are (ring row, slot in, slot out, absolute end).
    """
    count = len(starts)
    return ExtendRows(
        width=max(num_new) if width is None else width,
        rows_R=torch.tensor(rows or range(1, count + 1)),
        slots_R=torch.tensor(slots or range(1, count + 1)),
        starts_R=torch.tensor(starts),
        num_ring_R=torch.tensor([start % 64 for start in starts]),
        num_new=tuple(num_new),
        contexts=tuple(start + new for start, new in zip(starts, num_new, strict=True)),
        page_table_RP=torch.zeros(count, 1, dtype=torch.int64) if table_RP is None else table_RP,
        fold_rows_F=torch.tensor([fold[0] for fold in folds], dtype=torch.int64),
        fold_in_F=torch.tensor([fold[1] for fold in folds], dtype=torch.int64),
        fold_out_F=torch.tensor([fold[2] for fold in folds], dtype=torch.int64),
        fold_ends=tuple(fold[3] for fold in folds),
    )


@dataclass(frozen=True, slots=True)
class GdnSizes:
    """J key heads, H value heads, K and V head sizes."""

    num_key_heads: int = 2
    num_value_heads: int = 6
    key_size: int = 24
    value_size: int = 40


@dataclass(frozen=True, slots=True)
class GdnInputs:
    """q and k [T, J, K], normalised; v [T, H, V]; g and beta [T, H]; float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def random(cls, num_tokens: int, sizes: GdnSizes, seed: int = 0, decay: float = 1.0) -> GdnInputs:
        """Head h decays by about `decay` * 4^-h per token, so that one tensor holds short and long memories."""
        draw = generator(seed)
        keys = (num_tokens, sizes.num_key_heads, sizes.key_size)
        q, k = (torch.randn(keys, generator=draw) for _ in range(2))
        v = torch.randn(num_tokens, sizes.num_value_heads, sizes.value_size, generator=draw)
        rates = decay * 4.0 ** -torch.arange(sizes.num_value_heads)
        g = -rates * torch.rand(num_tokens, sizes.num_value_heads, generator=draw) * 2
        beta = torch.rand(num_tokens, sizes.num_value_heads, generator=draw)
        q = q / q.norm(dim=-1, keepdim=True) * sizes.key_size**-0.5
        return cls(q, k / k.norm(dim=-1, keepdim=True), v, g, beta)

    def take(self, tokens: Tensor | slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q[tokens], self.k[tokens], self.v[tokens], self.g[tokens], self.beta[tokens]


@dataclass(frozen=True, slots=True)
class GdnPools:
    """states [S, LG, H, K, V], ring_k [R, LG, 64, J, K], ring_u [R, LG, 64, H, V], ring_g [R, LG, 64, H]."""

    states: Tensor
    ring_k: Tensor
    ring_u: Tensor
    ring_g: Tensor

    @classmethod
    def empty(
        cls,
        sizes: GdnSizes,
        *,
        num_slots: int = 8,
        num_rows: int = 4,
        num_layers: int = 2,
        state_dtype: torch.dtype = torch.float32,
    ) -> GdnPools:
        """NaN everywhere but in slot 0, which is zero."""
        heads, ring = (num_layers, sizes.num_value_heads), (num_rows, num_layers, 64)
        pools = cls(
            torch.zeros(num_slots, *heads, sizes.key_size, sizes.value_size, dtype=state_dtype),
            fill_nan(torch.zeros(*ring, sizes.num_key_heads, sizes.key_size)),
            fill_nan(torch.zeros(*ring, sizes.num_value_heads, sizes.value_size)),
            fill_nan(torch.zeros(*ring, sizes.num_value_heads)),
        )
        fill_nan(pools.states[1:])
        return pools

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.states[:, index], self.ring_k[:, index], self.ring_u[:, index], self.ring_g[:, index]
