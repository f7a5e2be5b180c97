"""The streaming query of one table of aggregates: a row for each window and group.

The rule kept here: a window is written once, when the watermark has passed its
end, and never changes after.  What comes later is counted as late, and stands
in the table of the messages all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.message_rows import EVENT_TIME, MessageRows
from bridge_spark.tables.query_job import QueryJob, batch_table
from bridge_spark.tables.sink_config import AggregateConfig
from bridge_spark.tables.staged_rows import write
from bridge_spark.tables.table_config import TableConfig

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class AggregateJob(QueryJob):
    """`window_start`, `window_end`, the groups' columns, `count`, and mean, min,
    max and last (by event time) of each value."""

    def __init__(self, table: TableConfig, aggregate: AggregateConfig, spark: SparkSession, where: str) -> None:
        where = f"{where}: tables.{table.name}"
        self._table = table
        self._aggregate = aggregate
        self._own_where = f"{where}.aggregates.{aggregate.name}"
        self._rows = MessageRows(table, spark, where)
        self._output = batch_table(table.sink, aggregate.output)
        settings = {"window": aggregate.window, "group_by": list(aggregate.group_by), "values": list(aggregate.values),
                    "deduplicate_by": list(table.sink.deduplicate_by)}
        super().__init__(f"{table.name}.{aggregate.name}", self._own_where, aggregate.checkpoint, [self._output],
                         settings)

    def _stream(self) -> DataFrame:
        from pyspark.sql import functions as F

        from bridge_spark.tables.payloads import REASON

        sink = self._table.sink
        found = self._rows.parsed(self._rows.stream(self._checkpoint, f".{self._aggregate.name}"))
        if sink.deduplicate_by:
            timed = self._rows.deduplicated(found).where(F.col(REASON).isNull())
        else:
            timed = self._rows.timed(found).where(F.col(REASON).isNull()) \
                .withWatermark(EVENT_TIME, f"{sink.watermark} seconds")
        groups = [self._rows.column(name, f"aggregates.{self._aggregate.name}.group_by").alias(name)
                  for name in self._aggregate.group_by]
        window = F.window(EVENT_TIME, f"{self._aggregate.window} seconds")
        measures = [measure for name in self._aggregate.values for measure in self._measures(timed, name)]
        return timed.groupBy(window, *groups).agg(F.count(F.lit(1)).alias("count"), *measures).select(
            F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end"),
            *[F.col(f"`{name}`") for name in self._aggregate.group_by], "count",
            *[F.col(f"`{name}_{kind}`") for name in self._aggregate.values for kind in ("mean", "min", "max", "last")])

    def _measures(self, timed: DataFrame, name: str) -> list[Column]:
        from pyspark.sql import functions as F
        from pyspark.sql.types import NumericType

        value = self._rows.column(name, f"aggregates.{self._aggregate.name}.values")
        kind = timed.select(value).schema[0].dataType
        if not isinstance(kind, NumericType):
            raise IngestError(f"{self._own_where}.values: {name!r} is {kind.simpleString()}, not a number")
        order = F.when(value.isNotNull(), F.struct(EVENT_TIME, *self._rows.place))
        return [F.avg(value).alias(f"{name}_mean"), F.min(value).alias(f"{name}_min"),
                F.max(value).alias(f"{name}_max"), F.max_by(value, order).alias(f"{name}_last")]

    def _done(self, batch: int, checkpoint: str) -> Optional[dict[str, Any]]:
        return self._output.done(batch, checkpoint)

    def _fill(self, messages: DataFrame, batch: int, checkpoint: str) -> dict[str, Any]:
        self._columns.note(messages.schema)
        staged = self._output.stage(batch)
        mark = {"checkpoint": checkpoint, "rows": write(messages, staged)}
        if mark["rows"]:
            self._output.publish(batch, staged, mark)
        else:
            self._output.withdraw(batch, staged)
        return mark
