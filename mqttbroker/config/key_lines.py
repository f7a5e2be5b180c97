"""The lines of a TOML text in which its keys are; `tomllib` does not tell them."""

from __future__ import annotations

import tomllib
from typing import Any


class KeyLines:
    """Lines by the path of a key. The members of lists of tables have their index as a name."""

    def __init__(self, text: str) -> None:
        """Raises no error for an invalid text: the keys before the mistake have lines."""
        self._lines: dict[tuple[str, ...], int] = {}
        self._tables: dict[tuple[str, ...], int] = {}  # members so far of each list of tables
        self._section: tuple[str, ...] = ()
        statement = ""
        first = 0
        for number, line in enumerate(text.split("\n"), 1):
            if not statement:
                first = number
            statement += line + "\n"
            try:
                parsed = tomllib.loads(statement)
            except ValueError:
                continue  # it goes on in the next line
            if statement.lstrip().startswith("["):
                self._enter(parsed, first)
            else:
                self._note(self._section, parsed, first)
            statement = ""

    def of(self, path: tuple[str, ...]) -> int:
        """The line of a key, or of the nearest table that it would be in; 0 if there is none."""
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return 0

    def _enter(self, header: Any, line: int) -> None:
        """A line with the name of a table, or of one more member of a list of tables."""
        path: tuple[str, ...] = ()
        node = header
        while isinstance(node, dict) and node:
            name, node = next(iter(node.items()))
            path += (name,)
            if isinstance(node, list):
                self._tables[path] = self._tables.get(path, -1) + 1
                path += (str(self._tables[path]),)
                node = None
            elif path in self._tables and node:
                path += (str(self._tables[path]),)
        self._section = path
        self._lines.setdefault(path, line)

    def _note(self, path: tuple[str, ...], value: Any, line: int) -> None:
        if path:
            self._lines.setdefault(path, line)
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict):
            for name, item in value.items():
                self._note(path + (name,), item, line)
