"""The database file: locked, opened, migrated, and closed again."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import sys
from pathlib import Path

from sessions.store.check import is_emptied, open_to_read
from sessions.store.damage import DamageMarker, is_corrupt
from sessions.store.disk import is_full, make_directory, prove_room, sync_directory
from sessions.store.interface import CorruptStore, StoreError
from sessions.store.salvage import finish_salvage
from sessions.store.schema import OLDEST_SQLITE, prepare

logger = logging.getLogger(__name__)

CACHED_STATEMENTS = 256
CACHE_KIB = 8 * 1024
WAL_KEEP_BYTES = 64 * 1024 * 1024
# How long a commit waits for another process that writes.
BUSY_TIMEOUT_MS = 5000
WRITE_BYTES = 1024 * 1024  # of the write-ahead log that are written again at a time
# The least room that SQLite needs to open a database: its index of the write-ahead log grows by this much.
WAL_INDEX_BYTES = 32 * 1024
# Where that index counts the frames of the log (sqlite.org/walformat.html, section 2.1: mxFrame, native byte order).
_MX_FRAME = 16


def lock_directory(directory: Path) -> int:
    """A descriptor that holds the lock of a data directory until it is closed.

    Raises `StoreError` if another process holds it.
    """
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StoreError(f"{directory}: in use by another process") from None
    return lock


class Database:
    """The database at `path`, whose directory is the data directory; in memory unless `durable`."""

    def __init__(self, path: Path, durable: bool) -> None:
        self.path = path
        self.durable = durable
        self.damage = DamageMarker(path)
        self._lock: int | None = None
        self._wal_index: int | None = None
        self._wal: int | None = None
        self._wal_suspect = True  # a sync may have failed before the start
        self._connection: sqlite3.Connection | None = None

    @property
    def connection(self) -> sqlite3.Connection:
        assert self._connection is not None, "the database is closed"
        return self._connection

    def open(self, may_be_new: bool) -> None:
        """Make the directory, lock it, open the database and migrate it; make one if it ``may_be_new``.

        Raises `StoreError`, `sqlite3.Error` or `OSError`; `close` or `close_unchanged` is to be called all the same.
        """
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            oldest = ".".join(map(str, OLDEST_SQLITE))
            raise StoreError(f"{self.path}: needs SQLite {oldest} or newer, this is {sqlite3.sqlite_version}")
        make_directory(self.path.parent)
        self._lock = lock_directory(self.path.parent)
        if self.durable:
            finish_salvage(self.path)
            if is_emptied(self.path):
                raise CorruptStore(f"{self.path}: is empty, though its write-ahead log is not")
            if not may_be_new and not self.path.exists():
                raise StoreError(f"{self.path}: is missing, but its commit log is there; restore the database")
        connection = sqlite3.connect(
            self.path if self.durable else ":memory:",
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=CACHED_STATEMENTS,
        )
        self._connection = connection
        connection.execute("SELECT json_array(1)")
        if connection.execute("PRAGMA page_count").fetchone()[0] == 0:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA secure_delete = OFF")
        prepare(connection, str(self.path))
        if self.durable:
            self._open_write_ahead_log(connection)

    def _open_write_ahead_log(self, connection: sqlite3.Connection) -> None:
        self.damage.check(connection)
        # The commit log has what a power loss takes from the write-ahead log: `sync` comes before it is dropped.
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise StoreError(f"{self.path}: the file system does not allow a write-ahead log")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_KEEP_BYTES}")
        # Only a statement that writes shows that a readable database cannot be written.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE stream_ends SET end_offset = end_offset")
        connection.execute("ROLLBACK")
        # Closed after the connection: closing it earlier would release SQLite's locks on the file.
        self._wal_index = os.open(f"{self.path}-shm", os.O_RDONLY)
        self._wal = os.open(f"{self.path}-wal", os.O_RDWR)
        sync_directory(self.path.parent)
        # A killed process may have left what it says of its commit log in memory only.
        try:
            self.sync()
        except OSError as error:
            if not is_full(error):
                raise
            # Some file systems need room to write the same bytes again; the disk may be full for long.
            self._wal_suspect = False
            self.sync()

    def sync(self) -> None:
        """Return when all transactions are on disk. Raises `OSError`.

        After a failed sync the write-ahead log is written again first: a sync that is only repeated reports success.
        """
        if self._wal is None:
            return
        try:
            if self._wal_suspect:
                self._write_again(self._wal)
            os.fdatasync(self._wal)
        except OSError as error:
            self._wal_suspect = True
            raise OSError(error.errno, error.strerror, f"{self.path}-wal") from error
        self._wal_suspect = False

    @staticmethod
    def _write_again(file: int) -> None:
        position = 0
        while data := os.pread(file, WRITE_BYTES, position):
            position += os.pwrite(file, data, position)

    def checkpoint(self, kind: str) -> int:
        """Copy the write-ahead log into the database; 1 if another process prevented a part, else 0.

        Raises `OSError` or `sqlite3.Error`.
        """
        # SQLite's own sync of the log must find nothing to do: if it failed, repeating the pragma would hide that.
        self.sync()
        try:
            busy: int = self.connection.execute(f"PRAGMA wal_checkpoint({kind})").fetchone()[0]
        except sqlite3.Error:
            self._wal_suspect = True
            raise
        return busy

    def wal_pages(self) -> int:
        """The frames in the write-ahead log; 0 for a database in memory."""
        if self._wal_index is None:
            return 0
        return int.from_bytes(os.pread(self._wal_index, 4, _MX_FRAME), sys.byteorder)

    def note_damage(self, error: Exception | None) -> None:
        """Have the next start check every page if the error means damage."""
        if self.durable:
            self.damage.note(error)

    def error(self, error: sqlite3.Error) -> StoreError:
        """The same error with the file and the reason; for an I/O error the disk may give a better one."""
        reason = str(error)
        if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_IOERR:
            try:
                prove_room(self.path.parent, WAL_INDEX_BYTES)
            except OSError as failure:
                reason = f"{error}: {failure.strerror}"
        return (CorruptStore if is_corrupt(error) else StoreError)(f"{self.path}: {reason}")

    def close(self) -> None:
        """Close and unlock; as the last connection, SQLite then checkpoints and removes the write-ahead log."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        for descriptor in (self._wal, self._wal_index, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._wal = self._wal_index = self._lock = None

    def close_unchanged(self) -> None:
        """Close and unlock, and keep the write-ahead log: SQLite does so while there is another connection."""
        reader: sqlite3.Connection | None = None
        try:
            if self._connection is not None and self.durable:
                reader = open_to_read(self.path)
                reader.execute("PRAGMA schema_version").fetchone()
        except sqlite3.Error:
            pass
        self.close()
        if reader is not None:
            reader.close()
