"""Reads the slices of a task as Arrow record batches.

The rule kept here: the bytes stream through.  At most one chunk (or one batch
of the log, if that is larger) is held per task, every batch is checked before
a row of it is seen, and what leaves is large enough for Spark to be quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.columns import ColumnMaker, PropertyError
from bridge_spark.offsets import DataLoss
from bridge_spark.plan import Slice
from bridge_spark.segment import Batch, CorruptBatch, SegmentError, TornBatch, decode_columns, read_batch, read_header
from bridge_spark.storage import SegmentGone, Storage, StreamError

CHUNK_BYTES = 8 * 1024 * 1024
ROWS = 16_384
ROWS_BYTES = 16 * 1024 * 1024


def read_slices(
    storage: Storage, slices: list[Slice], maker: ColumnMaker, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of the slices in order, in the maker's schema.

    Raises `DataLoss` when retention has taken a file since the plan was made, or
    a repair had to give offsets up (or goes on without), `StreamError` for
    damaged bytes.
    """
    for part in slices:
        try:
            stored = _stored_rows(storage, part, maker, fail_on_data_loss)
            for rows in _gathered(map(maker.select, _gathered(stored))):
                yield maker.finish(rows, part.partition)
        except SegmentGone:
            if fail_on_data_loss:
                raise DataLoss([f"partition {part.partition}: retention has removed offsets of the range "
                                f"{part.start_offset} to {part.end_offset - 1}"]) from None
        except PropertyError as error:
            raise StreamError(f"mqtt source: {storage.describe(part.partition, part.file)}: {error}") from None


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least `ROWS` rows or `ROWS_BYTES`, but
    for the last."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= ROWS or size >= ROWS_BYTES:
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _stored_rows(
    storage: Storage, part: Slice, maker: ColumnMaker, fail_on_data_loss: bool
) -> Iterator[pa.RecordBatch]:
    for data, batch in log_batches(storage, part):
        if batch.lost:
            if fail_on_data_loss:
                raise DataLoss([f"partition {part.partition}: offsets {batch.first_offset} to "
                                f"{batch.end_offset - 1} were lost to damage"])
            continue
        try:
            columns = decode_columns(data, batch)
        except SegmentError as error:
            raise _corrupt(storage, part, batch.first_offset, error.reason) from None
        yield maker.lay_over(pa.py_buffer(data), batch, columns, part.start_offset, part.end_offset)


def log_batches(storage: Storage, part: Slice) -> Iterator[tuple[bytes, Batch]]:
    """The batches that hold the slice's rows, checked, each with the bytes it
    was found in; raises `StreamError` and `SegmentGone`."""
    data = b""
    fetched = _checked_start(storage, part)
    left = part.end_position - fetched
    position = 0
    expected: Optional[int] = None
    while expected is None or expected < part.end_offset:
        try:
            batch = read_batch(data, position)
            if expected not in (None, batch.first_offset):
                raise CorruptBatch(position, f"offset {batch.first_offset} where {expected} comes next")
        except TornBatch as error:
            length = min(max(CHUNK_BYTES, _missing(data, position)), left)
            if not length:
                raise _corrupt(storage, part, expected, error.reason) from None
            data = data[position:] + storage.read(part.partition, part.file, fetched, length)
            position, fetched, left = 0, fetched + length, left - length
            continue
        except SegmentError as error:
            raise _corrupt(storage, part, expected, error.reason) from None
        if batch.end_offset > part.start_offset:
            yield data, batch
        position, expected = batch.end, batch.end_offset


def _missing(data: bytes, position: int) -> int:
    """How many more bytes the batch at ``position`` needs at least."""
    try:
        batch: Batch = read_header(data, position)
    except TornBatch:
        return 1
    return batch.end - len(data)


def _checked_start(storage: Storage, part: Slice) -> int:
    """Where to begin: an index that a crash left stale sends us to byte 0."""
    if part.position == 0:
        return 0
    try:
        head = read_header(storage.read(part.partition, part.file, part.position, 32))
    except SegmentError:
        return 0
    return part.position if head.first_offset <= part.start_offset else 0


def _corrupt(storage: Storage, part: Slice, expected: Optional[int], reason: str) -> StreamError:
    offset = part.start_offset if expected is None else expected
    return StreamError(f"mqtt source: {storage.describe(part.partition, part.file)} is corrupt "
                       f"at offset {offset}: {reason}")
