"""Finding the model to serve: a directory, a Hub id, or what there is when none is named.

A Hub id goes through `huggingface_hub`, which keeps its own cache and honours HF_HUB_OFFLINE. With no model named,
the one that ships with the project is served; if that is missing, a small random checkpoint is made once and kept.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.core.version import VERSION

PACKAGE = Path(__file__).parents[1]
SHIPPED = Path("models") / "tiny"
WRITE_SAMPLE = "import sys; from deltaserve.model.sample import write_sample_checkpoint as w; w(sys.argv[1])"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`name` is what clients call it unless told otherwise; `note` is a sentence for the start-up text, or empty."""

    directory: Path
    name: str
    note: str = ""


def find_checkpoint(model: str | None, revision: str | None = None, download_dir: str | None = None) -> Checkpoint:
    """Raises ConfigError when there is no such model."""
    if model is None:
        return _shipped() or _sample()
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} holds no config.json; give a checkpoint directory in the Hub's layout")
        return Checkpoint(directory, model)
    if directory.exists() or not HUB_ID.fullmatch(model):
        raise ConfigError(f"{model} is neither a directory nor a Hub id such as Qwen/Qwen3.5-4B")
    return Checkpoint(_download(model, revision, download_dir), model)


def _shipped() -> Checkpoint | None:
    found = (root / SHIPPED for root in (PACKAGE, PACKAGE.parent) if (root / SHIPPED / "config.json").is_file())
    directory = next(found, None)
    return None if directory is None else Checkpoint(directory, "tiny")


def _sample() -> Checkpoint:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deltaserve"
    directory = root / f"sample-{VERSION}"
    if not (directory / "config.json").is_file():
        _write_sample(directory)
    note = f"no model was named: serving a small random checkpoint, which writes nonsense ({directory})"
    return Checkpoint(directory, "sample", note)


def _write_sample(directory: Path) -> None:
    """In a process of its own, because it needs torch and this one shall not load it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".sample-", dir=directory.parent))
    paths = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    try:
        command = [sys.executable, "-c", WRITE_SAMPLE, str(temporary)]
        environment = os.environ | {"PYTHONPATH": paths}
        # In a session of its own: Ctrl-C reaches this process only, which then kills that one.
        subprocess.run(command, check=True, env=environment, start_new_session=True)  # noqa: S603 - our own code
        if not directory.exists():
            temporary.rename(directory)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"the sample checkpoint could not be written to {directory}; name a model") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _download(model: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only a model from the Hub needs it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        path = snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=list(WANTED_FILES))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{model} is no directory here, and neither in the Hub's cache nor reachable (HF_HUB_OFFLINE is "
            f"{os.environ.get('HF_HUB_OFFLINE', 'not set')}); download it first, or give a directory"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"{model} cannot be fetched from the Hub: {error}") from error
    return Path(path)
