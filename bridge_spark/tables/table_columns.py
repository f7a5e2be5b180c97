"""What a table's columns are, over all its batches and changes of its settings.

The rule kept here: columns may come and go, and their type stays; a plain
reader of the files could not bring two types of one column together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_spark.log.files import replace_file

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

COLUMNS_FILE = "ingest.json"
"""In the checkpoint of the table's query."""

DIRECTORY_NAMES = ("batches", "range")
"""What directories of tables are called, as in `batches=0/`: readers make columns of them that hide those of the files."""


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
        self.types: dict[str, str] = known["columns"]
        """Of every column that the table ever had, in Spark's words."""
        self.added: dict[str, str] = known.get("added", {})
        """The columns of `types` that came of fields without a place in the schema."""
        self._known = path.exists()
        for key in {*self._state, *known["state"]}:
            given, before = self._state.get(key), known["state"].get(key)
            if given != before:
                raise ColumnChange(f"{key} was {before!r} when {path.parent} was made and is {given!r} now: "
                                   f"give another output and checkpoint")

    def check(self, schema: StructType) -> dict[str, str]:
        """The columns of a batch by name; raises `ColumnChange` for one whose type is not the table's."""
        found = {field.name: field.dataType.simpleString() for field in schema.fields}
        by_lower = {name.lower(): name for name in self.types}
        for name, kind in found.items():
            known = by_lower.get(name.lower(), name)
            if self.types.get(known, kind) != kind or known != name:
                raise ColumnChange(f"column {known!r} is {self.types[known]} in the table, and would be {name!r} "
                                   f"{kind}: give another name, or another output and checkpoint")
        return found

    def note(self, schema: StructType, added: Mapping[str, str] = {}) -> None:
        """Take in the columns of a batch, durably, of which some were ``added`` now; raises `ColumnChange` as `check`."""
        found = self.check(schema)
        if added or not self._known or not found.keys() <= self.types.keys():
            self.types = {**self.types, **found}
            self.added = {**self.added, **added}
            document = {"columns": self.types, "state": self._state, **({"added": self.added} if self.added else {})}
            replace_file(self._path, json.dumps(document, indent=1).encode())
            self._known = True


def added_columns(path: Path) -> dict[str, str]:
    """What `TableColumns.added` is, without opening the table."""
    return dict(json.loads(path.read_bytes()).get("added", {})) if path.exists() else {}
