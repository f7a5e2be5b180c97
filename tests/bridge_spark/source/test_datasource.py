"""The Spark source: rows, ranges and offsets in-process, and in a real session."""

from __future__ import annotations

import pickle
import shutil
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType
from support.sealed_log import seal_closed
from support.spark_session import StreamWriter, message, spark
from support.stream_reads import OF_SENSORS, batches, places, rows, source, stream_reader, stream_rows

from bridge_spark.datasource import MqttDataSource
from bridge_spark.log.columns import PropertyError, decode_properties
from bridge_spark.log.record_batch import encode_batch
from bridge_spark.log.sparse_index import INDEX_ENTRY, decode_index
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from bridge_spark.source import spark_workarounds
from bridge_spark.source.directory_storage import DirectoryStorage
from bridge_spark.source.offsets import DataLoss
from bridge_spark.source.options import OptionError
from bridge_spark.source.storage import StreamError, UnknownStream
from sessions.message import Message
from topic_matcher.filters import matches

pytestmark = pytest.mark.one_build

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
COLUMNS = [
    "topic",
    "payload",
    "qos",
    "retain",
    "partition",
    "offset",
    "timestamp",
    "client_id",
    "content_type",
    "response_topic",
    "correlation_data",
    "user_properties",
    "stream",
]


def expected(record: Message, partition: int, offset: int) -> dict[str, Any]:
    properties = decode_properties(record.properties)
    return {
        "topic": record.topic,
        "payload": record.payload,
        "qos": record.qos,
        "retain": record.retain,
        "partition": partition,
        "offset": offset,
        "timestamp": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=record.timestamp),
        "client_id": record.publisher,
        "content_type": properties.content_type,
        "response_topic": properties.response_topic,
        "correlation_data": properties.correlation_data,
        "user_properties": list(dict(properties.user_properties).items()),
        "stream": "sensors",
    }


# --- columns --------------------------------------------------------------------------------------------------------


def test_every_column_of_every_message(tmp_path: Path) -> None:
    records = [
        message(0, "sensors/a", b"", 0),
        message(1, "sensors/\u00fc\U0001f600", b"\x00\xff", 2, True, PROPERTIES),
        message(2, "b", b"x" * 1000, 1, False, b"\x26\x00\x01k\x00\x01v"),
    ]
    StreamWriter(tmp_path).append(0, records)
    found = rows(tmp_path)
    assert list(found[0]) == COLUMNS
    assert found == [expected(record, 0, offset) for offset, record in enumerate(records)]


def test_the_arrow_schema_equals_sparks(tmp_path: Path) -> None:
    StreamWriter(tmp_path).append(0, [message(0, properties=PROPERTIES)])
    for options in ({}, {"includeUserProperties": "true"}):
        found = source(tmp_path, **options)
        for batch in batches(found):
            batch.validate(full=True)
            assert batch.schema.equals(to_arrow_schema(found.schema(), timezone="UTC"), check_metadata=True)


def test_user_property_list_keeps_duplicates_and_order(tmp_path: Path) -> None:
    StreamWriter(tmp_path).append(0, [message(0, properties=PROPERTIES), message(1)])
    first, second = rows(tmp_path, includeUserProperties="true")
    assert [(pair["key"], pair["value"]) for pair in first["user_property_list"]] == [("a", "1"), ("\u00e9", ""), ("a", "2")]
    assert dict(first["user_properties"]) == {"a": "2", "\u00e9": ""}
    assert second["user_property_list"] == [] and second["user_properties"] == []


