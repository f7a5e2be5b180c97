"""Snapshots of a shard's database in real Kafka."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.kafka import KafkaCluster

from mqttbroker.cluster.shard.snapshot_keeper import SnapshotKeeper, extent
from mqttbroker.cluster.shard.snapshots import SnapshotEntry, SnapshotFailure, Snapshots, needed_from, newest
from mqttbroker.cluster.shard.tables import DATABASE

pytestmark = pytest.mark.one_build


def entry(shard: int, end: int, marks: dict[int, int], node: str = "a") -> SnapshotEntry:
    return SnapshotEntry(shard, node, b"", 0, 0, 1, 0, b"", end, marks, 0.0)


def test_a_log_is_needed_from_the_least_offset_that_a_snapshot_asks_for() -> None:
    first, second = entry(0, 100, {1: 40}), entry(1, 70, {0: 90})
    assert needed_from([first], 0, 2) == 0
    assert needed_from([first, second], 0, 2) == 90
    assert needed_from([first, second], 1, 2) == 40
    newer = entry(1, 170, {0: 99}, "b")
    assert newest([second, newer], 1) is newer
    assert needed_from([first, newer, second], 0, 2) == 99
    assert needed_from([entry(0, 100, {}), second], 1, 2) == 0


def database(directory: Path, end: int, rows: int) -> None:
    """A database with what `SnapshotKeeper` looks at, and some rows."""
    directory.mkdir(exist_ok=True)
    with closing(sqlite3.connect(directory / DATABASE)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS shard_log (id INTEGER PRIMARY KEY, end INTEGER)")
        connection.execute("CREATE TABLE IF NOT EXISTS marks (log INTEGER PRIMARY KEY, offset INTEGER)")
        connection.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, payload BLOB)")
        connection.execute("INSERT OR REPLACE INTO shard_log VALUES (1, ?)", (end,))
        connection.execute("INSERT OR REPLACE INTO marks VALUES (1, ?)", (end // 2,))
        connection.executemany("INSERT INTO rows (payload) VALUES (randomblob(?))", [(3000,)] * rows)
        connection.commit()


def content(file: Path) -> list[Any]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("SELECT * FROM rows ORDER BY id").fetchall()


async def test_a_node_without_tables_starts_with_a_snapshot(kafka: KafkaCluster, tmp_path: Path) -> None:
    cluster_id = f"snap-{uuid.uuid4().hex[:8]}"
    await kafka.create_topic(f"{cluster_id}.log", 2)
    await kafka.create_topic(f"{cluster_id}.snapshots", 2)
    await kafka.create_topic(f"{cluster_id}.snapshot-index", 1, **{"cleanup.policy": "compact"})
    connection = {"bootstrap_servers": kafka.bootstrap}

    def keeper(node: str) -> SnapshotKeeper:
        return SnapshotKeeper(
            Snapshots(connection, cluster_id, node, lambda: 5.0), 0, 2, f"{cluster_id}.log", tmp_path / node,
            1 << 30, 900.0, lambda: 0, lambda: False, lambda: None, lambda _: None,
        )  # fmt: skip

    old, late = keeper("old"), keeper("late")
    with pytest.raises(SnapshotFailure, match="begins at offset 7, the tables end at 0, and no snapshot"):
        await late.prepare(7)
    database(tmp_path / "old", 10, 700)
    writing = asyncio.create_task(old.run())
    old.request()
    while not old.written:
        await asyncio.sleep(0.05)
    writing.cancel()
    # A second one of the same node replaces its entry; another node's older one does not.
    database(tmp_path / "old", 20, 300)
    await old.write()
    database(tmp_path / "behind", 15, 1)
    await keeper("behind").write()

    await late.prepare(18)
    assert extent(tmp_path / "late" / DATABASE) == (20, {1: 10})
    assert content(tmp_path / "late" / DATABASE) == content(tmp_path / "old" / DATABASE)
    before = content(tmp_path / "late" / DATABASE)
    await late.prepare(20)
    assert content(tmp_path / "late" / DATABASE) == before

    with pytest.raises(SnapshotFailure, match="begins at offset 21, the tables end at 20"):
        await late.prepare(21)
    snapshots = Snapshots(connection, cluster_id, "late", lambda: 6.0)
    found = newest(await snapshots.entries(), 0)
    assert found is not None and found.count > 1 and found.written == 5.0
    await snapshots.delete_before(snapshots.topic, 0, found.last)
    with pytest.raises(SnapshotFailure, match="partition 0"):
        await snapshots.read(found, tmp_path / "damaged.db")
    assert not (tmp_path / "damaged.db").exists()
