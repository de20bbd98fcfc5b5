"""A naive scheduler for a real runner: plans rows by hand, so that drafts can be cut, dropped and placed at will.

Requests keep their own pages and slots, handed out in rising order and never taken back. Every step plans all
requests that have work: verify and decode rows first, then prefill chunks. A second reading of the rules of
`core.plan`; whoever breaks them here would see NaN or wrong tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deltaserve.cache.layout import plan_pools
from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from deltaserve.core.plan import Admission, Cut, Logits, Row, RowKind, RowOutput, StepPlan
from deltaserve.core.types import BLOCK, SamplingParams
from deltaserve.model.config import ModelConfig
from deltaserve.runner.build import cache_spec, load_runner


@dataclass(eq=False)
class Job:
    """One request: `known` are prompt and output, of which `computed` are in the cache, the latest state in `slot`."""

    id: int
    row: int
    prompt: list[int]
    params: SamplingParams
    num_drafts: int
    known: list[int]
    computed: int = 0
    boundary: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    num_pages_sent: int = 0
    drafts: tuple[int, ...] = ()
    snapshots: dict[int, int] = field(default_factory=dict)
    outputs: list[RowOutput] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)  # tokens that each of its verify rows gave
    prefill_end: int = 0
    stop_ids: tuple[int, ...] = ()

    @property
    def output_ids(self) -> list[int]:
        return self.known[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        assert self.params.max_tokens is not None
        return len(self.output_ids) >= self.params.max_tokens or any(output.error for output in self.outputs)


class ByHand:
    """`lookahead`: pages for the newest token and all drafts are there before they are needed, or only at need.

    `rng` cuts each row's drafts at random.
    """

    def __init__(
        self,
        directory: Path,
        num_drafts: int,
        *,
        num_rows: int = 24,
        chunk: int = 1 << 20,
        max_model_len: int = 512,
        lookahead: bool = True,
        rng: random.Random | None = None,
        synthetic: float | None = None,
    ) -> None:
        config = EngineConfig(
            model=directory,
            max_model_len=max_model_len,
            num_threads=1,
            debug_checks=True,
            cache=CacheConfig(num_pages=400, num_snapshots=300),
            scheduler=SchedulerConfig(num_rows),
            speculative=SpeculativeConfig(num_drafts, synthetic),
        )
        model_config = ModelConfig.from_directory(directory)
        spec = cache_spec(config, model_config)
        self.sizes = plan_pools(spec, config.cache, config.scheduler, max_model_len, available_bytes=1 << 32)
        self.runner, _ = load_runner(config, model_config, self.sizes)
        self.num_drafts, self.chunk, self.lookahead, self.rng = num_drafts, chunk, lookahead, rng
        self.max_model_len = max_model_len
        self.jobs: list[Job] = []
        self.next_page, self.next_slot = 1, 1
        self.admitted: list[Job] = []
        self.retired: list[int] = []
        self.plans: list[StepPlan] = []
        self.free_rows = list(range(num_rows))

    def add(self, prompt: Sequence[int], params: SamplingParams, num_drafts: int | None = None, **more: object) -> Job:
        drafts = self.num_drafts if num_drafts is None else num_drafts
        job = Job(len(self.jobs), self.free_rows.pop(0), list(prompt), params, drafts, list(prompt), **more)  # type: ignore[arg-type]
        job.prefill_end = len(prompt)
        self.jobs.append(job)
        self.admitted.append(job)
        return job

    def move(self, job: Job, boundary: int = 0) -> None:
        """Preempt the job: it comes back on another row, from its snapshot at `boundary`, with new pages behind."""
        self.retired.append(job.row)
        self.free_rows.append(job.row)
        job.row = self.free_rows.pop(0)
        job.slot = job.snapshots[boundary] if boundary else 0
        job.computed = job.boundary = boundary
        job.pages = job.pages[: boundary // BLOCK]
        job.num_pages_sent, job.drafts, job.prefill_end = 0, (), len(job.known)
        self.admitted.append(job)

    def leave(self, job: Job) -> None:
        self.retired.append(job.row)
        self.free_rows.append(job.row)
        self.jobs = [other for other in self.jobs if other is not job]

    def run(self) -> list[list[int]]:
        while any(not job.is_done for job in self.jobs):
            self.step()
        return [job.output_ids[: job.params.max_tokens] for job in self.jobs]

    def step(self) -> list[Row]:
        plan = self.plan()
        output = self.runner.execute(plan)
        self.take(plan, output.rows)
        return list(plan.rows)

    def plan(self) -> StepPlan:
        alive = [job for job in self.jobs if not job.is_done]
        rows = [self._extend(job) for job in alive if job.computed >= job.prefill_end]
        rows += [self._prefill(job) for job in alive if job.computed < job.prefill_end]
        admitted = tuple(
            Admission(job.id, job.row, tuple(job.prompt), tuple(job.output_ids), job.params, job.stop_ids)
            for job in self.admitted
        )
        plan = StepPlan(len(self.plans), tuple(rows), admitted, tuple(self.retired))
        self.admitted, self.retired = [], []
        self.plans.append(plan)
        return plan

    def take(self, plan: StepPlan, outputs: Sequence[RowOutput]) -> None:
        for row, output in zip(plan.rows, outputs, strict=True):
            job = next(job for job in self.jobs if job.id == row.request_id)
            job.outputs.append(output)
            job.verified += [len(output.token_ids)] if row.kind == RowKind.VERIFY else []
            job.drafts = output.draft_ids
            job.computed = row.start + (len(row.token_ids) if row.kind == RowKind.PREFILL else len(output.token_ids))
            job.known += output.token_ids
            assert len(output.token_ids) <= (len(row.token_ids) if row.kind == RowKind.VERIFY else 1), output
            assert len(output.draft_ids) <= row.num_drafts, output
            if row.slot_out != row.slot_in:
                job.boundary = row.cuts[-1].position if row.cuts else row.start
                job.slot = row.slot_out
                job.snapshots |= {cut.position: cut.slot for cut in row.cuts} or {job.boundary: job.slot}

    def _extend(self, job: Job) -> Row:
        assert job.computed == len(job.known) - 1, job
        num_ring = job.computed - job.boundary
        room = min(BLOCK - num_ring % BLOCK, self.max_model_len - job.computed) - 1
        drafts = job.drafts[:room]
        if self.rng is not None:
            drafts = drafts[: self.rng.randrange(len(drafts) + 1)]
        kind = RowKind.VERIFY if drafts else RowKind.DECODE
        slot_out = self._slot() if num_ring == BLOCK else job.slot
        return self._row(job, kind, (job.known[-1], *drafts), slot_out, num_ring, ())

    def _prefill(self, job: Job) -> Row:
        end = min(job.computed + self.chunk, job.prefill_end)
        if end < job.prefill_end:
            end = end // BLOCK * BLOCK
        first = job.computed // BLOCK * BLOCK + BLOCK
        cuts = tuple(Cut(position, self._slot()) for position in range(first, end + 1, BLOCK))
        slot_out = cuts[-1].slot if cuts else job.slot
        return self._row(job, RowKind.PREFILL, tuple(job.known[job.computed : end]), slot_out, 0, cuts)

    def _row(
        self, job: Job, kind: RowKind, tokens: tuple[int, ...], slot_out: int, num_ring: int, cuts: tuple[Cut, ...]
    ) -> Row:
        end = job.computed + len(tokens)
        ahead = min(end + 1 + self.num_drafts, self.max_model_len) if self.lookahead else end
        while len(job.pages) * BLOCK < ahead:
            job.pages.append(self.next_page)
            self.next_page += 1
        new, offset = tuple(job.pages[job.num_pages_sent :]), job.num_pages_sent
        job.num_pages_sent = len(job.pages)
        is_last = kind != RowKind.PREFILL or end == job.prefill_end
        logits = Logits.ALL if kind == RowKind.VERIFY else Logits.LAST if is_last else Logits.NONE
        return Row(
            job.id, job.row, kind, job.computed, tokens, offset, new, job.slot, slot_out, num_ring, cuts, logits,
            is_last, job.num_drafts,
        )  # fmt: skip

    def _slot(self) -> int:
        self.next_slot += 1
        return self.next_slot - 1
