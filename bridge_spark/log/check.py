"""Checks the files of a stream: reads every batch and reports damage and gaps.

A check never writes and may run while a broker appends, rolls and removes segments.  A damaged span ends where the next
undamaged batch begins, so damage does not affect later records.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bridge_spark.log.high_watermark import Watermark, read_watermark
from bridge_spark.log.record_batch import (
    HEADER_BYTES,
    LOST_MAGIC,
    MAGIC,
    Batch,
    CorruptBatch,
    SegmentError,
    read_batch,
    read_header,
)
from bridge_spark.log.sealed.footer import verify_file
from bridge_spark.log.segment_names import sealed_file_in, segment_file_name, segment_offsets
from bridge_spark.log.stream_files import DELETED_FILE, DESCRIPTION_FILE

BLOCK_BYTES = 4096
READ_BYTES = 1 << 20

_BATCH_START = re.compile(b"|".join((MAGIC, LOST_MAGIC)))


class FileSpan(NamedTuple):
    """A part of a segment file: undamaged batches, or damaged bytes.

    ``reason`` describes the damage, "" for undamaged batches.  ``lost``: the batches stand for offsets lost to damage
    that was repaired before.
    """

    position: int
    size: int
    first_offset: int
    end_offset: int
    reason: str = ""
    lost: bool = False


class PartitionState(NamedTuple):
    """The result of a check; ``lost`` are ranges of offsets that earlier repairs marked as lost."""

    start: int
    end: int
    segments: int
    lost: list[tuple[int, int]]
    problems: list[str]


def partitions(directory: Path) -> list[tuple[str, int]]:
    """Every partition below the data directory's ``streams``: stream and number."""
    found = []
    for path in directory.glob("*/*"):
        if path.is_dir() and path.name.isdigit():
            found.append((path.parent.name, int(path.name)))
    return sorted(found)


def read_file(path: Path) -> bytes:
    """A file's bytes, with zeros for blocks that cannot be read."""
    parts: list[bytes] = []
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        position = 0
        step = READ_BYTES
        while position < size:
            length = min(step, size - position)
            try:
                data = os.pread(file.fileno(), length, position)
            except OSError:
                if step > BLOCK_BYTES:
                    step = BLOCK_BYTES
                    continue
                data = bytes(length)
            if not data:
                break
            parts.append(data)
            position += len(data)
            if position % READ_BYTES == 0:
                step = READ_BYTES
    return b"".join(parts)


def survey(data: bytes, first_offset: int, limit: int | None) -> list[FileSpan]:
    """The spans of a segment that begins with `first_offset`, up to the offset `limit`.

    A damaged span at the end covers all offsets up to `limit`, or none if `limit` is None.
    """
    spans: list[FileSpan] = []
    position, expected = 0, first_offset
    while position < len(data) and (limit is None or expected < limit):
        try:
            batch = _read_expected(data, position, expected, limit)
            reason = ""
        except SegmentError as error:
            reason = error.reason
            following = next_batch(data, position, expected, limit)
            if following is None:
                end = expected if limit is None else limit
                spans.append(FileSpan(position, len(data) - position, expected, end, reason))
                break
            batch = following
            size = batch.position - position
            spans.append(FileSpan(position, size, expected, batch.first_offset, reason))
        _append_span(spans, batch)
        position, expected = batch.end, batch.end_offset
    return spans


def _read_expected(data: bytes, position: int, expected: int, limit: int | None) -> Batch:
    batch = read_batch(data, position)
    if batch.first_offset != expected:
        raise CorruptBatch(position, f"batch of offset {batch.first_offset} where {expected} comes next")
    if limit is not None and batch.end_offset > limit:
        raise CorruptBatch(position, f"batch up to offset {batch.end_offset - 1} beyond {limit - 1}")
    return batch


def next_batch(data: bytes, position: int, expected: int, limit: int | None) -> Batch | None:
    """The first undamaged batch after `position` that may follow the offset `expected`.

    Tried first is the end of the damaged batch according to its header, then every occurrence of a batch's magic bytes.
    Payloads may contain those too.
    """
    candidates: Iterator[int] = (match.start() for match in _BATCH_START.finditer(data, position))
    try:
        damaged = read_header(data, position)
        if damaged.first_offset == expected:
            candidates = chain((damaged.end,), candidates)
    except SegmentError:
        pass
    for candidate in candidates:
        try:
            batch = read_batch(data, candidate)
        except SegmentError:
            continue
        if batch.first_offset >= expected and (limit is None or batch.end_offset <= limit):
            return batch
    return None


