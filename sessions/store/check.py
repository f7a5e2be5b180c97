"""Checks a database of the store beyond SQLite's own check: references between rows, and sizes.

A check writes neither to the database nor to its write-ahead log, and sees one commit of a database in use.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from sessions.row_kinds import KINDS, RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.store.schema import APPLICATION_ID, MIGRATIONS

_OF_KINDS = {kind.table: kind.name for kind in KINDS if kind.in_record}
_FIRST = (SESSIONS.table, SUBSCRIPTIONS.table)
# The tables in the order of reports, and the name of their rows there.
TABLES = {
    **{table: _OF_KINDS[table] for table in _FIRST},
    "messages": "messages",
    "queue": "queue entries",
    "received": "packet ids",
    RETAINED.table: RETAINED.name,
    "stream_ends": "stream ends",
    **_OF_KINDS,
}
# The position of the commit log; not in reports.
COMMIT_LOG = "commit_log"
MAX_PROBLEMS = 100
BUSY_TIMEOUT = 5.0  # seconds


class Rule(NamedTuple):
    """Rows of `table` for which `condition` holds are an error.

    A repair applies ``change`` to them, or deletes them if there is none; ``fault`` describes them in reports.
    """

    fault: str
    table: str
    condition: str
    change: str = ""

    @property
    def deletes(self) -> bool:
        return not self.change

    @property
    def count_sql(self) -> str:
        return f"SELECT count(*) FROM {self.table} WHERE {self.condition}"

    @property
    def repair_sql(self) -> str:
        action = f"UPDATE {self.table} SET {self.change}" if self.change else f"DELETE FROM {self.table}"
        return f"{action} WHERE {self.condition}"

    def describe(self, count: int) -> str:
        return f"{count} {TABLES[self.table]} {self.fault}"


_NO_SESSION = "session_id NOT IN (SELECT session_id FROM sessions)"
_SIZE = "(SELECT length(topic) + length(payload) + length(properties) FROM messages WHERE messages.id = message_id)"
RULES = (
    *(
        Rule(
            f"without a {kind.owner_column.removesuffix('_id')}",
            kind.table,
            f"{kind.owner_column} NOT IN (SELECT {kind.owner_column} FROM {kind.owner.table})",
        )
        for kind in KINDS
        if kind.owner is not None and kind.removed_with_owner
    ),
    Rule("without a session", "received", _NO_SESSION),
    Rule("without a message", "queue", "message_id NOT IN (SELECT id FROM messages)"),
    Rule("that no queue entry refers to", "messages", "id NOT IN (SELECT message_id FROM queue)"),
    Rule(
        "that share a message and do not say so",
        "queue",
        "shared = 0 AND message_id IN (SELECT message_id FROM queue GROUP BY message_id HAVING count(*) > 1)",
        "shared = 1",
    ),
    Rule("with a wrong size", "queue", f"size <> {_SIZE}", f"size = {_SIZE}"),
)
# The entries of a deleted session are deleted in steps, so only in a salvaged database does an entry without a session
# mean a loss.
SALVAGE_RULES = (Rule("without a session", "queue", _NO_SESSION),)


class DatabaseState(NamedTuple):
    """The result of a check; ``ends`` (of the streams) is None if they cannot be read."""

    counts: dict[str, int]
    ends: dict[tuple[str, int], int] | None
    problems: list[str]


def is_emptied(path: Path) -> bool:
    """Whether the database is missing or empty while its write-ahead log is not; SQLite would delete that log."""
    size = path.stat().st_size if path.exists() else 0
    wal = Path(f"{path}-wal")
    return size == 0 and wal.exists() and wal.stat().st_size > 0


def open_to_read(path: Path) -> sqlite3.Connection:
    """A connection that cannot write; the database may be in use.

    A database without a write-ahead log and its index is not in use. It is opened as an immutable file, because SQLite
    would create both otherwise.
    """
    wal = Path(f"{path}-wal")
    unused = not os.path.exists(f"{path}-shm") and not (wal.exists() and os.path.getsize(wal))
    mode = "immutable=1" if unused else "mode=ro"
    return sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, isolation_level=None, timeout=BUSY_TIMEOUT)


def check_database(path: Path) -> DatabaseState:
    """Check the database at `path` without changing it. Raises `OSError` if there is no such file."""
    os.stat(path)
    if is_emptied(path):
        return DatabaseState({}, None, ["is empty, though its write-ahead log is not"])
    try:
        connection = open_to_read(path)
        try:
            connection.execute("BEGIN")
            return _check(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        return DatabaseState({}, None, [str(error)])


def _check(connection: sqlite3.Connection) -> DatabaseState:
    counts: dict[str, int] = {}
    problems: list[str] = []
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        return DatabaseState(counts, None, ["not a database of this broker"])
    if version > len(MIGRATIONS):
        newer = f"schema version {version} is newer than this program's {len(MIGRATIONS)}"
        return DatabaseState(counts, None, [newer])
    for (text,) in connection.execute(f"PRAGMA integrity_check({MAX_PROBLEMS})"):
        if text != "ok":
            problems += [line for line in text.splitlines() if not line.startswith("***")]
    try:
        tables = list(TABLES)
        if version < len(MIGRATIONS):  # an older program's database lacks those that came later
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            tables = [table for table in TABLES if (table,) in names]
        for table in tables:
            counts[table] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for rule in (rule for rule in RULES if rule.table in tables):
            found = connection.execute(rule.count_sql).fetchone()[0]
            if found:
                problems.append(rule.describe(found))
    except sqlite3.Error as error:
        problems.append(str(error))
    try:
        rows = connection.execute("SELECT stream, partition, end_offset FROM stream_ends")
        return DatabaseState(counts, {(name, part): end for name, part, end in rows}, problems)
    except sqlite3.Error as error:
        return DatabaseState(counts, None, [*problems, f"stream ends: {error}"])
