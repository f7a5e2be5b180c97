"""The start of a store: the records of the commit log that tables and streams lack are applied to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sessions.message import Message
from sessions.pending_changes import PendingChanges
from sessions.store.commit_log.file_log import FileCommitLog
from sessions.store.commit_log.records import StreamExtent, decode, decode_extents
from sessions.store.commit_log.survey import Survey
from sessions.store.disk import is_full
from sessions.store.interface import CorruptStore, Partition, StreamLog
from sessions.store.tables import SqliteTables

LOG_DIRECTORY = "log"
# Changes of about this much memory are applied in one transaction.
REPLAY_BYTES = 32 * 1024 * 1024


def recover_log(log: FileCommitLog, tables: SqliteTables) -> LogReplay:
    """Open the log of these tables, and apply it to them.

    Raises the errors of `SqliteTables.log_state` and `FileCommitLog.open`.
    """
    state = tables.log_state(log.exists)
    replayed = LogReplay(log.open(state.identity, state.position, state.closed), tables, state.position)
    replayed.apply()
    return replayed


Records = dict[Partition, list[Message]]


def recover_streams(replayed: LogReplay, stream_log: StreamLog) -> tuple[dict[Partition, int], list[Records]]:
    """Append to the streams what the log has and they have not; return their ends, and what a full disk left over.

    Raises the errors of `StreamLog.recover` and `StreamLog.append`.
    """
    ends = stream_log.recover(replayed.ends, replayed.logged)
    left: list[Records] = []
    if any(ends[partition] < replayed.ends.get(partition, 0) for partition in ends):
        for missing in _missing_records(replayed, ends):
            if not left:
                try:
                    stream_log.append(missing)
                    stream_log.committed()
                    continue
                except OSError as error:
                    if not is_full(error):
                        raise
                    stream_log.rollback()
            left.append(missing)
    return ends, left


class LogReplay:
    """Applies the records of a log to tables that have those up to ``position``.

    By partition, ``logged`` is the first offset in the log, and ``ends`` the end of the stream after the log.
    ``with_streams`` are the positions of the records that write to streams. If the disk is full, ``left`` has the
    changes that could not be applied, and `reading` shows the tables as if they had been. The rows of ``salvaged``
    tables may be of different times.
    """

    def __init__(self, found: Survey, tables: SqliteTables, position: int, salvaged: bool = False) -> None:
        self.ends = tables.stream_ends()
        self.logged: dict[Partition, int] = {}
        self.with_streams: list[int] = []
        self.position = position
        self.left: PendingChanges | None = None
        self.failure: Exception | None = None
        self.found = found
        self._tables = tables
        self._salvaged = salvaged

    def apply(self) -> None:
        """Apply all records; raises `CorruptStore` if one has no write set, `OSError` or `sqlite3.Error`."""
        changes = PendingChanges(self._salvaged)
        for record in self.found.records(0):
            try:
                streams = decode_extents(record.body)
                write_set = decode(record.body)[0] if record.position > self.position else None
            except ValueError as error:
                raise CorruptStore(f"commit log: record of position {record.position}: {error}") from None
            for extent in streams:
                partition = (extent.stream, extent.partition)
                self.logged.setdefault(partition, extent.first_offset)
                self.ends[partition] = max(self.ends.get(partition, 0), extent.end_offset)
            if streams:
                self.with_streams.append(record.position)
            if write_set is not None:
                changes.merge(write_set)
                self.position = record.position
                if changes.size > REPLAY_BYTES and self.failure is None:
                    changes = self._commit(changes)
        if not changes.empty and self.failure is None:
            changes = self._commit(changes)
        self.left = None if changes.empty else changes

    def _commit(self, changes: PendingChanges) -> PendingChanges:
        """Apply changes; returns those that are left, which are all if the disk is full."""
        tables = self._tables
        try:
            tables.begin()
            tables.apply(changes.write_set())
            tables.set_stream_ends(self.ends)
            tables.set_position(self.position)
            tables.commit()
        except sqlite3.Error as error:
            if not is_full(error):
                raise
            tables.undo()
            self.failure = error
            return changes
        return PendingChanges(self._salvaged)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the tables with everything that the log has, though the disk may be full."""
        if self.left is None:
            yield
            return
        with self._tables.in_memory():
            self._tables.apply(self.left.write_set())
            yield


def _missing_records(replayed: LogReplay, ends: dict[Partition, int]) -> Iterator[Records]:
    """What the streams have not, of each record of the log; ``ends`` are theirs, and are moved."""
    wanted = set(replayed.with_streams)
    for record in replayed.found.records(min(wanted) - 1):
        if record.position not in wanted:
            continue
        if not any(_begins_in(extent, ends) for extent in decode_extents(record.body)):
            continue
        missing: Records = {}
        for part in decode(record.body)[1]:
            partition = (part.stream, part.partition)
            end = ends.get(partition)
            if end is not None and part.first_offset <= end < part.first_offset + len(part.messages):
                missing[partition] = part.messages[end - part.first_offset :]
                ends[partition] = part.first_offset + len(part.messages)
        if missing:
            yield missing


def _begins_in(extent: StreamExtent, ends: dict[Partition, int]) -> bool:
    """Whether what a stream lacks begins in this extent."""
    end = ends.get((extent.stream, extent.partition))
    return end is not None and extent.first_offset <= end < extent.end_offset
