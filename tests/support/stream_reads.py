"""Reads with the source's own classes, called as Spark calls them, in-process and without a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from bridge_spark.datasource import MqttDataSource, MqttStreamReader

OF_SENSORS = {"stream=sensors": 0}
"""An entry of the offsets of the stream `sensors` without a known incarnation."""


def source(data: Path, **options: str) -> MqttDataSource:
    return MqttDataSource({"path": str(data), "stream": "sensors", **options})


def batches(found: MqttDataSource, schema: StructType | None = None) -> Iterator[pa.RecordBatch]:
    reader = found.reader(schema or found.schema())
    for partition in reader.partitions():
        yield from reader.read(partition)


def rows(data: Path, **options: str) -> list[dict[str, Any]]:
    return [row for batch in batches(source(data, **options)) for row in batch.to_pylist()]


def stream_reader(data: Path, **options: str) -> MqttStreamReader:
    found = source(data, **options)
    reader = found.streamReader(found.schema())
    assert isinstance(reader, MqttStreamReader)
    return reader


def stream_rows(reader: MqttStreamReader, start: dict[str, int], end: dict[str, int]) -> list[dict[str, Any]]:
    return [row for part in reader.partitions(start, end) for batch in reader.read(part) for row in batch.to_pylist()]


def places(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for row in found]
