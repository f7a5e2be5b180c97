"""The settings in force by dotted key, with the place that set each, and without secrets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from mqttbroker.config.setting_kinds import Url, shown_url
from mqttbroker.config.settings import Settings

MASK = "***"
NOT_KEYS = ("sources",)


def flatten(settings: Settings) -> dict[str, Any]:
    """All values by dotted key: ``limits.max_sessions``, ``listeners.0.port``, ``streams.0.filters``."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if field.name in NOT_KEYS:
            continue
        value = getattr(settings, field.name)
        parts = enumerate(value) if field.name in ("listeners", "streams", "queues", "bridges") else [("", value)]
        for index, part in parts:
            prefix = f"{field.name}.{index}" if index != "" else field.name
            if dataclasses.is_dataclass(part):
                found |= {f"{prefix}.{inner.name}": getattr(part, inner.name) for inner in dataclasses.fields(part)}
            else:
                found[prefix] = part
    return found


def _all_fields(section: Any) -> Iterator[Field[Any]]:
    for field in dataclasses.fields(section):
        yield field
        for inner in (field.metadata.get("section"), field.metadata.get("tables")):
            if inner is not None:
                yield from _all_fields(inner)


SECRETS = frozenset(field.name for field in _all_fields(Settings) if not field.repr)
"""Names of keys whose values are never shown."""
URLS = frozenset(field.name for field in _all_fields(Settings) if isinstance(field.metadata.get("kind"), Url))
"""Names of keys that are URLs."""


def shown_value(key: str, value: object) -> Any:
    """The value of a key of `flatten` as JSON, without secrets, which the query of a URL may be, too."""
    name = key.rpartition(".")[2]
    if name in SECRETS:
        return None if value is None else MASK
    if name in URLS and isinstance(value, str):
        return shown_url(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: shown_value(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [shown_value("", item) for item in value]
    return value


def settings_in_force(settings: Settings) -> list[dict[str, Any]]:
    """Each key with its value and its source: a file, a variable, a flag, or "default".

    Durations are in seconds, sizes in bytes; null stands for the word for "none" or "unlimited". Each table of a list,
    such as ``http.access``, has keys of its own.
    """
    return [
        {"key": key, "value": shown_value(key, value), "source": settings.sources.get(key, "default")}
        for setting, values in flatten(settings).items()
        for key, value in _members(setting, values)
    ]


def _members(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The keys of the tables of a list, or the key itself."""
    if not isinstance(value, tuple) or not value or not dataclasses.is_dataclass(value[0]):
        yield key, value
        return
    for index, table in enumerate(value):
        for field in dataclasses.fields(table):
            yield f"{key}.{index}.{field.name}", getattr(table, field.name)
