"""The tables of all shards of a cluster as the store of a single broker."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from sessions.rows import (
    ENTRY_COLUMNS,
    MESSAGE_COLUMNS,
    SUBSCRIPTION_READER,
    OffsetsRow,
    ProducerRow,
    ReaderRow,
    RetainedRow,
    SessionRow,
    SubscriptionRow,
)
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
        # The new id of each session of a shard.
        connection.execute("CREATE TEMP TABLE ids (old INTEGER PRIMARY KEY, new INTEGER NOT NULL)")
        connection.execute("CREATE TEMP TABLE reader_ids (old INTEGER PRIMARY KEY, new INTEGER NOT NULL)")
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


_COUNTED = ("sessions", "subscriptions", "queue", "retained", "stream_readers")


def _number(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])


def _copy(connection: sqlite3.Connection) -> None:
    """Copy the rows of one shard."""
    messages = _number(connection, "SELECT coalesce(max(id), 0) FROM main.messages")
    sessions = _number(connection, "SELECT coalesce(max(session_id), 0) FROM main.sessions")
    connection.execute("DELETE FROM temp.ids")
    connection.execute(
        "INSERT INTO temp.ids SELECT session_id, ?1 + row_number() OVER (ORDER BY session_id) FROM shard.sessions"
        " WHERE substr(client_id, 1, length(?2)) <> ?2",
        (sessions, CORE_PREFIX),
    )
    for table, columns in (
        ("sessions", SessionRow._fields),
        ("subscriptions", SubscriptionRow._fields),
        ("received", ("session_id", "packet_id")),
    ):
        connection.execute(_insert(table, columns, {"session_id": "ids.new"}) + _OF_SESSION)
    entries = {"session_id": "ids.new", "message_id": "rows.message_id + ?"}
    connection.execute(_insert("queue", ENTRY_COLUMNS, entries) + _OF_SESSION, (messages,))
    connection.execute(
        _insert("messages", MESSAGE_COLUMNS, {"id": "rows.id + ?"})
        + " WHERE rows.id IN (SELECT message_id FROM shard.queue JOIN temp.ids ON ids.old = queue.session_id)",
        (messages,),
    )
    _copy_readers(connection)
    connection.execute(_insert("retained", RetainedRow._fields, {}))
    # Every shard has those that `import-store` brought.
    connection.execute(_insert("producers", ProducerRow._fields, {}, "INSERT OR IGNORE"))


def _copy_readers(connection: sqlite3.Connection) -> None:
    """Copy the readers of streams of one shard, which a single broker had before `import-store`."""
    readers = _number(connection, "SELECT coalesce(max(reader_id), 0) FROM main.stream_readers")
    connection.execute("DELETE FROM temp.reader_ids")
    connection.execute(
        "INSERT INTO temp.reader_ids SELECT reader_id, ?1 + row_number() OVER (ORDER BY reader_id) FROM shard.stream_readers"
        " WHERE kind <> ?2 OR session_id IN (SELECT old FROM temp.ids)",
        (readers, SUBSCRIPTION_READER),
    )
    of_reader = " JOIN temp.reader_ids ON reader_ids.old = rows.reader_id"
    session = "coalesce((SELECT new FROM temp.ids WHERE old = rows.session_id), rows.session_id)"
    changed = {"reader_id": "reader_ids.new", "session_id": session}
    connection.execute(_insert("stream_readers", ReaderRow._fields, changed) + of_reader)
    connection.execute(_insert("stream_offsets", OffsetsRow._fields, {"reader_id": "reader_ids.new"}) + of_reader)


_OF_SESSION = " JOIN temp.ids ON ids.old = rows.session_id"


def _insert(table: str, columns: Sequence[str], changed: dict[str, str], verb: str = "INSERT") -> str:
    values = ", ".join(changed.get(name, f"rows.{name}") for name in columns)
    return f"{verb} INTO main.{table} ({', '.join(columns)}) SELECT {values} FROM shard.{table} AS rows"
