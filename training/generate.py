"""Greedy answers and scores from the training model, without a cache: short, and enough to see how training goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.model import Model

Example = tuple[list[int], list[int]]  # a prompt's ids and the ids of the answer that is wanted


@torch.no_grad()
def greedy(model: Model, prompts: Sequence[list[int]], max_new_tokens: int, stop_ids: set[int]) -> list[list[int]]:
    """New tokens of each prompt, the stop token included where one comes."""
    known, open_ones = [list(prompt) for prompt in prompts], set(range(len(prompts)))
    for _ in range(max_new_tokens):
        rows = sorted(open_ones)
        if not rows:
            break
        hidden, ids = _hidden(model, [known[row] for row in rows])
        lasts = torch.tensor([len(known[row]) - 1 for row in rows], device=ids.device)
        choices = model.logits(hidden[torch.arange(len(rows), device=ids.device), lasts]).argmax(-1).tolist()
        for row, token in zip(rows, choices, strict=True):
            known[row].append(token)
            if token in stop_ids:
                open_ones.discard(row)
    return [row[len(prompt) :] for row, prompt in zip(known, prompts, strict=True)]


@torch.no_grad()
def exact(model: Model, examples: Sequence[Example], tokens_at_once: int = 65536) -> float:
    """Share of examples whose greedy answer is the wanted one, token for token."""
    hits = 0
    for batch in _batches(examples, tokens_at_once):
        hidden, ids = _hidden(model, [prompt + answer for prompt, answer in batch])
        for row, (prompt, answer) in enumerate(batch):
            places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            choices = model.logits(hidden[row, places]).argmax(-1)
            hits += int(torch.equal(choices, ids[row, len(prompt) : len(prompt) + len(answer)]))
    return hits / max(len(examples), 1)


@torch.no_grad()
def acceptance(model: Model, sequences: Sequence[Example], num_drafts: int = 3, tokens_at_once: int = 65536) -> float:
    """Mean tokens per step, 1 + accepted drafts, where each answer is the model's own greedy one."""
    tokens = steps = 0
    for batch in _batches(sequences, tokens_at_once):
        rows = [prompt + answer for prompt, answer in batch]
        hidden, ids = _hidden(model, rows)
        after = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        drafts = model.draft(after, hidden.flatten(0, 1), num_drafts)
        guesses = [model.logits(x).argmax(-1).view(ids.shape).tolist() for x, _ in drafts]
        for row, (prompt, answer) in enumerate(batch):
            counted = _walk(rows[row], [guess[row] for guess in guesses], len(prompt), len(prompt) + len(answer))
            tokens, steps = tokens + counted[0], steps + counted[1]
    return tokens / max(steps, 1)


def _walk(known: list[int], guesses: list[list[int]], start: int, stop: int) -> tuple[int, int]:
    """Tokens and steps of one answer at [start, stop), whose first token came with the prompt.

    Entry i of `guesses[s]` is what depth s + 1 says token i + 2 is.
    """
    at, steps = start, 0
    while at < stop - 1:
        accepted = 0
        while accepted < len(guesses) and at + accepted + 1 < stop:
            if guesses[accepted][at + accepted - 1] != known[at + accepted + 1]:
                break
            accepted += 1
        at, steps = min(at + accepted + 1, stop - 1), steps + 1
    return stop - 1 - start, steps


def _batches(examples: Sequence[Example], tokens_at_once: int) -> Iterator[list[Example]]:
    """Examples of like length together."""
    batch: list[Example] = []
    for example in sorted(examples, key=lambda pair: len(pair[0]) + len(pair[1])):
        if batch and (len(batch) + 1) * (len(example[0]) + len(example[1])) > tokens_at_once:
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def _hidden(model: Model, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Hidden [rows, length, D] and ids, padded on the right to a multiple of the chunk (which changes nothing)."""
    device, chunk = model.embed.device, model.settings.chunk
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % chunk)).to(device)
    return model.hidden(ids)[0].unflatten(0, ids.shape), ids
