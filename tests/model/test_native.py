"""Whole layers by the C kernels: against the oracle, and against our references at odd sizes, on all kinds of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.ops import native
from deltaserve.ops.testing import compare
from tests.model import tiny
from tests.model.pairs import assert_logits, driver, load, load_pair
from tests.model.steps import Driver

pytestmark = pytest.mark.skipif(not native.is_ready(), reason=f"no C kernels: {native.load().note}")

# No two alike, no power of two, none but the experts' width a multiple of a vector's 16 lanes.
ODD = {
    "vocab_size": 101,
    "hidden_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 36,
}
MOST_DRAFTS = 7
ODD_MOE = ODD | {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 48,
}
ODD_DENSE = ODD | {"intermediate_size": 90}


@pytest.mark.parametrize("num_tokens", [1, 65, 300])
@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_prepared_models_equal_the_oracle(kind: str, num_tokens: int, tmp_path: Path) -> None:
    oracle, model = load_pair(kind, tmp_path)
    model.prepare()
    run, ids = driver(model), tiny.random_ids(num_tokens + 20, seed=1)
    expected = oracle(input_ids=torch.tensor([ids])).logits[0]
    sequence = run.open()
    hidden = run.step(prefill=[(sequence, ids[:num_tokens])])
    hidden += [run.step(extend=[(sequence, [token])])[0] for token in ids[num_tokens:]]
    assert_logits(model, hidden, expected)


class Twins:
    """The same checkpoint on the kernels and on the references: each step runs on both and its outputs are compared."""

    def __init__(self, directory: Path, caches: dict[str, torch.dtype]) -> None:
        self.runs = [self._run(directory, force, caches) for force in ("native", "reference")]

    @staticmethod
    def _run(directory: Path, force: str, dtypes: dict[str, torch.dtype]) -> Driver:
        model = load(directory)
        model.prepare(force)
        run = driver(model, drafts=MOST_DRAFTS)
        changed = {name: getattr(run.caches, name).to(dtype) for name, dtype in dtypes.items()}
        return Driver(model, replace(run.caches, **changed))

    def open(self, count: int) -> list[int]:
        for run in self.runs:
            run.sequences = [run.open() for _ in range(count)]  # type: ignore[attr-defined]
        return list(range(count))

    def step(
        self,
        extend: list[tuple[int, list[int]]] = (),  # type: ignore[assignment]
        prefill: list[tuple[int, list[int]]] = (),  # type: ignore[assignment]
        dtype: torch.dtype = torch.float32,
        width: int | None = None,
    ) -> None:
        outputs = []
        for run in self.runs:
            rows = [[(run.sequences[i], ids) for i, ids in part] for part in (extend, prefill)]  # type: ignore[attr-defined]
            outputs.append(torch.cat(run.step(*rows, width=width)))
        compare(*outputs, dtype=dtype)


def script(twins: Twins, dtype: torch.dtype) -> None:
    """Prompts around the grid, joins, verify rows of unequal width, decode over boundaries."""
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 101, (count,), generator=draw).tolist()

    twins.open(4)
    twins.step(prefill=[(0, ids(1)), (1, ids(63)), (2, ids(130))], dtype=dtype)
    twins.step([(0, ids(1)), (1, ids(1)), (2, ids(1))], [(3, ids(64))], dtype=dtype)
    twins.step([(0, ids(3)), (1, ids(1)), (2, ids(2))], [(3, ids(70))], dtype=dtype, width=4)
    twins.step([(0, ids(1)), (1, ids(5)), (3, ids(8))], dtype=dtype)
    for _ in range(64):
        twins.step([(row, ids(1)) for row in range(4)], dtype=dtype)


@pytest.fixture(scope="module")
def odd_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("odd-moe")
    tiny.save(tiny.hf_model("moe", **ODD_MOE), directory)
    return directory


@pytest.mark.parametrize(
    ("caches", "dtype"),
    [
        ({}, torch.float32),
        ({"pages": torch.bfloat16}, torch.bfloat16),
        ({"pages": torch.float8_e4m3fn}, torch.float8_e4m3fn),
        ({"states": torch.float16}, torch.float16),
        ({"states": torch.bfloat16}, torch.bfloat16),
    ],
    ids=["float32", "KV bfloat16", "KV float8", "state float16", "state bfloat16"],
)
def test_kernels_equal_references_at_odd_sizes(
    odd_moe: Path, caches: dict[str, torch.dtype], dtype: torch.dtype
) -> None:
    script(Twins(odd_moe, caches), dtype)


def test_a_dense_model_at_odd_sizes(tmp_path: Path) -> None:
    tiny.save(tiny.hf_model("dense", **ODD_DENSE), tmp_path)
    script(Twins(tmp_path, {}), torch.float32)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_nothing(odd_moe: Path, num_threads: int) -> None:
    """Not a bit: which thread does an item changes nothing in it."""
    outputs = []
    for threads in (1, num_threads):
        torch.set_num_threads(threads)
        try:
            outputs.append(_some_steps(odd_moe))
        finally:
            torch.set_num_threads(1)
    assert outputs[0].equal(outputs[1])


def _some_steps(directory: Path) -> Tensor:
    model = load(directory)
    model.prepare()
    run = driver(model, drafts=MOST_DRAFTS)
    first, second = run.open(), run.open()
    hidden = run.step(prefill=[(first, list(range(100))), (second, list(range(70)))])
    hidden += run.step(extend=[(first, [5]), (second, [6, 7, 8])])
    return torch.cat(hidden)


@pytest.fixture(scope="module")
def even_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that matrix tiles take, where the processor has them."""
    directory = tmp_path_factory.mktemp("even-moe")
    tiny.save(tiny.hf_model("moe"), directory)
    return directory


@pytest.mark.parametrize("sizes", ["odd_moe", "even_moe"])
def test_a_row_is_the_same_to_the_bit_whatever_is_beside_it(sizes: str, request: pytest.FixtureRequest) -> None:
    model = load(request.getfixturevalue(sizes))
    model.prepare()

    def run_with(neighbours: int) -> Tensor:
        run = driver(model)
        rows = [run.open() for _ in range(1 + neighbours)]
        hidden = [run.step(prefill=[(row, [3, 1, 4, 1, 5, 9][: 6 - i]) for i, row in enumerate(rows)])[0]]
        hidden += [run.step(extend=[(row, [token]) for row in rows])[0] for token in range(70)]
        return torch.cat(hidden)

    alone = run_with(0)
    assert alone.equal(run_with(1))
    assert alone.equal(run_with(4))


def test_nan_shows(odd_moe: Path) -> None:
    """A broken weight must reach the logits, where the sampler reports it."""
    model = load(odd_moe)
    model.layers[2].post_norm.scale.data[3] = torch.nan
    model.prepare()
    run = driver(model)
    assert model.logits(run.step(prefill=[(run.open(), [1, 2, 3])])[0]).isnan().all()
