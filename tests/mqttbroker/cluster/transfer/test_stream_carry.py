"""Streams go into topics of real Kafka and back; every row is as it was, with its partition and offset."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from support.kafka import KafkaCluster
from support.patience import PATIENCE

from bridge_spark.datasource import MqttDataSource
from bridge_spark.log.high_watermark import Watermark, encode_watermark
from bridge_spark.log.sealed.gapped import GappedPartition
from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.cluster.kafka.log import KafkaLog, LogFailure
from mqttbroker.cluster.log.body import encode_body
from mqttbroker.cluster.log.records import CHANGES, NO_EPOCH, TAKEOVER, Header, Takeover, encode_record, encode_takeover
from mqttbroker.cluster.transfer.store_import import ImportFailure
from mqttbroker.cluster.transfer.stream_export import StreamExport
from mqttbroker.cluster.transfer.stream_import import VOID_AT_ONCE, KafkaPartition, StreamImport
from mqttbroker.config.settings import Cluster, Stream
from sessions.message import Message
from sessions.store.database import Database
from sessions.store.salvage import set_stream_ends
from sessions.write_set import BusMessages, WriteSet

pytestmark = [pytest.mark.one_build, pytest.mark.slow("starts three Kafka brokers")]

CLUSTER, OWNER = b"cluster1", b"ownerown"
LAB = Stream(name="lab", filters=("lab/#",), partitions=3)
MAX_BYTES = 100_000
TIME = 10**15
PROPERTIES = (
    b"", b"\x01\x01\x03\x00\x04json\x08\x00\x05reply\x09\x00\x02\xff\x00\x26\x00\x01a\x00\x01b\x26\x00\x06mqtt.q\x00\x01c\x26\x00\x01a\x00\x01d"
)  # fmt: skip
START = 2 * VOID_AT_ONCE + 3  # of the partition that retention has shortened
SPARSE = [START, START + 2, START + 5, START + 6, *range(START + 8, START + 5000, 2), START + 5001, START + 250_000]
END = START + 250_002


def message(number: int) -> Message:
    payload = b"" if number % 7 == 0 else b"%d" % number
    return Message(
        f"lab/{number % 5}/é", payload, number % 3, number % 4 == 0, PROPERTIES[number % 2], f"dev{number % 3}", TIME + number * 1001, 0
    )


def store(data: Path) -> Path:
    """Partition 0 has gaps and a later begin, 1 is a common log, 2 is empty; returns the database."""
    logs = StreamLogs(data / "streams", [StreamConfig("lab", ["lab/#"], 3, segment_bytes=20_000)], lambda: 1e9)
    logs.recover({})
    for first in range(0, 10_000, 100):
        logs.append({("lab", 1): [message(number) for number in range(first, first + 100)]})
        logs.committed()
    logs.close()
    directory = data / "streams" / "lab" / "0"
    with GappedPartition(directory, "lab", 0, START, 1 << 20) as target:
        for offset in SPARSE:
            target.add(offset, message(offset))
        target.close(END)
    (directory / "high_watermark").write_bytes(encode_watermark(Watermark(END, END, 0, START)))
    database = Database(data / "mqttbroker.db", durable=True)
    database.open(may_be_new=True)
    database.close()
    set_stream_ends(data / "mqttbroker.db", {("lab", 0): END, ("lab", 1): 10_000})
    return data / "mqttbroker.db"


class Killed(BaseException):
    """In the place of a signal."""


def test_an_import_that_was_killed_is_repeated_from_the_beginning(
    kafka: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka ends its transaction before the next import writes: the end takes an offset."""
    database = store(tmp_path)
    cluster = Cluster(id=f"t{uuid.uuid4().hex[:8]}", shards=2, min_insync_replicas=2)
    connection = {"bootstrap_servers": kafka.bootstrap}
    topic = f"{cluster.id}.stream.lab"

    async def prepared() -> StreamImport:
        found = StreamImport(connection, cluster, [LAB], MAX_BYTES, tmp_path)
        found.plan(database)
        await found.prepare()
        return found

    async def killed(target: KafkaPartition) -> None:
        raise Killed

    async def first() -> None:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(KafkaPartition, "end_void", killed)
            await (await prepared()).run()
        with pytest.raises(ImportFailure, match=rf"topic {topic}: has \d+ records already"):
            await prepared()
        admin = AIOKafkaAdminClient(**connection)
        await admin.start()
        await admin.delete_topics([topic])
        async with asyncio.timeout(PATIENCE):
            while topic in await admin.list_topics():
                await asyncio.sleep(0.1)
        await admin.close()

    async def second() -> None:
        (carried,) = await (await prepared()).run()
        assert carried.records == len(SPARSE) + 10_000

    asyncio.run(first())
    asyncio.run(second())
    assert rows(**{"kafka.bootstrap.servers": ",".join(kafka.bootstrap), "clusterId": cluster.id}) == rows(path=str(tmp_path))