def _append_span(spans: list[FileSpan], batch: Batch) -> None:
    size = HEADER_BYTES + batch.body_length
    last = spans[-1] if spans else None
    if last is not None and not last.reason and last.lost == batch.lost:
        spans[-1] = last._replace(size=last.size + size, end_offset=batch.end_offset)
    else:
        found = FileSpan(batch.position, size, batch.first_offset, batch.end_offset, "", batch.lost)
        spans.append(found)


def check_partition(directory: Path, end: int | None, live: bool) -> PartitionState:
    """Read every batch of a partition up to `end`, the end offset in the database.

    If `end` is None, the partition is checked as far as it goes.  ``live``: a broker has it open, and had it open when
    `end` was read.  Each problem begins with the file's name.  Raises `OSError` if the directory cannot be read.
    """
    problems: list[str] = []
    try:
        watermark = read_watermark(directory)
    except SegmentError as error:
        problems.append(f"high_watermark: {error}")
        watermark = Watermark(0, 0, 0, 0)
    published = watermark.high_watermark
    if end is not None and published > end and not live:
        problems.append(f"high_watermark: readers have seen offsets up to {published}, but the database ends at {end}")
    firsts = [first for first in segment_offsets(directory) if first >= watermark.log_start_offset and (end is None or first < end)]
    lost: list[tuple[int, int]] = []
    start = expected = firsts[0] if firsts else watermark.log_start_offset
    for index, first in enumerate(firsts):
        limit = firsts[index + 1] if index + 1 < len(firsts) else end
        try:
            name, spans = survey_segment(directory, first, limit, live, problems)
        except FileNotFoundError:
            if live:  # removed by retention
                start = expected = firsts[index + 1] if index + 1 < len(firsts) else end or expected
                continue
            raise
        if first != expected:
            problems.append(f"{name}: offsets {expected} to {first - 1} are missing before it")
        expected = first
        for span in spans:
            if span.reason:
                problems.append(describe(name, span))
            elif span.lost:
                lost.append((span.first_offset, span.end_offset))
            expected = span.end_offset
    if end is not None and expected < end:
        last = segment_file_name(firsts[-1]) if firsts else "no segment"
        problems.append(f"{last}: offsets {expected} to {end - 1} are missing after it")
    return PartitionState(start, expected, len(firsts), lost, problems)


def survey_segment(directory: Path, first: int, limit: int | None, live: bool, problems: list[str]) -> tuple[str, list[FileSpan]]:
    """The file name of a segment and its spans.

    If the segment exists sealed and unsealed, the sealed file is used unless it is damaged.  Raises `FileNotFoundError`
    if it does not exist.
    """
    for attempt in range(2):  # it may be sealed or compacted between the two reads
        name = sealed_file_in(directory, first)
        try:
            footer = verify_file(directory / name)
        except FileNotFoundError:
            pass
        except SegmentError as error:
            if not (directory / segment_file_name(first)).exists():
                end = first if limit is None else limit
                return name, [FileSpan(0, (directory / name).stat().st_size, first, end, error.reason)]
            problems.append(f"{name}: {error.reason}; {segment_file_name(first)} exists too")
        else:
            if limit is not None and footer.end_offset > limit and not live:
                problems.append(f"{name}: offsets {limit} to {footer.end_offset - 1} are too many")
            spans = [FileSpan(0, footer.size, *gap, "", True) for gap in footer.lost]
            end = footer.end_offset if limit is None else min(footer.end_offset, limit)
            return name, [*spans, FileSpan(0, footer.size, first, end)]
        try:
            return segment_file_name(first), survey(read_file(directory / segment_file_name(first)), first, limit)
        except FileNotFoundError:
            if attempt:
                raise
    raise AssertionError("the second attempt returns or raises")


def describe(name: str, span: FileSpan) -> str:
    """One line about a damaged span of the segment file `name`."""
    where = f"{name}: bytes {span.position} to {span.position + span.size - 1}: {span.reason}"
    if span.size == 0:
        where = f"{name}: byte {span.position}: {span.reason}"
    if span.end_offset == span.first_offset:
        return where
    return f"{where}; offsets {span.first_offset} to {span.end_offset - 1}"


def check_description(directory: Path) -> str | None:
    """The problem of a stream's `stream.json`, or None."""
    path = directory / DESCRIPTION_FILE
    try:
        json.loads(path.read_bytes())["partitions"]
    except FileNotFoundError:
        return None if (directory / DELETED_FILE).exists() else "stream.json: is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"stream.json: is damaged: {error!r}"
    return None
