"""Sampling on the CPU. See `reference` for the rules and their order."""

from __future__ import annotations

from deltaserve.ops.sampling.noise import seed_keys, stream_keys
from deltaserve.ops.sampling.reference import Logprobs, Rules, greedy, logprobs, sample

__all__ = ["Logprobs", "Rules", "greedy", "logprobs", "sample", "seed_keys", "stream_keys"]
