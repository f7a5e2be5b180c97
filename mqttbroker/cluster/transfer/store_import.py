"""Writes the store of a single broker into the empty logs of a cluster, from which its nodes then start."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import (
    CHANGES,
    NO_EPOCH,
    RELEASE,
    TAKEOVER,
    Header,
    Takeover,
    encode_record,
    encode_takeover,
)
from mqttbroker.cluster.shards import Shards
from mqttbroker.cluster.transfer.conversion import Carried, StoreRows
from sessions.store.database import lock_directory
from sessions.store.interface import StoreError
from sessions.write_set import WriteSet

RECORD_PART: Final = 2  # a write set takes at most 1/2 of the largest record


class ImportFailure(Exception):
    """The store cannot be imported; the text is one line."""


class StoreImport:
    """Writes to the logs in ``kafka``, as the owner ``owner`` of all shards; records have at most ``max_record_bytes``."""

    def __init__(self, kafka: KafkaLog, cluster: bytes, owner: bytes, takeover: Takeover, max_record_bytes: int) -> None:
        self._kafka = kafka
        self._cluster = cluster
        self._owner = owner
        self._takeover = takeover
        self._max_record_bytes = max_record_bytes
        self._sequences: dict[int, int] = {}

    async def run(self, database: Path, shards: int) -> Carried:
        """Import the database of a broker that does not run, whose tables have all that its commit log had.

        All logs get an owner that releases them at the end. Raises `ImportFailure`; then the topics are to be made anew.
        """
        await self.check(shards)
        for shard in range(shards):
            header = Header(TAKEOVER, shard, self._cluster, self._owner, NO_EPOCH, 0)
            await self._append(shard, header, encode_takeover(self._takeover))
            self._sequences[shard] = 0
        try:
            with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
                rows = StoreRows(connection, Shards(shards), self._max_record_bytes // RECORD_PART, time.time())
                for shard, write_set in rows.write_sets():
                    await self._changes(shard, write_set)
                carried = rows.carried
        except sqlite3.Error as error:
            raise ImportFailure(f"{database}: {error}") from None
        for shard in range(shards):
            await self._append(shard, self._next(RELEASE, shard), b"")
        return carried

    async def check(self, shards: int) -> None:
        """Raise `ImportFailure` unless the logs are empty."""
        ends = await self._kafka.ends(range(shards))
        for shard in range(shards):
            if shard not in ends:
                raise ImportFailure(f"{self._kafka.topic}, partition {shard}: has no leader that can be reached")
            if ends[shard]:
                raise ImportFailure(f"{self._kafka.topic}, partition {shard}: has {ends[shard]} records; the logs must be empty")

    def _next(self, kind: int, shard: int) -> Header:
        self._sequences[shard] += 1
        return Header(kind, shard, self._cluster, self._owner, 0, self._sequences[shard])

    async def _changes(self, shard: int, write_set: WriteSet) -> None:
        body = encode_body(write_set)
        if len(body) > self._max_record_bytes:
            raise ImportFailure(f"{self._kafka.topic}, partition {shard}: a message of {len(body)} bytes, more than max_record_bytes")
        await self._append(shard, self._next(CHANGES, shard), body)

    async def _append(self, shard: int, header: Header, body: bytes) -> None:
        answer = await self._kafka.append(shard, encode_record(header, body))
        if answer.offset != self._sequences.get(shard, 0):
            reason = answer.reason or "another process writes to it"
            raise ImportFailure(f"{self._kafka.topic}, partition {shard}: {reason}; delete the topic and begin again")


def lock_store(data_dir: Path, database: Path) -> int:
    """A descriptor that holds the lock of a broker's data directory. Raises `StoreError` if a broker uses it, or left a commit log
    that its tables lack."""
    if not database.exists():
        raise StoreError(f"{database}: is missing")
    lock = lock_directory(data_dir)
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        row = connection.execute("SELECT closed FROM commit_log").fetchone()
    if row is not None and not row[0]:
        raise StoreError(f"{database}: was not closed in order; start the broker once and stop it, then import")
    return lock
