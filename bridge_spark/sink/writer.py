"""The writers of the Spark sink `mqtt`: each task publishes its partition and returns when all of it is acknowledged.

The producer of a row is its query, batch and partition, and its number the position within the partition.  So a task that
is repeated, or run twice at once, or whose batch is repeated after a kill of the driver, sends the same numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.options import SinkOptions
from bridge_spark.sink.publisher import Publisher
from bridge_spark.sink.rows import PacketEncoder, Row, RowReader, check_schema
from bridge_spark.source.spark_workarounds import acknowledge_at_once, freeze_worker

# Properties that Spark gives to the tasks of a micro-batch.
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"

ROWS_AT_ONCE = 10_000


class Written(WriterCommitMessage):
    """The number of rows that a task wrote."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("mqtt")`."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_schema(schema, options)
        self._options = options
        # The same for all attempts of a task, as the writer is made once per write.
        self._producer = options.producer_id or secrets.token_hex(12)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        acknowledge_at_once()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        # In foreachBatch the same `producerId` is given for each batch.
        batch = _micro_batch()
        return write_partition(self._options, "/".join((self._producer, *batch)), iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("mqtt")`."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_schema(schema, options)
        self._options = options

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        acknowledge_at_once()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        micro_batch = _micro_batch()
        if self._options.deduplicate and not micro_batch:
            raise SinkError("option 'deduplicate': Spark does not say which batch this is: set it to false")
        query, batch = micro_batch or ("", "")
        return write_partition(self._options, f"{self._options.producer_id or query}/{batch}", iterator)


def _micro_batch() -> tuple[str, ...]:
    """The id of the streaming query and of the batch that this task belongs to; empty if to none."""
    context = TaskContext.get()
    found = () if context is None else (context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH))
    return tuple(name for name in found if name is not None) if None not in found else ()


def write_partition(options: SinkOptions, producer: str, batches: Iterator[pa.RecordBatch]) -> Written:
    """Publish the rows of this task's partition; ``producer`` names the write."""
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    reader = RowReader(options, partition)
    encoder = PacketEncoder(options.version, f"{producer}/{partition}" if options.deduplicate else None)
    publisher: Publisher | None = None
    written = 0
    try:
        for rows in _sorted(reader, batches) if options.sort_rows else map(reader.read, batches):
            for start in range(0, len(rows), ROWS_AT_ONCE):
                if publisher is None:
                    client_id = f"{options.client_id_prefix}-{partition}-{secrets.token_hex(4)}"
                    publisher = Publisher(options, client_id, lambda row: f"partition {partition}, row {row}")
                chunk = rows[start : start + ROWS_AT_ONCE]
                publisher.publish(encoder.encode(chunk, written))
                written += len(chunk)
        if publisher is not None:
            publisher.finish()
    finally:
        if publisher is not None:
            publisher.close()
        freeze_worker()
    return Written(written)


def _sorted(reader: RowReader, batches: Iterator[pa.RecordBatch]) -> Iterator[list[Row]]:
    """All rows of the partition, by topic and content: the same order for the same rows."""
    yield sorted(row for batch in batches for row in reader.read(batch))
