"""A Spark session reads a stream while the broker seals and compacts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession
from support.broker_process import BrokerProcess
from support.raw_client import RawClient
from support.spark_session import spark

pytestmark = pytest.mark.one_build
__all__ = ["spark"]

KEYS = 5
CONFIG = {
    "streams": {
        "s": {
            "filters": ["state/#"],
            "partitions": 1,
            "segment_bytes": "4KiB",
            "seal": True,
            "compact": True,
            "compact_dirty_percent": 10,
        }
    }
}


def last_values(rows: list[Row]) -> dict[str, bytes]:
    return {row.topic: bytes(row.payload) for row in sorted(rows, key=lambda row: int(row.offset))}


def test_spark_reads_a_stream_that_is_being_compacted(tmp_path: Path, spark: SparkSession) -> None:
    with BrokerProcess(config=CONFIG) as broker, RawClient(broker.port) as client:
        client.connect()
        published = 0
        expected: dict[str, bytes] = {}

        def publish(count: int) -> None:
            nonlocal published
            for _ in range(count):
                topic, payload = f"state/{published % KEYS}", b"%d " % published + b"x" * 100
                assert client.publish(topic, payload, 1) in (0, 16)
                expected[topic] = payload
                published += 1

        publish(100)
        source = spark.readStream.format("mqtt").options(url=broker.url, stream="s", startingOffsets="earliest", maxOffsetsPerTrigger="100")
        query = source.load().writeStream.format("memory").queryName("compacted").option(
            "checkpointLocation", str(tmp_path / "checkpoint")
        ).start()  # fmt: skip
        try:
            for _ in range(2):
                line = len(broker.lines)
                publish(120)
                broker.wait_for_log("event=compacted ", 30, line)
            query.processAllAvailable()
        finally:
            query.stop()
        followed = spark.table("compacted").collect()
        assert last_values(followed) == expected
        assert len({row.offset for row in followed}) == len(followed) <= published
        assert all(row.topic is not None for row in followed)

        rows = spark.read.format("mqtt").options(url=broker.url, stream="s").load().collect()
        assert last_values(rows) == expected and len(rows) < published
        for row in rows:
            number = int(bytes(row.payload).split()[0])
            assert number == row.offset and row.topic == f"state/{number % KEYS}"
