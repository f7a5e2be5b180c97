"""Copies of the shards' databases in Kafka, so that a shard can be loaded by a node that has neither its tables nor all of its log.

A snapshot is the compressed database in records of the topic ``<id>.snapshots``, whose partitions are the shards, and then one
record of the compacted topic ``<id>.snapshot-index`` that says where it is and what it stands for. A snapshot without that
record is none. Each node replaces only its own entry of a shard, so a slow writer cannot hide a newer snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError

log = logging.getLogger("mqttbroker.cluster")

ID_BYTES: Final = 16  # of the id of a snapshot, with which each of its records begins
CHUNK_BYTES: Final = 786_432  # of compressed data in a record
READ_BYTES: Final = 4_194_304  # of the file that are compressed in one call
LEVEL: Final = 1  # of zlib: the network is faster than a higher one
READ_TIMEOUT_MS: Final = 1000


RECORD_BYTES: Final = ID_BYTES + CHUNK_BYTES  # the longest record


def snapshots_topic(cluster_id: str) -> str:
    return f"{cluster_id}.snapshots"


def snapshot_index(cluster_id: str) -> str:
    return f"{cluster_id}.snapshot-index"


class SnapshotFailure(Exception):
    """A snapshot cannot be written or read; the text is one line."""


class SnapshotEntry(msgspec.Struct, array_like=True, frozen=True):
    """Where a snapshot is, and what it stands for.

    Its records are those of ``id`` among the ``count`` and more from the offset ``first`` on. The database has the records of the
    shard's log before ``end``, and ``marks`` are the offsets of the other logs, by shard, from which a core that starts with it reads
    them. ``digest`` is the SHA-256 of the file, ``size`` its length in bytes, ``written`` the time in seconds since the epoch.
    """

    shard: int
    node: str
    id: bytes
    first: int
    last: int
    count: int
    size: int
    digest: bytes
    end: int
    marks: dict[int, int]
    written: float


def newest(entries: Sequence[SnapshotEntry], shard: int) -> SnapshotEntry | None:
    """The entry of the shard that stands for most of its log."""
    return max((entry for entry in entries if entry.shard == shard), key=lambda entry: entry.end, default=None)


def needed_from(entries: Sequence[SnapshotEntry], shard: int, shards: int) -> int:
    """The offset of a shard's log before which no core needs it, whatever it starts with: 0 unless each shard has a snapshot.

    A core that starts with the newest snapshot of its shard reads the log from the snapshot's end, and the others from its marks.
    """
    found = [newest(entries, one) for one in range(shards)]
    least: int | None = None
    for one, entry in enumerate(found):
        if entry is None:
            return 0
        offset = entry.end if one == shard else entry.marks.get(shard, 0)
        least = offset if least is None else min(least, offset)
    return least or 0


def copy_database(source: Path, target: Path) -> None:
    """Copy a database that other connections use, as of one moment. Raises `sqlite3.Error`."""
    connection = sqlite3.connect(f"file:{source}?mode=ro", uri=True)
    try:
        connection.execute("VACUUM INTO ?", (str(target),))
    finally:
        connection.close()


class Snapshots:
    """The snapshots of the cluster ``cluster_id`` (the setting `cluster.id`), as the node called ``node`` reads and writes them.

    ``connection`` are the arguments of aiokafka's clients. All methods are for one event loop; files are read and written on
    threads. They raise `SnapshotFailure`.
    """

    def __init__(self, connection: dict[str, Any], cluster_id: str, node: str, now: Callable[[], float]) -> None:
        self.topic = snapshots_topic(cluster_id)
        self.index = snapshot_index(cluster_id)
        self._connection = connection
        self._node = node
        self._now = now

    # -- writing ------------------------------------------------------------------

    async def write(self, shard: int, file: Path, end: int, marks: dict[int, int]) -> SnapshotEntry:
        """Write the database in ``file``, which nobody changes meanwhile, as a snapshot of the shard."""
        producer = AIOKafkaProducer(
            **self._connection,
            client_id="mqttbroker-snapshots",
            acks="all",
            enable_idempotence=True,
            max_request_size=2 * CHUNK_BYTES,
            linger_ms=0,
        )
        try:
            await producer.start()
            try:
                entry = await self._write(producer, shard, file, end, marks)
            finally:
                await producer.stop()
        except (KafkaError, OSError) as error:
            raise SnapshotFailure(f"{self.topic}, partition {shard}: {error!r}") from None
        log.info("event=snapshot_written shard=%d end=%d bytes=%d records=%d", shard, end, entry.size, entry.count)
        return entry

    async def _write(self, producer: AIOKafkaProducer, shard: int, file: Path, end: int, marks: dict[int, int]) -> SnapshotEntry:
        snapshot = secrets.token_bytes(ID_BYTES)
        digest = hashlib.sha256()
        compressor = zlib.compressobj(LEVEL)
        offsets = []
        size = 0
        waiting = bytearray()
        with await asyncio.to_thread(open, file, "rb") as opened:
            while True:
                data = await asyncio.to_thread(opened.read, READ_BYTES)
                digest.update(data)
                size += len(data)
                waiting += await asyncio.to_thread(compressor.compress if data else lambda _: compressor.flush(), data)
                while len(waiting) >= CHUNK_BYTES or (not data and waiting):
                    chunk = snapshot + bytes(waiting[:CHUNK_BYTES])
                    del waiting[:CHUNK_BYTES]
                    offsets.append((await producer.send_and_wait(self.topic, chunk, partition=shard)).offset)
                if not data:
                    break
        entry = SnapshotEntry(
            shard, self._node, snapshot, offsets[0], offsets[-1], len(offsets), size, digest.digest(), end, marks, self._now()
        )
        key = f"{shard}/{self._node}".encode()
        await producer.send_and_wait(self.index, msgspec.msgpack.encode(entry), key=key, partition=0)
        return entry

    # -- reading ------------------------------------------------------------------

    async def entries(self) -> list[SnapshotEntry]:
        """The entries of all shards and nodes."""
        found: dict[bytes, SnapshotEntry] = {}
        place = TopicPartition(self.index, 0)
        try:
            consumer = self._consumer()
            await consumer.start()
            try:
                consumer.assign([place])
                await consumer.seek_to_beginning(place)
                end = (await consumer.end_offsets([place]))[place]
                while await consumer.position(place) < end:
                    for record in (await consumer.getmany(place, timeout_ms=READ_TIMEOUT_MS)).get(place, ()):
                        found[record.key or b""] = msgspec.msgpack.decode(record.value or b"", type=SnapshotEntry)
            finally:
                await consumer.stop()
        except (KafkaError, OSError, msgspec.MsgspecError) as error:
            raise SnapshotFailure(f"{self.index}: {error!r}") from None
        return list(found.values())

    async def read(self, entry: SnapshotEntry, file: Path) -> None:
        """Write the database of a snapshot to ``file``, which is whole if this returns."""
        place = TopicPartition(self.topic, entry.shard)
        unfinished = file.with_name(file.name + ".part")
        digest = hashlib.sha256()
        decompressor = zlib.decompressobj()
        count = 0
        try:
            consumer = self._consumer()
            await consumer.start()
            try:
                consumer.assign([place])
                consumer.seek(place, entry.first)
                with await asyncio.to_thread(open, unfinished, "wb") as opened:
                    while await consumer.position(place) <= entry.last:
                        for record in (await consumer.getmany(place, timeout_ms=READ_TIMEOUT_MS)).get(place, ()):
                            value = record.value or b""
                            if record.offset <= entry.last and value.startswith(entry.id):
                                count += 1
                                data = await asyncio.to_thread(decompressor.decompress, value[ID_BYTES:])
                                digest.update(data)
                                await asyncio.to_thread(opened.write, data)
                    rest = decompressor.flush()
                    digest.update(rest)
                    opened.write(rest)
            finally:
                await consumer.stop()
        except (KafkaError, OSError, zlib.error) as error:
            raise SnapshotFailure(f"{self.topic}, partition {entry.shard}: {error!r}") from None
        if count != entry.count or digest.digest() != entry.digest:
            raise SnapshotFailure(
                f"{self.topic}, partition {entry.shard}: the snapshot of offset {entry.first} is damaged: {count} of {entry.count} records"
            )
        await asyncio.to_thread(unfinished.replace, file)

    def _consumer(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **self._connection,
            client_id="mqttbroker-snapshots",
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            metadata_max_age_ms=30_000,
        )

    # -- deleting -----------------------------------------------------------------

    async def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Delete the records of a topic before an offset."""
        try:
            admin = AIOKafkaAdminClient(**self._connection, client_id="mqttbroker-snapshots")
            await admin.start()
            try:
                await admin.delete_records({TopicPartition(topic, partition): RecordsToDelete(before_offset=offset)})
            finally:
                await admin.close()
        except (KafkaError, OSError) as error:
            raise SnapshotFailure(f"{topic}, partition {partition}: {error!r}") from None

    async def delete_unneeded(self, log_topic: str, shard: int, shards: int, most: int | None = None) -> int:
        """Delete what no core needs of the shard's log, up to the offset ``most``, and of its snapshots.

        Returns the offset before which the log was deleted.
        """
        entries = await self.entries()
        offset = needed_from(entries, shard, shards)
        if most is not None:
            offset = min(offset, most)
        if offset > 0:
            await self.delete_before(log_topic, shard, offset)
        entry = newest(entries, shard)
        if entry is not None:
            await self.delete_before(self.topic, shard, entry.first)
        return offset