MALFORMED = [b"\x03", b"\x03\x00", b"\x03\x00\x05abc", b"\x03\x00\x01\xff", b"\x26\x00\x01a", b"\x7f\x00", b"\x01"]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_properties(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(PropertyError):
        decode_properties(data)
    StreamWriter(tmp_path).append(0, [message(0, properties=data)])
    with pytest.raises(StreamError, match=r"00000000000000000000\.seg"):
        rows(tmp_path)


def test_a_schema_selects_columns(tmp_path: Path) -> None:
    StreamWriter(tmp_path).append(0, [message(0, properties=b"\xff broken")])
    found = source(tmp_path)
    chosen = StructType([found.schema()["offset"], found.schema()["topic"]])
    assert [batch.to_pylist() for batch in batches(found, chosen)] == [[{"offset": 0, "topic": "sensors/a"}]]
    with pytest.raises(StreamError, match="column 'value' needs the option 'payloadFormat'"):
        found.reader(StructType().add("value", "double"))
    with pytest.raises(StreamError, match="'payload' is binary, not string"):
        found.reader(StructType().add("payload", "string"))


def test_small_log_batches_are_merged(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path)
    for number in range(3000):
        writer.append(0, [message(number * 10 + n) for n in range(10)])
    sizes = [batch.num_rows for batch in batches(source(tmp_path))]
    assert sum(sizes) == 30_000 and all(size >= 10_000 for size in sizes[:-1])


def test_a_worker_exempts_its_modules_from_garbage_collection_once_after_its_first_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StreamWriter(tmp_path).append(0, [message(0)])
    calls: list[str] = []
    monkeypatch.setattr(
        spark_workarounds, "gc", SimpleNamespace(collect=lambda: calls.append("collect"), freeze=lambda: calls.append("freeze"))
    )
    monkeypatch.setattr(spark_workarounds, "_frozen", False)
    assert rows(tmp_path) and not calls
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="pyspark.daemon"))
    found = source(tmp_path)
    reader = found.reader(found.schema())
    task = reader.read(reader.partitions()[0])
    assert next(task).num_rows == 1 and not calls
    assert list(task) == [] and calls == ["collect", "freeze"]
    assert rows(tmp_path) == rows(tmp_path) and calls == ["collect", "freeze"]


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="an option of Linux")
def test_a_worker_acknowledges_its_task_without_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StreamWriter(tmp_path).append(0, [message(0)])
    found = source(tmp_path)
    sink, column = {"url": "mqtt://127.0.0.1:1", "topic": "t"}, StructType([StructField("payload", BinaryType())])
    tasks = [
        found.reader(found.schema()),
        found.streamReader(found.schema()),
        MqttDataSource(sink).writer(column, False),
        MqttDataSource(sink).streamWriter(column, False),
    ]
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as worker:
        for task in map(pickle.dumps, tasks):
            worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            pickle.loads(task)
            assert worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 0
            with monkeypatch.context() as patched:
                patched.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="pyspark.daemon"))
                pickle.loads(task)
            assert worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1


def test_columns_that_every_message_has_are_not_nullable(tmp_path: Path) -> None:
    StreamWriter(tmp_path).append(0, [message(0)])
    nullable = {field.name for field in source(tmp_path).schema() if field.nullable}
    assert nullable == {"content_type", "response_topic", "correlation_data"}


# --- ranges ---------------------------------------------------------------------------------------------------------

TOPICS = ["sensors/a", "sensors/a/b", "other", "$SYS/x"]
COMMIT = st.tuples(st.integers(0, 1), st.integers(1, 20), st.booleans())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    commits=st.lists(COMMIT, max_size=12),
    topic_filter=st.sampled_from(["#", "+", "sensors/#", "sensors/+", "$SYS/#"]),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_range_equals_a_slice_of_all_rows(
    tmp_path: Path, commits: list[tuple[int, int, bool]], topic_filter: str, cuts: tuple[float, float]
) -> None:
    data = tmp_path / "data"
    shutil.rmtree(data, ignore_errors=True)
    writer = StreamWriter(data, partitions=2)
    stored: list[list[Message]] = [[], []]
    for partition, count, roll in commits:
        records = [message(len(stored[partition]) + n, TOPICS[n % len(TOPICS)]) for n in range(count)]
        writer.append(partition, records)
        stored[partition] += records
        if roll:
            writer.roll(partition)
    low, high = sorted(cuts)
    ranges = [(round(low * len(stored[p])), round(high * len(stored[p]))) for p in (0, 1)]
    found = rows(
        data,
        filter=topic_filter,
        startingOffsets='{"0": %d, "1": %d}' % (ranges[0][0], ranges[1][0]),
        endingOffsets='{"0": %d, "1": %d}' % (ranges[0][1], ranges[1][1]),
    )
    assert found == [
        expected(stored[partition][offset], partition, offset)
        for partition in (0, 1)
        for offset in range(*ranges[partition])
        if matches(topic_filter, stored[partition][offset].topic)
    ]


