"""Reads a range of a stream again, into a table of its own.

A range is created or replaced atomically: one directory, `range=<from>_<to>/`, or the files of that name in a Delta or
Iceberg table.  So repeating a range changes nothing, and overlapping ranges are refused.  The job's own table is not
written, as it may have those messages already.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import parse_options
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_config import SinkConfig, TableConfig
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError, one_line
from bridge_spark.tables.jobs.backfill_range import BackfillRange
from bridge_spark.tables.jobs.staged_files import check_staged
from bridge_spark.tables.output.range_table import RangeTable, open_ranges
from bridge_spark.tables.output.table_format import in_directory
from bridge_spark.tables.recorded_columns import COLUMNS_FILE, added_columns
from bridge_spark.tables.rows.message_rows import MessageRows
from bridge_spark.tables.rows.payloads import dead_letters

SourceOptions = dict[str, str]


def backfill(table: TableConfig, spark: SparkSession, where: str, span: BackfillRange) -> TableProgress:
    """Read the range into `<output>.backfill` and its dead letters into `<output>.backfill.rejected`.

    Raises `IngestError`.
    """
    where = f"{where}: tables.{table.name}"
    progress = TableProgress(table.name)
    rows = MessageRows(table, spark, where)
    staging = _staging(table)
    with Checkpoint(staging).lock(where):
        try:
            good = open_ranges(table.sink, table.backfill, staging)
            bad = open_ranges(table.sink, _beside(table.backfill, table.sink), staging)
            for ranges in (good, bad):
                _check_overlap(ranges, span, where)
            counts = _write(table, rows, _source_options(table, span), span.directory, good, bad)
        except IngestError:
            raise
        except Exception as error:
            raise IngestError(f"{where}: {one_line(error)}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    progress.rows, progress.bad, progress.batches = counts["rows"], counts["bad"], 1
    return progress


def _write(
    table: TableConfig,
    rows: MessageRows,
    ends: tuple[SourceOptions, SourceOptions],
    name: str,
    good: RangeTable,
    bad: RangeTable,
) -> dict[str, Any]:
    """Write the range ``name`` to the tables ``good`` and ``bad``; return the numbers of rows."""
    found = rows.parse(rows.batch(*ends))
    if table.sink.deduplicate_by:
        found = rows.first_of_each(found).persist()
    try:
        counted = rows.counted(found)
        added = added_columns(table.checkpoint / COLUMNS_FILE)
        staged_good = good.stage(rows.table_rows(counted.rows, added), name)
        counts = counted.counts()
        check_staged(staged_good, counts["rows"])
        staged_bad = bad.stage(dead_letters(found), name) if counts["bad"] else None
        if staged_bad is not None:
            check_staged(staged_bad, counts["bad"])
    finally:
        found.unpersist()
    bad.replace(name, staged_bad)
    good.replace(name, staged_good)
    return counts


def _staging(table: TableConfig) -> Path:
    if in_directory(table.sink, table.backfill):
        path = Path(table.backfill)
        return path.parent / f".{path.name}.staging"
    return table.checkpoint.parent / f".{table.checkpoint.name}.backfill.staging"


def _beside(backfill: str, sink: SinkConfig) -> str:
    return f"{backfill}{'_' if sink.table_format == 'iceberg' else '.'}rejected"


def _check_overlap(ranges: RangeTable, span: BackfillRange, where: str) -> None:
    for name, place in ranges.ranges():
        if name != span.directory and span.overlaps(name):
            raise IngestError(
                f"{where}: the range overlaps {place}, whose rows would be there twice: remove that, or give another 'backfill'"
            )


def _source_options(table: TableConfig, span: BackfillRange) -> tuple[SourceOptions, SourceOptions]:
    begin, end = span.begin, span.end
    if isinstance(begin, datetime) and isinstance(end, datetime):
        return (
            {"startingTimestamp": begin.isoformat(), "startingOffsetsByTimestampStrategy": "latest"},
            {"endingTimestamp": end.isoformat()},
        )
    assert isinstance(begin, Mapping) and isinstance(end, Mapping)
    storage = open_storage(parse_options(table.source))
    try:
        others = dict.fromkeys(storage.manifest().keys() - begin.keys(), 0)
    finally:
        storage.close()
    return {"startingOffsets": json.dumps({**begin, **others})}, {"endingOffsets": json.dumps({**end, **others})}
