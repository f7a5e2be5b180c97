"""Reading a stream over HTTP from the broker's own server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from pyspark.sql import SparkSession
from support.http_server import http_server
from support.spark_session import START_US, message, spark
from support.stream_reads import places, rows

from bridge_spark.datasource import MqttDataSource
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from bridge_spark.source import http_client, http_storage
from bridge_spark.source.storage import SegmentGone, StreamError, UnknownStream
from mqttbroker.admin.http.access import AccessList, access_list
from mqttbroker.admin.metrics.consumer_lag import ConsumerLag
from mqttbroker.config.settings import Consumers, Http, Settings
from mqttbroker.core.access.policy import AllowAll

__all__ = ["spark"]

pytestmark = pytest.mark.one_build


def access(token: str = "") -> AccessList:
    return access_list(Settings(http=Http(token=token or None)), AllowAll())


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[StreamLogs]:
    found = StreamLogs(tmp_path / "streams", [StreamConfig("sensors", ["#"], partitions=2, segment_bytes=8192)])
    found.recover({})
    for number in range(40):
        found.append({("sensors", p): [message(number * 5 + n, f"sensors/{p}") for n in range(5)] for p in (0, 1)})
        found.sync()
        found.committed()
    yield found
    found.close()


@pytest.fixture
def lag(logs: StreamLogs) -> ConsumerLag:
    return ConsumerLag(logs, Consumers())


@pytest.fixture
def broker_url(logs: StreamLogs, lag: ConsumerLag) -> Iterator[str]:
    server = http_server(logs, AsyncMock(), AsyncMock(), access("s3cret"), consumers=lag)
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


def rows_over(url: str, **options: str) -> list[dict[str, Any]]:
    found = MqttDataSource({"url": url, "stream": "sensors", **options})
    reader = found.reader(found.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_rows_equal_those_of_the_directory(broker_url: str, tmp_path: Path) -> None:
    for options in (
        {},
        {"filter": "sensors/1"},
        {"startingOffsets": '{"0": 57, "1": 199}'},
        {"startingTimestamp": str(START_US // 1000 + 120)},
    ):
        found = rows_over(broker_url, token="s3cret", **options)
        assert found == rows(tmp_path, **options)
    assert places(found) == [(partition, offset) for partition in (0, 1) for offset in range(120, 200)]


def test_a_wrong_or_missing_token(broker_url: str) -> None:
    with pytest.raises(StreamError, match="option 'token': .* refused it"):
        rows_over(broker_url, token="wrong")
    with pytest.raises(StreamError, match="wants a 'token'"):
        rows_over(broker_url)


def test_an_unknown_stream_and_a_file_that_is_gone(broker_url: str) -> None:
    with pytest.raises(UnknownStream, match=r"has no stream 'meters' \(there are: sensors\)"):
        MqttDataSource({"url": broker_url, "stream": "meters", "token": "s3cret"})
    storage = http_storage.HttpStorage(broker_url, "sensors", "s3cret")
    with pytest.raises(SegmentGone):
        storage.read(0, "00000000000000009999.seg", 0, 10)
    storage.close()


def test_an_answer_that_is_no_manifest(broker_url: str, logs: StreamLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "manifest", lambda _: {"hello": "world"})
    with pytest.raises(StreamError, match="did not answer with a stream's manifest"):
        rows_over(broker_url, token="s3cret")


def test_an_unreadable_file_is_named(logs: StreamLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_WAIT_S", 0.001)
    server = http_server(logs, AsyncMock(), AsyncMock(), access())
    server.start()
    found = MqttDataSource({"url": f"http://127.0.0.1:{server.port}", "stream": "sensors"})
    reader = found.reader(found.schema())
    part = reader.partitions()[0]
    server.stop()
    with pytest.raises(StreamError, match=r"cannot be read after 6 tries: Connection refused"):
        MqttDataSource({"url": f"http://127.0.0.1:{server.port}", "stream": "sensors"})
    with pytest.raises(StreamError, match=r"^mqtt source: .*0{20}\.seg cannot be read after 15 tries: Connection refused"):
        list(reader.read(part))


def test_spark_reads_over_http(spark: SparkSession, broker_url: str) -> None:
    found = spark.read.format("mqtt").options(url=broker_url, stream="sensors", token="s3cret").load()
    assert found.where("topic = 'sensors/1'").count() == 200
    with pytest.raises(Exception, match="option 'token': .* refused it"):
        spark.readStream.format("mqtt").options(url=broker_url, stream="sensors", token="no").load()


def test_a_query_reports_its_committed_offsets(spark: SparkSession, broker_url: str, lag: ConsumerLag, tmp_path: Path) -> None:
    reading = (
        spark.readStream.format("mqtt")
        .options(url=broker_url, stream="sensors", token="s3cret", consumer="job", startingOffsets="earliest", maxOffsetsPerTrigger="300")
        .load()
    )
    told: list[list[int]] = []

    def tell(*_: object) -> None:
        told.extend([partition.offset for partition in consumer.partitions] for consumer in lag.consumers("sensors"))

    query = (
        reading.writeStream.foreachBatch(tell).option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    tell()
    assert told == [[0, 0], [150, 150], [200, 200]]
    assert [consumer.name for consumer in lag.consumers("sensors")] == ["job"]
