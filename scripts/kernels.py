"""Times the Triton kernels at the published shapes beside what the card allows; called by scripts/gpu.

    python scripts/kernels.py [--only SECTION ...] [--output FILE.json]

A case is run as a CUDA graph of calls on several sets of inputs, together larger than the level-2 cache; the figure is
the median of the replays. Its floor is the bytes it must move over 4.3 TB/s, or its operations over the measured rate
of the unit that does them, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deltaserve.ops.attention import triton as attention
from deltaserve.ops.conv import triton as conv
from deltaserve.ops.gdn import triton as gdn
from deltaserve.ops.linear import triton as linear
from deltaserve.ops.linear import triton_fp8
from deltaserve.ops.moe import triton as moe
from deltaserve.ops.norm import triton as norm
from deltaserve.ops.rope import triton as rope
from deltaserve.ops.rows import ExtendRows, PrefillRows
from deltaserve.ops.sampling import triton as sampling

BANDWIDTH = 4.3e12  # bytes a second
BF16, FP8, FLOAT32 = 764e12, 1257e12, 60e12  # operations a second
CACHE_BYTES = 150e6

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """`make(i)` gives a call on the i-th set of inputs. `num_bytes` counts each input read and output written once."""

    name: str
    shape: str
    make: Callable[[int], Call]
    num_bytes: float
    num_ops: float = 0.0
    rate: float = BF16
    most_sets: int = 8

    @property
    def floor_s(self) -> float:
        return max(self.num_bytes / BANDWIDTH, self.num_ops / self.rate)


def measure(case: Case) -> float:
    """Seconds a call."""
    num_sets = max(1, min(case.most_sets, math.ceil(CACHE_BYTES / max(case.num_bytes, 1.0))))
    calls = [case.make(i) for i in range(num_sets)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    repeats = max(1, min(50, int(2e-3 / max(case.floor_s * num_sets, 1e-7))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / repeats / num_sets)
    return statistics.median(times[1:])


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda")


def extend_rows(count: int, context: int, width: int, num_pages: int = 1, folds: int = 0) -> ExtendRows:
    places = torch.arange(count, device="cuda")
    table = 1 + torch.randperm(count * num_pages, device="cuda").view(count, num_pages)
    return ExtendRows(
        width, places, places + 1, torch.full_like(places, context - width), torch.full_like(places, 31),
        (width,) * count, (context,) * count, table,
        places[:folds], places[:folds] + 1, places[:folds] + 1 + count, (context,) * folds,
    )  # fmt: skip


def prefill_rows(lengths: list[int], start: int = 0, cuts: tuple[tuple[int, int, int], ...] = ()) -> PrefillRows:
    count = len(lengths)
    pages = [-(-(start + n) // 64) for n in lengths]
    ids = 1 + torch.randperm(sum(pages), device="cuda")
    table = torch.nn.utils.rnn.pad_sequence(list(ids.split(pages)), batch_first=True)
    offsets = tuple(sum(lengths[:row]) for row in range(count + 1))
    places = torch.arange(count, device="cuda")
    return PrefillRows(offsets, (start,) * count, places, places, cuts, table)


def gdn_inputs(tokens: int, heads: int) -> tuple[Tensor, ...]:
    q, k = gdn.normalize(randn(tokens, 16, 128), randn(tokens, 16, 128))
    g = -torch.rand(tokens, heads, device="cuda") * 0.2
    return q, k, randn(tokens, heads, 128), g, torch.rand(tokens, heads, device="cuda")


def gdn_pools(slots: int, rows: int, heads: int, layers: int = 1) -> tuple[Tensor, ...]:
    return (
        randn(slots, layers, heads, 128, 128, dtype=torch.float32),
        randn(rows, layers, 64, 16, 128) * 0.1,
        randn(rows, layers, 64, heads, 128, dtype=torch.float32),
        -torch.rand(rows, layers, 64, heads, device="cuda") * 0.2,
    )


def gdn_extend(rows: int, width: int, heads: int) -> Case:
    ring_bytes = 31 * (heads * 128 * 4 + 16 * 128 * 2 + heads * 4)

    def make(_: int) -> Call:
        inputs, pools = gdn_inputs(rows * width, heads), gdn_pools(rows + 1, rows, heads)
        step = extend_rows(rows, 31 + width, width)
        layer = [pool[:, 0] for pool in pools]
        return partial(gdn.extend, *inputs, *layer, step)

    num_bytes = rows * (heads * 128 * 128 * 4 + ring_bytes + width * heads * 128 * 10)
    shape = f"{rows} rows of {width}, {heads} heads, ring 31"
    return Case("gdn.extend", shape, make, num_bytes, 4 * width * rows * heads * 128 * 160, FLOAT32)


def gdn_fold(rows: int, layers: int, heads: int) -> Case:
    def make(_: int) -> Call:
        return partial(gdn.fold, *gdn_pools(2 * rows + 1, rows, heads, layers), extend_rows(rows, 64, 1, folds=rows))

    num_bytes = rows * layers * (2 * heads * 128 * 128 * 4 + 64 * (heads * 129 * 4 + 16 * 128 * 2))
    return Case("gdn.fold", f"{rows} rows, {layers} layers, {heads} heads", make, num_bytes, most_sets=2)


def gdn_prefill(lengths: list[int], heads: int) -> Case:
    tokens = sum(lengths)

    def make(_: int) -> Call:
        inputs, pools = gdn_inputs(tokens, heads), gdn_pools(len(lengths) + 4, len(lengths), heads)
        cuts = tuple((row, n // 64 * 64, len(lengths)) for row, n in enumerate(lengths[:1]))
        layer = [pool[:, 0] for pool in pools]
        return partial(gdn.prefill, *inputs, *layer, prefill_rows(lengths, cuts=cuts))

    num_bytes = tokens * (2 * 16 * 128 + 2 * heads * 128) * 2
    shape = f"{len(lengths)} rows, {tokens} tokens, {heads} heads"
    return Case("gdn.prefill", shape, make, num_bytes, 6 * 128 * 128 * heads * tokens, most_sets=2)


def attention_extend(rows: int, context: int, width: int, heads: int, dtype: torch.dtype) -> Case:
    num_pages = context // 64

    def make(_: int) -> Call:
        pages = randn(1 + rows * num_pages, 1, 2, 2, 64, 256).to(dtype)
        q = randn(rows * width, heads, 256)
        return partial(attention.extend, q, pages[:, 0], extend_rows(rows, context, width, num_pages), 1 / 16)

    shape = f"{rows} rows of {width} on {context}, {heads}/2 heads, {_name(dtype)}"
    num_bytes = rows * context * 2 * 2 * 256 * dtype.itemsize
    return Case("attention.extend", shape, make, num_bytes, 4.0 * rows * width * context * heads * 256, most_sets=1)


def attention_prefill(length: int, context: int, heads: int, dtype: torch.dtype) -> Case:
    def make(_: int) -> Call:
        pages = randn(2 + context // 64, 1, 2, 2, 64, 256).to(dtype)
        rows = prefill_rows([length], start=context - length)
        return partial(attention.prefill, randn(length, heads, 256), pages[:, 0], rows, 1 / 16)

    pairs = length * (context - length) + length * (length + 1) / 2
    shape = f"{length} tokens on {context}, {heads}/2 heads, {_name(dtype)}"
    return Case("attention.prefill", shape, make, context * 2048, 4.0 * pairs * heads * 256, most_sets=1)


class Moe:
    """Weights of one layer's experts, made once."""

    def __init__(self, name: str, experts: int, top_k: int, width: int, ffn: int, is_fp8: bool) -> None:
        self.name, self.experts, self.top_k, self.width, self.ffn, self.is_fp8 = (
            name,
            experts,
            top_k,
            width,
            ffn,
            is_fp8,
        )
        kind = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        self.gate_up = torch.empty(experts, 2 * ffn, width, device="cuda", dtype=kind)
        self.down = torch.empty(experts, width, ffn, device="cuda", dtype=kind)
        for weight in (self.gate_up, self.down):
            for matrix in weight:
                matrix.copy_(randn(*matrix.shape))
        scales = [(experts, -(-w.shape[1] // 128), -(-w.shape[2] // 128)) for w in (self.gate_up, self.down)]
        self.scales = [torch.full(shape, 0.02, device="cuda") for shape in scales]

    def case(self, tokens: int) -> Case:
        torch.manual_seed(tokens)
        touched = torch.rand(tokens, self.experts).topk(self.top_k).indices.unique().numel()

        def make(i: int) -> Call:
            torch.manual_seed(tokens + i)
            chosen = torch.rand(tokens, self.experts).topk(self.top_k).indices.cuda()
            weights, x = torch.full((tokens, self.top_k), 1 / self.top_k, device="cuda"), randn(tokens, self.width)
            if not self.is_fp8:
                return partial(moe.experts, x, weights, chosen, self.gate_up, self.down)
            up, down = self.scales
            return partial(moe.experts_fp8, x, weights, chosen, self.gate_up, up, self.down, down)

        size = 1 if self.is_fp8 else 2
        num_bytes = touched * 3 * self.width * self.ffn * size + tokens * self.width * 4
        ops = 6.0 * tokens * self.top_k * self.width * self.ffn
        shape = f"{self.name}, {tokens} tokens, {touched} experts touched"
        return Case("moe.experts", shape, make, num_bytes, ops, FP8 if self.is_fp8 else BF16, most_sets=6)


def dense(tokens: int, outputs: int, inputs: int) -> Case:
    def make(_: int) -> Call:
        weight, scale = randn(outputs, inputs, dtype=torch.float8_e4m3fn), torch.ones(outputs // 128, inputs // 128)
        return partial(triton_fp8.linear_fp8, randn(tokens, inputs), weight, scale.cuda())

    num_bytes = outputs * inputs + tokens * (2 * inputs + 2 * outputs)
    shape = f"{tokens} x {inputs} -> {outputs}"
    return Case("linear.fp8", shape, make, num_bytes, 2.0 * tokens * outputs * inputs, FP8)


def small_cases() -> Iterator[Case]:
    ones = partial(torch.ones, device="cuda")
    for t in (32, 8192):
        cos, sin = torch.rand(2, t, 32, device="cuda")
        cases: list[tuple[str, str, Callable[[], Call], float]] = [
            (
                "norm.add_rms_norm",
                "3072",
                lambda t=t: partial(norm.add_rms_norm, *rows_of(2, t, 3072), ones(3072), 1e-6),
                24576,
            ),
            (
                "norm.gated_rms_norm",
                "64 x 128",
                lambda t=t: partial(norm.gated_rms_norm, *rows_of(2, t, 64, 128), ones(128), 1e-6),
                49152,
            ),
            (
                "rope.norm_rope",
                "32 x 256",
                lambda t=t, c=cos, s=sin: partial(rope.norm_rope, randn(t, 32, 256), ones(256), 1e-6, c, s),
                32768,
            ),
            ("gdn.normalize", "16 x 128", lambda t=t: partial(gdn.normalize, *rows_of(2, t, 16, 128)), 16384),
            ("gdn.gates", "64", lambda t=t: partial(gdn.gates, *rows_of(2, t, 64), ones(64), ones(64)), 768),
            ("linear.silu_mul", "2048", lambda t=t: partial(linear.silu_mul, randn(t, 2048)), 6144),
            ("linear.quantize", "3072", lambda t=t: partial(linear.quantize, randn(t, 3072)), 9312),
            ("moe.route", "256", lambda t=t: partial(moe.route, randn(t, 256), 8, True), 608),
        ]
        for name, shape, make, token_bytes in cases:
            yield Case(name, f"{t} x {shape}", lambda _, make=make: make(), t * token_bytes)
    yield Case("conv.prefill", "8192 x 12288", _conv_prefill, 8192 * 12288 * 4)
    for width in (1, 4):
        moved = 32 * 12288 * 2 * (3 + 3 * width)
        yield Case("conv.extend", f"32 rows of {width} x 12288", partial(_conv_extend, width), moved)
    for name, has_rules in (("greedy", None), ("any", False), ("top_k 20, top_p 0.95", True)):
        yield Case("sampling", f"32 x 248320, {name}", partial(_sampling, has_rules), 32 * 248320 * 4, most_sets=4)


def rows_of(count: int, *shape: int) -> list[Tensor]:
    return [randn(*shape) for _ in range(count)]


def _conv_prefill(_: int) -> Call:
    windows, ring = randn(4, 1, 3, 12288), randn(4, 1, 7, 12288)
    return partial(conv.prefill, randn(8192, 12288), randn(12288, 4), windows[:, 0], ring[:, 0], prefill_rows([8192]))


def _conv_extend(width: int, _: int) -> Call:
    ring = randn(32, 1, 3 + width, 12288)
    return partial(conv.extend, randn(32 * width, 12288), randn(12288, 4), ring[:, 0], extend_rows(32, 1000, width))


def _sampling(has_rules: bool | None, _: int) -> Call:
    logits = randn(32, 248320, dtype=torch.float32) * 3
    if has_rules is None:
        return partial(sampling.launch, logits, None, False)
    row = torch.tensor([0.7, 0.95, -math.inf], dtype=torch.float64).view(torch.int64).tolist()
    if not has_rules:
        row = torch.tensor([0.7, math.inf, -math.inf], dtype=torch.float64).view(torch.int64).tolist()
    table = torch.tensor([[*row, 20 if has_rules else 0, 12345]], device="cuda").repeat(32, 1)
    return partial(sampling.launch, logits, table, has_rules)


def gdn_extend_cases() -> Iterator[Case]:
    for heads in (64, 32):
        for rows in (1, 32, 128):
            for width in (1, 4, 8):
                yield gdn_extend(rows, width, heads)


def gdn_fold_cases() -> Iterator[Case]:
    yield gdn_fold(8, 36, 64)
    yield gdn_fold(1, 36, 64)


def gdn_prefill_cases() -> Iterator[Case]:
    for heads in (64, 32):
        for lengths in ([8192], [1024] * 8):
            yield gdn_prefill(lengths, heads)
    yield gdn_prefill([65536], 64)


def attention_extend_cases() -> Iterator[Case]:
    kinds = (torch.bfloat16, torch.float8_e4m3fn)
    for dtype in kinds:
        for width in (1, 4):
            yield attention_extend(32, 65536, width, 32, dtype)
    yield attention_extend(1, 8192, 1, 32, torch.bfloat16)
    yield attention_extend(1, 65536, 4, 32, torch.bfloat16)


def attention_prefill_cases() -> Iterator[Case]:
    for length, context in ((8192, 8192), (8192, 65536), (5056, 62656), (100, 60036)):
        yield attention_prefill(length, context, 32, torch.bfloat16)
    yield attention_prefill(8192, 65536, 32, torch.float8_e4m3fn)


def dense_cases() -> Iterator[Case]:
    for tokens in (1, 16, 64, 256, 8192):
        for outputs, inputs in ((20480, 3072), (3072, 8192), (16384, 3072)):
            yield dense(tokens, outputs, inputs)


def moe_fp8_cases() -> Iterator[Case]:
    layer = Moe("122B FP8", 256, 8, 3072, 1024, True)
    for tokens in (1, 32, 64, 256, 1024, 8192):
        yield layer.case(tokens)


def moe_bf16_cases() -> Iterator[Case]:
    layer = Moe("35B BF16", 256, 8, 2048, 512, False)
    for tokens in (1, 32, 256, 8192):
        yield layer.case(tokens)


SECTIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "gdn.extend": gdn_extend_cases,
    "gdn.fold": gdn_fold_cases,
    "gdn.prefill": gdn_prefill_cases,
    "attention.extend": attention_extend_cases,
    "attention.prefill": attention_prefill_cases,
    "small": small_cases,
    "dense": dense_cases,
    "moe.fp8": moe_fp8_cases,
    "moe.bf16": moe_bf16_cases,
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(case: Case, seconds: float) -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return {
        "name": f"kernel.{case.name}",
        "value": round(seconds * 1e6, 2),
        "unit": "us",
        "shape": case.shape,
        "floor_share": round(case.floor_s / seconds, 3),
        "gpus": 1,
        "hardware": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "commit": commit.stdout.strip() or "unknown",
        "command": "scripts/gpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS), help="these sections")
    parser.add_argument("--output", type=Path, help="where the rows go as JSON; rows that are there stay")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further case is begun")
    options = parser.parse_args()
    begin = time.monotonic()
    rows = json.loads(options.output.read_text()) if options.output and options.output.exists() else []
    for section in options.only:
        for case in SECTIONS[section]():
            if time.monotonic() - begin > options.budget:
                print("out of time")
                return
            try:
                seconds = measure(case)
            except Exception:  # noqa: BLE001 - one case that fails must not hide the others
                reason = traceback.format_exc(limit=-1).splitlines()
                print(
                    f"{case.name:18} {case.shape}: FAILED {next(x for x in reversed(reason) if 'rror' in x)[:150]}",
                    flush=True,
                )
                torch.cuda.synchronize()
                continue
            rows.append(_row(case, seconds))
            rates = f"{case.num_bytes / seconds / 1e12:5.2f} TB/s {case.num_ops / seconds / 1e12:6.1f} TFLOP/s"
            print(
                f"{case.name:18} {seconds * 1e6:9.1f} us {case.floor_s / seconds:6.1%} {rates}  {case.shape}",
                flush=True,
            )
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
