"""The commit: records to the stream log, everything else and the log's ends to SQLite, in one step.

Records are synced before COMMIT, and COMMIT stores the ends of the stream log. After a failure both are back at the
last commit.
"""

from __future__ import annotations

from typing import Dict, List, Optional

from sessions.message import Message
from sessions.store.database import Database
from sessions.store.disk import prove_room
from sessions.store.failure_log import FailureLog
from sessions.store.interface import Partition, StreamLog
from sessions.store.tables import SqliteTables
from sessions.write_set import WriteSet

# After a failure this many bytes must fit on the disk before a commit counts as a success: one page may still fit into
# the space that the write-ahead log has.
ROOM_BYTES = 1024 * 1024


class Committer:
    """Commits write sets to the stream log, if there is one, and to the tables."""

    def __init__(
        self, database: Database, tables: SqliteTables, stream_log: Optional[StreamLog], failures: FailureLog
    ) -> None:
        self.commits = 0
        self._database = database
        self._tables = tables
        self._stream_log = stream_log
        self._failures = failures
        self._log_ahead = False  # the stream log has records that no commit covers

    def commit(self, write_set: WriteSet) -> None:
        """Return when the write set is durable. If it raises, call `roll_back`."""
        self._undo()
        if not write_set.has_changes():
            return
        tables = self._tables
        if write_set.after_failure:
            self._prove_room()
        ends = self._append(write_set.stream_messages) if write_set.stream_messages else {}
        tables.begin()
        tables.apply(write_set)
        tables.set_stream_ends(ends)
        if write_set.after_failure:
            tables.write_first_page()
        tables.commit()
        self.commits += 1
        self._failures.clear()
        if self._log_ahead:
            self._log_ahead = False
            self.publish_ends()

    def _prove_room(self) -> None:
        if self._database.durable:
            prove_room(self._database.path.parent, ROOM_BYTES)
        if self._stream_log is not None:
            prove_room(self._stream_log.directory, ROOM_BYTES)

    def _append(self, records: Dict[Partition, List[Message]]) -> Dict[Partition, int]:
        if self._stream_log is None:
            raise ValueError("messages for a stream, and no stream log")
        self._log_ahead = True
        ends = self._stream_log.append(records)
        if self._database.durable:
            self._stream_log.sync()
        return {partition: end[0] for partition, end in ends.items()}

    def publish_ends(self) -> None:
        """Have the stream log move its high watermarks and apply its retention, unless a commit is incomplete.

        A failure does not affect the commit.
        """
        if self._stream_log is None or self._log_ahead:
            return
        try:
            self._stream_log.committed()
        except Exception as error:
            self._failures.report("high watermarks stay behind until the next commit", error)

    def roll_back(self) -> None:
        """Undo a failed commit; if that fails too, it is tried again before the next commit."""
        try:
            self._undo()
        except Exception as error:
            self._failures.report("a rollback failed and is repeated before the next commit", error)

    def _undo(self) -> None:
        # SQLite first: until a failed COMMIT is overwritten, the stream log keeps the records whose ends it may hold.
        self._tables.undo()
        if self._log_ahead:
            assert self._stream_log is not None
            self._stream_log.rollback()
            self._log_ahead = False
