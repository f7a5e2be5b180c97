"""Reads one section of a configuration file key by key.

An invalid value or an unknown key raises `ConfigError`, whose text names the file, the key and the reason in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """An invalid setting: ``where`` is the file, ``key`` the dotted key."""

    def __init__(self, where: str, key: str, reason: str) -> None:
        super().__init__(f"{where}: {key}: {reason}")


class Section:
    """One table of the file.  Each method removes the key that it reads; `finish` refuses the keys that are left."""

    def __init__(self, where: str, name: str, values: Any) -> None:
        self.where = where
        self.name = name
        if not isinstance(values, Mapping):
            raise ConfigError(where, name, "is not a table")
        self.values = dict(values)

    def error(self, key: str, reason: str) -> ConfigError:
        return ConfigError(self.where, f"{self.name}.{key}".lstrip("."), reason)

    def table(self, key: str) -> Mapping[str, Any]:
        values = self.values.pop(key, {})
        if not isinstance(values, Mapping):
            raise self.error(key, "is not a table")
        return values

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.pop(key, default)
        if value is None:
            similar = difflib.get_close_matches(key, self.values, 1)
            hint = f", and {similar[0]!r} is unknown: did you mean {key}?" if similar else ""
            raise self.error(key, f"is missing{hint}")
        if not isinstance(value, str):
            raise self.error(key, f"{value!r} is not a text")
        return value

    def number(self, key: str) -> int | None:
        value = self.values.pop(key, None)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(key, f"{value!r} is not a positive whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.pop(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is neither true nor false")
        return value

    def list_of_texts(self, key: str, default: list[str]) -> list[str]:
        value = self.values.pop(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "is not a list of texts")
        return value

    def texts(self) -> dict[str, str]:
        """All values as text, for options of Spark."""
        return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in self.values.items()}

    def secrets(self) -> dict[str, str]:
        """All values as text, for options of a library: nested tables with dots between their keys.

        No error shows a value.
        """
        found: dict[str, str] = {}
        for key, value in self.values.items():
            if isinstance(value, Mapping):
                nested = Section(self.where, f"{self.name}.{key}", value).secrets()
                found |= {f"{key}.{name}": text for name, text in nested.items()}
            elif isinstance(value, (str, bool, int, float)):
                found[key] = str(value).lower() if isinstance(value, bool) else str(value)
            else:
                raise self.error(key, "is neither a text, a number nor true or false")
        return found

    def finish(self) -> None:
        for key in self.values:
            raise self.error(key, "unknown key")
