"""The Spark source on a cluster's streams: columns, ranges, and a streaming query that is stopped and goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.kafka import KafkaCluster
from support.spark_session import StreamWriter, message, spark
from support.stream_reads import source
from support.stream_topic import Topic

from bridge_spark.datasource import MqttDataSource
from bridge_spark.ingest import run
from bridge_spark.source.offsets import DataLoss
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.options import parse_options
from bridge_spark.source.storage import StreamError, UnknownStream
from bridge_spark.tables.ingest_config import parse_config
from sessions.message import Message

pytestmark = [pytest.mark.slow("needs Kafka: 1 minute"), pytest.mark.one_build]

__all__ = ["spark"]

PROPERTIES = (
    b"\x01\x01"
    b"\x03\x00\x10application/json"
    b"\x08\x00\x05reply"
    b"\x09\x00\x03\x00\xff\x01"
    b"\x26\x00\x01a\x00\x011"
    b"\x26\x00\x02\xc3\xa9\x00\x00"
    b"\x26\x00\x01a\x00\x012"
)


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), 1) as cluster:
        yield cluster


@pytest.fixture
def topic(kafka: KafkaCluster) -> Topic:
    return Topic(kafka)


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["payload"]) for row in rows]


def test_the_columns_are_those_of_a_stream_in_a_directory(topic: Topic, tmp_path: Path) -> None:
    records = [
        message(0, "sensors/a", b"", 0),
        message(1, "sensors/ü", b"\x00\xff", 2, True, PROPERTIES),
        message(2, "b", b"x" * 1000, 1, False, b"\x26\x00\x01k\x00\x01v"),
    ]
    StreamWriter(tmp_path).append(0, records)
    topic.append(0, records)
    by_path = source(tmp_path)
    reader = by_path.reader(by_path.schema())  # type: ignore[arg-type]
    expected = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert topic.rows() == expected
    assert MqttDataSource(topic.options()).schema() == by_path.schema()


def test_ranges_and_selections(topic: Topic) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def at(number: int) -> Message:
        moment = start + timedelta(seconds=number)
        return Message(f"sensors/{number % 3}", str(number).encode(), 1, False, b"", "c", int(moment.timestamp()) * 1_000_000, 0)

    topic.append(0, [at(number) for number in range(10)])  # offsets 0 to 9, and the end of the transaction
    topic.append(0, [at(number) for number in range(5, 10)], commit=False)
    topic.append(0, [at(number) for number in range(10, 20)])
    rows = topic.rows()
    assert seqs(rows) == list(range(20))
    assert rows[9]["offset"] == 9 and rows[10]["offset"] == 17
    assert seqs(topic.rows(startingOffsets='{"0": 9}', endingOffsets='{"0": 18}')) == [9, 10]
    assert seqs(topic.rows(filter="sensors/1")) == [1, 4, 7, 10, 13, 16, 19]
    since = (start + timedelta(seconds=15)).isoformat()
    assert seqs(topic.rows(startingTimestamp=since, startingOffsetsByTimestampStrategy="latest")) == [15, 16, 17, 18, 19]
    assert seqs(topic.rows(where=f"timestamp >= '{since}' AND offset < 25")) == [15, 16, 17]
    assert seqs(topic.rows(maxRecordsPerPartition="3")) == list(range(20))
    with pytest.raises(OptionError, match="there is no partition 2"):
        topic.rows(startingOffsets='{"2": 0}')


def test_a_streaming_read_with_a_limit_ends_where_the_next_begins(topic: Topic) -> None:
    topic.append(0, [message(number, "s", str(number).encode(), 0) for number in range(10)])
    topic.append(1, [message(number, "s", str(number).encode(), 0) for number in range(10, 20)])
    reader = topic.stream_reader(startingOffsets="earliest", maxOffsetsPerTrigger="5")
    start = reader.initialOffset()
    found: list[int] = []
    for _ in range(10):
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        found += seqs([row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()])
        start = end
    reader.stop()
    assert sorted(found) == list(range(20))
    with pytest.raises(DataLoss, match="ends at offset"):
        reader.latestOffset({"0": 1000, "1": 0}, reader.getDefaultReadLimit())


def test_a_topic_that_was_created_again_is_another_stream(topic: Topic) -> None:
    topic.append(0, [message(number) for number in range(5)])
    reader = topic.stream_reader(startingOffsets="earliest")
    checkpoint = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    reader.stop()
    again = topic.stream_reader()
    assert again.latestOffset(checkpoint, again.getDefaultReadLimit()) == checkpoint
    again.stop()
    (former,) = (key.partition("=")[2] for key in checkpoint if key.startswith("incarnation="))
    topic.create_again()
    topic.append(0, [message(number) for number in range(9)])
    reader = topic.stream_reader()
    with pytest.raises(StreamError, match=f"'sensors': the checkpoint is of its incarnation '{former}', not of '[0-9a-f]{{32}}'"):
        reader.latestOffset(checkpoint, reader.getDefaultReadLimit())
    reader.stop()
    accepting = topic.stream_reader(acceptIncarnation=former)
    assert accepting.latestOffset(checkpoint, accepting.getDefaultReadLimit())["0"] == 10
    accepting.stop()


def test_wrong_names_and_addresses_are_one_line(topic: Topic, kafka: KafkaCluster) -> None:
    with pytest.raises(UnknownStream, match=r"has no topic '\w+\.stream\.other' \(the cluster '\w+' has the streams sensors\)"):
        MqttDataSource(topic.options(stream="other"))
    with pytest.raises(UnknownStream, match="is 'clusterId' its id"):
        MqttDataSource(topic.options(clusterId="other"))
    with pytest.raises(StreamError, match="^mqtt source: 127.0.0.1:1: "):
        MqttDataSource({"kafka.bootstrap.servers": "127.0.0.1:1", "stream": "sensors", "fetch.numRetries": "0"})


@pytest.mark.parametrize(
    "options, line",
    [
        ({"kafka.bootstrap.servers": "host"}, "'host' is not HOST:PORT"),
        ({"kafka.bootstrap.servers": "h:1", "url": "http://h"}, "cannot be given together"),
        ({"kafka.bootstrap.servers": "h:1", "token": "x"}, "is for 'url' only"),
        ({"kafka.bootstrap.servers": "h:1", "kafka.security.protocol": "SASL_SSL"}, "and the password are required"),
        ({"kafka.bootstrap.servers": "h:1", "kafka.sasl.username": "u"}, "not PLAINTEXT"),
        ({"kafka.bootstrap.servers": "h:1", "kafka.ssl.ca.location": "u"}, "not PLAINTEXT"),
        ({"kafka.bootstrap.servers": "h:1", "archive.region": "u"}, "has no meaning for a cluster"),
        ({"path": "d", "clusterId": "m"}, "is for 'kafka.bootstrap.servers' only"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, str], line: str) -> None:
    with pytest.raises(OptionError, match=line):
        parse_options({"stream": "s", **options})


def test_a_query_that_is_stopped_goes_on_and_writes_each_row_once(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    table, checkpoint = str(tmp_path / "table"), str(tmp_path / "checkpoint")

    def query() -> None:
        rows = spark.readStream.format("mqtt").options(**topic.options(startingOffsets="earliest")).load()
        started = rows.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        started.trigger(availableNow=True).start(table).awaitTermination()

    for first in range(0, 60, 20):
        topic.append(0, [message(number, "s", str(number).encode(), 0) for number in range(first, first + 10)])
        topic.append(1, [message(number, "s", str(number).encode(), 1) for number in range(first + 10, first + 20)])
        query()
    rows = spark.read.parquet(table).collect()
    assert sorted(int(row.payload) for row in rows) == list(range(60))
    batch = spark.read.format("mqtt").options(**topic.options()).load()
    assert batch.where("qos = 1").count() == 30


def test_the_ingest_job_reads_a_cluster(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.append(0, [message(number, "sensors/a", json.dumps({"value": number}).encode(), 1) for number in range(10)])
    config = parse_config(
        {
            "source": {"bootstrap_servers": ",".join(topic.kafka.bootstrap), "cluster_id": topic.cluster},
            "tables": {"readings": {"stream": "sensors", "schema": "value double", "output": str(tmp_path / "readings")}},
        }
    )
    run(config, once=True, session=spark)
    assert sorted(row.value for row in spark.read.parquet(str(tmp_path / "readings")).collect()) == list(range(10))
