"""What can still be read of a damaged sealed segment, as a segment of batches.

The rule kept here: a row counts when its page's checksum is right, and stands at the offset that its own row names; so
damage costs the row groups that it hit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, Optional

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bridge_spark.log.log_repair import lost_marks
from bridge_spark.log.segment import encode_batches
from sessions.message import Message

BATCH_ROWS = 1000
_COLUMNS = ["topic", "payload", "qos", "retain", "properties", "client_id", "timestamp", "offset"]


def rescue(source: Path, target: Path, first_offset: int, end_offset: Optional[int]) -> None:
    """Write the segment `target` with the offsets from `first_offset` up to `end_offset` (None: up to the last that is
    there), marks where rows are lost.

    Raises `OSError` if it cannot be written.
    """
    reached = first_offset
    with open(target, "wb") as file:
        for rows in _readable(source):
            offsets = rows.pop("offset")
            first = offsets[0]
            if offsets != list(range(first, first + len(offsets))) or first < reached:
                continue
            if end_offset is not None and offsets[-1] >= end_offset:
                continue
            file.write(lost_marks(reached, first))
            records = [Message(*values) for values in zip(*rows.values(), repeat(0))]  # no expiry
            for start in range(0, len(records), BATCH_ROWS):
                for data in encode_batches(records[start:start + BATCH_ROWS], first + start):
                    file.write(data)
            reached = first + len(records)
        if end_offset is not None:
            file.write(lost_marks(reached, end_offset))
        file.flush()
        os.fsync(file.fileno())


def _readable(source: Path) -> Iterator[dict[str, list[Any]]]:
    """The row groups that are whole."""
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
