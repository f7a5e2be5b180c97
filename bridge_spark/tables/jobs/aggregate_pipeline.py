"""The pipeline of one aggregate table: a row for each window and group.

A window is written once, after the watermark has passed its end, and never changes.  Later messages are counted as
late; the table of messages has them in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import NumericType

from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_config import AggregateConfig, TableConfig
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.jobs.query_job import BatchContext, QueryJob
from bridge_spark.tables.jobs.staged_files import stage_counted
from bridge_spark.tables.output.batch_table import BatchTable, Marker
from bridge_spark.tables.output.table_format import open_table
from bridge_spark.tables.rows.column_names import quoted
from bridge_spark.tables.rows.message_rows import EVENT_TIME, MessageRows
from bridge_spark.tables.rows.payloads import REASON


def aggregate_job(table: TableConfig, aggregate: AggregateConfig, spark: SparkSession, where: str) -> QueryJob:
    """The job of one aggregate of a table.  Raises `IngestError`."""
    where = f"{where}: tables.{table.name}"
    return QueryJob(
        f"{table.name}.{aggregate.name}",
        f"{where}.aggregates.{aggregate.name}",
        aggregate.checkpoint,
        AggregatePipeline(table, aggregate, spark, where),
    )


class AggregatePipeline:
    """Columns: `window_start`, `window_end`, the groups, `count`, and mean, min, max and last (by event time) of each
    value."""

    def __init__(self, table: TableConfig, aggregate: AggregateConfig, spark: SparkSession, where: str) -> None:
        self._sink = table.sink
        self._aggregate = aggregate
        self._where = f"{where}.aggregates.{aggregate.name}"
        self._rows = MessageRows(table, spark, where)
        self._output = open_table(table.sink, aggregate.output)
        self.tables: Sequence[BatchTable[Any]] = [self._output]
        self.state: Mapping[str, Any] = {
            "window": aggregate.window,
            "group_by": list(aggregate.group_by),
            "values": list(aggregate.values),
            "deduplicate_by": list(table.sink.deduplicate_by),
        }

    def stream(self, checkpoint: Checkpoint) -> DataFrame:
        found = self._rows.parse(self._rows.stream(checkpoint, f".{self._aggregate.name}"))
        if self._sink.deduplicate_by:
            timed = self._rows.deduplicated(found).where(F.col(REASON).isNull())
        else:
            timed = (
                self._rows.with_event_time(found).where(F.col(REASON).isNull()).withWatermark(EVENT_TIME, f"{self._sink.watermark} seconds")
            )
        groups = [self._rows.column(name, f"aggregates.{self._aggregate.name}.group_by").alias(name) for name in self._aggregate.group_by]
        window = F.window(EVENT_TIME, f"{self._aggregate.window} seconds")
        measures = [measure for name in self._aggregate.values for measure in self._measures(timed, name)]
        rows = (
            timed.groupBy(window, *groups)
            .agg(F.count(F.lit(1)).alias("count"), *measures)
            .select(
                F.col("window.start").alias("window_start"),
                F.col("window.end").alias("window_end"),
                *[F.col(quoted(name)) for name in self._aggregate.group_by],
                "count",
                *[F.col(quoted(f"{name}_{kind}")) for name in self._aggregate.values for kind in ("mean", "min", "max", "last")],
            )
        )
        self._output.create(rows.sparkSession, rows.schema)
        return rows

    def committed(self, batch: int, checkpoint: str) -> Marker | None:
        return self._output.committed(batch, checkpoint)

    def write(self, messages: DataFrame, batch: BatchContext) -> Marker:
        batch.columns.record(messages.schema)
        staged, rows = stage_counted(self._output, messages, batch.id)
        marker = {"checkpoint": batch.checkpoint.id(), "rows": rows}
        if rows:
            self._output.publish(batch.id, staged, marker)
        else:
            self._output.publish_empty(batch.id, staged)
        self._output.maintain(batch.id)
        return marker

    def _measures(self, timed: DataFrame, name: str) -> list[Column]:
        value = self._rows.column(name, f"aggregates.{self._aggregate.name}.values")
        kind = timed.select(value).schema[0].dataType
        if not isinstance(kind, NumericType):
            raise IngestError(f"{self._where}.values: {name!r} is {kind.simpleString()}, not a number")
        order = F.when(value.isNotNull(), F.struct(EVENT_TIME, *self._rows.key_columns))
        return [
            F.avg(value).alias(f"{name}_mean"),
            F.min(value).alias(f"{name}_min"),
            F.max(value).alias(f"{name}_max"),
            F.max_by(value, order).alias(f"{name}_last"),
        ]
