"""The store of a single broker as records of a cluster's logs.

Sessions go to the shard of their client id with all that is theirs, retained messages to the shard of their topic. What producers
have stored is known in every shard, because a producer may have any client id.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from mqttbroker.cluster.shards import Shards
from sessions.message import Message
from sessions.rows import (
    ENTRY_COLUMNS,
    MESSAGE_COLUMNS,
    RECEIVED_COLUMNS,
    SUBSCRIPTION_READER,
    OffsetsRow,
    ProducerRow,
    ReaderRow,
    RetainedRow,
    SessionRow,
    SubscriptionRow,
    received_key,
)
from sessions.write_set import WriteSet

ROW_BYTES: Final = 64  # of the memory of a row, beside its texts


class Carried(NamedTuple):
    """How much of a store the write sets have; ``readers`` are those of streams."""

    sessions: int
    subscriptions: int
    queued: int
    retained: int
    producers: int
    readers: int


class _Part:
    """The write set of one shard that gathers."""

    def __init__(self) -> None:
        self.write_set = WriteSet()
        self.size = 0  # in bytes, about


class StoreRows:
    """The rows of a single broker's database as write sets of up to about ``most_bytes``, or of one row, for each of the ``shards``.

    A session that was connected counts as disconnected at ``now`` (Unix seconds). A message that several sessions queue is in the
    shards once per session.
    """

    def __init__(self, connection: sqlite3.Connection, shards: Shards, most_bytes: int, now: float) -> None:
        self._connection = connection
        self._shards = shards
        self._most_bytes = most_bytes
        self._now = now
        self._parts: list[_Part] = [_Part() for _ in range(shards.count)]
        self._shard_of: dict[int, int] = {}  # by session id
        self._next_message_id = 1
        self._counts: dict[str, int] = dict.fromkeys(Carried._fields, 0)

    @property
    def carried(self) -> Carried:
        """The rows of the write sets so far."""
        return Carried(**self._counts)

    def write_sets(self) -> Iterator[tuple[int, WriteSet]]:
        """All write sets, each with its shard, in the order in which a shard is to get them. Raises `sqlite3.Error`."""
        for rows in (
            self._sessions,
            self._subscriptions,
            self._queues,
            self._received,
            self._retained,
            self._producers,
            self._readers,
        ):
            yield from rows()
        for shard, part in enumerate(self._parts):
            if part.write_set.has_changes():
                yield shard, part.write_set

    def _make_room(self, shard: int, size: int) -> Iterator[tuple[int, WriteSet]]:
        """Have room for a row of ``size`` bytes in a shard's part; a part that has none goes."""
        part = self._parts[shard]
        if part.size and part.size + ROW_BYTES + size > self._most_bytes:
            self._parts[shard] = _Part()
            yield shard, part.write_set
        self._parts[shard].size += ROW_BYTES + size

    def _select(self, columns: tuple[str, ...], table: str) -> Iterator[Any]:
        return self._connection.execute(f"SELECT {', '.join(columns)} FROM {table}")

    def _sessions(self) -> Iterator[tuple[int, WriteSet]]:
        for found in self._select(SessionRow._fields, "sessions ORDER BY session_id"):
            row = SessionRow._make(found)
            if row.disconnected_at is None:
                row = row._replace(disconnected_at=self._now)
            shard = self._shard_of[row.session_id] = self._shards.of_text(row.client_id)
            yield from self._make_room(shard, len(row.client_id) + len(row.will or b"") + len(row.permissions or ""))
            self._parts[shard].write_set.sessions.append(row)
            self._counts["sessions"] += 1

    def _subscriptions(self) -> Iterator[tuple[int, WriteSet]]:
        for found in self._select(SubscriptionRow._fields, "subscriptions ORDER BY session_id"):
            row = SubscriptionRow._make(found)
            shard = self._shard_of[row.session_id]
            yield from self._make_room(shard, len(row.topic_filter))
            self._parts[shard].write_set.subscriptions.append(row)
            self._counts["subscriptions"] += 1

    def _queues(self) -> Iterator[tuple[int, WriteSet]]:
        entry_columns = tuple(f"queue.{name}" for name in ENTRY_COLUMNS)
        columns = entry_columns + tuple(f"messages.{name}" for name in MESSAGE_COLUMNS)
        joined = "queue JOIN messages ON messages.id = queue.message_id ORDER BY queue.session_id, queue.seq"
        for found in self._select(columns, joined):
            entry = dict(zip(ENTRY_COLUMNS, found))
            shard = self._shard_of.get(entry["session_id"])
            if shard is None:
                continue  # of a deleted session, whose entries go in steps
            row = found[len(ENTRY_COLUMNS) :]
            message = Message(row[1], row[2], row[3], bool(row[4]), row[5], row[6], row[7], row[8])
            message.id = entry["message_id"] = self._next_message_id
            self._next_message_id += 1
            entry["shared"] = 0
            entry["expires_at"] = entry["expires_at"] or 0
            yield from self._make_room(shard, message.size)
            write_set = self._parts[shard].write_set
            write_set.messages.append(message)
            write_set.entries.append(tuple(entry.values()))
            self._counts["queued"] += 1

    def _received(self) -> Iterator[tuple[int, WriteSet]]:
        for session_id, packet_id in self._select(RECEIVED_COLUMNS, "received"):
            shard = self._shard_of.get(session_id)
            if shard is not None:
                yield from self._make_room(shard, 0)
                self._parts[shard].write_set.received.append(received_key(session_id, packet_id))

    def _retained(self) -> Iterator[tuple[int, WriteSet]]:
        for found in self._select(RetainedRow._fields, "retained"):
            row = RetainedRow._make(found)
            message = Message(row.topic, row.payload, row.qos, True, row.properties, row.publisher, row.timestamp, row.expires_at)
            shard = self._shards.of_text(row.topic)
            yield from self._make_room(shard, message.size)
            self._parts[shard].write_set.retained.append(message)
            self._counts["retained"] += 1

    def _producers(self) -> Iterator[tuple[int, WriteSet]]:
        for found in self._select(ProducerRow._fields, "producers"):
            row = ProducerRow._make(found)
            self._counts["producers"] += 1
            for shard in range(self._shards.count):
                yield from self._make_room(shard, len(row.user_name) + len(row.producer_id) + len(row.missing))
                self._parts[shard].write_set.producers.append(row)

    def _readers(self) -> Iterator[tuple[int, WriteSet]]:
        """A cluster has no readers to use them, but a single broker that gets the store back has."""
        shard_of: dict[int, int] = {}
        for found in self._select(ReaderRow._fields, "stream_readers ORDER BY reader_id"):
            row = ReaderRow._make(found)
            shard = self._shards.of_text(row.name) if row.kind != SUBSCRIPTION_READER else self._shard_of.get(row.session_id)
            if shard is None:
                continue  # of a deleted session
            shard_of[row.reader_id] = shard
            yield from self._make_room(shard, len(row.name) + len(row.topic_filter))
            self._parts[shard].write_set.readers.append(row)
            self._counts["readers"] += 1
        for found in self._select(OffsetsRow._fields, "stream_offsets ORDER BY reader_id, partition"):
            offsets = OffsetsRow._make(found)
            shard = shard_of.get(offsets.reader_id)
            if shard is not None:
                yield from self._make_room(shard, len(offsets.pending))
                self._parts[shard].write_set.offsets.append(offsets)
