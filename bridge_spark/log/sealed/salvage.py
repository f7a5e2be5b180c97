"""Salvage of a damaged sealed segment: its undamaged row groups become an unsealed segment.

Page checksums tell which row groups are undamaged.  Every row keeps the offset in its own `offset` column.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.record_batch import encode_batches, encode_lost
from sessions.message import Message

BATCH_ROWS = 1000
_COLUMNS = ["topic", "payload", "qos", "retain", "properties", "client_id", "timestamp", "offset"]


def salvage(source: Path, target: Path, first_offset: int, end_offset: int | None) -> None:
    """Write the readable rows of `source` to the unsealed segment `target`, with lost batches for all other offsets.

    The segment ends at `end_offset`, or if that is None after the last readable row.  Raises `OSError` if `target`
    cannot be written.
    """
    reached = first_offset
    with open(target, "wb") as file:
        for rows in _undamaged_row_groups(source):
            offsets = rows.pop("offset")
            first = offsets[0]
            if None in rows["topic"]:  # compaction removed records
                reached = _write_kept(file, rows, offsets, reached, end_offset)
                continue
            if offsets != list(range(first, first + len(offsets))) or first < reached:
                continue
            if end_offset is not None and offsets[-1] >= end_offset:
                continue
            file.write(encode_lost(reached, first))
            records = [Message(*values) for values in zip(*rows.values(), repeat(0))]  # no expiry
            for start in range(0, len(records), BATCH_ROWS):
                for data in encode_batches(records[start : start + BATCH_ROWS], first + start):
                    file.write(data)
            reached = first + len(records)
        if end_offset is not None:
            file.write(encode_lost(reached, end_offset))
        file.flush()
        os.fsync(file.fileno())


def _write_kept(file: BinaryIO, rows: dict[str, list[Any]], offsets: list[int], reached: int, end_offset: int | None) -> int:
    """Write the records of a row group that compaction kept, each with lost batches before it; return the offset reached."""
    for offset, values in zip(offsets, zip(*rows.values(), repeat(0))):
        if values[0] is None or offset < reached or (end_offset is not None and offset >= end_offset):
            continue
        file.write(encode_lost(reached, offset))
        for data in encode_batches([Message(*values)], offset):
            file.write(data)
        reached = offset + 1
    return reached


def _undamaged_row_groups(source: Path) -> Iterator[dict[str, list[Any]]]:
    try:
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                try:
                    read = file.read_row_group(number, _COLUMNS, use_threads=False)
                    times = read.column("timestamp").cast(pa.int64())
                    made = read.set_column(read.schema.get_field_index("timestamp"), "timestamp", times)
                    rows = {name: made.column(name).to_pylist() for name in _COLUMNS}
                except (OSError, ValueError, pa.ArrowException):
                    continue
                if rows["offset"]:
                    yield rows
    except (OSError, ValueError, pa.ArrowException):
        return
