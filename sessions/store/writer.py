"""The store on disk: a thread that commits write sets to the log, and the tables and streams that follow it."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from sessions.message import Message
from sessions.row_kinds import SESSIONS
from sessions.store.commit_log.file_log import FileCommitLog
from sessions.store.commit_log.records import encode
from sessions.store.database import Database
from sessions.store.disk import prove_room
from sessions.store.failure_log import FailureLog
from sessions.store.follower import RETRY_AFTER, Follower
from sessions.store.interface import Done, Partition, Progress, ReadDone, Recovered, StoreError, StreamChange, StreamLog
from sessions.store.recovery import LOG_DIRECTORY, LogReplay, recover_log, recover_streams
from sessions.store.tables import SqliteTables
from sessions.write_set import WriteSet

logger = logging.getLogger(__name__)

DURABILITIES = ("commit", "interval", "off")

# How long a writer without work waits before the stream log may apply its retention, in seconds.
RETENTION_AFTER = 10.0
# After a failure this many bytes must fit on the disk before a commit counts as a success.
ROOM_BYTES = 1024 * 1024
# The log has this many segments when it is full, and none has less than the least size.
LOG_SEGMENTS = 8
LEAST_SEGMENT_BYTES = 64 * 1024


class SqliteStore:
    """Sessions, queues, retained messages and the ends of the streams, on disk. A `sessions.store.interface.Store`.

    ``path`` is the database file; its directory is the data directory and is created. ``durability`` is ``commit`` or
    ``interval`` (every commit synced), or ``off`` (a database in memory, no log, the stream log never synced). The log
    takes about ``log_bytes`` on disk at most. The tables are at most ``apply_interval`` seconds behind it, as far as the
    disk allows, and what they do not have yet takes about ``unapplied_bytes`` of memory at most.
    """

    def __init__(
        self,
        path: str | Path,
        durability: str,
        stream_log: StreamLog | None,
        log_bytes: int = 128 * 1024 * 1024,
        apply_interval: float = 1.0,
        unapplied_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        if durability not in DURABILITIES:
            raise ValueError(f"durability is {durability!r}, not one of {', '.join(DURABILITIES)}")
        self.database = Database(Path(path), durability != "off")
        self.follower: Follower | None = None
        self._stream_log = stream_log
        self._log_bytes = log_bytes
        self._apply_interval = apply_interval
        self._unapplied_bytes = unapplied_bytes
        self._log: FileCommitLog | None = None
        self._writer: Writer | None = None

    @property
    def damage(self) -> str:
        return self.database.damage.found

    def progress(self) -> Progress:
        log, follower = self._log, self.follower
        if follower is None:
            return Progress()
        behind = 0 if log is None else max(0, log.position - follower.applied)
        return Progress(0 if log is None else log.size, behind, follower.size, follower.apply_seconds)

    def recover(self) -> Recovered:
        database = self.database
        try:
            if database.durable:
                segment_bytes = max(LEAST_SEGMENT_BYTES, self._log_bytes // LOG_SEGMENTS)
                self._log = FileCommitLog(database.path.parent / LOG_DIRECTORY, segment_bytes)
            database.open(may_be_new=self._log is None or not self._log.exists)
            tables = SqliteTables(database.connection, database.path)
            stream_ends: dict[Partition, int] = {}
            unappended: list[dict[Partition, list[Message]]] = []
            replayed: LogReplay | None
            if self._log is not None:
                replayed = recover_log(self._log, tables)
                with replayed.reading():
                    recovered = tables.recover()
                if self._stream_log is not None:
                    stream_ends, unappended = recover_streams(replayed, self._stream_log)
            else:
                replayed = None
                recovered = tables.recover()
                if self._stream_log is not None:
                    stream_ends = self._stream_log.recover(None, {})
            # A log with another identity than the database would be refused.
            database.sync()
            self.follower = Follower(
                database,
                tables,
                self._log,
                self._stream_log,
                self._log.position if self._log is not None else 0,
                self._log_bytes,
                self._apply_interval,
                self._unapplied_bytes,
            )
            if replayed is not None and replayed.left is not None:
                self.follower.take_over(replayed)
            self._writer = Writer(database, self._log, self._stream_log, stream_ends, self.follower, unappended)
            return recovered
        except sqlite3.Error as error:
            self._close_unchanged()
            raise database.error(error) from error
        except OSError as error:
            self._close_unchanged()
            raise StoreError(f"{error.filename or database.path}: {error.strerror}") from error
        except BaseException:
            self._close_unchanged()
            raise

    def _close_unchanged(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        self.database.close_unchanged()

    def start(self, done: Done, read_done: ReadDone) -> None:
        assert self._writer is not None and self.follower is not None, "recover comes first"
        self.follower.start(read_done)
        self._writer.start(done)

    def submit(self, write_set: WriteSet) -> None:
        assert self._writer is not None
        self._writer.submit(write_set)

    def change_streams(self, change: StreamChange) -> None:
        assert self._writer is not None
        self._writer.submit(change)

    def stop(self) -> None:
        if self._writer is None:
            return
        assert self.follower is not None
        self._writer.stop()
        complete = self.follower.stop() and self._writer.streams_complete
        self._writer = None
        if self._log is not None:
            complete = complete and self._end_log(self._log)
            self._log.close()
        if complete:
            self.database.close()
        else:
            # Closing checkpoints, and trusts a write-ahead log whose sync may have failed.
            self.database.close_unchanged()

    def _end_log(self, log: FileCommitLog) -> bool:
        """Remove the log, as the tables and the streams have everything; false if the next start needs it."""
        try:
            tables = SqliteTables(self.database.connection, self.database.path)
            tables.close_log()
            self.database.sync()
            log.remove()
        except (OSError, sqlite3.Error) as error:
            logger.warning("event=store_trouble what=%s reason=%s", "the commit log is kept", error)
            return False
        return True


class Writer:
    """The thread that commits."""

    def __init__(
        self,
        database: Database,
        log: FileCommitLog | None,
        stream_log: StreamLog | None,
        stream_ends: dict[Partition, int],
        follower: Follower,
        unappended: Sequence[dict[Partition, list[Message]]],
    ) -> None:
        self._database = database
        self._log = log
        self._stream_log = stream_log
        self._ends = stream_ends  # of the streams, with everything that the log has
        self._follower = follower
        self._failures = FailureLog()
        self._unappended: deque[dict[Partition, list[Message]]] = deque(unappended)  # records that the stream log refused
        self._stream_failure: Exception | None = None
        if unappended:
            follower.streams_position = 0
        self._submitted: queue.SimpleQueue[WriteSet | StreamChange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def streams_complete(self) -> bool:
        """Whether the stream log has everything that was committed."""
        return not self._unappended

    def start(self, done: Done) -> None:
        self._thread = threading.Thread(target=self._run, args=(done,), name="store", daemon=True)
        self._thread.start()

    def submit(self, work: WriteSet | StreamChange) -> None:
        self._submitted.put(work)

    def stop(self) -> None:
        """Return when everything submitted is done."""
        if self._thread is not None:
            self._submitted.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, done: Done) -> None:
        while True:
            work = self._next()
            if work is None:
                return
            if isinstance(work, WriteSet):
                self._write(work, done)
            else:
                self._change(work)

    def _next(self) -> WriteSet | StreamChange | None:
        """The next work, None at the end; works on the stream log while there is none."""
        while self._stream_log is not None:
            try:
                return self._submitted.get(timeout=RETRY_AFTER if self._unappended else RETENTION_AFTER)
            except queue.Empty:
                self._append_to_streams()
                if not self._unappended:
                    self._show_to_readers()
        return self._submitted.get()

    def _write(self, write_set: WriteSet, done: Done) -> None:
        """Commit a write set, report, and hand it to what follows the log."""
        failure: Exception | None = None
        ends: dict[Partition, int] = {}
        try:
            if write_set.has_changes():
                ends = self._commit(write_set)
        except Exception as error:
            failure = error
        if failure is None and write_set.stream_messages:
            # Before the report: a client that reads the stream finds what was acknowledged.
            self._ends.update(ends)
            self._unappended.append(write_set.stream_messages)
            self._append_to_streams()
        try:
            done(write_set, failure)
        except Exception:
            logger.exception("event=defect in=store_report")
        if failure is not None:
            return
        position = self._log.position if self._log is not None else 0
        if not self._unappended:
            self._follower.streams_position = position
        try:
            self._follower.add(write_set, position, ends)
        except Exception as error:
            self._follower.fail(error)

    def _change(self, change: StreamChange) -> None:
        self._append_to_streams()
        try:
            change(self._ends)
        except Exception:
            logger.exception("event=defect in=stream_change")
        if self._unappended:
            kept = [{key: messages for key, messages in records.items() if key in self._ends} for records in self._unappended]
            self._unappended = deque(records for records in kept if records)
            self._append_to_streams()

    def _commit(self, write_set: WriteSet) -> dict[Partition, int]:
        """Return the new ends of the streams when the write set is durable."""
        self._check(write_set)
        if self._unappended:
            self._append_to_streams()
        if self._stream_failure is None:  # while the streams are behind, the log is not dropped
            self._follower.wait_for_room()
        failure = self._follower.failure or self._stream_failure
        if failure is not None:
            raise failure.with_traceback(None)
        if write_set.after_failure:
            self._prove_room()
        if self._log is not None:
            self._log.append(encode(write_set, self._ends))
        self._failures.clear()
        return {partition: self._ends[partition] + len(messages) for partition, messages in write_set.stream_messages.items()}

    def _check(self, write_set: WriteSet) -> None:
        """Refuse what could be committed, but never applied."""
        if write_set.stream_messages:
            if self._stream_log is None:
                raise ValueError("messages for a stream, and no stream log")
            for partition in write_set.stream_messages:
                if partition not in self._ends:
                    raise ValueError(f"no stream {partition[0]!r} with a partition {partition[1]}")
        deleted, sessions = write_set.removed(SESSIONS), write_set.saved(SESSIONS)
        if deleted and sessions:
            if not {row.session_id for row in sessions}.isdisjoint(deleted):
                raise ValueError("a session id is used again after its session ended")

    def _prove_room(self) -> None:
        if self._database.durable:
            prove_room(self._database.path.parent, ROOM_BYTES)
        if self._log is not None:
            # Each attempt to append would write a whole new segment.
            prove_room(self._log.directory, ROOM_BYTES)
        if self._stream_log is not None:
            prove_room(self._stream_log.directory, ROOM_BYTES)

    def _append_to_streams(self) -> None:
        """Append committed records to the stream log, and show them to readers; what fails is repeated."""
        assert self._stream_log is not None
        while self._unappended:
            try:
                self._stream_log.append(self._unappended[0])
            except Exception as error:
                self._stream_failure = error
                self._failures.report("records wait for the stream log", error)
                self._undo_append()
                return
            self._unappended.popleft()
            self._show_to_readers()
        self._stream_failure = None
        if self._log is not None:
            self._follower.streams_position = self._log.position

    def _show_to_readers(self) -> None:
        """Move the high watermarks, and apply retention."""
        assert self._stream_log is not None
        try:
            self._stream_log.committed()
        except Exception as error:
            self._failures.report("high watermarks stay behind until the next commit", error)

    def _undo_append(self) -> None:
        assert self._stream_log is not None
        try:
            self._stream_log.rollback()
        except Exception as error:
            self._failures.report("a rollback failed and is repeated before the next commit", error)
