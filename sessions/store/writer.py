"""The SQLite store: a thread that commits write sets, answers their pages and queries, and maintains the database.

Today one SQLite transaction with an append to the stream log is both parts of `sessions.store.interface`: the commit
(`Committer`) and the change of the tables (`SqliteTables`).
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from pathlib import Path
from typing import Optional, Union

from sessions.store.committer import Committer
from sessions.store.database import Database
from sessions.store.failure_log import FailureLog
from sessions.store.interface import Done, Recovered, StoreError, StreamLog, Tables
from sessions.store.maintenance import Maintenance
from sessions.store.tables import SqliteTables
from sessions.write_set import Page, WriteSet

logger = logging.getLogger(__name__)

DURABILITIES = ("commit", "interval", "off")

# How long a writer with maintenance to do waits for the next write set, in seconds.
IDLE_AFTER = 0.05
# How long a writer without work waits before the stream log may apply its retention, in seconds.
RETENTION_AFTER = 10.0


class SqliteStore:
    """Sessions, queues, retained messages and the ends of the streams, on disk. A `sessions.store.interface.Store`.

    ``path`` is the database file; its directory is the data directory and is created. ``durability`` is ``commit`` or
    ``interval`` (every commit synced), or ``off`` (a database in memory, the stream log never synced).
    """

    def __init__(self, path: Union[str, Path], durability: str, stream_log: Optional[StreamLog]) -> None:
        if durability not in DURABILITIES:
            raise ValueError(f"durability is {durability!r}, not one of {', '.join(DURABILITIES)}")
        self.database = Database(Path(path), durability != "off")
        self._stream_log = stream_log
        self._writer: Optional[Writer] = None

    @property
    def damage(self) -> str:
        return self.database.damage.found

    def recover(self) -> Recovered:
        database = self.database
        try:
            database.open()
            tables = SqliteTables(database.connection, database.path)
            recovered = tables.recover()
            if database.durable:
                database.sync_recovered()
            if self._stream_log is not None:
                self._stream_log.recover(tables.stream_ends() if database.durable else None)
            self._writer = Writer(database, tables, self._stream_log)
            return recovered
        except sqlite3.Error as error:
            database.close_unchanged()
            raise database.error(error) from error
        except OSError as error:
            database.close()
            raise StoreError(f"{error.filename or database.path}: {error.strerror}") from error
        except BaseException:
            database.close_unchanged()
            raise

    def start(self, done: Done) -> None:
        assert self._writer is not None, "recover comes first"
        self._writer.start(done)

    def submit(self, write_set: WriteSet) -> None:
        assert self._writer is not None
        self._writer.submit(write_set)

    def stop(self) -> None:
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        self.database.close()


class Writer:
    """The writer thread. It alone uses the connection once it runs."""

    def __init__(self, database: Database, tables: SqliteTables, stream_log: Optional[StreamLog]) -> None:
        self._database = database
        self._tables: Tables = tables
        self._has_stream_log = stream_log is not None
        self._failures = FailureLog()
        self._committer = Committer(database, tables, stream_log, self._failures)
        self._maintenance = Maintenance(database, tables)
        self._submitted: queue.SimpleQueue[Optional[WriteSet]] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None

    def start(self, done: Done) -> None:
        self._thread = threading.Thread(target=self._run, args=(done,), name="store", daemon=True)
        self._thread.start()

    def submit(self, write_set: WriteSet) -> None:
        self._submitted.put(write_set)

    def stop(self) -> None:
        """Return when everything submitted is done."""
        if self._thread is not None:
            self._submitted.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, done: Done) -> None:
        while True:
            write_set = self._next()
            if write_set is None:
                return
            self._write(write_set, done)
            self._maintain(idle=False)

    def _next(self) -> Optional[WriteSet]:
        """The next write set, None at the end; works on the database and the stream log while there is none."""
        while self._maintenance.has_work:
            try:
                return self._submitted.get(timeout=IDLE_AFTER)
            except queue.Empty:
                self._maintain(idle=True)
        while self._has_stream_log:
            try:
                return self._submitted.get(timeout=RETENTION_AFTER)
            except queue.Empty:
                self._committer.publish_ends()
        return self._submitted.get()

    def _write(self, write_set: WriteSet, done: Done) -> None:
        """Commit a write set, read its pages and queries, and report."""
        pages: list[Page] = []
        failure: Optional[Exception] = None
        try:
            self._committer.commit(write_set)
            if write_set.has_changes():
                self._maintenance.committed()
            pages = [self._tables.read_page(request) for request in write_set.pages]
            for query in write_set.queries:
                self._tables.run_query(query)
        except Exception as error:
            failure = error
            self._committer.roll_back()
        for problem in (failure, *(page.error for page in pages)):
            self._database.note_damage(problem)
        try:
            done(write_set, pages, failure)
        except Exception:
            logger.exception("event=defect in=store_report")

    def _maintain(self, idle: bool) -> None:
        """Do one step of maintenance; a failure affects no commit."""
        try:
            self._maintenance.run(self._committer.commits, idle)
        except Exception as error:
            self._failures.report("tidying failed", error)
            self._database.note_damage(error)
            self._committer.roll_back()
