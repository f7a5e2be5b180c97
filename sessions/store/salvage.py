"""Copies the readable rows of a damaged database into a new one.

The damaged files are never written to and never deleted. Once the new database is complete and on disk, they are
renamed to ``<name>.corrupt-<stamp>`` with their ``-wal``, and the new one gets the name last; `finish_salvage` finishes
or undoes this after a crash.

The page that says where each table begins may be the damaged one, so rows are assigned to tables by their column types;
no two tables may have the same.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sessions.store.check import COMMIT_LOG, RULES, SALVAGE_RULES, TABLES
from sessions.store.disk import sync_directory, sync_file
from sessions.store.interface import StoreError
from sessions.store.pages import PageFile, Record
from sessions.store.schema import APPLICATION_ID, MIGRATIONS, Migration, as_database, prepare

if TYPE_CHECKING:
    from sqlite_utils import Database

SIDE_FILES = ("-wal", "-shm", ".suspect")
BATCH_ROWS = 1000

_TYPES: dict[str, tuple[type, ...]] = {
    "INTEGER": (int,),
    "TEXT": (str,),
    "BLOB": (bytes,),
    "REAL": (float, int),
}


class Salvaged(NamedTuple):
    """The result: the new path of the damaged file, rows kept per table, lines for the operator."""

    aside: Path
    kept: dict[str, int]
    lines: list[str]


class _Shape:
    """The column types of one table, to recognise its rows on a page."""

    def __init__(self, database: Database, name: str) -> None:
        table = database.table(name)
        self.has_rowid = not table.schema.rstrip().upper().endswith("WITHOUT ROWID")
        keys = [column.cid for column in table.columns if column.is_pk]
        # An INTEGER PRIMARY KEY is the rowid, and NULL in the record.
        self.alias = keys[0] if self.has_rowid and len(keys) == 1 else -1
        self.types = [_TYPES[column.type] for column in table.columns]
        self.nullable = [not column.notnull and not column.is_pk for column in table.columns]
        self.insert = f"INSERT OR IGNORE INTO {name} VALUES ({', '.join('?' * len(self.types))})"

    def row(self, rowid: int | None, record: Record) -> Record | None:
        """The row to insert, or None if the record is of another table.

        A record lacks columns that were added after it was written.
        """
        missing = len(self.types) - len(record)
        if (rowid is not None) != self.has_rowid or missing < 0:
            return None
        if not all(self.nullable[len(record) :]):
            return None
        values = list(record) + [None] * missing
        for index, value in enumerate(values):
            if index == self.alias:
                if value is not None:
                    return None
                values[index] = rowid
            elif value is None:
                if not self.nullable[index]:
                    return None
            elif not isinstance(value, self.types[index]):
                return None
        return tuple(values)


def set_aside(path: Path, stamp: str) -> Path:
    """Rename a database and its side files; returns its new path."""
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    number = 2
    while aside.exists():
        aside = path.with_name(f"{path.name}.corrupt-{stamp}-{number}")
        number += 1
    os.rename(path, aside)
    _rename_side_files(path, aside)
    return aside


def _rename_side_files(path: Path, aside: Path) -> None:
    """Rename the side files of a database that was renamed, and sync the directory."""
    for suffix in SIDE_FILES:
        if os.path.exists(f"{path}{suffix}"):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    sync_directory(path.parent)


def damaged_copies(path: Path) -> list[Path]:
    """The damaged databases that were set aside from `path`, oldest first."""
    found = path.parent.glob(f"{path.name}.corrupt-*")
    return sorted(other for other in found if not other.name.endswith((*SIDE_FILES, ".txt")))


def finish_salvage(path: Path) -> None:
    """Finish or undo a salvage that a crash interrupted; without effect otherwise."""
    path.with_name(f"{path.name}.salvaged.part").unlink(missing_ok=True)
    finished = path.with_name(f"{path.name}.salvaged")
    if not finished.exists():
        return
    if path.exists():
        finished.unlink()
        return
    for aside in damaged_copies(path)[-1:]:
        _rename_side_files(path, aside)
    os.rename(finished, path)
    sync_directory(path.parent)


def salvage(path: Path, stamp: str, reason: str, migrations: Sequence[Migration] = MIGRATIONS) -> Salvaged:
    """Set a damaged database aside and replace it by a new one with all its readable rows.

    The caller holds the lock of the data directory. ``<new path of the damaged file>.txt`` has ``reason`` and the
    report. Raises `StoreError` if the database is of a newer program, `OSError` or `sqlite3.Error` if the new one
    cannot be written; the damaged one keeps its name then.
    """
    unfinished = path.with_name(f"{path.name}.salvaged.part")
    unfinished.unlink(missing_ok=True)
    pages = PageFile(path)
    try:
        version = pages.user_version
        if pages.application_id not in (None, 0, APPLICATION_ID):
            raise StoreError(f"{path}: not a database of this broker")
        if version is not None and version > len(migrations):
            raise StoreError(f"{path}: schema version {version} is newer than this program")
        known = migrations[: version or len(migrations)]
        connection = sqlite3.connect(unfinished, isolation_level=None)
        try:
            kept, notes = _copy(pages, connection, known)
        finally:
            connection.close()
        notes = [*pages.notes(), *notes]
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        pages.close()
    sync_file(unfinished)
    finished = path.with_name(f"{path.name}.salvaged")
    os.rename(unfinished, finished)
    sync_directory(path.parent)
    aside = set_aside(path, stamp)
    os.rename(finished, path)
    counts = ", ".join(f"{count} {TABLES.get(table, table)}" for table, count in kept.items())
    lines = [f"put aside as {aside.name}: {reason}", *notes, f"kept {counts}"]
    report = "".join(f"{line}\n" for line in lines)
    aside.with_name(f"{aside.name}.txt").write_text(report, encoding="utf-8")
    sync_directory(path.parent)
    return Salvaged(aside, kept, lines)


def _copy(pages: PageFile, connection: sqlite3.Connection, migrations: Sequence[Migration]) -> tuple[dict[str, int], list[str]]:
    """Fill a new database; returns the rows kept per table, and notes about those left out."""
    for pragma in ("auto_vacuum = INCREMENTAL", "synchronous = OFF", "journal_mode = OFF"):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    prepare(connection, "the new database", migrations)
    database = as_database(connection)
    # A session's record may lack columns, so that a record of the commit log would pass for one.
    tables = sorted((name for name in database.table_names() if "sqlite_" not in name), key=[COMMIT_LOG, *TABLES].index)
    shapes = {table: _Shape(database, table) for table in tables}
    batches: dict[str, list[Record]] = {table: [] for table in shapes}
    connection.execute("BEGIN")
    for rowid, record in pages.records():
        for table, shape in shapes.items():
            row = shape.row(rowid, record)
            if row is not None:
                batches[table].append(row)
                if len(batches[table]) == BATCH_ROWS:
                    connection.executemany(shape.insert, batches[table])
                    batches[table].clear()
                break
    for table, shape in shapes.items():
        connection.executemany(shape.insert, batches[table])
    notes = []
    for rule in (rule for rule in (*SALVAGE_RULES, *RULES) if rule.table in shapes):
        count = connection.execute(rule.repair_sql).rowcount
        if count > 0 and rule.deletes:
            notes.append(f"left out: {rule.describe(count)}")
    connection.execute("COMMIT")
    kept = {table: database.table(table).count for table in shapes}
    kept.pop(COMMIT_LOG, None)
    return kept, notes


def set_stream_ends(path: Path, ends: dict[tuple[str, int], int]) -> None:
    """Write the ends of these partitions into a database that is not in use."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        rows = [(stream, partition, end) for (stream, partition), end in ends.items()]
        connection.executemany("INSERT OR REPLACE INTO stream_ends VALUES (?, ?, ?)", rows)
        connection.execute("COMMIT")
    finally:
        connection.close()