def test_rows_beyond_the_high_watermark_are_not_read(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path)
    writer.append(0, [message(0), message(1)])
    writer.append(0, [message(2)], commit=False)
    (tmp_path / "streams/sensors/0/00000000000000000002.seg").write_bytes(encode_batch([message(9)], 2))
    assert places(rows(tmp_path)) == [(0, 0), (0, 1)]


def test_an_empty_stream(tmp_path: Path) -> None:
    StreamWriter(tmp_path, partitions=3)
    assert rows(tmp_path) == []
    assert stream_reader(tmp_path).initialOffset() == {"0": 0, "1": 0, "2": 0} | OF_SENSORS


def test_offsets_by_name_and_number(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path, partitions=2)
    for partition in (0, 1):
        writer.append(partition, [message(n) for n in range(5)])
    assert places(rows(tmp_path, startingOffsets='{"0": 3}', endingOffsets='{"1": 1}')) == [(0, 3), (0, 4), (1, 0)]
    assert stream_reader(tmp_path).initialOffset() == {"0": 5, "1": 5} | OF_SENSORS
    assert stream_reader(tmp_path, startingOffsets="earliest").initialOffset() == {"0": 0, "1": 0} | OF_SENSORS
    assert stream_reader(tmp_path, startingOffsets='{"1": -1, "0": -2}').initialOffset() == {"0": 0, "1": 5} | OF_SENSORS
    with pytest.raises(OptionError, match="there is no partition 7, only 0 to 1"):
        rows(tmp_path, startingOffsets='{"7": 0}')
    with pytest.raises(OptionError, match="endingOffsets.*before it starts"):
        rows(tmp_path, startingOffsets='{"0": 3}', endingOffsets='{"0": 2}')


def test_chunks_smaller_than_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StreamWriter(tmp_path)
    for number in range(7):
        writer.append(0, [message(number * 50 + n) for n in range(50)])
    for size in (1, 40, 1000, 3001):
        monkeypatch.setattr(DirectoryStorage, "chunk_bytes", size)
        assert places(rows(tmp_path)) == [(0, offset) for offset in range(350)]


def test_a_stale_or_missing_index_gives_the_same_rows(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path)
    for number in range(20):
        writer.append(0, [message(n, payload=bytes(1000)) for n in range(100)])
    whole = places(rows(tmp_path, startingOffsets='{"0": 777}'))
    index = tmp_path / "streams/sensors/0/00000000000000000000.idx"
    entries = decode_index(index.read_bytes())
    assert whole == [(0, offset) for offset in range(777, 2000)] and len(entries) > 10
    wrong = [INDEX_ENTRY.pack(e.first_offset, e.position + (8 if e.position else 0), e.timestamp) for e in entries]
    index.write_bytes(b"".join(wrong))
    assert places(rows(tmp_path, startingOffsets='{"0": 777}')) == whole
    index.unlink()
    assert places(rows(tmp_path, startingOffsets='{"0": 777}')) == whole


