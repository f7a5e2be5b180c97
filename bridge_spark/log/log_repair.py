"""Making a damaged partition whole again: what is good stays, what is lost is marked.

The rule kept here: a record keeps its offset for ever.  Where damage took
records a mark stands for their offsets, so that readers learn of the loss and
never read something else in their place; the damaged file is kept under the name
``<segment>.damaged-<stamp>``.  Of a damaged sealed segment the row groups that are
whole go on as a segment that is not sealed, if pyarrow is installed to read them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import List, NamedTuple, Optional

import google_crc32c

from bridge_spark.log.files import replace_file, sync_directory
from bridge_spark.log.log_check import (
    Span,
    describe,
    read_file,
    read_watermark,
    segment_name,
    segment_offsets,
    survey,
)
from bridge_spark.log.sealed import file_name, verify
from bridge_spark.log.sealer import Sealer, SealingFailed
from bridge_spark.log.segment import (
    FORMAT_VERSION,
    HEADER,
    LOST_MAGIC,
    SegmentError,
    Watermark,
    encode_watermark,
)

MAX_COUNT = 0xFFFFFFFF


class Repaired(NamedTuple):
    """Where the partition ends now, and one line for each thing that was done."""

    end: int
    lines: List[str]


def lost_marks(first_offset: int, end_offset: int) -> bytes:
    """Batches without records that stand for these offsets."""
    marks = []
    while first_offset < end_offset:
        count = min(end_offset - first_offset, MAX_COUNT)
        blank = HEADER.pack(LOST_MAGIC, 0, 0, count, first_offset, FORMAT_VERSION, 0)
        crc = google_crc32c.value(blank[12:])
        marks.append(HEADER.pack(LOST_MAGIC, 0, crc, count, first_offset, FORMAT_VERSION, 0))
        first_offset += count
    return b"".join(marks)


def repair_partition(directory: Path, end: Optional[int], least: int, stamp: str) -> Repaired:
    """Make the files of a partition good from their first offset to their end.

    The end is `end`; None if the database does not know it: then it is behind
    every whole batch, what readers have been shown, and the offset `least`.
    Nothing may be at work on the files.  Raises `OSError`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines: List[str] = []
    try:
        watermark = read_watermark(directory)
    except SegmentError as error:
        lines.append(f"high_watermark: {error}; written anew")
        watermark = Watermark(0, 0, 0, 0)
    if end is None or end < watermark.high_watermark:
        least = max(least, watermark.high_watermark, end or 0)
        end = None
    firsts = [
        first
        for first in segment_offsets(directory)
        if first >= watermark.log_start_offset and (end is None or first < end)
    ]
    start = expected = firsts[0] if firsts else watermark.log_start_offset
    last, size = start, 0
    for index, first in enumerate(firsts):
        following = firsts[index + 1] if index + 1 < len(firsts) else None
        limit = end if following is None else following
        sealed_end = _sealed_end(directory, first, limit, stamp, lines)
        if sealed_end is not None:
            expected = last = sealed_end
            size = 0
            if following is not None and sealed_end < following:
                _mark(directory, sealed_end, following, lines)
            continue
        data = read_file(directory / segment_name(first))
        spans = survey(data, first, limit)
        expected = spans[-1].end_offset if spans else first
        stop = limit if limit is not None else max(expected, least)
        last, size = first, _mend(directory, first, data, spans, stop, stamp, lines)
        expected = stop
    stop = max(expected, least) if end is None else end
    if expected < stop:  # there is no segment, or the last one is sealed
        last, size = expected, _mark(directory, expected, stop, lines)
    if lines:
        _write(directory / "high_watermark", encode_watermark(Watermark(stop, last if size else stop, size, start)))
    return Repaired(stop, lines)


def _mark(directory: Path, first: int, end: int, lines: List[str]) -> int:
    """Write a segment that says that these offsets are lost; its size."""
    marks = lost_marks(first, end)
    _write(directory / segment_name(first), marks)
    lines.append(f"{segment_name(first)}: offsets {first} to {end - 1} are lost")
    return len(marks)


def _sealed_end(directory: Path, first: int, limit: Optional[int], stamp: str, lines: List[str]) -> Optional[int]:
    """Where the sealed segment ends if it is good; else it is put aside and what can be read of it stands as a segment
    of batches, which may need mending itself."""
    path, unsealed = directory / file_name(first), directory / segment_name(first)
    try:
        part = verify(path)
        if limit is None or part.end_offset <= limit:
            return part.end_offset
        reason, limit = f"ends at offset {part.end_offset}, not {limit}", part.end_offset
    except FileNotFoundError:
        return None
    except SegmentError as error:
        reason = error.reason
    lines.append(f"{path.name}: {reason}; put aside as {path.name}.damaged-{stamp}")
    if not unsealed.exists():
        rescued = path.with_name(f"{unsealed.name}.new")
        sealer = Sealer()
        try:
            sealer.do({"do": "rescue", "source": str(path), "target": str(rescued), "first_offset": first,
                       "end_offset": limit})
            os.replace(rescued, unsealed)
        except SealingFailed as error:
            if error.errno:  # what is there could be read, and is not given up for want of room
                raise OSError(error.errno, str(error)) from None
            lines.append(f"{path.name}: nothing could be read of it: {error}")
            _write(unsealed, b"" if limit is None else lost_marks(first, limit))
        finally:
            sealer.close()
    os.rename(path, path.with_name(f"{path.name}.damaged-{stamp}"))
    sync_directory(directory)
    return None


def _mend(
    directory: Path,
    first: int,
    data: bytes,
    spans: List[Span],
    stop: int,
    stamp: str,
    lines: List[str],
) -> int:
    """Write a segment anew if it is damaged or ends before `stop`; its size up to there."""
    name = segment_name(first)
    parts: List[bytes] = []
    reached = first
    for span in spans:
        if span.reason:
            lines.append(describe(name, span))
            continue
        parts.append(lost_marks(reached, span.first_offset))
        parts.append(data[span.position : span.position + span.size])
        reached = span.end_offset
    if reached < stop and (not spans or not spans[-1].reason):
        lines.append(f"{name}: offsets {reached} to {stop - 1} are missing after it")
    parts.append(lost_marks(reached, stop))
    mended = b"".join(parts)
    if not data.startswith(mended):
        damaged = f"{name}.damaged-{stamp}"
        os.link(directory / name, directory / damaged)
        _write(directory / name, mended)
        lines.append(f"{name}: put aside as {damaged}")
    return len(mended)


def _write(path: Path, data: bytes) -> None:
    """Put a file in place; the index that belongs to it is made at the next start."""
    path.with_suffix(".idx").unlink(missing_ok=True)
    replace_file(path, data)
