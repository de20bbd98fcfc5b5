"""The loader's books: which stored tensor fills which part of which parameter. Made from headers, before any data.

A *cell* is (parameter, section, expert): the least that one tensor can fill. The plan is right when every cell is
filled exactly once, every stored tensor is used once or skipped for a stated reason, and every shape and format fits.
What is wrong is collected, not raised at the first find: `inspect` prints it, `LoadPlan.check` raises it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deltaserve.core.errors import CheckpointError
from deltaserve.model import names, quant
from deltaserve.model.checkpoint import MTP_PREFIX, Checkpoint, TensorInfo, first_ten
from deltaserve.model.config import ModelConfig
from deltaserve.model.names import Target, Transform
from deltaserve.model.params import Parameter
from deltaserve.model.quant import Format

Cell = tuple[str, int, int | None]
TIED = "lm_head.weight"
NO_DRAFT_HEAD = "draft head: the model is built without one"


@dataclass(frozen=True, slots=True)
class Module:
    """What is stored under one stem: a weight, and the scales that belong to it.

    `tensors` is keyed by suffix; the one tensor of a stem that stands without a suffix is keyed "weight" too.
    """

    stem: str
    has_suffix: bool
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """One module's tensors (by suffix) and where its weight goes. `is_tied`: only compared with what is there."""

    stem: str
    tensors: Mapping[str, TensorInfo]
    format: Format
    target: Target
    is_tied: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    @property
    def position(self) -> tuple[bool, Path, int]:
        """Jobs in this order read each file from front to back."""
        weight = self.tensors[self.format.suffixes[0]]
        return self.is_tied, weight.file, weight.start


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`skipped`: stored name -> why it is not read. `problems`: sentences, none if the checkpoint can be loaded."""

    directory: Path
    jobs: tuple[Job, ...]
    skipped: Mapping[str, str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return sum(job.num_bytes for job in self.jobs)

    def summary(self) -> tuple[str, ...]:
        """Sentences for people: what is not read and why, and where the config and the tensors differ."""
        found_why = by_reason(self.skipped).items()
        unread = (f"not read: {len(found)} tensors, such as {found[0]} ({why})" for why, found in found_why)
        return (*unread, *self.notes)

    def check(self) -> None:
        """Raises CheckpointError with everything that is wrong."""
        if self.problems:
            raise CheckpointError(f"{self.directory} cannot be loaded: " + "; ".join(self.problems))


def by_reason(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    """Names by the reason why they are skipped."""
    names_by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in skipped.items():
        names_by_reason[reason].append(name)
    return dict(names_by_reason)


def plan_load(config: ModelConfig, parameters: Mapping[str, Parameter], checkpoint: Checkpoint) -> LoadPlan:
    """`parameters` are the model's by name, a tied one under each of its names; the meta device will do."""
    has_draft_head = any(name.startswith(MTP_PREFIX) for name in parameters)
    skipped, modules = group_modules(checkpoint.tensors, has_draft_head)
    books = _Books(config, parameters)
    jobs = [job for module in modules if (job := books.assign(module)) is not None]
    declared = quant.declared(checkpoint.directory)
    formats = {job.format.name for job in jobs}
    refusal = declared.refusal(formats)
    return LoadPlan(
        directory=checkpoint.directory,
        jobs=tuple(sorted(jobs, key=lambda job: job.position)),
        skipped=skipped,
        problems=(*(() if refusal is None else (refusal,)), *books.problems()),
        notes=tuple(declared.notes(formats)),
    )


def group_modules(tensors: Mapping[str, TensorInfo], has_draft_head: bool) -> tuple[dict[str, str], list[Module]]:
    """What is skipped (name -> reason), and the rest by module."""
    skipped: dict[str, str] = {}
    modules: dict[tuple[str, bool], Module] = {}
    for name, info in tensors.items():
        reason = names.skip_reason(name)
        if reason is None and name.startswith(MTP_PREFIX) and not has_draft_head:
            reason = NO_DRAFT_HEAD
        if reason is not None:
            skipped[name] = reason
            continue
        stem, suffix = quant.split_name(name)
        module = modules.setdefault((stem, bool(suffix)), Module(stem, bool(suffix)))
        module.tensors[suffix or "weight"] = info
    return skipped, list(modules.values())