def test_a_corrupt_batch_is_named_by_file_and_offset(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path)
    writer.append(0, [message(n) for n in range(10)])
    size = writer.segments(0)[0].stat().st_size
    writer.append(0, [message(n) for n in range(10)])
    data = bytearray(writer.segments(0)[0].read_bytes())
    data[size + 100] ^= 1
    writer.segments(0)[0].write_bytes(data)
    with pytest.raises(StreamError, match=r"0/0{20}\.seg is corrupt at offset 10: wrong checksum"):
        rows(tmp_path)


def test_reads_a_log_written_by_the_broker(tmp_path: Path) -> None:
    logs = StreamLogs(tmp_path / "streams", [StreamConfig("sensors", ["#"], partitions=2, segment_bytes=4096)])
    logs.recover({})
    for number in range(50):
        logs.append({("sensors", p): [message(number * 4 + n) for n in range(4)] for p in (0, 1)})
        logs.sync()
        logs.committed()
    logs.append({("sensors", 0): [message(0)]})
    logs.close()
    assert places(rows(tmp_path)) == [(partition, offset) for partition in (0, 1) for offset in range(200)]
    assert len(list((tmp_path / "streams/sensors/0").glob("*.seg"))) > 2


# --- data loss ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shortened(tmp_path: Path) -> StreamWriter:
    writer = StreamWriter(tmp_path)
    for _ in range(3):
        writer.append(0, [message(n) for n in range(10)])
        writer.roll(0)
    writer.remove_before(0, 10)
    return writer


def test_offsets_removed_by_retention_are_named_or_skipped(tmp_path: Path, shortened: StreamWriter) -> None:
    with pytest.raises(DataLoss, match="partition 0: retention has removed the offsets 4 to 9 .*failOnDataLoss=false"):
        rows(tmp_path, startingOffsets='{"0": 4}')
    assert len(rows(tmp_path)) == 20
    assert places(rows(tmp_path, startingOffsets='{"0": 4}', failOnDataLoss="false"))[0] == (0, 10)
    reader = stream_reader(tmp_path)
    with pytest.raises(DataLoss, match="offsets 0 to 9"):
        reader.latestOffset({"0": 0}, ReadAllAvailable())
    with pytest.raises(DataLoss, match="offsets 0 to 4"):
        reader.partitions({"0": 0}, {"0": 5})
    lenient = stream_reader(tmp_path, failOnDataLoss="false")
    assert lenient.latestOffset({"0": 0}, ReadMaxRows(5)) == {"0": 15} | OF_SENSORS
    assert len(stream_rows(lenient, {"0": 0}, {"0": 15})) == 5


def test_a_recreated_stream_is_data_loss(tmp_path: Path, shortened: StreamWriter) -> None:
    reader = stream_reader(tmp_path)
    with pytest.raises(DataLoss, match="partition 0 ends at offset 30, before 500"):
        reader.latestOffset({"0": 500}, ReadAllAvailable())
    with pytest.raises(DataLoss, match="partition 3 does not exist"):
        reader.latestOffset({"0": 10, "3": 1}, ReadAllAvailable())
    lenient = stream_reader(tmp_path, failOnDataLoss="false")
    assert lenient.latestOffset({"0": 500}, ReadAllAvailable()) == {"0": 30} | OF_SENSORS


def test_retention_between_planning_and_reading(tmp_path: Path, shortened: StreamWriter) -> None:
    for lossy in (False, True):
        found = source(tmp_path, failOnDataLoss=str(not lossy).lower(), minPartitions="2")
        reader = found.reader(found.schema())
        tasks = reader.partitions()
        shortened.remove_before(0, 20)
        if lossy:
            assert sum(batch.num_rows for task in tasks for batch in reader.read(task)) == 10
        else:
            with pytest.raises(DataLoss, match="range 10 to 19"):
                list(reader.read(tasks[0]))


# --- rate limit ----------------------------------------------------------------------------------------------


