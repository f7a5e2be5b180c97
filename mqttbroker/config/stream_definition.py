"""Streams that are created at run time: their settings, as in a [streams.NAME] table, from JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mqttbroker.config.settings import Stream

STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
FIXED = ("partitions", "key")
"""Settings that never change: keys would move to other partitions, and their order would be lost."""
FILE_ONLY = ("archive", "archive_retention_age", "archive_retention_bytes")
"""Settings that only the configuration file has: a caller of the API must not choose where the broker writes."""


class DefinitionError(ValueError):
    """A setting is wrong; ``key`` is its name."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key


def settable() -> dict[str, dataclasses.Field[Any]]:
    """The settings that a definition may have, by name."""
    fields = {field.name: field for field in dataclasses.fields(Stream)}
    return {name: field for name, field in fields.items() if "kind" in field.metadata and name not in FILE_ONLY}


def stream_of(name: str, definition: Mapping[str, object]) -> Stream:
    """The stream with these settings, which are written as in the file. Raises `DefinitionError`."""
    if not STREAM_NAME.fullmatch(name):
        raise DefinitionError("name", "must be 1–64 of A–Z a–z 0–9 _ -, first a letter or digit")
    known = settable()
    values: dict[str, Any] = {}
    for key, value in definition.items():
        if key in FILE_ONLY:
            raise DefinitionError(key, "is for streams of the configuration file")
        if key not in known:
            raise DefinitionError(key, f"unknown setting; there are: {', '.join(known)}")
        try:
            values[key] = known[key].metadata["kind"].read(value)
        except ValueError as error:
            raise DefinitionError(key, str(error)) from None
    if "filters" not in values:
        raise DefinitionError("filters", "is required")
    stream = Stream(name, **values)
    for key, reason in stream.problems():
        raise DefinitionError(key, reason)
    return stream


def altered(stream: Stream, definition: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """The definition of a stream with changes. Raises `DefinitionError`."""
    changed = {**definition, **changes}
    new = stream_of(stream.name, changed)
    for key in FIXED:
        if getattr(new, key) != getattr(stream, key):
            reason = f"is {getattr(stream, key)!r} and cannot change, as keys would move: create another stream"
            raise DefinitionError(key, reason)
    return changed


def complete(definition: Mapping[str, object]) -> dict[str, object]:
    """The definition with the settings that never change, so that later defaults of these do not apply."""
    defaults = {field.name: field.default for field in dataclasses.fields(Stream)}
    return {**{key: defaults[key] for key in FIXED}, **definition}
