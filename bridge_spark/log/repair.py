"""Repairs a damaged partition.

Records keep their offsets.  Batches without records stand for the lost offsets, so that readers report the loss.  The
damaged file is kept as ``<segment>.damaged-<stamp>``.  The undamaged row groups of a damaged sealed segment become an
unsealed segment, if pyarrow is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bridge_spark.log.archive.index import INDEX_FILE, IndexReader, repair_index
from bridge_spark.log.check import FileSpan, describe, read_file, survey
from bridge_spark.log.files import replace_file, sync_directory
from bridge_spark.log.high_watermark import WATERMARK_FILE, Watermark, encode_watermark, read_watermark
from bridge_spark.log.record_batch import SegmentError, encode_batches, encode_lost
from bridge_spark.log.sealed.footer import verify_file
from bridge_spark.log.sealed.job_process import JobFailed, JobProcess
from bridge_spark.log.segment_names import INDEX_SUFFIX, sealed_file_in, segment_file_name, segment_offsets
from sessions.message import Message


class Repaired(NamedTuple):
    """The partition's end offset, and one line for each change."""

    end: int
    lines: list[str]


def repair_partition(directory: Path, end: int | None, least: int, stamp: str) -> Repaired:
    """Repair the files of a partition up to the offset `end`, which is the one in the database.

    If `end` is None or below the high watermark, the end is the largest of: the end of all undamaged batches, the
    high watermark, and `least`.  No broker may have the files open.  Raises `OSError`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    try:
        watermark = read_watermark(directory)
    except SegmentError as error:
        lines.append(f"high_watermark: {error}; rewritten")
        watermark = Watermark(0, 0, 0, 0)
    if end is None or end < watermark.high_watermark:
        least = max(least, watermark.high_watermark, end or 0)
        end = None
    firsts = [first for first in segment_offsets(directory) if first >= watermark.log_start_offset and (end is None or first < end)]
    lines += repair_index(directory, stamp)
    firsts, kept_from = _without_archived_damage(directory, firsts, end, stamp, lines)
    start = expected = firsts[0] if firsts else max(watermark.log_start_offset, kept_from)
    last, size = start, 0
    for index, first in enumerate(firsts):
        following = firsts[index + 1] if index + 1 < len(firsts) else None
        limit = end if following is None else following
        sealed_end = _check_sealed(directory, first, limit, stamp, lines)
        if sealed_end is not None:
            expected = last = sealed_end
            size = 0
            if following is not None and sealed_end < following:
                _write_lost(directory, sealed_end, following, lines)
            continue
        data = read_file(directory / segment_file_name(first))
        spans = survey(data, first, limit)
        expected = spans[-1].end_offset if spans else first
        stop = limit if limit is not None else max(expected, least)
        last, size = first, _repair_segment(directory, first, data, spans, stop, stamp, lines)
        expected = stop
    stop = max(expected, least) if end is None else end
    if expected < stop:  # there is no segment, or the last one is sealed
        last, size = expected, _write_lost(directory, expected, stop, lines)
    if lines:
        _write(directory / WATERMARK_FILE, encode_watermark(Watermark(stop, last if size else stop, size, start)))
    return Repaired(stop, lines)


def _without_archived_damage(directory: Path, firsts: list[int], end: int | None, stamp: str, lines: list[str]) -> tuple[list[int], int]:
    """The segments after the last one that is damaged, or followed by a gap, and is in the archive; the first offset.

    Readers find the offsets before it in the archive.
    """
    archived = IndexReader(directory / INDEX_FILE).state()
    kept = 0
    following = firsts[:1]
    for index, first in enumerate(firsts):
        after = firsts[index + 1] if index + 1 < len(firsts) else end
        if after is None or not archived.start <= first or after > archived.end:
            break
        path = directory / sealed_file_in(directory, first)
        try:
            reached, reason = verify_file(path).end_offset, ""
        except FileNotFoundError:
            continue
        except SegmentError as error:
            reached, reason = first, error.reason
        if reached == after or not _is_archived(directory, first, after):
            continue
        if reason:
            aside = f"{path.name}.damaged-{stamp}"
            lines.append(f"{path.name}: {reason}; put aside as {aside}")
            os.rename(path, path.with_name(aside))
        kept, following = index + 1, [after]
        lines.append(f"{path.name}: the archive has the offsets up to {after - 1}; the data directory begins after them")
    return firsts[kept:], following[0] if following else 0


def _is_archived(directory: Path, first: int, end: int) -> bool:
    reached = first
    for segment in IndexReader(directory / INDEX_FILE).between(first, end):
        if segment.first_offset > reached:
            break
        reached = segment.end_offset
    return reached >= end


def append_missing(directory: Path, records: list[tuple[int, list[Message]]], stamp: str) -> list[str]:
    """Write the records that a partition has not: ``records`` have a first offset each, in their order.

    They go into new segments, between and behind the undamaged batches that are there.  No broker may have the files
    open.  Returns a line about each.  Raises `OSError`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        start = read_watermark(directory).log_start_offset
    except SegmentError:
        start = 0
    lines: list[str] = []
    end = start
    for boundary in [*(first for first in segment_offsets(directory) if first >= start), None]:
        for first, messages in _runs(records, end, boundary):
            path = directory / segment_file_name(first)
            if path.exists():  # it has no undamaged batch
                os.rename(path, _aside(path, stamp))
            _write(path, b"".join(encode_batches(messages, first)))
            lines.append(f"{path.name}: offsets {first} to {first + len(messages) - 1} are from the commit log")
        if boundary is not None:
            end = _undamaged_end(directory, boundary)
    return lines


