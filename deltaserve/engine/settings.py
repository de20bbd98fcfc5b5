"""Settings as flat keys and as JSON: how an EngineConfig is made from keyword arguments and crosses to a process.

A flat key is the name of a field of EngineConfig or of a config inside it; the names are distinct. Drafts may also be
asked for by `speculative_config`, the object that the flag takes. Standard library only, because LLM uses it too.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from deltaserve.core.errors import ConfigError
from deltaserve.engine.speculative import speculative_config

T = TypeVar("T")

_AREAS = {"cache": CacheConfig, "scheduler": SchedulerConfig, "speculative": SpeculativeConfig}
_OBJECT = "speculative_config"


def engine_config(model: Path | str, settings: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from flat settings; a ConfigError names an unknown key and the nearest known one, or a type."""
    own = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", *_AREAS}
    areas = {area: {field.name for field in dataclasses.fields(kind)} for area, kind in _AREAS.items()}
    if _OBJECT in settings:
        settings = _without_object(settings, areas["speculative"])
    _check_known(settings, own.union(*areas.values()))
    _check_types(settings)
    parts = {area: _AREAS[area](**_pick(settings, names)) for area, names in areas.items()}
    return EngineConfig(Path(model), **_pick(settings, own), **parts)


def to_json(value: Any) -> str:
    """A frozen config, with others inside it, as one line."""
    return json.dumps(dataclasses.asdict(value), default=str, sort_keys=True)


def from_json(kind: type[T], text: str) -> T:
    """The inverse of `to_json`."""
    return cast("T", _build(kind, json.loads(text)))


def _without_object(settings: Mapping[str, Any], fields: set[str]) -> dict[str, Any]:
    """`speculative_config` spelled out as its fields."""
    twice = sorted(fields & settings.keys())
    if twice:
        raise ConfigError(f"give {_OBJECT} or its parts, not both {_OBJECT} and {', '.join(twice)}")
    rest = {name: value for name, value in settings.items() if name != _OBJECT}
    return rest | dataclasses.asdict(speculative_config(settings[_OBJECT]))


def _build(kind: Callable[..., Any], value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        return cast("Callable[..., Any]", kind)(**{name: _build(hints[name], item) for name, item in value.items()})
    return kind(value) if kind is Path else value


def _check_types(settings: Mapping[str, Any]) -> None:
    hints: dict[str, Any] = {}
    for kind in (EngineConfig, *_AREAS.values()):
        hints |= get_type_hints(kind)
    for name, value in settings.items():
        wanted = int | float if hints[name] is float else hints[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and hints[name] is not bool):
            kinds = str(getattr(hints[name], "__name__", hints[name])).replace(" | ", " or ")
            raise ConfigError(f"{name} must be {kinds}, not {value!r}")


def _pick(settings: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


def _check_known(settings: Mapping[str, Any], known: set[str]) -> None:
    for name in settings:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(sorted(known))}"
            raise ConfigError(f"unknown setting {name}{hint}")
