"""Reads the slices of a task as Arrow record batches.

A task holds at most one chunk, or one log batch if that is larger.  Each batch's checksum is verified before its rows
are used.  Small log batches are merged: Spark's cost per Arrow batch is high.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.log.columns import ColumnBuilder, PropertyError
from bridge_spark.log.record_batch import (
    Batch,
    CorruptBatch,
    SegmentError,
    TornBatch,
    decode_columns,
    read_batch,
    read_header,
)
from bridge_spark.log.sealed.footer import RowGroup
from bridge_spark.log.sealed.reader import SealedFile
from bridge_spark.log.segment_names import is_sealed
from bridge_spark.source.damage import CorruptSegment, skip_damage
from bridge_spark.source.offsets import DataLoss
from bridge_spark.source.plan import Slice
from bridge_spark.source.storage import RecordStorage, SegmentGone, Storage, StreamError, segments_between

ROWS = 16_384
ROWS_BYTES = 16 * 1024 * 1024
LOOKUPS = 5  # of offsets whose file is gone; more than the number of times a segment changes its file

OffsetRows = tuple[int, int, pa.RecordBatch | None]
"""First offset, end offset (exclusive) and rows; None for offsets lost to damage."""


def read_slices(
    storage: Storage, slices: list[Slice], builder: ColumnBuilder, fail_on_data_loss: bool, skip_corrupt: bool = False
) -> Iterator[pa.RecordBatch]:
    """The rows of the slices in order, in the schema of ``builder``.

    Offsets whose file was sealed after planning are found in the new file.  Raises `DataLoss` for offsets that
    retention or a repair removed, unless ``fail_on_data_loss`` is false, and `CorruptSegment` for damaged bytes, unless
    ``skip_corrupt`` is set.
    """

    def rows_of(part: Slice) -> Iterator[pa.RecordBatch]:
        return _stored_rows(storage, part, builder, fail_on_data_loss)

    for part in slices:
        try:
            stored = skip_damage(storage, part, rows_of) if skip_corrupt else rows_of(part)
            for rows in _merged(map(builder.select, _merged(stored))):
                yield builder.build(rows, part.partition)
        except SegmentGone:
            if fail_on_data_loss:
                raise DataLoss(
                    [f"partition {part.partition}: retention has removed offsets of the range {part.start_offset} to {part.end_offset - 1}"]
                ) from None
        except PropertyError as error:
            raise StreamError(f"mqtt source: {storage.describe(part.partition, part.file)}: {error}") from None


def _merged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least `ROWS` rows or `ROWS_BYTES`, except the last."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.get_total_buffer_size()
        if rows >= ROWS or size >= ROWS_BYTES:
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches)


def _stored_rows(storage: Storage, part: Slice, builder: ColumnBuilder, fail_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    waiting = [part]
    lookups = 0
    while waiting:
        part = waiting.pop(0)
        reached = part.start_offset
        read = _records if isinstance(storage, RecordStorage) else _sealed_rows if is_sealed(part.file) else _log_rows
        try:
            for first, end, rows in read(storage, part, builder):
                if rows is not None:
                    yield rows
                elif fail_on_data_loss:
                    raise DataLoss([f"partition {part.partition}: offsets {first} to {end - 1} were lost to damage"])
                reached = end
        except SegmentGone:
            lookups += 1
            if lookups > LOOKUPS:
                raise
            waiting[:0] = look_up(storage, replace(part, start_offset=max(reached, part.start_offset)))


def look_up(storage: Storage, part: Slice) -> list[Slice]:
    """Locate a slice's rows in a new manifest; raises `SegmentGone` unless all are kept."""
    state = storage.manifest().get(part.partition)
    found: list[Slice] = []
    reached = part.start_offset
    if state is not None:
        for segment, first, end in segments_between(storage, part.partition, state, reached, part.end_offset):
            if segment.missing:
                break
            found.append(Slice(part.partition, segment.file, 0, segment.size, first, end, segment.size))
            reached = end
    if reached < part.end_offset:
        raise SegmentGone(f"mqtt source: {storage.describe(part.partition, part.file)} is gone")
    return found