def rows(**options: str) -> list[dict[str, Any]]:
    found = MqttDataSource({"stream": "lab", **options})
    reader = found.reader(found.schema())  # type: ignore[arg-type]
    read = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted(read, key=lambda row: (row["partition"], row["offset"]))


def test_streams_go_there_and_back(kafka: KafkaCluster, tmp_path: Path) -> None:
    database = store(tmp_path / "single")
    before = rows(path=str(tmp_path / "single"), includeUserProperties="true")
    assert len(before) == len(SPARSE) + 10_000
    id = f"t{uuid.uuid4().hex[:8]}"
    cluster = Cluster(id=id, shards=2, min_insync_replicas=2)
    connection = {"bootstrap_servers": kafka.bootstrap}
    of_kafka = {"kafka.bootstrap.servers": ",".join(kafka.bootstrap), "clusterId": id}

    async def there() -> None:
        found = StreamImport(connection, cluster, [LAB], MAX_BYTES, tmp_path / "single")
        found.plan(database)
        await found.prepare()
        (carried,) = await found.run()
        assert (carried.topic, carried.records, carried.lost) == (f"{id}.stream.lab", len(before), [])
        again = StreamImport(connection, cluster, [LAB], MAX_BYTES, tmp_path / "single")
        again.plan(database)
        with pytest.raises(ImportFailure, match=rf"topic {id}.stream.lab: has \d+ records already; .*: delete it and begin again"):
            await again.prepare()

    asyncio.run(there())
    assert rows(includeUserProperties="true", **of_kafka) == before
    since = '{"0": %d, "1": 9000, "2": 0}' % (START + 1)  # the position of a reader, at an offset without a record
    assert rows(startingOffsets=since, **of_kafka) == rows(path=str(tmp_path / "single"), startingOffsets=since)
    late = [message(number) for number in range(4)]

    async def back() -> None:
        """Messages that no core has copied are in the log of shard 1 only."""
        await kafka.create_topic(cluster.log_topic, 2)
        log = KafkaLog(connection, cluster.log_topic, 5.0)
        await log.start()
        try:
            write_set = WriteSet()
            write_set.stream_messages = {("lab", 1): late[:3], ("lab", 2): late[3:]}
            write_set.bus = BusMessages()
            write_set.bus.to_all = late
            header = Header(TAKEOVER, 1, CLUSTER, OWNER, NO_EPOCH, 0)
            assert (await log.append(1, encode_record(header, encode_takeover(Takeover("n", "", ""))))).offset == 0
            assert (await log.append(1, encode_record(Header(CHANGES, 1, CLUSTER, OWNER, 0, 1), encode_body(write_set)))).offset == 1
            other = StreamExport(connection, id, [], tmp_path / "none")
            with pytest.raises(LogFailure, match=rf"topic {id}.stream.lab: .* no \[streams.lab\]: add it, or .* --leave-out lab"):
                await other.plan()
            wrong = StreamExport(connection, id, [Stream(name="lab", filters=("#",), partitions=4)], tmp_path / "none")
            with pytest.raises(LogFailure, match="has 3 partitions, and the stream 4 in the configuration: set partitions = 3"):
                await wrong.plan()
            export = StreamExport(connection, id, [LAB], tmp_path / "back" / "streams")
            await export.plan()
            (exported,) = await export.run(log, CLUSTER, await log.ends(range(2)))
            assert (exported.records, exported.late) == (len(before) + 4, 4)
            assert export.ends == {("lab", 0): END, ("lab", 1): 10_003, ("lab", 2): 1}
        finally:
            await log.stop()

    asyncio.run(back())
    after = rows(path=str(tmp_path / "back"), includeUserProperties="true")
    added = [row for row in after if row not in before]
    assert [row for row in after if row in before] == before
    assert [(row["partition"], row["offset"], row["payload"]) for row in added] == [
        (1, 10_000, late[0].payload), (1, 10_001, b"1"), (1, 10_002, b"2"), (2, 0, b"3")
    ]  # fmt: skip
    assert (
        rows(path=str(tmp_path / "back"), startingOffsets=since)[: len(SPARSE) - 1]
        == rows(path=str(tmp_path / "single"), startingOffsets=since)[: len(SPARSE) - 1]
    )
    logs = StreamLogs(tmp_path / "back" / "streams", [StreamConfig("lab", ["lab/#"], 3)], lambda: 1e9)
    assert logs.recover({("lab", 0): END, ("lab", 1): 10_003, ("lab", 2): 1}) == {("lab", 0): END, ("lab", 1): 10_003, ("lab", 2): 1}
    logs.close()
