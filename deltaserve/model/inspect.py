"""What a model directory holds and whether it can be served, from its JSON files and the headers of its weights.

The loader's own plan is made against a model on the meta device, so what is refused here is what loading would refuse,
in the same words. A directory that cannot be served still gives a Report, with everything that could be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deltaserve.core.errors import ConfigError
from deltaserve.model import names, quant
from deltaserve.model.checkpoint import MTP_PREFIX, Checkpoint, read_checkpoint
from deltaserve.model.config import ModelConfig
from deltaserve.model.config_file import read_json
from deltaserve.model.load_plan import LoadPlan, Module, by_reason, group_modules, plan_load
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.model.sizes import ParameterCounts, conv_state_bytes, parameter_counts, state_bytes
from deltaserve.model.weights import parameters_by_name
from deltaserve.parallel.mesh import SINGLE

FAMILIES = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, 3.6, 3.8 (dense)",
    "qwen3_5_moe_text": "Qwen3.5, 3.6, 3.8 (mixture of experts)",
}
STATE_DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("float32", "bfloat16", "fp8_e4m3")
UNPLACED = "unknown"

Formats = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Tensors that are not read for one reason; `example` is the first of them."""

    reason: str
    num_tensors: int
    num_bytes: int
    example: str


@dataclass(frozen=True, slots=True)
class SequenceBytes:
    """What a sequence costs over all ranks, by dtype: its recurrent state, its convolution window, and each token's
    KV, the draft head's included."""

    state: Mapping[str, int]
    window: Mapping[str, int]
    kv_per_token: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """`refusals` are the reasons why it cannot be served; none if it can.

    `formats` counts modules by kind (`names.Kind`) and format. What needs a config is None without a valid one.
    """

    directory: Path
    config: ModelConfig | None
    parameters: ParameterCounts | None
    sequence: SequenceBytes | None
    has_mtp: bool
    num_tensors: int
    num_bytes: int
    formats: Formats
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people, without colours."""
        verdict = "can be served" if not self.refusals else "cannot be served:"
        return [
            str(self.directory),
            *self._shape_lines(),
            f"  on disk      {self.num_tensors} tensors, {_size(self.num_bytes)}",
            "formats (modules of each kind)" if self.formats else "formats      nothing could be read",
            *(f"  {kind:<28}{_counts(found)}" for kind, found in self.formats.items()),
            *(["skipped"] if self.skipped else []),
            *(f"  {s.num_tensors} ({_size(s.num_bytes)}; {s.example}): {s.reason}" for s in self.skipped),
            *self._sequence_lines(),
            *(f"note: {note}" for note in self.notes),
            verdict,
            *(f"  {refusal}" for refusal in self.refusals),
        ]

    def _shape_lines(self) -> Iterator[str]:
        c, counts = self.config, self.parameters
        if c is None or counts is None:
            return
        part = ", the text part of a multimodal checkpoint" if c.is_multimodal else ""
        head = "with a draft head (MTP)" if self.has_mtp else "no draft head (MTP)"
        yield f"  family       {FAMILIES[c.model_type]}, {c.model_type}{part}"
        yield f"  layers       {c.num_layers}: {c.num_gdn_layers} GDN, {c.num_attention_layers} attention; {head}"
        yield f"  width        {c.hidden_size}, vocabulary {c.vocab_size}{' (tied)' if c.tie_word_embeddings else ''}"
        yield f"  attention    {c.num_heads} query heads, {c.num_kv_heads} KV heads of {c.head_dim}"
        yield (
            f"  GDN          {c.num_key_heads} key heads of {c.key_head_dim}, "
            f"{c.num_value_heads} value heads of {c.value_head_dim}, convolution of {c.conv_width}"
        )
        if c.is_moe:
            yield (
                f"  experts      {c.num_experts} of width {c.moe_intermediate_size}, {c.num_experts_per_token} a token "
                f"and a shared one of {c.shared_intermediate_size}"
            )
        if not all(c.moe_layers):
            yield f"  MLP          {c.intermediate_size} wide"
        draft = f", draft head {_billions(counts.mtp)}" if counts.mtp else ""
        yield f"  parameters   {_billions(counts.base)}, {_billions(counts.active)} for one token{draft}"
        yield f"  context      {c.max_position_embeddings} tokens"

    def _sequence_lines(self) -> Iterator[str]:
        if self.sequence is not None:
            yield "one sequence takes"
            yield f"  recurrent state    {_sizes(self.sequence.state)}"
            yield f"  conv window        {_sizes(self.sequence.window)}"
            yield f"  KV of each token   {_sizes(self.sequence.kv_per_token)}"


def inspect_checkpoint(directory: Path | str) -> Report:
    """Reads no weights. Whatever is wrong with the directory is in `refusals`; nothing is raised."""
    directory = Path(directory)
    refusals: list[str] = []
    checkpoint = _checkpoint(directory, refusals)
    has_mtp = any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors)
    config = _config(directory, has_mtp if checkpoint.tensors else None, refusals)
    plan = _plan(config, checkpoint, refusals) if config is not None and checkpoint.tensors else None
    skipped, modules = group_modules(checkpoint.tensors, has_draft_head=True)
    ignored = [f"{file.name} is not in the index and is not read" for file in checkpoint.ignored_files]
    return Report(
        directory=directory,
        config=config,
        parameters=None if config is None else parameter_counts(config),
        sequence=None if config is None else _sequence_bytes(config),
        has_mtp=has_mtp,
        num_tensors=len(checkpoint.tensors),
        num_bytes=checkpoint.num_bytes,
        formats=_formats(modules),
        skipped=_skipped(checkpoint, skipped),
        notes=(*(plan.notes if plan is not None else ()), *ignored),
        refusals=tuple(refusals),
    )


def _checkpoint(directory: Path, refusals: list[str]) -> Checkpoint:
    try:
        return read_checkpoint(directory)
    except ConfigError as error:
        refusals.append(str(error))
        return Checkpoint(directory, {})


def _config(directory: Path, has_mtp: bool | None, refusals: list[str]) -> ModelConfig | None:
    """From config.json alone, so that broken weight files do not hide the shape; the tensors decide on a draft head."""
    try:
        config = ModelConfig.from_dict(read_json(directory / "config.json"))
        return config if has_mtp is None else replace(config, num_mtp_layers=int(has_mtp))
    except ConfigError as error:
        refusals.append(str(error))
        return None


def _plan(config: ModelConfig, checkpoint: Checkpoint, refusals: list[str]) -> LoadPlan | None:
    try:
        with torch.device("meta"):
            model = Qwen3_5(config, SINGLE, torch.float32)
        plan = plan_load(config, parameters_by_name(model), checkpoint)
    except ConfigError as error:
        refusals.append(str(error))
        return None
    refusals.extend(plan.problems)
    return plan


def _sequence_bytes(config: ModelConfig) -> SequenceBytes:
    return SequenceBytes(
        state={dtype: state_bytes(config, dtype) for dtype in STATE_DTYPES},
        window={dtype: conv_state_bytes(config, dtype) for dtype in STATE_DTYPES},
        kv_per_token={dtype: config.cache_spec(kv_dtype=dtype).kv_bytes_per_token for dtype in KV_DTYPES},
    )


def _formats(modules: Iterable[Module]) -> Formats:
    """Modules counted by kind, in the order of `Kind`, and by format; refused and malformed ones too."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in (*names.Kind, UNPLACED)}
    for module in modules:
        target = names.resolve(module.stem)
        try:
            format = quant.detect(module.stem, module.tensors).name
        except quant.FormatError as error:
            format = error.refused or UNPLACED
        found[target.kind if target is not None else UNPLACED][format] += 1
    return {str(kind): dict(counts) for kind, counts in found.items() if counts}


def _skipped(checkpoint: Checkpoint, skipped: Mapping[str, str]) -> tuple[Skipped, ...]:
    return tuple(
        Skipped(reason, len(found), sum(checkpoint.tensors[name].num_bytes for name in found), found[0])
        for reason, found in by_reason(skipped).items()
    )


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{format} x {count}" for format, count in found.items())


def _sizes(by_dtype: Mapping[str, int]) -> str:
    return ", ".join(f"{_size(num_bytes)} in {dtype}" for dtype, num_bytes in by_dtype.items())


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:,.2f} GiB"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3f} B" if count >= 1e7 else f"{count:,}"
