"""What every test stands on: a clean environment, one thread, no network, and sample checkpoints made once a session.

The environment is set before any test module is imported, because torch and the Hub's libraries read it at import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

_INHERITED = ("DELTASERVE_", "HF_", "TRANSFORMERS_", "VLLM_", "OPENAI_")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")

for _name in [name for name in os.environ if name.startswith(_INHERITED) or name in _PROXIES]:
    del os.environ[_name]
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)

from deltaserve.model.sample import write_sample_checkpoint  # noqa: E402

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`write_sample_checkpoint` with the directory chosen for you; equal arguments share one. Do not write into it."""
    made: dict[tuple[tuple[str, object], ...], Path] = {}

    def make(**arguments: object) -> Path:
        key = tuple(sorted(arguments.items()))
        if key not in made:
            directory = tmp_path_factory.mktemp("checkpoint")
            write_sample_checkpoint(directory, **arguments)  # type: ignore[arg-type]
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def sample_checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    """A small mixture-of-experts checkpoint with a draft head, tokenizer and chat template."""
    return make_checkpoint(kind="moe")
