"""The store of a single broker in the logs of real Kafka."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from support.kafka import KafkaCluster
from support.store_model import RandomCommits

from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.log.body import changes_of
from mqttbroker.cluster.log.records import CHANGES, HEADER_BYTES, Takeover, decode_header
from mqttbroker.cluster.log.view import VALID, LogView
from mqttbroker.cluster.shards import Shards
from mqttbroker.cluster.transfer.store_import import ImportFailure, StoreImport, lock_store
from sessions.row_kinds import SESSIONS
from sessions.store.database import Database
from sessions.store.interface import StoreError
from sessions.store.tables import SqliteTables
from sessions.write_set import WriteSet

pytestmark = pytest.mark.one_build

CLUSTER, OWNER = b"cluster1", b"importer"


def single_store(path: Path) -> list[str]:
    """A database with the rows of random commits; returns the client ids of its sessions."""
    database = Database(path, durable=True)
    database.open(may_be_new=True)
    tables = SqliteTables(database.connection, path)
    commits = RandomCommits(1)
    for _ in range(40):
        write_set = commits.next()
        write_set.stream_messages = {}
        tables.begin()
        tables.apply(write_set)
        tables.commit()
    found = tables.recover()
    database.close()
    return [row.client_id for row in found.rows(SESSIONS)]


async def test_each_shard_has_a_released_log_with_its_rows(kafka: KafkaCluster, tmp_path: Path) -> None:
    topic = f"import-{uuid.uuid4().hex[:8]}.log"
    await kafka.create_topic(topic, 3)
    path = tmp_path / "mqttbroker.db"
    client_ids = single_store(path)
    log = KafkaLog({"bootstrap_servers": kafka.bootstrap}, topic, 5.0)
    assert await log.start() == 3
    try:
        store_import = StoreImport(log, CLUSTER, OWNER, Takeover("import", "", "1"), 16_000)
        carried = await store_import.run(path, 3)
        assert carried.sessions == len(client_ids) > 0
        ends = await log.ends(range(3))
        views = [LogView(shard, CLUSTER) for shard in range(3)]
        found: dict[int, list[str]] = {shard: [] for shard in range(3)}

        def on_record(shard: int, offset: int, record: bytes) -> None:
            header = decode_header(record)
            assert views[shard].read(offset, header) == VALID
            if header.kind == CHANGES:
                write_set = changes_of(record[HEADER_BYTES:])[0] or WriteSet()
                found[shard] += [row.client_id for row in write_set.saved(SESSIONS)]

        reader = log.reader(dict.fromkeys(range(3), 0), on_record)
        reader.start()
        for shard in range(3):
            while views[shard].end < ends[shard]:
                assert not reader.failure
                await log.ends([shard])
        assert all(view.released for view in views)
        shards = Shards(3)
        for shard in range(3):
            assert sorted(found[shard]) == sorted(one for one in client_ids if shards.of_text(one) == shard)
        with pytest.raises(ImportFailure, match=f"{topic}, partition 0: has {ends[0]} records"):
            await store_import.run(path, 3)
    finally:
        await log.stop()


def test_a_store_is_imported_only_when_no_broker_uses_it(tmp_path: Path) -> None:
    path = tmp_path / "mqttbroker.db"
    with pytest.raises(StoreError, match="is missing"):
        lock_store(tmp_path, path)
    single_store(path)
    broker = Database(path, durable=True)
    broker.open(may_be_new=False)
    with pytest.raises(StoreError, match="in use by another process"):
        lock_store(tmp_path, path)
    SqliteTables(broker.connection, path).log_state(False)
    broker.connection.execute("UPDATE commit_log SET closed = 0")
    broker.close()
    with pytest.raises(StoreError, match="was not closed in order"):
        lock_store(tmp_path, path)
