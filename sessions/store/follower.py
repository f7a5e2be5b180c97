"""The tables follow the commit log: a thread that applies what was committed, some at a time, and reads for the broker.

Changes are gathered in memory for `apply_interval`, or until they are a certain part of `max_bytes`, and applied in one
transaction with the position of the log. Syncs come later, and only then segments of the log are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from sessions.pending_changes import PendingChanges
from sessions.store.commit_log.file_log import FileCommitLog
from sessions.store.database import Database
from sessions.store.failure_log import FailureLog
from sessions.store.interface import Partition, ReadDone, StreamLog
from sessions.store.maintenance import Maintenance
from sessions.store.recovery import LogReplay
from sessions.store.tables import SqliteTables
from sessions.write_set import Page, WriteSet

logger = logging.getLogger(__name__)

# How long the thread waits before it repeats what failed, and for the next changes while the database has maintenance
# to do, in seconds.
RETRY_AFTER = 0.25
IDLE_AFTER = 0.05
# The part of the log's limit that full segments take before the tables are synced, and before commits wait for it.
SYNC_PART = 4
WAIT_PART = 2
# The part of the memory for changes that one transaction takes: commits that wait for room wait for one of them.
CUT_PART = 8
# How long the thread waits before it makes a segment of the log again after that failed, in seconds: it writes much.
SEGMENT_RETRY_AFTER = 5.0


class _Transaction:
    """One transaction of the tables: the changes up to a position of the log, and the reads that follow it."""

    def __init__(self, position: int) -> None:
        self.changes = PendingChanges()
        self.position = position
        self.ends: dict[Partition, int] = {}
        self.due = 0.0  # monotonic seconds; 0 if there are no changes
        self.reads: WriteSet | None = None
        self.behind: _Transaction | None = None  # reads only: the changes that gathered when they were asked for


class Follower:
    """Applies changes to the tables on a thread of its own, which alone uses the database once it runs.

    `add` and `wait_for_room` are called on the thread that commits. ``applied`` is the position that the tables are at.
    """

    def __init__(
        self,
        database: Database,
        tables: SqliteTables,
        log: FileCommitLog | None,
        stream_log: StreamLog | None,
        position: int,
        log_bytes: int,
        apply_interval: float,
        max_bytes: int,
    ) -> None:
        self._apply_failure: Exception | None = None
        self._sync_failure: Exception | None = None
        self._defect: Exception | None = None
        self.applied = position
        self.apply_seconds = 0.0  # that the last transaction took
        self.streams_position = position  # the stream log has the records up to it; set by the thread that commits
        self._database = database
        self._tables = tables
        self._log = log
        self._stream_log = stream_log
        self._log_bytes = log_bytes
        self._apply_interval = apply_interval
        self._max_bytes = max_bytes
        self._cut_bytes = max_bytes // CUT_PART
        self._segment_after = 0.0  # monotonic seconds; no segment is made before
        self._maintenance = Maintenance(database, tables)
        self._failures = FailureLog()
        self._transactions = 0
        self._lock = threading.Condition()  # for everything below
        self._gathering = _Transaction(position)
        self._waiting: deque[_Transaction] = deque()
        self._applying: _Transaction | None = None
        self._stopping = False
        self._read_done: ReadDone = _no_reads
        self._thread: threading.Thread | None = None

    def take_over(self, replayed: LogReplay) -> None:
        """Begin with the changes that a start could not apply; commits are refused until they are."""
        assert replayed.left is not None
        transaction = _Transaction(replayed.position)
        transaction.changes, transaction.ends, transaction.due = replayed.left, dict(replayed.ends), time.monotonic()
        self._waiting.append(transaction)
        self._apply_failure = replayed.failure

    def start(self, read_done: ReadDone) -> None:
        self._read_done = read_done
        self._thread = threading.Thread(target=self._run, name="tables", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Apply everything, answer all reads, and end; whether the tables have everything, on disk."""
        if self._thread is not None:
            with self._lock:
                self._stopping = True
                self._lock.notify_all()
            self._thread.join()
            self._thread = None
        return self.failure is None and not self._gathering.due and self._sync()

    # -- the thread that commits ------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        """What the tables fail with at present, None if they do not."""
        return self._defect or self._apply_failure or self._sync_failure

    @property
    def size(self) -> int:
        """Bytes of memory that changes take which the tables do not have."""
        with self._lock:
            return self._size()

    def _size(self) -> int:
        applying = self._applying.changes.size if self._applying is not None else 0
        return self._gathering.changes.size + applying + sum(transaction.changes.size for transaction in self._waiting)

    def add(self, write_set: WriteSet, position: int, ends: dict[Partition, int]) -> None:
        """Add a committed write set, with the ends that it gives to the streams; its reads follow it."""
        with self._lock:
            gathering = self._gathering
            wake = False
            if write_set.has_changes():
                gathering.changes.merge(write_set)
                gathering.position = position
                gathering.ends.update(ends)
                if not gathering.due:
                    gathering.due = time.monotonic() + self._apply_interval
                    wake = True
            reads = bool(write_set.pages or write_set.queries)
            if reads and not _needs_changes(write_set, gathering.changes):
                reading = _Transaction(gathering.position)
                reading.reads, reading.behind = write_set, gathering
                self._waiting.append(reading)
                reads = False
                wake = True
            if reads:
                gathering.reads = write_set
            if reads or gathering.changes.size >= self._cut_bytes:
                self._waiting.append(gathering)
                self._gathering = _Transaction(gathering.position)
                wake = True
            if wake:
                self._lock.notify_all()

    def fail(self, defect: Exception) -> None:
        """The tables may lack changes from now on: refuse all commits, and keep the log for the next start. On any thread."""
        logger.error("event=defect in=tables", exc_info=defect)
        with self._lock:
            self._defect = defect
            self._lock.notify_all()

    def wait_for_room(self) -> None:
        """Return when the tables are not too far behind, or fail."""
        with self._lock:
            while self.failure is None and not self._stopping and self._is_far_behind():
                self._gathering.due = min(self._gathering.due, time.monotonic())
                self._lock.notify_all()
                self._lock.wait()

    def _is_far_behind(self) -> bool:
        return self._size() > self._max_bytes or (self._log is not None and self._log.closed_size > self._log_bytes // WAIT_PART)

    # -- the thread of the tables -----------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.fail(error)

    def _work(self) -> None:
        while True:
            transaction = self._next()
            if transaction is None:
                if self._stopping:
                    return
                self._maintain(idle=True)
                continue
            if not self._apply_until_done(transaction) or not self._read(transaction):
                return
            self._maintain(idle=False)

    def _next(self) -> _Transaction | None:
        """The next changes to apply; None if there are none, at the end and when there is time for maintenance."""
        with self._lock:
            waited = False
            while True:
                if self._waiting:
                    self._applying = self._waiting.popleft()
                    return self._applying
                gathering = self._gathering
                left = gathering.due - time.monotonic()
                if gathering.due and (left <= 0 or self._stopping):
                    self._gathering = _Transaction(gathering.position)
                    self._applying = gathering
                    return gathering
                if self._stopping or waited:
                    return None
                timeout = left if gathering.due else None
                if self._has_maintenance():
                    timeout = IDLE_AFTER if timeout is None else min(timeout, IDLE_AFTER)
                    waited = not self._lock.wait(timeout)
                else:
                    self._lock.wait(timeout)

    def _has_maintenance(self) -> bool:
        return self._maintenance.has_work or self._sync_is_due() or self._segment_is_due()

    def _segment_is_due(self) -> bool:
        return self._log is not None and self._log.needs_segment and time.monotonic() >= self._segment_after

    def _apply_until_done(self, transaction: _Transaction) -> bool:
        """Apply a transaction, and repeat it while it fails; false if the thread is to end before."""
        while True:
            try:
                if transaction.due:
                    self._apply(transaction)
                break
            except Exception as error:
                self._database.note_damage(error)
                self._tables.undo()
                self._failures.report("the tables cannot be written", error)
                with self._lock:
                    self._apply_failure = error
                    self._lock.notify_all()
                    if self._stopping:
                        return False
                    self._lock.wait(RETRY_AFTER)
        with self._lock:
            if transaction.due:
                self.applied = transaction.position
            self._applying = None
            self._apply_failure = None
            self._lock.notify_all()
        self._failures.clear()
        return True

    def _apply(self, transaction: _Transaction) -> None:
        began = time.monotonic()
        tables = self._tables
        tables.begin()
        tables.apply(transaction.changes.write_set())
        tables.set_stream_ends(transaction.ends)
        tables.set_position(transaction.position)
        tables.commit()
        self._transactions += 1
        self._maintenance.committed()
        self.apply_seconds = time.monotonic() - began

    def _read(self, transaction: _Transaction) -> bool:
        """Answer the reads of a transaction; false if the thread is to end before."""
        write_set = transaction.reads
        if write_set is None:
            return True
        pages = self._read_pages(write_set, transaction.behind)
        if pages is None:
            return False
        for page in pages:
            self._database.note_damage(page.error)
        for query in write_set.queries:
            self._tables.run_query(query)
        try:
            self._read_done(write_set, pages)
        except Exception:
            logger.exception("event=defect in=store_report")
        return True

    def _read_pages(self, write_set: WriteSet, behind: _Transaction | None) -> list[Page] | None:
        """The pages; if changes behind the tables concern any of them, these are applied first. None if the thread is
        to end before."""
        tables = self._tables
        pages: list[Page] = [tables.read_page(request) for request in write_set.pages]
        if behind is None:
            return pages
        with self._lock:
            if not any(behind.changes.changes_rows(page.session_id, page.rows) for page in pages):
                return pages
            if behind is self._gathering:
                self._gathering = _Transaction(behind.position)
        # Between this transaction and that of the changes there are only reads, which find the tables up to date.
        if not self._apply_until_done(behind):
            return None
        with self._lock:
            behind.changes, behind.due = PendingChanges(), 0.0
        pages = [tables.read_page(request) for request in write_set.pages]
        for page, request in zip(pages, write_set.pages):
            if request.until_seq:
                # The changes may have later entries, which the client was offered while the page was read.
                page.rows = [row for row in page.rows if row.seq <= request.until_seq]
        return pages

    def _maintain(self, idle: bool) -> None:
        """Do one step of maintenance of the database and the log."""
        try:
            self._maintenance.run(self._transactions, idle)
        except Exception as error:
            self._failures.report("tidying failed", error)
            self._database.note_damage(error)
            self._tables.undo()
        log = self._log
        if log is None:
            return
        if self._segment_is_due():
            try:
                log.make_ready()
            except OSError as error:
                self._segment_after = time.monotonic() + SEGMENT_RETRY_AFTER
                self._failures.report("no segment of the log is ready", error)
        if self._sync_is_due():
            self._sync()

    def _sync_is_due(self) -> bool:
        return self._sync_failure is not None or (self._log is not None and self._log.closed_size > self._log_bytes // SYNC_PART)

    def _sync(self) -> bool:
        """Sync what was applied, and drop the log up to it; false if that failed."""
        position = min(self.applied, self.streams_position)
        try:
            if self._stream_log is not None and self._database.durable:
                self._stream_log.sync()
            self._database.sync()
            if self._log is not None:
                self._log.drop(position)
        except Exception as error:
            self._failures.report("the tables cannot be synced, and the log not be dropped", error)
            failure: Exception | None = error
        else:
            failure = None
        with self._lock:
            self._sync_failure = failure
            self._lock.notify_all()
        if failure is not None and not self._stopping:
            time.sleep(RETRY_AFTER)
        return failure is None


def _needs_changes(write_set: WriteSet, changes: PendingChanges) -> bool:
    """Whether reads may concern entries that were added by these changes.

    If not, the page is read without a transaction before it. While a client reads its queue, it acknowledges entries,
    and most are then removed before the change that says that they were sent is applied.
    """
    if write_set.queries:
        return True
    return any(request.with_received or request.after_seq < changes.last_seq for request in write_set.pages)


def _no_reads(write_set: WriteSet, pages: list[Page]) -> None:
    raise AssertionError("not started")
