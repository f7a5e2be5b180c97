"""The columns of a table over all its batches, recorded in the checkpoint.

Columns may be added and dropped, but never change their type: readers of the files could not merge two types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_spark.log.files import replace_file

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS_FILE = "ingest.json"  # in the checkpoint of the table's query
RANGE_PREFIX = "range="  # of the names of ranges that `--backfill` wrote
RESERVED_COLUMNS = ("range",)  # readers make columns of directory names such as `range=0_9`


@dataclass(frozen=True)
class AddedColumns:
    """Columns for fields that are not in the schema.

    ``types`` has the Spark type of each column.  ``spellings`` has the column of each field whose name differs from the
    column's in case.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: AddedColumns) -> AddedColumns:
        return AddedColumns({**self.types, **other.types}, {**self.spellings, **other.spellings})

    def __bool__(self) -> bool:
        return bool(self.types or self.spellings)


NO_COLUMNS = AddedColumns()


class ColumnChange(Exception):
    """The settings do not fit the existing table; the text is one line."""


class RecordedColumns:
    """The columns of a table, and the settings that the state of its query depends on; stored in the file ``path``.

    ``types`` has the Spark type of every column that the table ever had.  ``added`` are those of them that were added
    for fields without a column in the schema.  Raises `ColumnChange` if ``state`` differs from the stored one.
    """

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self._path = path
        self._state: dict[str, Any] = json.loads(json.dumps(state))
        known = json.loads(path.read_bytes()) if path.exists() else {"columns": {}, "state": self._state}
        self.types: dict[str, str] = known["columns"]
        self.added = _added(known)
        self._stored = path.exists()
        for key in {*self._state, *known["state"]}:
            given, before = self._state.get(key), known["state"].get(key)
            if given != before:
                raise ColumnChange(
                    f"{key} was {before!r} when {path.parent} was made and is {given!r} now: give another output and checkpoint"
                )

    def check(self, schema: StructType) -> dict[str, str]:
        """The types of a batch's columns by name.  Raises `ColumnChange` if a type differs from the table's."""
        found = {field.name: field.dataType.simpleString() for field in schema.fields}
        by_lower = {name.lower(): name for name in self.types}
        for name, kind in found.items():
            known = by_lower.get(name.lower(), name)
            if self.types.get(known, kind) != kind or known != name:
                raise ColumnChange(
                    f"column {known!r} is {self.types[known]} in the table, and would be {name!r} "
                    f"{kind}: give another name, or another output and checkpoint"
                )
        return found

    def record(self, schema: StructType, added: AddedColumns = NO_COLUMNS) -> None:
        """Store the columns of a batch durably; ``added`` are new for the table.  Raises `ColumnChange` as `check`."""
        found = self.check(schema)
        if added or not self._stored or not found.keys() <= self.types.keys():
            self.types = {**self.types, **found}
            self.added = self.added | added
            found_later = {"added": self.added.types, "spellings": self.added.spellings}
            document = {"columns": self.types, "state": self._state, **{key: value for key, value in found_later.items() if value}}
            replace_file(self._path, json.dumps(document, indent=1).encode())
            self._stored = True


def added_columns(path: Path) -> AddedColumns:
    """`RecordedColumns.added` of the file ``path``."""
    return _added(json.loads(path.read_bytes())) if path.exists() else NO_COLUMNS


def _added(document: Mapping[str, Any]) -> AddedColumns:
    return AddedColumns(document.get("added", {}), document.get("spellings", {}))
