"""The tables of all shards of a cluster as the store of a single broker."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sessions.row_kinds import KINDS, READERS, RETAINED, SESSIONS, SUBSCRIPTIONS, RowKind
from sessions.rows import ENTRY_COLUMNS, MESSAGE_COLUMNS, RECEIVED_COLUMNS
from sessions.session import CORE_PREFIX
from sessions.store.database import Database
from sessions.store.disk import sync_directory


class Merged(NamedTuple):
    """How much a store has."""

    sessions: int
    subscriptions: int
    queued: int
    retained: int
    readers: int


def merge_shards(database: Path, shards: Iterable[Path]) -> Merged:
    """Make the database of a single broker of those of the shards, which nobody uses; it is on disk when this returns.

    Sessions and messages get new ids, for those of the shards overlap. Sessions that stand for those of another
    core, which queue nothing, and entries of sessions that were deleted are left out. Raises `StoreError`,
    `sqlite3.Error` or `OSError`.
    """
    target = Database(database, durable=True)
    try:
        target.open(may_be_new=True)
        connection = target.connection
        for kind in _NUMBERED:  # the new id of each row of a shard
            connection.execute(f"CREATE TEMP TABLE {_ids(kind)} (old INTEGER PRIMARY KEY, new INTEGER NOT NULL)")
        for shard in shards:
            connection.execute("ATTACH ? AS shard", (str(shard),))
            connection.execute("BEGIN IMMEDIATE")
            _copy(connection)
            connection.execute("COMMIT")
            connection.execute("DETACH shard")
        merged = Merged(*(_number(connection, f"SELECT count(*) FROM {table}") for table in _COUNTED))
    finally:
        target.close()
    descriptor = os.open(database, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(database.parent)
    return merged


_COUNTED = (SESSIONS.table, SUBSCRIPTIONS.table, "queue", RETAINED.table, READERS.table)
_NUMBERED = [kind for kind in KINDS if kind.in_record and kind.numbered]


def _ids(kind: RowKind[Any, Any]) -> str:
    return f"temp.{kind.table}_ids"


def _number(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])


def _copy(connection: sqlite3.Connection) -> None:
    """Copy the rows of one shard."""
    messages = _number(connection, "SELECT coalesce(max(id), 0) FROM main.messages")
    for kind in KINDS:
        if kind.in_record:
            _copy_kind(connection, kind)
    of_session = f" JOIN {_ids(SESSIONS)} AS owners ON owners.old = rows.session_id"
    connection.execute(_insert("received", RECEIVED_COLUMNS, {"session_id": "owners.new"}) + of_session)
    entries = {"session_id": "owners.new", "message_id": "rows.message_id + ?"}
    connection.execute(_insert("queue", ENTRY_COLUMNS, entries) + of_session, (messages,))
    connection.execute(
        _insert("messages", MESSAGE_COLUMNS, {"id": "rows.id + ?"})
        + f" WHERE rows.id IN (SELECT message_id FROM shard.queue JOIN {_ids(SESSIONS)} AS owners ON owners.old = queue.session_id)",
        (messages,),
    )


def _copy_kind(connection: sqlite3.Connection, kind: RowKind[Any, Any]) -> None:
    """Copy the rows of a kind whose owners, if they have any, were copied."""
    changed: dict[str, str] = {}
    joined, condition = "", ""
    if kind.owner is not None:
        column = kind.owner_column
        joined = f" LEFT JOIN {_ids(kind.owner)} AS owners ON owners.old = rows.{column}"
        condition = f" WHERE owners.new IS NOT NULL OR rows.{column} < 1"
        changed[column] = f"coalesce(owners.new, rows.{column})"
    elif kind is SESSIONS:
        condition = f" WHERE substr(rows.client_id, 1, {len(CORE_PREFIX)}) <> '{CORE_PREFIX}'"
    if kind.numbered:
        key, ids = kind.key[0], _ids(kind)
        last = _number(connection, f"SELECT coalesce(max({key}), 0) FROM main.{kind.table}")
        numbers = f"{last} + row_number() OVER (ORDER BY {key})"
        connection.execute(f"DELETE FROM {ids}")
        connection.execute(f"INSERT INTO {ids} SELECT {key}, {numbers} FROM shard.{kind.table} AS rows{joined}{condition}")
        changed[key] = "own.new"
        joined += f" JOIN {ids} AS own ON own.old = rows.{key}"
    # Every shard has the rows that are placed in no certain one, which `import-store` brought.
    everywhere = kind.owner is None and not kind.placed_by
    connection.execute(_insert(kind.table, kind.columns, changed, "INSERT OR IGNORE" if everywhere else "INSERT") + joined + condition)


def _insert(table: str, columns: Sequence[str], changed: dict[str, str], verb: str = "INSERT") -> str:
    values = ", ".join(changed.get(name, f"rows.{name}") for name in columns)
    return f"{verb} INTO main.{table} ({', '.join(columns)}) SELECT {values} FROM shard.{table} AS rows"