def test_available_now_ends_at_its_target_in_limited_batches(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path, partitions=2)
    for partition in (0, 1):
        writer.append(partition, [message(n) for n in range(30 * (partition + 1))])
    reader = stream_reader(tmp_path, startingOffsets="earliest", maxOffsetsPerTrigger="40")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(40)
    reader.prepareForTriggerAvailableNow()
    writer.append(0, [message(n) for n in range(100)])
    position, found = reader.initialOffset(), []
    while (following := reader.latestOffset(position, limit)) != position:
        found += stream_rows(reader, position, following)
        position = following
    assert position == {"0": 30, "1": 60} | OF_SENSORS
    assert reader.reportLatestOffset() == {"0": 130, "1": 60} | OF_SENSORS
    assert sorted(places(found)) == [(0, n) for n in range(30)] + [(1, n) for n in range(60)]


def test_a_range_gives_the_same_rows_after_later_writes(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path)
    writer.append(0, [message(n) for n in range(100)])
    first = stream_rows(stream_reader(tmp_path), {"0": 10}, {"0": 100})
    writer.roll(0)
    writer.append(0, [message(n) for n in range(100)])
    assert stream_rows(stream_reader(tmp_path), {"0": 10}, {"0": 100}) == first


def test_a_checkpoint_is_bound_to_its_selection_of_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StreamWriter(tmp_path).append(0, [message(n) for n in range(10)])
    start = stream_reader(tmp_path, filter="sensors/a", where="offset < 5", startingOffsets="earliest").initialOffset()
    assert start == {"0": 0, "filter=sensors/a": 0, "where=offset < 5": 0} | OF_SENSORS
    same = stream_reader(tmp_path, filter="sensors/a", where="offset < 5")
    end = same.latestOffset(start, ReadAllAvailable())
    assert end == start | {"0": 10} and same.reportLatestOffset() == end
    assert len(stream_rows(same, start, end)) == 5
    for options, option in (
        ({"filter": "#", "where": "offset < 5"}, "filter"),
        ({"filter": "sensors/a"}, "where"),
        ({}, "filter"),
    ):
        with pytest.raises(OptionError, match=f"option '{option}': the checkpoint was written with .*startingOffsets='.\"0\": 0"):
            stream_reader(tmp_path, **options).latestOffset(start, ReadAllAvailable())
        with pytest.raises(OptionError, match="use a new checkpoint"):
            stream_reader(tmp_path, **options).partitions(start, end)
    assert not caplog.records
    assert stream_reader(tmp_path, filter="#").latestOffset({"0": 3}, ReadAllAvailable()) == {"0": 10, "filter=#": 0} | OF_SENSORS
    assert "the checkpoint does not say" in caplog.text


def test_an_unknown_directory_or_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownStream, match="option 'path': .* is not a directory"):
        source(tmp_path / "nowhere")
    StreamWriter(tmp_path, "meters")
    with pytest.raises(UnknownStream, match="option 'stream': no stream 'sensors' .*there are: meters"):
        source(tmp_path)


# --- in a real session ----------------------------------------------------------------------------------------------


def collected(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.select("partition", "offset", "topic", "payload").collect())


def stream_into(session: SparkSession, name: str, checkpoint: Path, options: Mapping[str, str]) -> Any:
    query = (
        session.readStream.format("mqtt")
        .options(**options)
        .load()
        .writeStream.format("parquet")
        .option("path", str(checkpoint / "out"))
        .option("checkpointLocation", str(checkpoint / "check"))
        .queryName(name)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


def test_batch_and_stream_agree_across_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data", partitions=2)
    for partition in (0, 1):
        writer.append(partition, [message(n, properties=PROPERTIES) for n in range(500)])
    options = {"path": str(tmp_path / "data"), "stream": "sensors", "startingOffsets": "earliest"}
    query = stream_into(spark, "first", tmp_path / "q", options | {"maxOffsetsPerTrigger": "600"})
    assert [progress["numInputRows"] for progress in query.recentProgress] == [600, 400]
    writer.append(1, [message(n) for n in range(50)])
    query = stream_into(spark, "second", tmp_path / "q", options)
    assert [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]] == [50]
    batch = spark.read.format("mqtt").option("stream", "sensors").load(str(tmp_path / "data"))
    assert batch.columns == COLUMNS
    streamed = spark.read.parquet(str(tmp_path / "q" / "out"))
    assert streamed.schema.simpleString() == batch.schema.simpleString()
    assert collected(streamed) == collected(batch)
    assert batch.where("user_properties['a'] = '2' and content_type = 'application/json'").count() == 1000


