"""A store that commits one numbered write set after the other, and a minimal stream log.

As a program, `test_kill_9_loses_no_reported_commit` kills it: it prints the number of each commit once it is durable.
"""

from __future__ import annotations

import errno
import os
import queue
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from sessions.message import Message
from sessions.row_kinds import RETAINED, SESSIONS, SUBSCRIPTIONS
from sessions.rows import RetainedRow, SessionRow, SubscriptionRow, received_key
from sessions.store.writer import SqliteStore
from sessions.write_set import Page, PageRequest, WriteSet

Partition = tuple[str, int]
Outcome = tuple[WriteSet, Exception | None]

PARTITIONS = 8  # of the stream "s"
ENTRIES = 10  # of each commit, in session 1
KEPT = 5  # commits whose entries are still queued


class FileLog:
    """One file of 8-byte records per partition; ``events`` has the calls in their order.

    ``fail_in`` names a method that raises OSError, with the number ``error``, after its work.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.events: list[str] = []
        self.fail_in = ""
        self.error = errno.EIO
        self.ends: dict[Partition, int] = {}
        self.appended: dict[Partition, int] = {}

    def path(self, partition: Partition) -> Path:
        return self.directory / f"{partition[0]}-{partition[1]}"

    def records(self, partition: Partition) -> list[int]:
        data = self.path(partition).read_bytes()
        assert len(data) % 8 == 0
        return [int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)]

    def _called(self, name: str) -> None:
        self.events.append(name)
        if self.fail_in == name:
            error = OSError(f"{name} fails")
            error.errno = self.error
            raise error

    def append(self, records: dict[Partition, list[Message]]) -> dict[Partition, tuple[int, int, str]]:
        for partition, messages in records.items():
            with open(self.path(partition), "ab") as file:
                for message in messages:
                    file.write(message.payload.rjust(8, b"\0"))
            end = self.ends.get(partition, 0) + len(messages)
            self.appended[partition] = end
        self._called("append")
        return {key: (end, end * 8, "0") for key, end in self.appended.items()}

    def sync(self) -> None:
        for partition in self.appended:
            with open(self.path(partition), "ab") as file:
                os.fsync(file.fileno())
        self._called("sync")

    def rollback(self) -> None:
        self._called("rollback")
        for partition in self.appended:
            os.truncate(self.path(partition), self.ends.get(partition, 0) * 8)
        self.appended = {}

    def committed(self) -> None:
        self.ends.update(self.appended)
        self.appended = {}
        self._called("committed")

    def recover(self, ends: dict[Partition, int] | None, logged: dict[Partition, int]) -> dict[Partition, int]:
        self.events.append("recover" if ends is not None else "recover all")
        self.ends = {("s", number): 0 for number in range(PARTITIONS)}
        for name in os.listdir(self.directory):
            stream, _, number = name.rpartition("-")
            partition = (stream, int(number))
            have = os.path.getsize(self.directory / name) // 8
            end = have if ends is None else ends.get(partition, 0)
            found = min(end, have)
            assert end == found or found >= logged[partition], f"{partition} lost records"
            os.truncate(self.directory / name, found * 8)
            self.ends[partition] = found
        return dict(self.ends)


def message(
    message_id: int,
    topic: str,
    payload: bytes,
    qos: int = 1,
    retain: bool = False,
    properties: bytes = b"",
    publisher: str = "p",
    timestamp: int = 1,
    expires_at: int = 0,
) -> Message:
    """A message under the id that the journal would give it."""
    made = Message(topic, payload, qos, retain, properties, publisher, timestamp, expires_at)
    made.id = message_id
    return made


def retained(
    topic: str,
    payload: bytes,
    qos: int = 1,
    properties: bytes = b"",
    publisher: str = "p",
    timestamp: int = 1,
    expires_at: int = 0,
) -> Message:
    return Message(topic, payload, qos, True, properties, publisher, timestamp, expires_at)


def retained_rows(write_set: WriteSet) -> list[tuple[Any, ...]]:
    """The rows that the retained messages of a write set become."""
    return list(map(attrgetter(*RetainedRow._fields), write_set.saved(RETAINED)))


class Writer:
    """A started store that commits one write set at a time."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[WriteSet, list[Page]]] = queue.SimpleQueue()
        store.start(lambda *outcome: self._done.put(outcome), lambda *read: self._read.put(read))

    def outcome(self, write_set: WriteSet) -> Exception | None:
        """None when the write set is durable, or why it is not; its pages are not waited for."""
        self.store.submit(write_set)
        done, error = self._done.get(timeout=30)
        assert done is write_set
        return error

    def pages(self, write_set: WriteSet) -> list[Page]:
        """The pages of a write set that is durable."""
        read, pages = self._read.get(timeout=30)
        assert read is write_set
        return pages

    def commit(self, write_set: WriteSet) -> list[Page]:
        """Return the pages when the write set is durable, and the tables have it."""
        added = [] if write_set.pages or write_set.queries else [PageRequest(0, 0, 1, True)]
        write_set.pages += added
        error = self.outcome(write_set)
        if error is not None:
            raise error
        pages = self.pages(write_set)
        return [] if added else pages

    def page(self, session_id: int, after: int = 0, limit: int = 10**6, size: int = 0) -> Page:
        write_set = WriteSet()
        write_set.pages.append(PageRequest(session_id, after, limit, True, size))
        return self.commit(write_set)[0]

    def next_page(self, session_id: int, after: int, limit: int = 10**6) -> Page:
        """A page as a client that has read those before asks for it."""
        write_set = WriteSet()
        write_set.pages.append(PageRequest(session_id, after, limit, False))
        return self.commit(write_set)[0]


def commit_number(number: int) -> WriteSet:
    """A write set with every kind of change, so that a partial commit is detected."""
    write_set = WriteSet()
    keys = range(number * ENTRIES, (number + 1) * ENTRIES)
    write_set.saved(SESSIONS).append(SessionRow(1, "victim", 5, 3600, float(number), None, None, None, None))
    write_set.saved(SUBSCRIPTIONS).append(SubscriptionRow(1, "a/+", 1, 1, number))
    write_set.messages = [message(key, f"a/{key}", b"%d" % key, timestamp=key) for key in keys]
    write_set.entries = [(1, key, key, 0, 1, 0, b"", 0, 0, len(f"a/{key}{key}"), 0) for key in keys]
    write_set.received.append(received_key(1, number % 60000 + 1))
    if number > 0:
        write_set.deleted_received.append(received_key(1, (number - 1) % 60000 + 1))
        write_set.entry_updates = [(key % 60000 + 1, 2, 1, key) for key in range((number - 1) * ENTRIES, number * ENTRIES)]
    if number >= KEPT:
        gone = range((number - KEPT) * ENTRIES, (number - KEPT + 1) * ENTRIES)
        write_set.deleted_entries = [(1, key, key, 0) for key in gone]
    write_set.saved(RETAINED).append(retained("last", b"%d" % number, timestamp=number))
    record = Message("s", number.to_bytes(8, "big"), 1, False, b"", "p", number, 0)
    write_set.stream_messages = {("s", number % 2): [record]}
    return write_set


def main(directory: str) -> None:
    store = SqliteStore(Path(directory) / "broker.db", "commit", FileLog(Path(directory) / "streams"))
    recovered = store.recover()
    number = int(recovered.rows(RETAINED)[0][1]) + 1 if recovered.rows(RETAINED) else 0
    writer = Writer(store)
    while True:
        writer.commit(commit_number(number))
        os.write(1, b"%d\n" % number)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1])
