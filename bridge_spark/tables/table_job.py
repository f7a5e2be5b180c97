"""The streaming query of one table of the ingest job.

The rule kept here: each message is a row of the table, or a dead letter with
the reason, or a duplicate that is counted.  Dead letters are published before
the table, so a batch that is in the table is done.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from bridge_spark.tables import late_rows
from bridge_spark.tables.batch_table import BatchTable
from bridge_spark.tables.ingest_session import IngestError, spark_path
from bridge_spark.tables.message_rows import MessageRows
from bridge_spark.tables.query_job import QueryJob, batch_table
from bridge_spark.tables.staged_rows import check_written, write
from bridge_spark.tables.table_config import TableConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class TableJob(QueryJob):
    """Rows of one table, and its dead letters."""

    def __init__(self, table: TableConfig, spark: SparkSession, where: str) -> None:
        self._config = table
        self._rows = MessageRows(table, spark, f"{where}: tables.{table.name}")
        self._good = batch_table(table.sink, table.output)
        self._bad = BatchTable(table.dead_letters, table.sink.merge_files)
        keys = list(table.sink.deduplicate_by)
        super().__init__(table.name, f"{where}: tables.{table.name}", table.checkpoint, [self._good, self._bad],
                         {"deduplicate_by": keys} if keys else {})

    def _stream(self) -> DataFrame:
        found = self._rows.parsed(self._rows.stream(self._checkpoint))
        return self._rows.deduplicated(found) if self._config.sink.deduplicate_by else found

    def _done(self, batch: int, checkpoint: str) -> Optional[dict[str, Any]]:
        self._bad.done(batch, checkpoint)
        return self._good.done(batch, checkpoint)

    def _fill(self, found: DataFrame, batch: int, checkpoint: str) -> dict[str, Any]:
        deduplicates = bool(self._config.sink.deduplicate_by)
        if deduplicates:
            found.persist()
        try:
            staged, counts = self._stage(found, batch)
            mark = {"checkpoint": checkpoint, **counts}
            late = self._late(batch) if deduplicates else None
            if mark["bad"] or late is not None:
                staged_bad = self._bad.stage(batch)
                bad = self._rows.dead_letters(found)
                write(bad if late is None else bad.unionByName(late), staged_bad)
                self._bad.publish(batch, staged_bad, mark)
            else:
                self._bad.withdraw(batch)
        finally:
            if deduplicates:
                found.unpersist()
        if mark["rows"]:
            self._good.publish(batch, staged, mark)
        else:
            self._good.withdraw(batch, staged)
        return mark

    def _stage(self, found: DataFrame, batch: int) -> tuple[Path, dict[str, Any]]:
        """Write the table's rows, a second time where they have a field that gets a column now."""
        counted = self._rows.observed(found)
        staged = self._good.stage(batch)
        rows = self._rows.good(counted.rows, self._columns.added)
        self._columns.check(rows.schema)
        rows.write.parquet(spark_path(staged))
        counts = counted.result()
        check_written(staged, counts["rows"])
        new = self._rows.new_fields(counts, self._columns)
        if new:
            shutil.rmtree(staged)
            rows = self._rows.good(found, {**self._columns.added, **new})
            staged = self._good.stage(batch)
            write(rows, staged)
        self._columns.note(rows.schema, new)
        counts.pop("fields", None)
        return staged, counts

    def _late(self, batch: int) -> Optional[DataFrame]:
        """What the state left out of this batch because it came too late."""
        assert self._query is not None
        dropped = late_rows.dropped(self._query)
        if not dropped:
            return None
        begin, before = self._rows.beginning(self._checkpoint), 0
        if batch:
            offsets, before = self._checkpoint.offsets_and_watermark(batch - 1)
            begin = json.dumps(offsets)
        end, _ = self._checkpoint.offsets_and_watermark(batch)
        late = self._rows.late(self._rows.batch(
            {"startingOffsets": begin}, {"endingOffsets": json.dumps(end)}), before)
        if late.count() != dropped:
            raise IngestError(f"batch {batch}: {dropped} messages came too late, but others are found between "
                              f"{begin} and {json.dumps(end)}")
        return self._rows.dead_letters(late.dropDuplicates(["partition", "offset"]))