def test_bad_options_are_refused_at_load_time(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path)
    for options, reason in (
        ({"stream": "sensors", "ofset": "1"}, "mqtt source: option 'ofset': unknown"),
        ({"stream": "meters"}, "mqtt source: option 'stream': no stream 'meters'"),
        ({"stream": "sensors", "filter": "a#"}, "mqtt source: option 'filter': 'a#' is not"),
    ):
        for reader in (spark.read, spark.readStream):
            with pytest.raises(Exception) as caught:
                reader.format("mqtt").options(**options).load(str(tmp_path))
            assert reason in str(caught.value)


def test_sql_reads_a_view(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path).append(0, [message(n, f"sensors/{n % 2}") for n in range(10)])
    spark.sql(f"CREATE TEMPORARY VIEW messages USING mqtt OPTIONS (path '{tmp_path}', stream 'sensors')")
    try:
        found = spark.sql("SELECT topic, count(*), max(offset) FROM messages GROUP BY topic ORDER BY topic").collect()
        assert [tuple(row) for row in found] == [("sensors/0", 5, 8), ("sensors/1", 5, 9)]
    finally:
        spark.sql("DROP VIEW messages")


def test_each_use_of_a_dataframe_gives_its_own_rows(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's push-down gives the rows of the filter pushed last (docs/spark-issue-filter-pushdown.md)."""
    writer = StreamWriter(tmp_path, partitions=2)
    for partition in (0, 1):
        writer.append(partition, [message(n, f"sensors/{n % 2}") for n in range(100)])
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = spark.read.format("mqtt").options(stream="sensors", pushDownFilters="true").load(str(tmp_path))
        low, high = frame.where("offset < 10"), frame.where("offset >= 90 AND topic = 'sensors/1'")
        expected = [20, 200, 10, 30]
        assert [low.count(), frame.count(), high.count(), low.union(high).count()] == expected
        assert low.alias("a").join(high.alias("b"), "partition").count() == 10 * 5 * 2
        frame.createOrReplaceTempView("reused")
        counts = "SELECT count_if(offset < 10), count(*) FROM reused WHERE topic = 'sensors/0'"
        assert spark.sql(counts).collect() == spark.sql(counts).collect() == [(10, 100)]
        assert spark.sql("SELECT * FROM reused WHERE offset = 3 UNION ALL SELECT * FROM reused").count() == 202
        low.cache()
        counts = [low.count(), frame.count(), frame.where("offset < 10 AND qos = 1").count(), low.count()]
        assert counts == [20, 200, 20, 20]
        low.unpersist()
        spark.conf.set("spark.sql.adaptive.enabled", "true")
        spark.conf.set("spark.sql.autoBroadcastJoinThreshold", "-1")
        joined = (
            frame.where("offset < 20")
            .join(frame.where("offset >= 10").withColumnRenamed("topic", "t"), ["partition", "offset"])
            .groupBy("partition")
            .count()
        )
        assert sorted(joined.collect()) == [(0, 10), (1, 10)]
    finally:
        for name in ("python.filterPushdown.enabled", "adaptive.enabled", "autoBroadcastJoinThreshold"):
            spark.conf.unset(f"spark.sql.{name}")
        spark.catalog.dropTempView("reused")


def test_a_table_follows_the_stream_and_a_dataframe_does_not(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(n) for n in range(10)])
    options = f"path '{tmp_path / 'data'}', stream 'sensors'"
    spark.sql(f"CREATE TABLE following USING mqtt OPTIONS ({options})")
    spark.sql("CREATE TEMPORARY VIEW view_of_table AS SELECT * FROM following WHERE offset >= 5")
    spark.sql(f"CREATE TEMPORARY VIEW fixed USING mqtt OPTIONS ({options})")
    spark.sql(
        f"CREATE TABLE typed USING mqtt OPTIONS ({options}, payloadFormat 'json', "
        "schema 'offset long, value struct<n long>, reason string')"
    )
    try:
        frame = spark.read.format("mqtt").option("stream", "sensors").load(str(tmp_path / "data"))

        def counts() -> list[int]:
            names = ("following", "view_of_table", "fixed", "typed")
            return [*(spark.sql(f"SELECT count(*) FROM {name}").first()[0] for name in names), frame.count()]

        assert counts() == [10, 5, 10, 10, 10]
        writer.append(0, [message(n) for n in range(10, 15)])
        assert counts() == [15, 10, 10, 15, 10]
        assert spark.sql("SELECT max(value.n) FROM typed").first()[0] == 14
        assert spark.sql("SELECT count(*) FROM following WITH (`where` = 'offset < 3')").first()[0] == 3
        assert spark.read.option("startingOffsets", '{"0": 11}').table("following").count() == 4
        query = (
            spark.readStream.option("startingOffsets", "earliest")
            .table("following")
            .writeStream.format("memory")
            .queryName("streamed")
            .option("checkpointLocation", str(tmp_path / "check"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert spark.table("streamed").count() == 15
        with pytest.raises(Exception, match="mqtt sink: a table of the catalog is for reading"):
            spark.sql("INSERT INTO following SELECT * FROM fixed")
        with pytest.raises(Exception, match="option 'token': cannot be kept in a table"):
            spark.sql("CREATE TABLE secret USING mqtt OPTIONS (url 'http://h', stream 's', token 'x')")
        spark.sql(f"CREATE TABLE listed (topic string) USING mqtt OPTIONS ({options})")
        with pytest.raises(Exception, match="CREATE TABLE must have no list of columns"):
            spark.sql("SELECT * FROM listed").collect()
    finally:
        for name in ("following", "typed", "listed"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")
        for name in ("view_of_table", "fixed"):
            spark.catalog.dropTempView(name)


def test_progress_reports_the_latest_offset_of_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(n) for n in range(10)])
    query = (
        spark.readStream.format("mqtt")
        .options(stream="sensors", startingOffsets="earliest", maxOffsetsPerTrigger="6")
        .load(str(tmp_path / "data"))
        .select("offset")
        .writeStream.format("memory")
        .queryName("running")
        .option("checkpointLocation", str(tmp_path / "check"))
        .trigger(processingTime="10 milliseconds")
        .start()
    )
    try:
        query.processAllAvailable()
        assert [row[0] for row in spark.table("running").collect()] == list(range(10))
        (state,) = query.recentProgress[0]["sources"]
        assert (state["endOffset"], state["latestOffset"]) == ('{"0": 6, "stream=sensors": 0}', '{"0": 10, "stream=sensors": 0}')
    finally:
        query.stop()


def test_sealed_segments_read_as_parquet_give_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(0, properties=PROPERTIES, qos=2, retain=True), message(1, "b", b"\xff")])
    writer.roll(0)
    writer.append(0, [message(2)])
    reading = spark.read.format("mqtt").option("stream", "sensors").load(str(tmp_path / "data"))
    before = reading.orderBy("offset").collect()
    (file,) = seal_closed(tmp_path / "data/streams/sensors/0")
    assert reading.orderBy("offset").collect() == before
    direct = spark.read.parquet(str(file))
    assert [(field.name, field.dataType) for field in direct.drop("properties").schema] == [
        (field.name, field.dataType) for field in reading.schema
    ]
    assert direct.drop("properties").orderBy("offset").collect() == before[:2]
