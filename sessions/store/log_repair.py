"""Repairs the commit log of a data directory that no broker uses: everything that can be read of it goes to the tables.

Segments with damage are renamed to ``<name>.damaged-<stamp>``, the others are removed when the tables and the streams
have their records on disk.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import UUID

from sessions.store.check import RULES, open_to_read
from sessions.store.commit_log.records import StreamRecords, decode
from sessions.store.commit_log.segment import segment_files
from sessions.store.commit_log.survey import Survey, survey
from sessions.store.disk import sync_directory
from sessions.store.recovery import LogReplay
from sessions.store.tables import SqliteTables

# Appends records that a stream has not, and returns lines about it.
AppendMissing = Callable[[dict[tuple[str, int], list[StreamRecords]]], list[str]]


def fold_log(database: Path, directory: Path, salvaged: bool, stamp: str, append_missing: AppendMissing) -> list[str]:
    """Apply the log to the database and the streams, and end it; returns a line for each loss and each file set aside.

    If the database was ``salvaged``, its rows may be of different times, so the whole log is applied. Raises `StoreError`
    if the log is of another store or a newer program, `OSError` or `sqlite3.Error` if something cannot be written.
    """
    connection = sqlite3.connect(database, isolation_level=None)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'commit_log'").fetchone():
            return []  # of a program without a commit log
        tables = SqliteTables(connection, database)
        found = _survey(connection, directory)
        state = tables.log_state(bool(found.segments))
        lines = [f"log/{damage.path.name}: {damage.reason}" for damage in found.damage]
        if not segment_files_in(directory):
            if not state.closed:
                lines.append(f"log: is missing; changes after position {state.position} are lost")
        else:
            replayed = LogReplay(found, tables, 0 if salvaged else state.position, salvaged)
            _apply(connection, tables, found, replayed, append_missing, lines)
        tables.close_log()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.close()
    _remove(directory, found, stamp, lines)
    return lines


def segment_files_in(directory: Path) -> list[Path]:
    """The segments of a log, none if there is no directory."""
    return segment_files(directory) if directory.is_dir() else []


def _survey(connection: sqlite3.Connection, directory: Path) -> Survey:
    """The log of this database; a database that lost its identity gets that of the log."""
    row = connection.execute("SELECT identity FROM commit_log").fetchone()
    found = survey(directory, None if row is None else UUID(row[0]).bytes)
    if row is None and found.segments:
        identity = UUID(bytes=found.segments[0].header.identity).hex
        connection.execute("INSERT INTO commit_log (id, identity, position, closed) VALUES (1, ?, 0, 0)", (identity,))
    return found


def _apply(
    connection: sqlite3.Connection,
    tables: SqliteTables,
    found: Survey,
    replayed: LogReplay,
    append_missing: AppendMissing,
    lines: list[str],
) -> None:
    replayed.apply()
    if replayed.failure is not None:
        raise replayed.failure
    streams: dict[tuple[str, int], list[StreamRecords]] = {}
    for part in logged_records(found):
        streams.setdefault((part.stream, part.partition), []).append(part)
    lines += append_missing(streams)
    connection.execute("BEGIN IMMEDIATE")
    tables.set_stream_ends(replayed.ends)
    if found.next_position:
        tables.set_position(max(replayed.position, found.next_position - 1))
    for rule in RULES:
        count = connection.execute(rule.repair_sql).rowcount
        if count > 0 and rule.deletes:
            lines.append(f"left out: {rule.describe(count)}")
    connection.execute("COMMIT")


def _remove(directory: Path, found: Survey, stamp: str, lines: list[str]) -> None:
    damaged = {damage.path for damage in found.damage}
    for path in segment_files_in(directory):
        if path in damaged:
            aside = path.with_name(f"{path.name}.damaged-{stamp}")
            os.rename(path, aside)
            lines.append(f"log/{path.name}: put aside as {aside.name}")
        else:
            path.unlink()
    if directory.is_dir():
        sync_directory(directory)


def database_identity(database: Path) -> bytes | None:
    """The identity that the log of a database has; None if that cannot be read."""
    if not database.exists():
        return None
    try:
        connection = open_to_read(database)
        try:
            row = connection.execute("SELECT identity FROM commit_log").fetchone()
        finally:
            connection.close()
    except sqlite3.Error:
        return None
    return None if row is None else UUID(row[0]).bytes


def logged_records(found: Survey) -> Iterator[StreamRecords]:
    """The records for streams in a log. Records that cannot be decoded have none."""
    for record in found.records(0):
        with suppress(ValueError):
            yield from decode(record.body)[1]
