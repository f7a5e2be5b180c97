"""Maintenance of the database between commits: purge, vacuum and checkpoint, in steps of bounded size."""

from __future__ import annotations

import logging

from sessions.store.database import BUSY_TIMEOUT_MS, Database
from sessions.store.tables import SqliteTables

logger = logging.getLogger(__name__)

# A checkpoint is made every so many pages of the write-ahead log; from the limit on it waits for readers.
CHECKPOINT_PAGES = 4096
WAL_LIMIT_PAGES = 16 * CHECKPOINT_PAGES
READERS_WAIT_MS = 100

# Free pages go back to the file system when they are this many and a quarter of the file, one step at a time.
VACUUM_FREE_PAGES = 1024
VACUUM_STEP = 128
# How often a busy writer counts the free pages, in commits.
VACUUM_EVERY = 64


class Maintenance:
    """Purges the entries of deleted sessions, gives free pages back, and keeps the write-ahead log short."""

    def __init__(self, database: Database, tables: SqliteTables) -> None:
        self._database = database
        self._tables = tables
        self._may_vacuum = False
        self._vacuumed = False  # pages were freed; the file gets shorter at the next checkpoint
        self._checkpointed = 0  # pages of the write-ahead log at the last checkpoint

    @property
    def has_work(self) -> bool:
        """Whether an idle writer should call `run` soon."""
        return self._tables.has_purge or self._may_vacuum

    def committed(self) -> None:
        """A commit may have freed pages."""
        self._may_vacuum = True

    def run(self, commits: int, idle: bool) -> None:
        """Do one step after ``commits`` commits: purge only if the writer is ``idle``, vacuum if it is or every
        `VACUUM_EVERY` commits, checkpoint when due. Raises `sqlite3.Error`."""
        if idle and self._tables.has_purge:
            self._tables.purge()
        if idle or commits % VACUUM_EVERY == 0:
            self._vacuum()
        self._checkpoint()

    def _vacuum(self) -> None:
        connection = self._database.connection
        free = connection.execute("PRAGMA freelist_count").fetchone()[0]
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        self._may_vacuum = free >= VACUUM_FREE_PAGES and free * 4 >= pages
        if self._may_vacuum:
            # The pragma returns a row without columns per page, which only executescript steps through.
            connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_STEP})")
            self._vacuumed = True
        elif self._vacuumed:
            self._vacuumed = False
            # Until then only the write-ahead log says that the file is shorter.
            self._database.checkpoint("PASSIVE")

    def _checkpoint(self) -> None:
        """Copy the write-ahead log into the database every `CHECKPOINT_PAGES`, so that it does not grow.

        A process that reads the database prevents that; beyond the limit the writer waits a moment for it.
        """
        pages = self._database.wal_pages()
        if pages < self._checkpointed:
            self._checkpointed = 0
        if pages - self._checkpointed < CHECKPOINT_PAGES:
            return
        self._checkpointed = pages
        connection = self._database.connection
        if pages < WAL_LIMIT_PAGES:
            self._database.checkpoint("PASSIVE")
            return
        connection.execute(f"PRAGMA busy_timeout = {READERS_WAIT_MS}").fetchone()
        busy = self._database.checkpoint("RESTART")
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}").fetchone()
        if busy:
            logger.warning("event=write_ahead_log_long pages=%d reason=%s", pages, "another process reads the database")
