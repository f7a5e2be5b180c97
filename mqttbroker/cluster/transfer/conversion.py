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
from sessions.row_kinds import KINDS, PRODUCERS, READERS, RETAINED, SESSIONS, SUBSCRIPTIONS, RowKind
from sessions.rows import ENTRY_COLUMNS, MESSAGE_COLUMNS, RECEIVED_COLUMNS, received_key
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
        self._shard_of: list[dict[Any, int]] = [{} for _ in KINDS]  # by number of the kind and key, of rows that may own others
        self._next_message_id = 1
        self._counts = [0 for _ in KINDS]  # by number
        self._queued = 0

    @property
    def carried(self) -> Carried:
        """The rows of the write sets so far."""
        counts = (self._counts[kind.number] for kind in (SESSIONS, SUBSCRIPTIONS, RETAINED, PRODUCERS, READERS))
        sessions, subscriptions, retained, producers, readers = counts
        return Carried(sessions, subscriptions, self._queued, retained, producers, readers)

    def write_sets(self) -> Iterator[tuple[int, WriteSet]]:
        """All write sets, each with its shard, in the order in which a shard is to get them. Raises `sqlite3.Error`."""
        for kind in KINDS:
            if kind.in_record:
                yield from self._rows(kind)
        yield from self._queues()
        yield from self._received()
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

    def _rows(self, kind: RowKind[Any, Any]) -> Iterator[tuple[int, WriteSet]]:
        """The rows of a kind. A cluster has no readers of streams to use them, but a single broker that gets the store back has."""
        for found in self._select(kind.columns, kind.table_in_order):
            row = kind.row_type._make(found)
            if kind is SESSIONS and row.disconnected_at is None:
                row = row._replace(disconnected_at=self._now)
            shards = self._shards_for(kind, row)
            if not shards:
                continue
            if kind.of_messages:
                row = Message(row.topic, row.payload, row.qos, True, row.properties, row.publisher, row.timestamp, row.expires_at)
            self._counts[kind.number] += 1
            if kind.numbered:
                self._shard_of[kind.number][kind.key_of(row)] = shards[0]
            for shard in shards:
                yield from self._make_room(shard, kind.size_of(row))
                self._parts[shard].write_set.rows[kind.number].append(row)

    def _shards_for(self, kind: RowKind[Any, Any], row: Any) -> list[int]:
        """The shards that have a row, as `RowKind` says it; none if a session that was deleted owns it."""
        owner = 0 if kind.owner is None else getattr(row, kind.owner_column)
        if kind.owner is not None and owner > 0:
            shard = self._shard_of[kind.owner.number].get(owner)
            return [] if shard is None else [shard]
        return [self._shards.of_text(getattr(row, kind.placed_by))] if kind.placed_by else list(range(self._shards.count))

    def _queues(self) -> Iterator[tuple[int, WriteSet]]:
        entry_columns = tuple(f"queue.{name}" for name in ENTRY_COLUMNS)
        columns = entry_columns + tuple(f"messages.{name}" for name in MESSAGE_COLUMNS)
        joined = "queue JOIN messages ON messages.id = queue.message_id ORDER BY queue.session_id, queue.seq"
        for found in self._select(columns, joined):
            entry = dict(zip(ENTRY_COLUMNS, found))
            shard = self._shard_of[SESSIONS.number].get(entry["session_id"])
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
            self._queued += 1

    def _received(self) -> Iterator[tuple[int, WriteSet]]:
        for session_id, packet_id in self._select(RECEIVED_COLUMNS, "received"):
            shard = self._shard_of[SESSIONS.number].get(session_id)
            if shard is not None:
                yield from self._make_room(shard, 0)
                self._parts[shard].write_set.received.append(received_key(session_id, packet_id))
