"""What a table's columns are, over all its batches and changes of its settings.

The rule kept here: columns may come and go, and their type stays; a plain
reader of the files could not bring two types of one column together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_spark.log.files import replace_file

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class ColumnChange(Exception):
    """Settings that do not fit the table that is there, in one line."""


class TableColumns:
    """The columns and the state's settings of a table, remembered in ``path``.

    Raises `ColumnChange` if the state of the query was made with other settings.
    """

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self._path = path
        self._state: dict[str, Any] = json.loads(json.dumps(state))
        known = json.loads(path.read_bytes()) if path.exists() else {"columns": {}, "state": self._state}
        self._types: dict[str, str] = known["columns"]
        self._known = path.exists()
        for key in {*self._state, *known["state"]}:
            given, before = self._state.get(key), known["state"].get(key)
            if given != before:
                raise ColumnChange(f"{key} was {before!r} when {path.parent} was made and is {given!r} now: "
                                   f"give another output and checkpoint")

    def note(self, schema: StructType) -> None:
        """Take in the columns of a batch, durably; raises `ColumnChange` for
        one whose type is not the table's."""
        found = {field.name: field.dataType.simpleString() for field in schema.fields}
        by_lower = {name.lower(): name for name in self._types}
        for name, kind in found.items():
            known = by_lower.get(name.lower(), name)
            if self._types.get(known, kind) != kind or known != name:
                raise ColumnChange(f"column {known!r} is {self._types[known]} in the table, and would be {name!r} "
                                   f"{kind}: give another name, or another output and checkpoint")
        if not self._known or not found.keys() <= self._types.keys():
            self._types = {**self._types, **found}
            document = {"columns": self._types, "state": self._state}
            replace_file(self._path, json.dumps(document, indent=1).encode())
            self._known = True
