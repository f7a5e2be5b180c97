"""The durable store: one thread that owns SQLite and the end of the stream log.

The rule kept here: one write set is one transaction, of the log and of SQLite
together.  Log records are synced before COMMIT, COMMIT holds the log's ends,
and after any failure both are back at the last commit.  `done` without an
error means that everything in the write set is on disk.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import sqlite3
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import Callable, Optional, Protocol, Union

from sessions.message import Message
from sessions.store import statements as sql
from sessions.store.check import is_emptied, open_to_read
from sessions.store.disk import make_directory, prove_room
from sessions.store.salvage import settle
from sessions.store.schema import (
    APPLICATION_ID,
    OLDEST_SQLITE,
    CorruptStore,
    StoreError,
    is_corrupt,
    prepare,
)
from sessions.store.statements import Row
from sessions.write_set import Page, WriteSet

logger = logging.getLogger(__name__)

DURABILITIES = ("commit", "interval", "off")

CACHED_STATEMENTS = 256
CACHE_KIB = 8 * 1024

# The WAL goes back into the database every so many pages, and from the limit on
# waits for readers.
CHECKPOINT_PAGES = 4096
WAL_LIMIT_PAGES = 16 * CHECKPOINT_PAGES
WAL_KEEP_BYTES = 64 * 1024 * 1024
READERS_WAIT_MS = 100
# How long a commit waits for another process that writes.
BUSY_TIMEOUT_MS = 5000

# Free pages go back to the file system when they are this many and a quarter of the file.
VACUUM_FREE_PAGES = 1024
VACUUM_STEP = 128
# After a failure there must be room for so many bytes before the disk counts as well
# again: one page may still fit into what the write-ahead log was given before.
ROOM_BYTES = 1024 * 1024
# How often a busy writer looks for free pages, in commits, and how long a writer
# with something to tidy waits for work, in seconds.
VACUUM_EVERY = 64
IDLE_AFTER = 0.05
LOG_LOOK = 10.0  # seconds without work after which the log may look what it need not keep

# The least room that SQLite needs to open a database: the write-ahead log's index grows by that much.
WAL_INDEX_BYTES = 32 * 1024
# Where the write-ahead log's index keeps the count of its frames
# (sqlite.org/walformat.html, section 2.1: mxFrame, native byte order).
_MX_FRAME = 16

Done = Callable[[WriteSet, "list[Page]", Optional[Exception]], None]


class Log(Protocol):
    """The stream log as the store drives it; its files are below ``directory``."""

    directory: Path

    def append(
        self, records: dict[tuple[str, int], list[Message]]
    ) -> dict[tuple[str, int], tuple[int, int, str]]:
        """Write records, not yet durable; per partition the new (end offset, position, segment)."""

    def sync(self) -> None:
        """Put everything appended on disk."""

    def rollback(self) -> None:
        """Cut back to the last committed end; does nothing when that is the end."""

    def committed(self) -> None:
        """The transaction with the appended ends is durable."""

    def recover(self, ends: Optional[dict[tuple[str, int], int]]) -> None:
        """Cut back to these ends (missing = 0), or keep every valid batch (None)."""


class Recovered:
    """What the disk holds at start.

    ``sessions``, ``subscriptions`` and ``retained`` are rows as in `WriteSet`;
    a session that was connected at a crash has ``disconnected_at`` None.
    ``queues`` has (session_id, entries, bytes, last_seq) of every session with a
    queue, bytes being len(topic) + len(payload) + len(properties) summed over
    its entries.  The ``next_`` ids are greater than any that is stored.
    """

    def __init__(
        self,
        sessions: list[Row],
        subscriptions: list[Row],
        retained: list[Row],
        queues: list[tuple[int, int, int, int]],
        next_session_id: int,
        next_message_id: int,
        next_seq: int,
    ) -> None:
        self.sessions = sessions
        self.subscriptions = subscriptions
        self.retained = retained
        self.queues = queues
        self.next_session_id = next_session_id
        self.next_message_id = next_message_id
        self.next_seq = next_seq


def lock_directory(directory: Path) -> int:
    """The descriptor that holds the lock of a data directory, until it is closed.

    Raises `StoreError` if another process has it.
    """
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StoreError(f"{directory}: in use by another process") from None
    return lock


class Store:
    """Sessions, queues, retained messages and the ends of the streams, on disk.

    ``path`` is the database file; its directory is the data directory and is
    created.  ``durability`` is ``commit`` or ``interval`` (the file, every
    commit synced) or ``off`` (a database in memory, the log never synced).
    `recover`, `start`, `submit` and `stop` are for one thread, the owner's.
    """

    def __init__(self, path: Union[str, Path], durability: str, log: Optional[Log]) -> None:
        if durability not in DURABILITIES:
            raise ValueError(f"durability is {durability!r}, not one of {', '.join(DURABILITIES)}")
        self._path = Path(path)
        self._durable = durability != "off"
        self._log = log
        self._log_ahead = False
        self._in_doubt = False  # a COMMIT failed, and a crash might bring it back
        self._complaints: set[str] = set()
        self._lock: Optional[int] = None
        self._wal_index: Optional[int] = None
        self._connection: Optional[sqlite3.Connection] = None
        self._done: Optional[Done] = None
        self._work: queue.SimpleQueue[Optional[WriteSet]] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._ending: dict[int, int] = {}
        self._commits = 0
        self._untidy = False
        self._shrinking = False
        self._checkpointed = 0
        self._suspicion = self._path.with_name(f"{self._path.name}.suspect")
        self.damage = ""  # what SQLite said of a damaged page, as long as this store is open

    # -- opening ------------------------------------------------------------

    def recover(self) -> Recovered:
        """Open and migrate the database, cut the log back to it, and read what it holds.

        Raises `StoreError` if the directory or the file cannot be used, the
        database is newer than this program or in use by another process, and
        `CorruptStore` if it is damaged.  Whatever was opened is closed again then.
        """
        try:
            self._connection = connection = self._open()
            recovered = self._read_all(connection)
            if self._durable:
                self._make_sure(connection)
            if self._log is not None:
                self._log.recover(self._stream_ends(connection) if self._durable else None)
            return recovered
        except sqlite3.Error as error:
            self._abandon()
            kind = CorruptStore if is_corrupt(error) else StoreError
            raise kind(f"{self._path}: {self._reason(error)}") from error
        except OSError as error:
            self._close()
            raise StoreError(f"{error.filename or self._path}: {error.strerror}") from error
        except BaseException:
            self._abandon()
            raise

    def _reason(self, error: sqlite3.Error) -> str:
        """What kept SQLite from its work; where it knows an I/O error only, the disk may say more."""
        if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF == sqlite3.SQLITE_IOERR:
            try:
                prove_room(self._path.parent, WAL_INDEX_BYTES)
            except OSError as failure:
                return f"{error}: {failure.strerror}"
        return str(error)

    def _open(self) -> sqlite3.Connection:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            wanted = ".".join(map(str, OLDEST_SQLITE))
            raise StoreError(
                f"{self._path}: needs SQLite {wanted} or newer, this is {sqlite3.sqlite_version}"
            )
        make_directory(self._path.parent)
        self._lock = lock_directory(self._path.parent)
        if self._durable:
            settle(self._path)
            if is_emptied(self._path):
                raise CorruptStore(f"{self._path}: is empty, though its write-ahead log is not")
        connection = sqlite3.connect(
            self._path if self._durable else ":memory:",
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
        prepare(connection, str(self._path))
        if not self._durable:
            return connection
        if self._suspicion.exists():
            self._confirm(connection)
        connection.execute("PRAGMA synchronous = FULL")
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise StoreError(f"{self._path}: the file system does not allow a write-ahead log")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_KEEP_BYTES}")
        # A database that can be read but not written must not pass for a usable one;
        # only a statement that writes tells.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE stream_ends SET end_offset = end_offset")
        connection.execute("ROLLBACK")
        # SQLite's locks on this file would go if it were closed before the connection.
        self._wal_index = os.open(f"{self._path}-shm", os.O_RDONLY)
        return connection

    def _make_sure(self, connection: sqlite3.Connection) -> None:
        """Put on the disk what a process that was killed may have left in memory only.

        Nobody would commit it again: a repeated QoS 2 PUBLISH is acknowledged from what is read.
        """
        try:
            connection.execute("PRAGMA wal_checkpoint").fetchone()
        except sqlite3.OperationalError as error:
            # It syncs the write-ahead log before it needs any room.
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            logger.warning("event=write_ahead_log_kept file=%s reason=%s", self._path, error)

    def _confirm(self, connection: sqlite3.Connection) -> None:
        """Look at every page, since somebody met a damaged one."""
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise CorruptStore(f"{self._path}: {' '.join(found.split())}")
        self._suspicion.unlink()

    def _suspect(self, error: Optional[Exception]) -> None:
        """A damaged page was met: have the next start look at all of them."""
        if self.damage or not self._durable or not is_corrupt(error):
            return
        self.damage = str(error)
        try:
            self._suspicion.write_text(f"{error}\n")
        except OSError as failure:
            logger.error("event=damage_not_noted file=%s reason=%s", self._suspicion, failure.strerror)

    @staticmethod
    def _stream_ends(connection: sqlite3.Connection) -> dict[tuple[str, int], int]:
        rows = connection.execute("SELECT stream, partition, end_offset FROM stream_ends")
        return {(stream, partition): end for stream, partition, end in rows}

    def _read_all(self, connection: sqlite3.Connection) -> Recovered:
        sessions = connection.execute(
            "SELECT session_id, client_id, version, expiry_interval, disconnected_at, will,"
            " will_due, username, rules FROM sessions ORDER BY session_id"
        ).fetchall()
        subscriptions = connection.execute(
            "SELECT session_id, topic_filter, qos, options, subscription_id FROM subscriptions"
        ).fetchall()
        retained = connection.execute(
            "SELECT topic, payload, qos, properties, publisher, timestamp, expires_at FROM retained"
        ).fetchall()
        queues = connection.execute(sql.QUEUES).fetchall()
        known = {row[0] for row in sessions}
        strangers = {row[0] for row in subscriptions} - known
        if strangers:
            raise CorruptStore(f"{self._path}: subscriptions of {len(strangers)} unknown sessions")
        self._ending = {row[0]: row[3] for row in queues if row[0] not in known}
        last_message = connection.execute("SELECT max(id) FROM messages").fetchone()[0]
        return Recovered(
            sessions,
            subscriptions,
            retained,
            [row for row in queues if row[0] in known],
            1 + max(chain(known, self._ending), default=0),
            1 + (last_message or 0),
            1 + max((row[3] for row in queues), default=0),
        )

    # -- the owner's side ---------------------------------------------------

    def start(self, done: Done) -> None:
        """Start the writer thread; it calls `done` once for each write set, in their order.

        ``done(write_set, pages, None)``: the write set is durable.
        ``done(write_set, [], error)``: none of it is, nor will be.
        """
        self._done = done
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, write_set: WriteSet) -> None:
        """Hand a write set to the writer; never blocks."""
        self._work.put(write_set)

    def stop(self) -> None:
        """Finish what was submitted, bring the WAL into the database and close."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            # The last connection's close checkpoints and removes the WAL.
            self._connection.close()
            self._connection = None
        for descriptor in (self._wal_index, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._wal_index = self._lock = None

    def _abandon(self) -> None:
        """Close a database as it is: SQLite leaves its write-ahead log alone if it is not the last."""
        reader: Optional[sqlite3.Connection] = None
        try:
            if self._connection is not None and self._durable:
                reader = open_to_read(self._path)
                reader.execute("PRAGMA schema_version").fetchone()
        except sqlite3.Error:
            pass
        self._close()
        if reader is not None:
            reader.close()

    # -- the writer thread --------------------------------------------------

    def _run(self) -> None:
        assert self._connection is not None and self._done is not None
        connection, done = self._connection, self._done
        while True:
            write_set = self._next(connection)
            if write_set is None:
                return
            pages: list[Page] = []
            failure: Optional[Exception] = None
            try:
                self._commit(connection, write_set)
                pages = [sql.read_page(connection, request) for request in write_set.pages]
                for listing in write_set.listings:
                    sql.read_listing(connection, listing)
            except Exception as error:
                failure = error
                self._roll_back(connection)
            for problem in (failure, *(page.error for page in pages)):
                self._suspect(problem)
            try:
                done(write_set, pages, failure)
            except Exception:
                logger.exception("event=defect in=store_report")
            self._tidy(connection, idle=False)

    def _next(self, connection: sqlite3.Connection) -> Optional[WriteSet]:
        """The next write set, None at the end; tidies as long as there is none."""
        while self._ending or self._untidy:
            try:
                return self._work.get(timeout=IDLE_AFTER)
            except queue.Empty:
                self._tidy(connection, idle=True)
        while self._log is not None:
            try:
                return self._work.get(timeout=LOG_LOOK)
            except queue.Empty:
                if not self._log_ahead:
                    self._announce()
        return self._work.get()

    def _commit(self, connection: sqlite3.Connection, write_set: WriteSet) -> None:
        self._undo(connection)
        if not write_set.has_changes():
            return
        if write_set.probe:
            self._prove_room()
        ends: list[Row] = []
        if write_set.stream_messages:
            ends = self._append(write_set.stream_messages)
        connection.execute("BEGIN IMMEDIATE")
        ending = dict(self._ending)
        self._apply(connection, write_set, ending)
        sql.STREAM_ENDS.run(connection, ends)
        if write_set.probe:
            _write_first_page(connection)
        self._in_doubt = True
        connection.execute("COMMIT")
        self._in_doubt = False
        self._ending = ending
        self._untidy = True
        self._commits += 1
        self._complaints.clear()
        if self._log_ahead:
            self._log_ahead = False
            self._announce()

    def _prove_room(self) -> None:
        if self._durable:
            prove_room(self._path.parent, ROOM_BYTES)
        if self._log is not None:
            prove_room(self._log.directory, ROOM_BYTES)

    def _append(self, records: dict[tuple[str, int], list[Message]]) -> list[Row]:
        if self._log is None:
            raise ValueError("messages for a stream, and no stream log")
        self._log_ahead = True
        ends = self._log.append(records)
        if self._durable:
            self._log.sync()
        return [(stream, partition, end[0]) for (stream, partition), end in ends.items()]

    def _announce(self) -> None:
        """Let the log show what is committed, and drop what is over, even if nothing is new.

        The commit stands even if that fails.
        """
        assert self._log is not None
        try:
            self._log.committed()
        except Exception as error:
            self._complain("high watermarks stay behind until the next commit", error)

    def _undo(self, connection: sqlite3.Connection) -> None:
        """Make sure that the last transaction is gone if it failed, from SQLite first.

        A COMMIT that failed in its sync may stand complete in the write-ahead log, and would be
        found there after a crash.  Until another transaction has taken its place, the log keeps
        the records whose ends it holds.
        """
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if self._in_doubt:
            connection.execute("BEGIN IMMEDIATE")
            _write_first_page(connection)
            connection.execute("COMMIT")
            self._in_doubt = False
        if self._log_ahead:
            assert self._log is not None
            self._log.rollback()
            self._log_ahead = False

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            self._undo(connection)
        except Exception as error:
            self._complain("a rollback failed and is repeated before the next commit", error)

    def _complain(self, what: str, error: Exception) -> None:
        """Say what a disk in trouble keeps from happening, once until a commit goes through."""
        if not isinstance(error, (OSError, sqlite3.Error)):
            logger.error("event=store_trouble what=%s", what, exc_info=error)
        elif what not in self._complaints:
            self._complaints.add(what)
            logger.warning("event=store_trouble what=%s reason=%s", what, error)

    def _apply(
        self, connection: sqlite3.Connection, write_set: WriteSet, ending: dict[int, int]
    ) -> None:
        if write_set.ended:
            if not {row[0] for row in write_set.sessions}.isdisjoint(write_set.ended):
                raise ValueError("a session id is used again after its session ended")
            ended = [(session_id,) for session_id in write_set.ended]
            sql.END_SESSIONS.run(connection, ended)
            sql.END_SUBSCRIPTIONS.run(connection, ended)
            sql.END_RECEIVED.run(connection, ended)
            ending.update(sql.queues_of(connection, ended))
        if ending:
            sql.purge(connection, ending)
        sql.SESSIONS.run(connection, write_set.sessions)
        sql.SUBSCRIPTIONS.run(connection, write_set.subscriptions)
        sql.UNSUBSCRIPTIONS.run(connection, write_set.unsubscriptions)
        sql.MESSAGES.run(connection, write_set.messages)
        sql.ENTRIES.run(connection, write_set.entries)
        sql.UPDATES.run(connection, write_set.updates)
        sql.DELETES.run(connection, write_set.deletes)
        sql.SOLE_MESSAGES.run(connection, [(key,) for key in write_set.sole_messages])
        sql.SHARED_MESSAGES.run(connection, [(key,) for key in write_set.shared_messages])
        sql.RECEIVED.run(connection, write_set.received)
        sql.RELEASED.run(connection, write_set.released)
        sql.RETAINED.run(connection, write_set.retained)
        sql.UNRETAINED.run(connection, [(topic,) for topic in write_set.unretained])

    # -- tidying ------------------------------------------------------------

    def _tidy(self, connection: sqlite3.Connection, idle: bool) -> None:
        """Bounded work that nobody waits for; its failure costs only itself."""
        try:
            if self._ending and idle:
                ending = dict(self._ending)
                connection.execute("BEGIN IMMEDIATE")
                sql.purge(connection, ending)
                connection.execute("COMMIT")
                self._ending = ending
            if self._commits % VACUUM_EVERY == 0 or idle:
                self._vacuum(connection)
            self._checkpoint(connection)
        except Exception as error:
            self._complain("tidying failed", error)
            self._suspect(error)
            self._roll_back(connection)

    def _vacuum(self, connection: sqlite3.Connection) -> None:
        free = connection.execute("PRAGMA freelist_count").fetchone()[0]
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        self._untidy = free >= VACUUM_FREE_PAGES and free * 4 >= pages
        if self._untidy:
            # It yields a row without columns per page, which only a script steps over.
            connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_STEP})")
            self._shrinking = True
        elif self._shrinking:
            self._shrinking = False
            # Until then it is shorter in the write-ahead log alone.
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Bring the WAL into the database every so many pages, so that it starts again.

        Another process that reads keeps it from starting again; past the limit
        the writer waits a moment for such readers.
        """
        if self._wal_index is None:
            return
        pages = int.from_bytes(os.pread(self._wal_index, 4, _MX_FRAME), sys.byteorder)
        if pages < self._checkpointed:
            self._checkpointed = 0
        if pages - self._checkpointed < CHECKPOINT_PAGES:
            return
        self._checkpointed = pages
        if pages < WAL_LIMIT_PAGES:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            return
        connection.execute(f"PRAGMA busy_timeout = {READERS_WAIT_MS}").fetchone()
        busy = connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0]
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}").fetchone()
        if busy:
            logger.warning("event=write_ahead_log_long pages=%d reason=%s", pages, "another process reads the database")


def _write_first_page(connection: sqlite3.Connection) -> None:
    """Have the transaction write a page, though with what it holds."""
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
