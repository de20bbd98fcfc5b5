"""Answers and probabilities from the model as it is trained, in float32: for the machine that trains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from training.generate import acceptance, greedy
from training.model import load_checkpoint

STOPS = ("<|im_end|>", "<|endoftext|>")
NUM_DRAFTS = 3
TOKENS_AT_ONCE = 65536


class Engine:
    """A checkpoint that answers greedily."""

    def __init__(self, directory: Path) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_checkpoint(directory, device, torch.float32)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        found = [self.tokenizer.token_to_id(stop) for stop in STOPS]
        self.stop_ids = {token_id for token_id in found if token_id is not None}

    def answers(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[str]:
        """What follows each prompt up to the end of the turn."""
        return [self.tokenizer.decode(ids) for ids in self._answered(prompts, max_new_tokens)]

    def perplexity(self, ids: np.ndarray, weights: np.ndarray) -> float:
        """Of tokens [rows, length], each counted by its weight."""
        device, chunk = self.model.embed.device, self.model.settings.chunk
        loss = total = 0.0
        for row, own in zip(ids, weights, strict=True):
            known = torch.from_numpy(row).long().to(device)
            with torch.no_grad():
                hidden, _ = self.model.hidden(torch.nn.functional.pad(known, (0, -len(known) % chunk))[None])
                logprobs = self.model.logits(hidden[: len(known) - 1]).log_softmax(-1)
            chosen = logprobs.gather(1, known[1:, None])[:, 0].double().cpu().numpy()
            loss, total = loss - float((chosen * own[1:]).sum()), total + float(own[1:].sum())
        return math.exp(loss / total)

    def acceptance(self, prompts: Sequence[list[int]], max_new_tokens: int) -> float:
        """Mean tokens per step with `NUM_DRAFTS` drafts."""
        answered = self._answered(prompts, max_new_tokens)
        return acceptance(self.model, list(zip(prompts, answered, strict=True)), NUM_DRAFTS)

    def close(self) -> None:
        pass

    def _answered(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
        """A few at a time, by length, so that padding is short."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answered: list[list[int]] = [[] for _ in prompts]
        while order:
            most = max(1, TOKENS_AT_ONCE // (len(prompts[order[0]]) + max_new_tokens))
            batch, order = order[:most], order[most:]
            found = greedy(self.model, [prompts[index] for index in batch], max_new_tokens, self.stop_ids)
            for index, ids in zip(batch, found, strict=True):
                answered[index] = ids
        return answered
