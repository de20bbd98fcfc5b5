"""Feeds training with data that worker processes make while it runs.

Each worker answers requests (context, number of sequences) in order, from samplers of its own seed; the reader asks the
workers in turn, a few requests ahead. What is read depends on the seed, the number of workers and the contexts asked
for, never on timing.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from training.data import LONG_CONTEXT, LONG_SHARES, SHARES, Sampler

# Token ids uint16, loss weights float16 and skills uint8, each [sequences, context + 1].
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
SEED_STRIDE = 1000


class Feed:
    """Batches of `num_tokens` tokens (`num_tokens // context` sequences); `shares` replace some of the usual ones."""

    def __init__(
        self,
        tokenizer: Path,
        seed: int,
        num_workers: int,
        num_tokens: int,
        shares: Mapping[str, float] | None = None,
        ahead: int = 3,
    ) -> None:
        self.num_tokens, self.next_worker = num_tokens, 0
        self.waiting: deque[int] = deque()
        self.limit = ahead * num_workers
        context = multiprocessing.get_context("spawn")
        self.requests = [context.Queue() for _ in range(num_workers)]
        self.answers = [context.Queue(maxsize=ahead) for _ in range(num_workers)]
        self.processes = [
            context.Process(target=_work, args=(tokenizer, seed * SEED_STRIDE + i, shares or {}, *queues), daemon=True)
            for i, queues in enumerate(zip(self.requests, self.answers, strict=True))
        ]
        for process in self.processes:
            process.start()

    def next(self, context_of: Callable[[int], int], index: int) -> Batch:
        """Batch `index`, counted from 0 in this feed, whose context is `context_of(index)`; asks for later ones too.

        The context of a batch is fixed when it is asked for, up to `limit` batches before it is read.
        """
        while len(self.waiting) < self.limit:
            later = index + len(self.waiting)
            context = context_of(later)
            worker = later % len(self.requests)
            self.requests[worker].put((context, self.num_tokens // context))
            self.waiting.append(worker)
        return self.answers[self.waiting.popleft()].get(timeout=120)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def _work(
    tokenizer: Path,
    seed: int,
    shares: Mapping[str, float],
    requests: multiprocessing.queues.Queue,
    answers: multiprocessing.queues.Queue,
) -> None:
    samplers: dict[int, Sampler] = {}
    while True:
        context, num_sequences = requests.get()
        if context not in samplers:
            own = {**(LONG_SHARES if context >= LONG_CONTEXT else SHARES), **shares}
            samplers[context] = Sampler(tokenizer, split="train", seed=seed, context=context, shares=own)
        ids, weights, skills = samplers[context].packed_with_skills(num_sequences)
        answers.put((ids.astype(np.uint16), weights.astype(np.float16), skills))
