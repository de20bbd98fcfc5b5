"""`--speculative-config`: vLLM's JSON object, checked key by key, as a SpeculativeConfig.

    {"method": "mtp", "num_speculative_tokens": 3}
    {"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
     "synthetic_acceptance_length": 2.9}

| key                           | meaning                                                                              |
| ----------------------------- | ------------------------------------------------------------------------------------ |
| `method`                      | mtp, or one of vLLM's older names for it: the draft head of the checkpoint           |
| `num_speculative_tokens`      | most drafts a row proposes in a step, 0 (off) to 7                                   |
| `adaptive`                    | true: each request's number of drafts follows what is accepted                       |
| `rejection_sample_method`     | strict (the default): drafts are compared with what the model samples. synthetic:    |
|                               | they are accepted by a schedule, for measuring speed; the text then means nothing    |
| `synthetic_acceptance_length` | mean tokens a step, the sampled one included, 1 to 1 + drafts: vLLM's convention     |
| `synthetic_accepted_drafts`   | the same, drafts alone, 0 to drafts: TensorRT-LLM's convention, always one less      |

Anything else is refused by name. Standard library only, because LLM uses it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.errors import ConfigError

FLAG = "--speculative-config"
EXAMPLE = """'{"method": "mtp", "num_speculative_tokens": 3}'"""
METHODS = ("mtp", "qwen3_next_mtp", "qwen3_5_mtp")
STRICT, SYNTHETIC = "strict", "synthetic"
KEYS: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "num_speculative_tokens": (int,),
    "adaptive": (bool,),
    "rejection_sample_method": (str,),
    "synthetic_acceptance_length": (int, float),
    "synthetic_accepted_drafts": (int, float),
}


def speculative_config(given: str | Mapping[str, Any] | None) -> SpeculativeConfig:
    """From JSON text or the object itself; None: no drafts. Raises ConfigError naming the key."""
    if given is None:
        return SpeculativeConfig()
    values = _object(given)
    _check(values)
    if values.get("method") not in METHODS:
        raise ConfigError(f"{FLAG}: method must be mtp (the checkpoint's draft head), not {values.get('method')!r}")
    if "num_speculative_tokens" not in values:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is required")
    return SpeculativeConfig(
        num_drafts=values["num_speculative_tokens"],
        synthetic_acceptance=_synthetic_acceptance(values),
        is_adaptive=values.get("adaptive", False),
    )


def _object(given: str | Mapping[str, Any]) -> dict[str, Any]:
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ConfigError(f"{FLAG} is not JSON ({error}); write {EXAMPLE}") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{FLAG} must be a JSON object, not {given!r:.80}")
    return dict(values)


def _check(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        kinds = KEYS.get(key)
        if kinds is None:
            raise ConfigError(f"{FLAG}: {key} is not known; known are {', '.join(KEYS)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{FLAG}: {key} must be {kinds[-1].__name__}, not {value!r}")


def _synthetic_acceptance(values: Mapping[str, Any]) -> float | None:
    """Tokens a step, the sampled one included."""
    method = values.get("rejection_sample_method", STRICT)
    given = [key for key in ("synthetic_acceptance_length", "synthetic_accepted_drafts") if key in values]
    if method not in (STRICT, SYNTHETIC):
        raise ConfigError(f"{FLAG}: rejection_sample_method must be {STRICT} or {SYNTHETIC}, not {method!r}")
    if method == STRICT:
        if given:
            raise ConfigError(f'{FLAG}: {given[0]} needs "rejection_sample_method": "{SYNTHETIC}"')
        return None
    if len(given) != 1:
        raise ConfigError(
            f"{FLAG}: rejection_sample_method {SYNTHETIC} needs one of synthetic_acceptance_length (tokens a step) and "
            f"synthetic_accepted_drafts (one less)"
        )
    return float(values[given[0]]) + (given[0] == "synthetic_accepted_drafts")
