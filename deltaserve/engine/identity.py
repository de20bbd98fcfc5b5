"""Names a model by what its files hold, so that cached prefixes of two models are never taken for each other.

The digest covers config.json and, of each weight file, name, size, the head that lists its tensors, and samples spread
over its data. It does not depend on where the files lie or when they were written: workers that serve the same
checkpoint on several hosts give equal blocks equal hashes. Two finetunes of one model have equal heads; the samples
tell them apart. What else changes the bytes of the cache (types, dummy weights) is part of the name too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from deltaserve.core.config import EngineConfig
from deltaserve.runner.device import device_of

_HEAD_BYTES = 1 << 16
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 1 << 12


def model_identity(config: EngineConfig) -> str:
    """A hexadecimal digest, the same after a restart. Raises OSError where a file cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    cache, directory = config.cache, config.model
    weights = f"dummy {config.seed}" if config.load_format == "dummy" else "files"
    types = f"{device_of(config).type} {config.dtype} {cache.kv_cache_dtype} {cache.state_dtype}"
    _add(digest, f"{types} {weights}".encode())
    _add(digest, (directory / "config.json").read_bytes())
    if config.load_format != "dummy":
        for path in sorted(directory.glob("*.safetensors")):
            _add_weights(digest, path)
    return digest.hexdigest()


def _add_weights(digest: hashlib.blake2b, path: Path) -> None:
    size_bytes = path.stat().st_size
    _add(digest, f"{path.name} {size_bytes}".encode())
    with path.open("rb") as file:
        _add(digest, file.read(_HEAD_BYTES))
        for index in range(_NUM_SAMPLES):
            file.seek(index * max(size_bytes - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
            _add(digest, file.read(_SAMPLE_BYTES))


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    """With its length, so that no two lists of parts look alike."""
    digest.update(len(part).to_bytes(8, "little") + part)