def _runs(records: list[tuple[int, list[Message]]], start: int, end: int | None) -> Iterator[tuple[int, list[Message]]]:
    """The records from an offset up to another, each time as many as follow each other."""
    found: list[Message] = []
    first = start
    for offset, messages in records:
        until = offset + len(messages) if end is None else min(offset + len(messages), end)
        begin = max(offset, first + len(found))
        if begin >= until:
            continue
        if found and begin > first + len(found):
            yield first, found
            found = []
        if not found:
            first = begin
        found.extend(messages[begin - offset : until - offset])
    if found:
        yield first, found


def _aside(path: Path, stamp: str) -> Path:
    """A name for a damaged file that no other has."""
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 2
    while aside.exists():
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
        number += 1
    return aside


def _undamaged_end(directory: Path, first: int) -> int:
    """The end offset of the last undamaged batch of a segment."""
    try:
        return verify_file(directory / sealed_file_in(directory, first)).end_offset
    except (FileNotFoundError, SegmentError):
        pass
    path = directory / segment_file_name(first)
    spans = survey(read_file(path), first, None) if path.exists() else []
    return spans[-1].end_offset if spans else first


def _write_lost(directory: Path, first: int, end: int, lines: list[str]) -> int:
    """Write a segment of lost batches for these offsets; return its size."""
    data = encode_lost(first, end)
    _write(directory / segment_file_name(first), data)
    lines.append(f"{segment_file_name(first)}: offsets {first} to {end - 1} are lost")
    return len(data)


def _check_sealed(directory: Path, first: int, limit: int | None, stamp: str, lines: list[str]) -> int | None:
    """The end offset of the sealed segment, or None if there is none or it is damaged.

    A damaged one is put aside, and its readable rows become an unsealed segment, which may need repair itself.
    """
    path, unsealed = directory / sealed_file_in(directory, first), directory / segment_file_name(first)
    try:
        footer = verify_file(path)
        if limit is None or footer.end_offset <= limit:
            return footer.end_offset
        reason, limit = f"ends at offset {footer.end_offset}, not {limit}", footer.end_offset
    except FileNotFoundError:
        return None
    except SegmentError as error:
        reason = error.reason
    lines.append(f"{path.name}: {reason}; put aside as {path.name}.damaged-{stamp}")
    if not unsealed.exists():
        salvaged = path.with_name(f"{unsealed.name}.new")
        process = JobProcess()
        try:
            process.run({"do": "salvage", "source": str(path), "target": str(salvaged), "first_offset": first, "end_offset": limit})
            os.replace(salvaged, unsealed)
        except JobFailed as error:
            if error.errno:  # such as a full disk: the records are readable and must not be replaced by lost batches
                raise OSError(error.errno, str(error)) from None
            lines.append(f"{path.name}: nothing could be read of it: {error}")
            _write(unsealed, b"" if limit is None else encode_lost(first, limit))
        finally:
            process.close()
    os.rename(path, path.with_name(f"{path.name}.damaged-{stamp}"))
    sync_directory(directory)
    return None


def _repair_segment(
    directory: Path,
    first: int,
    data: bytes,
    spans: list[FileSpan],
    stop: int,
    stamp: str,
    lines: list[str],
) -> int:
    """Rewrite a segment if it is damaged or ends before `stop`; return its size."""
    name = segment_file_name(first)
    parts: list[bytes] = []
    reached = first
    for span in spans:
        if span.reason:
            lines.append(describe(name, span))
            continue
        parts.append(encode_lost(reached, span.first_offset))
        parts.append(data[span.position : span.position + span.size])
        reached = span.end_offset
    if reached < stop and (not spans or not spans[-1].reason):
        lines.append(f"{name}: offsets {reached} to {stop - 1} are missing after it")
    parts.append(encode_lost(reached, stop))
    repaired = b"".join(parts)
    if not data.startswith(repaired):
        damaged = _aside(directory / name, stamp).name
        os.link(directory / name, directory / damaged)
        _write(directory / name, repaired)
        lines.append(f"{name}: put aside as {damaged}")
    return len(repaired)


def _write(path: Path, data: bytes) -> None:
    """Replace a segment file and remove its index, which the broker rebuilds at its next start."""
    path.with_suffix(INDEX_SUFFIX).unlink(missing_ok=True)
    replace_file(path, data)