def _records(storage: Storage, part: Slice, builder: ColumnBuilder) -> Iterator[OffsetRows]:
    assert isinstance(storage, RecordStorage)
    return storage.rows(part, builder.stored_columns)


def _log_rows(storage: Storage, part: Slice, builder: ColumnBuilder) -> Iterator[OffsetRows]:
    for data, batch in log_batches(storage, part):
        if batch.lost:
            yield batch.first_offset, batch.end_offset, None
            continue
        try:
            columns = decode_columns(data, batch)
        except SegmentError as error:
            raise CorruptSegment(
                storage.describe(part.partition, part.file), part, batch.first_offset, error.reason, part.position, batch.end_offset
            ) from None
        rows = builder.view_batch(pa.py_buffer(data), batch, columns, part.start_offset, part.end_offset)
        yield batch.first_offset, batch.end_offset, rows


def _sealed_rows(storage: Storage, part: Slice, builder: ColumnBuilder) -> Iterator[OffsetRows]:
    groups: Sequence[RowGroup] = ()
    try:
        file = SealedFile(partial(storage.read, part.partition, part.file), part.file_size)
        groups = file.footer.groups
        if part.start_offset < file.footer.first_offset:
            raise CorruptBatch(part.file_size, f"the segment begins with offset {file.footer.first_offset}")
        yield from file.rows(builder.stored_columns, part.start_offset, part.end_offset, builder.predicate)
        if file.footer.end_offset < part.end_offset:
            raise CorruptSegment(
                storage.describe(part.partition, part.file),
                part,
                max(file.footer.end_offset, part.start_offset),
                "the segment ends here",
                part.file_size,
                part.end_offset,
            )
    except SegmentError as error:
        first, after = next(
            ((group.first_offset, group.end_offset) for group in groups if group.position == error.position),
            (part.start_offset, part.end_offset),
        )
        raise CorruptSegment(
            storage.describe(part.partition, part.file), part, max(first, part.start_offset), error.reason, error.position, after
        ) from None


def log_batches(storage: Storage, part: Slice) -> Iterator[tuple[bytes, Batch]]:
    """The verified batches that hold the slice's rows, each with the buffer it is in.

    Raises `StreamError` and `SegmentGone`.
    """
    data = b""
    fetched = _checked_start(storage, part)
    left = part.end_position - fetched
    position = 0
    expected: int | None = None
    while expected is None or expected < part.end_offset:
        try:
            batch = read_batch(data, position)
            if expected not in (None, batch.first_offset):
                raise CorruptBatch(position, f"offset {batch.first_offset} where {expected} comes next")
        except TornBatch as error:
            length = min(max(storage.chunk_bytes, _missing(data, position)), left)
            if not length:
                raise _corrupt(storage, part, expected, error.reason, fetched - len(data) + position) from None
            data = data[position:] + storage.read(part.partition, part.file, fetched, length)
            position, fetched, left = 0, fetched + length, left - length
            continue
        except SegmentError as error:
            raise _corrupt(storage, part, expected, error.reason, fetched - len(data) + position) from None
        if batch.end_offset > part.start_offset:
            yield data, batch
        position, expected = batch.end, batch.end_offset


def _missing(data: bytes, position: int) -> int:
    """The least number of bytes that the batch at ``position`` still needs."""
    try:
        batch: Batch = read_header(data, position)
    except TornBatch:
        return 1
    return batch.end - len(data)


def _checked_start(storage: Storage, part: Slice) -> int:
    """The byte to begin at: 0 if a crash left the index stale."""
    if part.position == 0:
        return 0
    try:
        head = read_header(storage.read(part.partition, part.file, part.position, 32))
    except SegmentError:
        return 0
    return part.position if head.first_offset <= part.start_offset else 0


def _corrupt(storage: Storage, part: Slice, expected: int | None, reason: str, position: int) -> CorruptSegment:
    offset = part.start_offset if expected is None else expected
    return CorruptSegment(storage.describe(part.partition, part.file), part, offset, reason, position, expected or 0)