def stored_shape(parameter: Parameter, target: Target) -> tuple[int, ...]:
    """The shape a stored tensor must have to fill its target, on the whole model."""
    shape = list(parameter.shape)
    if parameter.placement is not None:
        shape[parameter.placement.dim] = sum(parameter.placement.sections[s].size for s in target.sections)
    if target.expert is not None:
        del shape[0]
    if target.transform is Transform.DROP_DIM_1:
        shape.insert(1, 1)
    return tuple(shape)


@dataclass(slots=True)
class _Books:
    config: ModelConfig
    parameters: Mapping[str, Parameter]
    filled_by: dict[Cell, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def assign(self, module: Module) -> Job | None:
        """The job for one module, or None after writing down what is wrong with it."""
        target = self._target(module)
        if target is None:
            self.unexpected += [info.name for info in module.tensors.values()]
            return None
        is_tied = target.parameter == TIED and self.config.tie_word_embeddings
        if not is_tied:
            self._claim(module.stem, target)
        try:
            format = quant.detect(module.stem, module.tensors)
        except quant.FormatError as error:
            if error.refused is not None:
                self.refused[error.refused].append(module.stem)
            else:
                self.malformed.append(str(error))
            return None
        if not self._fits(format, module.tensors, target):
            return None
        return Job(module.stem, module.tensors, format, target, is_tied)

    def problems(self) -> list[str]:
        """Sentences, each with the first ten names and the count of the rest."""
        lists = (
            ("missing tensors", self._missing()),
            ("tensors with no place in this model", self.unexpected),
            ("parts of the model that are stored twice", self.twice),
            ("tensors of the wrong shape", self.misshapen),
            ("modules whose tensors do not fit together", self.malformed),
        )
        refused = ((f"modules in {name}, which is not served", stems) for name, stems in self.refused.items())
        return [f"{what} ({len(found)}): {first_ten(found)}" for what, found in (*refused, *lists) if found]

    def _target(self, module: Module) -> Target | None:
        target = names.resolve(module.stem)
        if target is None or target.parameter not in self.parameters or target.has_suffix != module.has_suffix:
            return None
        num_experts = len(self.parameters[target.parameter])
        return None if target.expert is not None and target.expert >= num_experts else target

    def _claim(self, stem: str, target: Target) -> None:
        others = []
        for cell in self._cells(target.parameter, target.sections, target.expert):
            other = self.filled_by.setdefault(cell, stem)
            others += [other] if other != stem and other not in others else []
        self.twice += [f"{other} and {stem}" for other in others]

    def _fits(self, format: Format, stored: Mapping[str, TensorInfo], target: Target) -> bool:
        expected = stored_shape(self.parameters[target.parameter], target)
        weight = stored[format.suffixes[0]]
        found = format.weight_shape(weight.shape)
        if found == expected:
            return True
        packed = f", which is {list(found)} unpacked" if found != weight.shape else ""
        self.misshapen.append(f"{weight.name} is {list(weight.shape)}{packed}, expected {list(expected)}")
        return False

    def _cells(self, name: str, sections: tuple[int, ...], expert: int | None) -> Iterator[Cell]:
        parameter = self.parameters[name]
        is_stack = parameter.dim() == 3
        experts = [expert] if expert is not None or not is_stack else range(len(parameter))
        return itertools.product((name,), sections, experts)

    def _missing(self) -> list[str]:
        found: dict[str, None] = {}
        for name, parameter in self.parameters.items():
            if name == TIED and self.config.tie_word_embeddings:
                continue
            num_sections = 1 if parameter.placement is None else len(parameter.placement.sections)
            for section in range(num_sections):
                cells = [cell for cell in self._cells(name, (section,), None) if cell not in self.filled_by]
                packed = len(cells) == len(parameter)
                for _, _, expert in cells:
                    found[self._source(name, section, expert, packed)] = None
        return list(found)

    def _source(self, name: str, section: int, expert: int | None, packed: bool) -> str:
        stem = names.sources(self.config, name, section, expert, packed=packed)
        target = names.resolve(stem)
        return stem + ".weight" if target is not None and target.has_suffix else stem
