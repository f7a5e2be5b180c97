"""Snapshots of one shard's database: loads one when the log no longer has what the database lacks, and writes new ones."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from mqttbroker.cluster.shard.snapshots import SnapshotEntry, SnapshotFailure, Snapshots, copy_database, newest
from mqttbroker.cluster.shard.tables import DATABASE
from sessions.store.damage import is_corrupt
from sessions.store.interface import CorruptStore, StoreError

log = logging.getLogger("mqttbroker.cluster")

LOOK_INTERVAL: Final = 5.0  # seconds between two looks whether a snapshot is due
RETRY_AFTER: Final = 30.0  # seconds after a snapshot failed


def extent(file: Path) -> tuple[int, dict[int, int]]:
    """The end of the log that a shard's database has, and its marks: offsets of the other logs, by shard. Raises `sqlite3.Error`."""
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        row = connection.execute("SELECT end FROM shard_log").fetchone()
        marks = dict(connection.execute("SELECT log, offset FROM marks"))
    return (0 if row is None else row[0]), marks


def _end_of(file: Path) -> int:
    """The end of the log that a database has, 0 for one that is not there or was not finished."""
    if not file.exists():
        return 0
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'shard_log'").fetchone() is None:
                return 0
            row = connection.execute("SELECT end FROM shard_log").fetchone()
            return 0 if row is None else int(row[0])
    except sqlite3.Error as error:
        raise (CorruptStore if is_corrupt(error) else StoreError)(f"{file}: {error}") from None


async def load_snapshot(snapshots: Snapshots, shard: int, log_topic: str, directory: Path, log_start: int) -> SnapshotEntry | None:
    """Replace a shard's database in ``directory`` by the newest snapshot if it lacks records that the log, whose first one is at
    ``log_start``, no longer has; the snapshot's entry, None if nothing is missing.

    To be called while the database is closed. Raises `SnapshotFailure` if there is no snapshot that helps, `StoreError` if the
    database cannot be read.
    """
    file = directory / DATABASE
    end = await asyncio.to_thread(_end_of, file)
    if end >= log_start:
        return None
    entry = newest(await snapshots.entries(), shard)
    if entry is None or entry.end < log_start:
        raise SnapshotFailure(
            f"{log_topic}, partition {shard}: the log begins at offset {log_start}, the tables end at {end},"
            " and no snapshot has what is between"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for suffix in ("-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise SnapshotFailure(f"{error.filename}: {error.strerror}") from None
    await snapshots.read(entry, file)
    return entry


class SnapshotKeeper:
    """The snapshots of the shard ``shard`` of ``shards``, whose database is in ``directory`` and whose log is a partition of
    ``log_topic``.

    A snapshot is due when the log has grown by ``most_bytes`` since the last one, or when it has grown at all and the last one is
    older than ``most_age`` seconds. ``log_bytes`` is how much of the log this process has read and written. An ``owner`` deletes what no
    core needs any more of its log, up to the offset ``derived`` before which the topics of streams have everything; None if there are no
    streams. ``failed`` is called with an error of SQLite, on the loop of `run`.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        shard: int,
        shards: int,
        log_topic: str,
        directory: Path,
        most_bytes: int,
        most_age: float,
        log_bytes: Callable[[], int],
        owner: Callable[[], bool],
        derived: Callable[[], int | None],
        failed: Callable[[sqlite3.Error], object],
    ) -> None:
        self.written = 0  # snapshots
        self._snapshots = snapshots
        self._shard = shard
        self._shards = shards
        self._log_topic = log_topic
        self._directory = directory
        self._most_bytes = most_bytes
        self._most_age = most_age
        self._log_bytes = log_bytes
        self._owner = owner
        self._derived = derived
        self._failed = failed
        self._end = 0  # of the log, as the last snapshot has it
        self._bytes = 0  # `log_bytes` at the last snapshot
        self._requested = asyncio.Event()

    async def prepare(self, log_start: int) -> None:
        """Replace a database that lacks records which the log, whose first record is at ``log_start``, no longer has.

        To be called while the database is closed. Raises `SnapshotFailure` if there is no snapshot that helps, `StoreError` if the
        database cannot be read.
        """
        entry = await load_snapshot(self._snapshots, self._shard, self._log_topic, self._directory, log_start)
        if entry is not None:
            log.info("event=snapshot_loaded shard=%d end=%d node=%s bytes=%d", self._shard, entry.end, entry.node, entry.size)

    def request(self) -> None:
        """Have a snapshot written soon."""
        self._requested.set()

    async def run(self) -> None:
        """Write snapshots when they are due, until this is cancelled."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL):
                    await self._requested.wait()
            grown = self._log_bytes() - self._bytes
            old = grown > 0 and loop.time() - last >= self._most_age
            if not (self._requested.is_set() or grown >= self._most_bytes or old):
                continue
            self._requested.clear()
            try:
                await self.write()
                last = loop.time()
            except (SnapshotFailure, sqlite3.Error, OSError) as error:
                log.warning("event=snapshot_failed shard=%d reason=%s", self._shard, error)
                if isinstance(error, sqlite3.Error):
                    self._failed(error)
                await asyncio.sleep(RETRY_AFTER)

    async def write(self) -> None:
        """Write a snapshot of what the database has now, and delete what is no longer needed."""
        read = self._log_bytes()
        copy = self._directory / "snapshot.db"
        copy.unlink(missing_ok=True)
        try:
            await asyncio.to_thread(copy_database, self._directory / DATABASE, copy)
            end, marks = await asyncio.to_thread(extent, copy)
            if end > self._end:
                await self._snapshots.write(self._shard, copy, end, marks)
                self.written += 1
                self._end = end
            self._bytes = read
        finally:
            copy.unlink(missing_ok=True)
        if self._owner():
            await self._snapshots.delete_unneeded(self._log_topic, self._shard, self._shards, self._derived())
