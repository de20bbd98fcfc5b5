"""The work that every engine is given, and what is measured of it.

Closed loop: `num_streams` requests are in flight until all are done, each `prompt_tokens` random ids in and exactly
`output_tokens` out, greedy, end-of-sequence ignored. Prompts come from a seed, so that each engine of a round gets
the same ones and no round repeats those of another (no cache can help).
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deltaserve.core.errors import ConfigError

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Shape:
    num_streams: int
    prompt_tokens: int
    output_tokens: int

    @property
    def num_requests(self) -> int:
        """Enough for a few seconds: 6, 24 and 64 for 1, 8 and 32 streams."""
        return max(6, 2 * self.num_streams, min(3 * self.num_streams, 24))

    @property
    def streams(self) -> str:
        return "1 stream" if self.num_streams == 1 else f"{self.num_streams} streams"

    def __str__(self) -> str:
        return (
            f"{self.streams}, {self.num_requests} requests of {self.prompt_tokens} tokens in, "
            f"{self.output_tokens} out, greedy"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one shape. `first_token_s` is None for an engine that answers whole batches at once.

    `cpu_s` is processor time over all threads, None where the engine is another process.
    """

    num_output_tokens: int
    wall_s: float
    cpu_s: float | None = None
    first_token_s: tuple[float, ...] | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float | None:
        return self.num_output_tokens / self.cpu_s if self.cpu_s else None

    @property
    def median_first_token_s(self) -> float | None:
        return statistics.median(self.first_token_s) if self.first_token_s else None


class Target(Protocol):
    """An engine under measurement."""

    name: str

    def run(self, prompts: Prompts, shape: Shape) -> Measured: ...

    def close(self) -> None: ...


def random_prompts(shape: Shape, vocab_size: int, seed: int) -> list[list[int]]:
    """Ids from the middle of the vocabulary: neither single bytes nor added tokens."""
    rng = random.Random(f"{seed} {shape}")
    low, high = vocab_size // 16, vocab_size * 15 // 16
    return [[rng.randrange(low, high) for _ in range(shape.prompt_tokens)] for _ in range(shape.num_requests)]


def read_vocab_size(directory: Path) -> int:
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory} has no config.json with a vocab_size; give a checkpoint's directory") from error
