"""Held-out scores of a checkpoint, as a table and as JSON.

    python -m training.evaluate models/tiny --out scores.json                    # by Deltaserve, on the CPU
    python -m training.evaluate models/tiny --backend torch                      # by the training model, on a GPU
    python -m training.evaluate models/tiny --skills tool_call,sums --count 20   # a quick look
    python -m training.evaluate models/tiny --skills none --perplexity fp8 nvfp4 # other exports beside it

All answers are greedy. `exact` counts answers that are the expected one, letter for letter; `right` is looser (see
`training.cases`). Needles: `--needles` at each of three depths, for each length.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from training.cases import DEPTHS, NEEDLE, SKILLS, Case, cases
from training.data import Sampler
from training.encoder import shared_encoder

BACKENDS = {"engine": "training.engine_backend", "torch": "training.torch_backend"}
MAX_NEW_TOKENS = 320
NEEDLE_TOKENS = 40
CHATS = ("facts", "deltaserve", "chat", "unknown", "mixed", "story")
LENGTHS = (4096, 16384)
PERPLEXITY_ROWS, PERPLEXITY_CONTEXT = 12, 1023

Scores = dict[str, Any]


class Backend(Protocol):
    """A checkpoint that answers greedily."""

    def answers(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[str]: ...
    def perplexity(self, ids: np.ndarray, weights: np.ndarray) -> float: ...
    def acceptance(self, prompts: Sequence[list[int]], max_new_tokens: int) -> float: ...
    def close(self) -> None: ...


def open_backend(name: str, directory: Path) -> Backend:
    backend: Backend = import_module(BACKENDS[name]).Engine(directory)
    return backend


def score(backend: Backend, tokenizer: Path, found: Sequence[Case], max_new_tokens: int) -> Scores:
    """Shares of exact and of right answers, and the first wrong one."""
    encode, start = shared_encoder(str(tokenizer)), time.monotonic()
    answers = backend.answers([encode(case.prompt) for case in found], max_new_tokens)
    pairs = list(zip(found, answers, strict=True))
    wrong = [(case, answer) for case, answer in pairs if not case.is_exact(answer)]
    result: Scores = {
        "count": len(found),
        "exact": 1 - len(wrong) / len(found),
        "right": sum(case.is_right(answer) for case, answer in pairs) / len(found),
        "seconds": round(time.monotonic() - start, 1),
    }
    if wrong:
        case, answer = wrong[0]
        result["wrong"] = {"prompt": case.prompt[-300:], "expected": case.answer, "answer": answer}
    return result


def needle_scores(backend: Backend, tokenizer: Path, length: int, each: int, seed: int) -> Scores:
    """Over all depths."""
    found = cases(tokenizer, NEEDLE, each * len(DEPTHS), seed, length)
    return score(backend, tokenizer, found, NEEDLE_TOKENS)


def perplexity(backend: Backend, tokenizer: Path, seed: int = 0) -> float:
    """On held-out documents of every skill, tokens counted as in training."""
    ids, weights = Sampler(tokenizer, "heldout", seed, PERPLEXITY_CONTEXT).packed(PERPLEXITY_ROWS)
    return backend.perplexity(ids, weights)


def acceptance(backend: Backend, tokenizer: Path, count: int, seed: int) -> float:
    """Mean acceptance length with three drafts, on held-out chats."""
    encode = shared_encoder(str(tokenizer))
    found = [case for skill in CHATS for case in cases(tokenizer, skill, count, seed)]
    return backend.acceptance([encode(case.prompt) for case in found], MAX_NEW_TOKENS)


def evaluate(backend: Backend, tokenizer: Path, options: argparse.Namespace) -> Scores:
    """All scores by name, printed as they come."""
    scores: Scores = {}
    for skill in options.skills:
        scores[skill] = score(backend, tokenizer, cases(tokenizer, skill, options.count, options.seed), MAX_NEW_TOKENS)
        _print(skill, scores[skill])
    for length in options.lengths if options.needles else ():
        name = f"{NEEDLE}_{length}"
        scores[name] = needle_scores(backend, tokenizer, length, options.needles, options.seed)
        _print(name, scores[name])
    scores["perplexity"] = perplexity(backend, tokenizer, options.seed)
    scores["acceptance"] = acceptance(backend, tokenizer, max(1, options.count // len(CHATS)), options.seed)
    return scores


def _print(name: str, result: Scores) -> None:
    exact, right = f"{result['exact']:.1%}", f"{result['right']:.1%}"
    print(f"{name:16} {result['count']:5} {exact:>8} {right:>8} {result['seconds']:8.1f} s", flush=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, default="engine")
    parser.add_argument("--skills", default=",".join(SKILLS), help="names with commas between, or none")
    parser.add_argument("--count", type=int, default=50, help="cases of each skill")
    parser.add_argument("--needles", type=int, default=20, help="at each depth and length; 0 for none")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="of the needles' texts, in tokens")
    parser.add_argument("--perplexity", type=Path, nargs="*", default=[], help="directories to compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parsed = parser.parse_args(arguments)
    parsed.skills = [] if parsed.skills == "none" else parsed.skills.split(",")
    parsed.lengths = [int(length) for length in parsed.lengths.split(",")]
    return parsed


def main(arguments: list[str] | None = None) -> Scores:
    options = parse_arguments(arguments)
    tokenizer = options.directory / "tokenizer.json"
    backend = open_backend(options.backend, options.directory)
    scores = evaluate(backend, tokenizer, options)
    backend.close()
    for directory in options.perplexity:
        other = open_backend(options.backend, directory)
        scores[f"perplexity of {directory.name}"] = perplexity(other, tokenizer, options.seed)
        other.close()
    for name, value in scores.items():
        if isinstance(value, float):
            print(f"{name:30} {value:.4f}")
    if options.out:
        options.out.write_text(json.dumps(scores, indent=1) + "\n", "utf-8")
    return scores


if __name__ == "__main__":
    main()
