"""Reads a range of a stream again, into a table of its own.

A range is one directory, `range=<from>_<to>/`, which is created or replaced atomically.  So repeating a range changes
nothing, and overlapping ranges are refused.  The job's own table is not written, as it may have those messages already.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bridge_spark.log.files import sync, sync_directory
from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import parse_options
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_config import TableConfig
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError, one_line, spark_path
from bridge_spark.tables.jobs.backfill_range import PREFIX, BackfillRange
from bridge_spark.tables.jobs.staged_files import check_staged, write_staged
from bridge_spark.tables.output.swap import swap
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
    bad = table.backfill.with_name(table.backfill.name + ".rejected")
    staging = table.backfill.parent / f".{table.backfill.name}.staging"
    with Checkpoint(staging).lock(where):
        for directory in (table.backfill, bad):
            _check_overlap(directory, span, where)
        try:
            counts = _write(table, rows, _source_options(table, span), staging,
                            table.backfill / span.directory, bad / span.directory)
        except Exception as error:
            raise IngestError(f"{where}: {one_line(error)}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    progress.rows, progress.bad, progress.batches = counts["rows"], counts["bad"], 1
    return progress


def _write(
    table: TableConfig, rows: MessageRows, ends: tuple[SourceOptions, SourceOptions], staging: Path, good: Path, bad: Path
) -> dict[str, Any]:
    """Write the range to the directories ``good`` and ``bad``; return the numbers of rows."""
    staged_good, staged_bad, replaced = (staging / f"{kind}-{os.getpid()}" for kind in ("good", "bad", "replaced"))
    for path in (staged_good, staged_bad, replaced):
        shutil.rmtree(path, ignore_errors=True)
    for path in (good, bad):
        path.parent.mkdir(parents=True, exist_ok=True)
    found = rows.parse(rows.batch(*ends))
    if table.sink.deduplicate_by:
        found = rows.first_of_each(found).persist()
    try:
        counted = rows.counted(found)
        added = added_columns(table.checkpoint / COLUMNS_FILE)
        rows.table_rows(counted.rows, added).write.parquet(spark_path(staged_good))
        counts = counted.counts()
        check_staged(staged_good, counts["rows"])
        if counts["bad"]:
            write_staged(dead_letters(found), staged_bad)
    finally:
        found.unpersist()
    if counts["bad"]:
        _publish(staged_bad, bad)
    elif bad.exists():
        os.rename(bad, replaced)
    _publish(staged_good, good)
    return counts


def _publish(staged: Path, target: Path) -> None:
    for path in staged.iterdir():
        if path.name.startswith((".", "_")):
            path.unlink()
    sync([*staged.iterdir(), staged])
    if target.exists() and not swap(staged, target):
        shutil.rmtree(target)
    if not target.exists():
        os.rename(staged, target)
    sync_directory(target.parent)


def _check_overlap(directory: Path, span: BackfillRange, where: str) -> None:
    for other in directory.glob(f"{PREFIX}*_*"):
        if other.name != span.directory and span.overlaps(other.name):
            raise IngestError(f"{where}: the range overlaps {other}, whose rows would be there twice: remove that, "
                              f"or give another 'backfill'")


def _source_options(table: TableConfig, span: BackfillRange) -> tuple[SourceOptions, SourceOptions]:
    begin, end = span.begin, span.end
    if isinstance(begin, datetime) and isinstance(end, datetime):
        return ({"startingTimestamp": begin.isoformat(), "startingOffsetsByTimestampStrategy": "latest"},
                {"endingTimestamp": end.isoformat()})
    assert isinstance(begin, Mapping) and isinstance(end, Mapping)
    storage = open_storage(parse_options(table.source))
    try:
        others = dict.fromkeys(storage.manifest().keys() - begin.keys(), 0)
    finally:
        storage.close()
    return {"startingOffsets": json.dumps({**begin, **others})}, {"endingOffsets": json.dumps({**end, **others})}
