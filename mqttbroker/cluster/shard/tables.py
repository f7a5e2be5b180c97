"""The rows of one shard in SQLite: what the valid records of its log add up to, up to an offset.

The offset and the state of the log's view are in the transaction that applies the records. So after a crash, also one that loses
transactions, the records behind that offset are read again, and each is applied once. Changes of two owners are in two transactions:
a row may have the id of one that the owner before has removed, and with the changes merged that removal would take the new row.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from mqttbroker.cluster.log.body import changes_of
from mqttbroker.cluster.log.records import NO_EPOCH
from mqttbroker.cluster.log.view import ViewState
from sessions.pending_changes import PendingChanges
from sessions.row_kinds import MARKS
from sessions.rows import MarkRow
from sessions.store.database import Database
from sessions.store.interface import CorruptStore, Recovered, StoreError
from sessions.store.maintenance import Maintenance
from sessions.store.tables import SqliteTables

DATABASE: Final = "shard.db"
NOTHING_READ: Final = ViewState(0, NO_EPOCH, b"", 0, False)


class ShardTables:
    """The database of a shard in ``directory``, for one thread at a time. ``cluster`` is the cluster that it belongs to."""

    def __init__(self, directory: Path, shard: int, cluster: bytes) -> None:
        self.database = Database(directory / DATABASE, durable=True)
        self._shard = shard
        self._cluster = cluster
        self._tables: SqliteTables | None = None
        self._maintenance: Maintenance | None = None
        self._transactions = 0
        self._tidied = 0  # transactions at the last maintenance
        self._changes = PendingChanges()
        self._state = NOTHING_READ  # with these changes
        self._marks: dict[int, MarkRow] = {}  # by log; all of them
        self._cuts: deque[tuple[PendingChanges, ViewState, list[MarkRow]]] = deque()  # to be applied one after the other
        self._cut_bytes = 0
        self._applied = NOTHING_READ

    @property
    def tables(self) -> SqliteTables:
        assert self._tables is not None, "the database is closed"
        return self._tables

    @property
    def size(self) -> int:
        """Bytes of memory of the changes that the database does not have."""
        return self._changes.size + self._cut_bytes

    def open(self) -> ViewState:
        """Open or make the database; returns the state of the log's view from which the log is to be read.

        Raises `StoreError` if it cannot be used, or belongs to another shard or cluster, and `CorruptStore` if it is damaged.
        """
        database = self.database
        try:
            if noted := database.damage.noted():
                raise CorruptStore(f"{database.path}: {noted}")
            database.open(may_be_new=True)
            self._applied = self._state = self._read_state(database.connection)
            self._tables = SqliteTables(database.connection, database.path)
            self._maintenance = Maintenance(database, self._tables)
        except sqlite3.Error as error:
            database.close_unchanged()
            raise database.error(error) from error
        except OSError as error:
            database.close_unchanged()
            raise StoreError(f"{error.filename or database.path}: {error.strerror}") from error
        except BaseException:
            database.close_unchanged()
            raise
        return self._state

    def put_aside(self) -> None:
        """Rename the files of a database that is damaged, while it is closed: the log and its snapshots have everything."""
        file = self.database.path
        target = file.with_name(f"{file.name}.damaged")
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                file.with_name(file.name + suffix).replace(target.with_name(target.name + suffix))
        self.database.damage.forget()

    def note_damage(self, error: Exception) -> bool:
        """Have the next `open` refuse the database if the error means that it is damaged; whether it does."""
        self.database.note_damage(error)
        return bool(self.database.damage.found)

    def _read_state(self, connection: sqlite3.Connection) -> ViewState:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS shard_log (id INTEGER PRIMARY KEY, cluster BLOB NOT NULL, shard INTEGER NOT NULL,"
            " end INTEGER NOT NULL, epoch INTEGER NOT NULL, owner BLOB NOT NULL, sequence INTEGER NOT NULL,"
            " released INTEGER NOT NULL)"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS marks (log INTEGER PRIMARY KEY, offset INTEGER NOT NULL, routed INTEGER NOT NULL,"
            " epoch INTEGER NOT NULL, owner BLOB NOT NULL, sequence INTEGER NOT NULL, released INTEGER NOT NULL)"
        )
        rows = connection.execute(f"SELECT {', '.join(MARKS.columns)} FROM {MARKS.table}")
        self._marks = {row[0]: MarkRow._make((*row[:6], row[6] != 0)) for row in rows}
        row = connection.execute("SELECT cluster, shard, end, epoch, owner, sequence, released FROM shard_log").fetchone()
        if row is None:
            return NOTHING_READ
        cluster, shard, end, epoch, owner, sequence, released = row
        if cluster != self._cluster:
            raise StoreError(f"{self.database.path}: belongs to the cluster {cluster.hex()}, not to {self._cluster.hex()}")
        if shard != self._shard:
            raise StoreError(f"{self.database.path}: belongs to shard {shard}, not to shard {self._shard}")
        return ViewState(end, epoch, owner, sequence, released != 0)

    def changed(self, state: ViewState, body: bytes) -> None:
        """Add the changes of a valid record, with the state of the log's view behind it. Raises `CorruptStore`."""
        try:
            write_set, marks = changes_of(body)
        except ValueError as error:
            raise CorruptStore(f"shard {self._shard}, record of offset {state.end - 1}: {error}") from None
        self._end_epoch(state)
        if write_set is not None:
            self._changes.merge(write_set)
        for mark in marks:
            self._marks[mark.log] = mark
        self._state = state

    def passed(self, state: ViewState) -> None:
        """A record without changes, or a void one, was read."""
        self._end_epoch(state)
        self._state = state

    def _end_epoch(self, state: ViewState) -> None:
        """Have the changes of the owner before applied without those of the owner in ``state``."""
        if state.epoch != self._state.epoch and not self._changes.empty:
            self._cut()

    def apply(self) -> None:
        """Apply everything that was added. After an error, the changes that are left wait for the next call. Raises `sqlite3.Error` or `OSError`."""
        if self._state != (self._cuts[-1][1] if self._cuts else self._applied):
            self._cut()
        while self._cuts:
            self._apply_cut()

    def _cut(self) -> None:
        """Have everything that was added applied without what follows."""
        self._cuts.append((self._changes, self._state, list(self._marks.values())))
        self._cut_bytes += self._changes.size
        self._changes = PendingChanges()

    def _apply_cut(self) -> None:
        changes, state, marks = self._cuts[0]
        tables = self.tables
        tables.begin()
        try:
            tables.apply(changes.write_set())
            self.database.connection.execute(
                "INSERT OR REPLACE INTO shard_log (id, cluster, shard, end, epoch, owner, sequence, released)"
                " VALUES (1, ?, ?, ?, ?, ?, ?, ?)",
                (self._cluster, self._shard, *state),
            )
            self.database.connection.executemany(
                f"INSERT OR REPLACE INTO {MARKS.table} ({', '.join(MARKS.columns)}) VALUES ({', '.join('?' * len(MARKS.columns))})",
                marks,
            )
            tables.commit()
        except BaseException:
            tables.undo()
            raise
        self._cuts.popleft()
        self._cut_bytes = sum(one.size for one, _, _ in self._cuts)
        self._applied = state
        self._transactions += 1
        if self._maintenance is not None:
            self._maintenance.committed()

    def tidy(self) -> None:
        """Do one step of maintenance if there was a transaction since the last call. Raises `sqlite3.Error` or `OSError`."""
        if self._maintenance is not None and self._tidied != self._transactions:
            self._tidied = self._transactions
            self._maintenance.run(self._transactions, idle=True)

    def recover(self) -> Recovered:
        """All rows that a broker holds in memory, with everything that was added. Raises `StoreError`, `sqlite3.Error` or `OSError`."""
        self.apply()
        return self.tables.recover()

    @property
    def marks(self) -> dict[int, MarkRow]:
        """How far the logs of other shards are read, by log, with everything that was added."""
        return dict(self._marks)

    def close(self, unchanged: bool = False) -> None:
        """Close the database; what waits is read from the log again. ``unchanged`` keeps its write-ahead log."""
        self._tables = self._maintenance = None
        if unchanged:
            self.database.close_unchanged()
        else:
            self.database.close()
