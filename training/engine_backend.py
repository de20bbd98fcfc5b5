"""Answers and probabilities from Deltaserve itself, on the CPU.

Only drafts are judged by the training model: the engine's own answers, and what the draft head would have guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deltaserve.core.types import SamplingParams
from deltaserve.engine.llm import LLM
from training.generate import acceptance
from training.model import load_checkpoint

NUM_ROWS, NUM_DRAFTS = 16, 3


class Engine:
    """A checkpoint that answers greedily; `close` gives its memory back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.llm = LLM(directory, max_num_seqs=NUM_ROWS)

    def answers(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[str]:
        """What follows each prompt up to the end of the turn."""
        params = SamplingParams(max_tokens=max_new_tokens, temperature=0.0)
        return [completion.text for completion in self.llm.generate(list(prompts), params)]

    def perplexity(self, ids: np.ndarray, weights: np.ndarray) -> float:
        """Of tokens [rows, length], each counted by its weight."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        completions = self.llm.generate([row.tolist() for row in ids], params)
        loss = total = 0.0
        for completion, row in zip(completions, weights, strict=True):
            assert completion.prompt_logprobs is not None
            for token, weight in zip(completion.prompt_logprobs[1:], row[1:], strict=True):
                assert token is not None
                loss, total = loss - float(weight) * token.logprob, total + float(weight)
        return math.exp(loss / total)

    def acceptance(self, prompts: Sequence[list[int]], max_new_tokens: int) -> float:
        """Mean tokens per step with `NUM_DRAFTS` drafts."""
        params = SamplingParams(max_tokens=max_new_tokens, temperature=0.0)
        completions = self.llm.generate(list(prompts), params)
        answered = [(list(prompt), list(done.token_ids)) for prompt, done in zip(prompts, completions, strict=True)]
        return acceptance(load_checkpoint(self.directory), answered, NUM_DRAFTS)

    def close(self) -> None:
        self.llm.close()
