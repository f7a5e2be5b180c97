"""The settings in force by dotted key, with the place that set each, and without secrets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, Iterator, List

from mqttbroker.config.settings import Settings

MASK = "***"
NOT_KEYS = ("sources",)


def flatten(settings: Settings) -> Dict[str, Any]:
    """All values by dotted key: ``limits.max_sessions``, ``listeners.0.port``, ``streams.0.filters``."""
    found: Dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if field.name in NOT_KEYS:
            continue
        value = getattr(settings, field.name)
        parts = enumerate(value) if field.name in ("listeners", "streams") else [("", value)]
        for index, part in parts:
            prefix = f"{field.name}.{index}" if index != "" else field.name
            if dataclasses.is_dataclass(part):
                found |= {f"{prefix}.{inner.name}": getattr(part, inner.name) for inner in dataclasses.fields(part)}
            else:
                found[prefix] = part
    return found


def _secrets(section: Any) -> Iterator[str]:
    for field in dataclasses.fields(section):
        if not field.repr:
            yield field.name
        for inner in (field.metadata.get("section"), field.metadata.get("tables")):
            if inner is not None:
                yield from _secrets(inner)


SECRETS = frozenset(_secrets(Settings))
"""Names of keys whose values are never shown."""


def shown_value(key: str, value: object) -> Any:
    """The value of a key of `flatten` as JSON, without secrets."""
    if key.rpartition(".")[2] in SECRETS:
        return None if value is None else MASK
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: shown_value(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [shown_value("", item) for item in value]
    return value


def settings_in_force(settings: Settings) -> List[Dict[str, Any]]:
    """Each key with its value and its source: a file, a variable, a flag, or "default".

    Durations are in seconds, sizes in bytes; null stands for the word for "none" or "unlimited".
    """
    return [
        {"key": key, "value": shown_value(key, value), "source": settings.sources.get(key, "default")}
        for key, value in flatten(settings).items()
    ]
