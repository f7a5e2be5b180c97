"""The tables: applies write sets to the rows in SQLite, and reads them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import UUID, uuid4

from sessions.row_kinds import KINDS, SESSIONS, SUBSCRIPTIONS
from sessions.rows import QueueRow
from sessions.store import statements as sql
from sessions.store.interface import CorruptStore, Partition, Recovered, StoreError
from sessions.write_set import EntryQuery, Page, PageRequest, WriteSet


class LogState(NamedTuple):
    """The identity of a store, which its log has too; the position of the log that the tables are at; and whether they
    have all changes, so that there need be no log."""

    identity: bytes
    position: int
    closed: bool


R = TypeVar("R", bound=tuple[Any, ...])


def _select(columns: Iterable[str], table: str) -> str:
    return f"SELECT {', '.join(columns)} FROM {table}"


def _rows(row_type: type[R], found: Iterable[tuple[Any, ...]]) -> list[R]:
    """The rows as NamedTuples; a start reads so many that `_make` would take noticeably longer."""
    return list(map(partial(tuple.__new__, row_type), found))


class SqliteTables:
    """The tables behind one connection; `path` names the database in errors.

    Changes are made between `begin` and `commit`. The entries of deleted sessions are deleted in steps, some in each
    transaction (`has_purge`).
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._purge: dict[int, int] = {}  # deleted sessions with stored entries: id to last seq, as of the last commit
        self._next_purge: dict[int, int] = {}  # the same, as of this transaction

    # -- reading ------------------------------------------------------------

    def recover(self) -> Recovered:
        connection = self._connection
        rows: list[list[Any]] = [[] for _ in KINDS]
        for kind in KINDS:
            if kind.in_record:
                rows[kind.number] = _rows(kind.row_type, connection.execute(_select(kind.columns, kind.table_in_order)))
        queues = _rows(QueueRow, connection.execute(sql.QUEUES))
        known = {row.session_id for row in rows[SESSIONS.number]}
        unknown = {row.session_id for row in rows[SUBSCRIPTIONS.number]} - known
        if unknown:
            raise CorruptStore(f"{self._path}: subscriptions of {len(unknown)} unknown sessions")
        self._purge = {row.session_id: row.last_seq for row in queues if row.session_id not in known}
        last_message = connection.execute("SELECT max(id) FROM messages").fetchone()[0]
        return Recovered(
            rows,
            [row for row in queues if row.session_id in known],
            1 + max(chain(known, self._purge), default=0),
            1 + (last_message or 0),
            1 + max((row.last_seq for row in queues), default=0),
        )

    def stream_ends(self) -> dict[Partition, int]:
        rows = self._connection.execute("SELECT stream, partition, end_offset FROM stream_ends")
        return {(stream, partition): end for stream, partition, end in rows}

    def read_page(self, request: PageRequest) -> Page:
        return sql.read_page(self._connection, request)

    def run_query(self, query: EntryQuery) -> None:
        sql.run_query(self._connection, query)

    # -- the commit log -----------------------------------------------------

    def log_state(self, has_log: bool) -> LogState:
        """What the tables know of their commit log; tables without any get an identity.

        Raises `StoreError` if these should know the log that is there.
        """
        connection = self._connection
        row = connection.execute("SELECT identity, position, closed FROM commit_log").fetchone()
        if row is None and has_log:
            raise StoreError(
                f"{self._path}: does not say which commit log belongs to it, but there is one: run mqttbroker repair-store"
                " to apply it, or move it away"
            )
        if row is None:
            row = (uuid4().hex, 0, 1)
            connection.execute("INSERT INTO commit_log (id, identity, position, closed) VALUES (1, ?, ?, ?)", row)
        return LogState(UUID(row[0]).bytes, row[1], row[2] != 0)

    def close_log(self) -> None:
        """The tables have all changes, so the log may be removed."""
        self._connection.execute("UPDATE commit_log SET closed = 1")

    # -- transactions -------------------------------------------------------

    def begin(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
        self._connection.execute("BEGIN IMMEDIATE")
        self._next_purge = dict(self._purge)

    def commit(self) -> None:
        self._connection.execute("COMMIT")
        self._purge = self._next_purge

    def undo(self) -> None:
        """Undo a failed transaction; if even that fails, the next one begins with it."""
        if self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """A transaction that takes no room on disk, and ends without effect."""
        connection = self._connection
        connection.execute("PRAGMA cache_spill = OFF")
        self.begin()
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
            connection.execute("PRAGMA cache_spill = ON")

    # -- changing, within a transaction ---------------------------------------

    def apply(self, write_set: WriteSet) -> None:
        connection = self._connection
        removed = write_set.removed_keys
        for statements in sql.OF_KINDS:
            statements.removed.run(connection, removed[statements.number])
            if statements.removed_with_owner is not None and statements.owner is not None:
                statements.removed_with_owner.run(connection, removed[statements.owner])
        deleted = write_set.removed(SESSIONS)
        if deleted:
            sql.DELETE_RECEIVED_OF.run(connection, deleted)
            self._next_purge.update(sql.queues_of(connection, deleted))
        if self._next_purge:
            sql.purge(connection, self._next_purge)
        for statements in sql.OF_KINDS:
            statements.saved.run(connection, write_set.rows[statements.number])
        sql.MESSAGES.run(connection, write_set.messages)
        sql.ENTRIES.run(connection, write_set.entries)
        sql.UPDATE_ENTRIES.run(connection, write_set.entry_updates)
        sql.delete_entries(connection, write_set.deleted_entries)
        sql.DELETE_RECEIVED.run(connection, write_set.deleted_received)
        sql.RECEIVED.run(connection, write_set.received)

    def set_stream_ends(self, ends: dict[Partition, int]) -> None:
        sql.STREAM_ENDS.run(self._connection, [(stream, partition, end) for (stream, partition), end in ends.items()])

    def set_position(self, position: int) -> None:
        """The tables have the commit log up to this position, and need it from there on."""
        self._connection.execute("UPDATE commit_log SET position = ?, closed = 0", (position,))

    # -- deleted sessions ---------------------------------------------------

    @property
    def has_purge(self) -> bool:
        """Whether entries of deleted sessions are still stored."""
        return bool(self._purge)

    def purge(self) -> None:
        """Delete some of the entries of deleted sessions, in a transaction of its own."""
        self.begin()
        sql.purge(self._connection, self._next_purge)
        self._connection.execute("COMMIT")
        self._purge = self._next_purge
