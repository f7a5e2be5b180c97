"""A range of a stream, read once more into a table of its own.

The rule kept here: a range is one directory, `range=<from>_<to>/`, that comes
or is replaced in one step; so to repeat it changes nothing, and two ranges
that overlap are refused.  It is not written into the job's own table, where
those messages may stand already.

A range is half open, and of partitions that its offsets do not name nothing.  Times are those of the broker's receipt, in the past, so
that the same range always is the same messages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from bridge_spark.log.files import sync, sync_directory
from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import parse_options
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.exchange import exchange
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError, one_line, spark_path
from bridge_spark.tables.message_rows import MessageRows
from bridge_spark.tables.staged_rows import check_written, write
from bridge_spark.tables.table_columns import COLUMNS_FILE, added_columns
from bridge_spark.tables.table_config import TableConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIME = "%Y%m%dT%H%M%S.%fZ"
Edge = Union[datetime, Mapping[int, int]]
"""A time, or an offset for each partition."""


def edge(text: str) -> Edge:
    """One end of a range: an ISO 8601 time (UTC where it names no zone) or
    offsets like `{"0": 123}`.  Raises `ValueError` with the reason."""
    if text.lstrip().startswith("{"):
        try:
            found = {int(key): offset for key, offset in json.loads(text).items()}
        except ValueError:
            found = {}
        if not found or not all(type(offset) is int and offset >= 0 for offset in found.values()):
            raise ValueError(f"{text!r} is not offsets like {{\"0\": 123}}")
        return found
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a time like 2026-01-31T12:00:00Z nor offsets like {{\"0\": 123}}") \
            from None
    return time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time.astimezone(timezone.utc)


def check_range(begin: Edge, end: Edge) -> None:
    """Raises `ValueError` for a range that is not one, or not over."""
    if isinstance(begin, datetime) and isinstance(end, datetime):
        if begin >= end:
            raise ValueError(f"the range ends at {end.isoformat()}, not after it begins")
        if end > datetime.now(timezone.utc):
            raise ValueError(f"{end.isoformat()} is in the future: what is received until then would be missing")
    elif isinstance(begin, datetime) or isinstance(end, datetime):
        raise ValueError("a range goes from a time to a time, or from offsets to offsets")
    elif begin.keys() != end.keys() or any(begin[partition] > end[partition] for partition in begin):
        raise ValueError("offsets must name the same partitions, and end where they begin or later")


def backfill(table: TableConfig, spark: SparkSession, where: str, begin: Edge, end: Edge) -> TableProgress:
    """Read the range into `<output>.backfill` and its dead letters into
    `<output>.backfill.rejected`; raises `IngestError`."""
    where = f"{where}: tables.{table.name}"
    progress = TableProgress(table.name)
    rows = MessageRows(table, spark, where)
    bad = table.backfill.with_name(table.backfill.name + ".rejected")
    name = f"range={_name(begin)}_{_name(end)}"
    staging = table.backfill.parent / f".{table.backfill.name}.staging"
    with Checkpoint(staging).lock(where):
        for directory in (table.backfill, bad):
            _check_overlap(directory, name, begin, end, where)
        try:
            result = _fill(table, rows, _options(table, begin, end), staging, table.backfill / name, bad / name)
        except Exception as error:
            raise IngestError(f"{where}: {one_line(error)}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    progress.rows, progress.bad, progress.batches = result["rows"], result["bad"], 1
    return progress


def _fill(
    table: TableConfig, rows: MessageRows, ends: tuple[dict[str, str], dict[str, str]], staging: Path, good: Path, bad: Path
) -> dict[str, Any]:
    """Read the range into the directories ``good`` and ``bad``; how many rows went where."""
    staged_good, staged_bad, gone = (staging / f"{kind}-{os.getpid()}" for kind in ("good", "bad", "gone"))
    for place in (staged_good, staged_bad, gone):
        shutil.rmtree(place, ignore_errors=True)
    for place in (good, bad):
        place.parent.mkdir(parents=True, exist_ok=True)
    found = rows.parsed(rows.batch(*ends))
    if table.sink.deduplicate_by:
        found = rows.first_of_each(found).persist()
    try:
        counts = rows.observed(found)
        rows.good(counts.rows, added_columns(table.checkpoint / COLUMNS_FILE)).write.parquet(spark_path(staged_good))
        result = counts.result()
        check_written(staged_good, result["rows"])
        if result["bad"]:
            write(rows.dead_letters(found), staged_bad)
    finally:
        found.unpersist()
    if result["bad"]:
        _publish(staged_bad, bad)
    elif bad.exists():
        os.rename(bad, gone)
    _publish(staged_good, good)
    return result


def _publish(staged: Path, place: Path) -> None:
    for path in staged.iterdir():
        if path.name.startswith((".", "_")):
            path.unlink()
    sync([*staged.iterdir(), staged])
    if place.exists() and not exchange(staged, place):
        shutil.rmtree(place)
    if not place.exists():
        os.rename(staged, place)
    sync_directory(place.parent)


def _name(at: Edge) -> str:
    if isinstance(at, datetime):
        return at.strftime(_TIME)
    return ",".join(f"{partition}.{offset}" for partition, offset in sorted(at.items()))


def _of_name(text: str) -> Optional[Edge]:
    if re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", text):
        return {int(partition): int(offset) for partition, _, offset in (part.partition(".") for part in text.split(","))}
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc)
    except ValueError:
        return None


def _check_overlap(directory: Path, name: str, begin: Edge, end: Edge, where: str) -> None:
    for other in directory.glob("range=*_*"):
        if other.name == name:
            continue
        first, last = (_of_name(text) for text in other.name.removeprefix("range=").split("_", 1))
        if _overlap(begin, end, first, last):
            raise IngestError(f"{where}: the range overlaps {other}, whose rows would be there twice: remove that, "
                              f"or give another 'backfill'")


def _overlap(begin: Edge, end: Edge, first: Optional[Edge], last: Optional[Edge]) -> bool:
    if isinstance(begin, datetime) and isinstance(end, datetime):
        return not (isinstance(first, datetime) and isinstance(last, datetime)) or (begin < last and first < end)
    if not (isinstance(begin, Mapping) and isinstance(end, Mapping)
            and isinstance(first, Mapping) and isinstance(last, Mapping)):
        return True
    return any(max(begin[partition], first[partition]) < min(end[partition], last[partition])
               for partition in begin.keys() & first.keys())


def _options(table: TableConfig, begin: Edge, end: Edge) -> tuple[dict[str, str], dict[str, str]]:
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
