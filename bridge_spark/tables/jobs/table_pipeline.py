"""The pipeline of one table and its dead letters.

Each message becomes a row of the table, a dead letter with the reason, or a counted duplicate.  Dead letters are
published before the table, so a batch that is in the table is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_config import TableConfig
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.jobs.query_job import BatchContext, QueryJob
from bridge_spark.tables.jobs.staged_files import check_staged, stage_counted
from bridge_spark.tables.output.batch_table import BatchTable, Marker, Staged
from bridge_spark.tables.output.table_format import open_dead_letters, open_table
from bridge_spark.tables.recorded_columns import COLUMNS_FILE, added_columns
from bridge_spark.tables.rows.message_rows import MessageRows
from bridge_spark.tables.rows.payloads import dead_letter_schema, dead_letters


def table_job(table: TableConfig, spark: SparkSession, where: str) -> QueryJob:
    """The job of one table.  Raises `IngestError`."""
    where = f"{where}: tables.{table.name}"
    return QueryJob(table.name, where, table.checkpoint, TablePipeline(table, spark, where))


class TablePipeline:
    """The rows of one table, and its dead letters."""

    def __init__(self, table: TableConfig, spark: SparkSession, where: str) -> None:
        keys = list(table.sink.deduplicate_by)
        self._deduplicates = bool(keys)
        self._rows = MessageRows(table, spark, where)
        self._good = open_table(table.sink, table.output)
        self._bad = open_dead_letters(table.sink, table.dead_letters)
        self.tables: Sequence[BatchTable[Any]] = [self._good, self._bad]
        self.state: Mapping[str, Any] = {"deduplicate_by": keys} if keys else {}

    def stream(self, checkpoint: Checkpoint) -> DataFrame:
        found = self._rows.parse(self._rows.stream(checkpoint))
        added = added_columns(checkpoint.path / COLUMNS_FILE)
        self._good.create(found.sparkSession, self._rows.table_rows(found, added).schema)
        self._bad.create(found.sparkSession, dead_letter_schema())
        return self._rows.deduplicated(found) if self._deduplicates else found

    def committed(self, batch: int, checkpoint: str) -> Marker | None:
        self._bad.committed(batch, checkpoint)
        return self._good.committed(batch, checkpoint)

    def write(self, found: DataFrame, batch: BatchContext) -> Marker:
        if self._deduplicates:
            found.persist()
        try:
            staged, counts = self._stage_rows(found, batch)
            marker = {"checkpoint": batch.checkpoint.id(), **counts}
            late = self._late(batch) if self._deduplicates else None
            if marker["bad"] or late is not None:
                bad = dead_letters(found)
                staged_bad, _ = stage_counted(self._bad, bad if late is None else bad.unionByName(late), batch.id)
                self._bad.publish(batch.id, staged_bad, marker)
            else:
                self._bad.publish_empty(batch.id)
        finally:
            if self._deduplicates:
                found.unpersist()
        if marker["rows"]:
            self._good.publish(batch.id, staged, marker)
        else:
            self._good.publish_empty(batch.id, staged)
        for table in self.tables:
            table.maintain(batch.id)
        return marker

    def _stage_rows(self, found: DataFrame, batch: BatchContext) -> tuple[Staged, dict[str, Any]]:
        """Write the table's rows; if they have fields that become columns now, write them again with those."""
        counted = self._rows.counted(found)
        rows = self._rows.table_rows(counted.rows, batch.columns.added)
        batch.columns.check(rows.schema)
        staged = self._good.stage(rows, batch.id)
        counts = counted.counts()
        check_staged(staged, counts["rows"])
        new = self._rows.new_columns(counts, batch.columns)
        if new:
            staged.discard()
            rows = self._rows.table_rows(found, batch.columns.added | new)
            staged, _ = stage_counted(self._good, rows, batch.id)
        batch.columns.record(rows.schema, new)
        counts.pop("fields", None)
        return staged, counts

    def _late(self, batch: BatchContext) -> DataFrame | None:
        """The messages that Spark dropped from this batch because they came after the watermark, as dead letters.

        Spark only counts them.  They are found again by reading the batch's range with the watermark from the
        checkpoint; the counts must agree.
        """
        dropped = _dropped_by_watermark(batch.query)
        if not dropped:
            return None
        begin, before = self._rows.starting_offsets(batch.checkpoint), 0
        if batch.id:
            offsets, before = batch.checkpoint.offsets_and_watermark(batch.id - 1)
            begin = json.dumps(offsets)
        end, _ = batch.checkpoint.offsets_and_watermark(batch.id)
        late = self._rows.late(self._rows.batch({"startingOffsets": begin}, {"endingOffsets": json.dumps(end)}), before)
        if late.count() != dropped:
            raise IngestError(
                f"batch {batch.id}: {dropped} messages came too late, but others are found between {begin} and {json.dumps(end)}"
            )
        return dead_letters(late.dropDuplicates(["partition", "offset"]))


def _dropped_by_watermark(query: StreamingQuery) -> int:
    """How many rows of the current batch Spark dropped because of the watermark."""

    def dropped(plan: Any) -> int:
        metric = plan.metrics().get("numRowsDroppedByWatermark")
        children = plan.children()
        return (int(metric.get().value()) if metric.isDefined() else 0) + sum(
            dropped(children.apply(number)) for number in range(children.size())
        )

    return dropped(query._jsq.streamingQuery().lastExecution().executedPlan())
