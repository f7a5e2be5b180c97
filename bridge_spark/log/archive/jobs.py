"""The jobs of an archive, which run in the process of `bridge_spark.log.sealed.segment_jobs`.

An upload is confirmed before it counts: size, footer and both checksums of the object must be those of the sealed
segment.  Repeating a job has the same result.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c

from bridge_spark.log.archive.files import UNFINISHED_SUFFIX, ArchiveError, ArchiveFiles, open_files
from bridge_spark.log.archive.index import INDEX_FILE, ArchivedSegment, IndexReader
from bridge_spark.log.archive.location import OWNER_FILE, ArchiveLocation, parse_location
from bridge_spark.log.high_watermark import read_watermark
from bridge_spark.log.record_batch import CorruptBatch, SegmentError
from bridge_spark.log.sealed.footer import Footer, load_footer, read_footer, search_row_groups
from bridge_spark.log.segment_names import archived_offsets, sealed_file_in

PART_BYTES = 4 * 1024 * 1024
EVERYTHING = 1 << 63  # beyond any offset
ANSWERED_NAMES = 10  # of missing files


class _OpenArchives:
    """The archives that this process has connected to, by location."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[ArchiveLocation, ArchiveFiles]] = {}

    def get(self, text: str) -> tuple[ArchiveLocation, ArchiveFiles]:
        if text not in self._open:
            location = parse_location(text)
            self._open[text] = location, open_files(location)
        return self._open[text]


_archives = _OpenArchives()


def run(job: dict[str, Any]) -> Any:
    """Run one job.  Raises `ArchiveError`, `SegmentError`, `ValueError`, `OSError` or `ImportError`."""
    location, files = _archives.get(job["location"])
    place = partial(location.path, job["stream"])
    if job["do"] == "open archive":
        _check_owner(files, place(OWNER_FILE), job["owner"])
        return [_reconcile(files, place(str(number)), Path(directory), job["stamp"]) for number, directory in enumerate(job["directories"])]
    directory = place(str(job["partition"]))
    if job["do"] == "upload":
        return _upload(files, Path(job["source"]), f"{directory}/{job['name']}")
    if job["do"] == "remove":
        for name in job["names"]:
            files.remove(f"{directory}/{name}")
        return None
    return _find_time(files, f"{directory}/{job['name']}", job["timestamp"])


def _check_owner(files: ArchiveFiles, path: str, owner: str) -> None:
    """Create the owner file if there is none.  Raises `ArchiveError` if it is of another data directory."""
    size = files.size(path)
    if size is None:
        files.write(path, iter([json.dumps({"format": "mqttbroker archive", "version": 1, "owner": owner}).encode()]))
        return
    try:
        found = json.loads(files.read(path, 0, size))["owner"]
    except (ValueError, KeyError, TypeError):
        raise ArchiveError(f"{path} is damaged") from None
    if found != owner:
        raise ArchiveError(
            f"{path} says that another data directory writes to this archive: use another prefix, or delete "
            f"that file if the archive belongs to this stream"
        )


def _reconcile(files: ArchiveFiles, directory: str, local: Path, stamp: str) -> dict[str, Any]:
    """Compare the files of a partition with its index.

    Files without a local segment, which a restored backup leaves, are renamed, so that nothing reads their offsets
    twice.  The answer has ``adopted``, segments that a lost index had, and the names of files that are ``missing``,
    ``renamed``, or ``leftovers`` of an interrupted removal.
    """
    index = IndexReader(local / INDEX_FILE)
    state = index.state()
    known = index.between(0, EVERYTHING)
    found = files.list(directory)
    answer: dict[str, Any] = {"adopted": [], "missing": [], "lost": 0, "leftovers": [], "renamed": []}
    for segment in known:
        if found.pop(segment.file, -1) != segment.size:
            answer["lost"] += 1
            answer["missing"] = [*answer["missing"], segment.file][:ANSWERED_NAMES]
    local_start = read_watermark(local).log_start_offset
    ranges = [(segment.first_offset, segment.end_offset) for segment in known]
    for name in sorted(found):
        path = f"{directory}/{name}"
        if name.endswith(UNFINISHED_SUFFIX):
            files.remove(path)
        offsets = archived_offsets(name)
        if offsets is None:
            continue
        place = bisect_left(ranges, offsets)
        overlaps = any(first < offsets[1] and offsets[0] < end for first, end in ranges[max(place - 1, 0) : place + 1])
        if offsets[1] <= state.start:
            answer["leftovers"].append(name)
        elif not overlaps and offsets[1] <= max(local_start, state.end):
            answer["adopted"].append(_entry(_footer(files, path), name))
            ranges.insert(place, offsets)
        elif overlaps or not _is_local(local, *offsets):
            files.rename(path, f"{path}.unknown-{stamp}")
            answer["renamed"].append(name)
    return answer


def _is_local(local: Path, first_offset: int, end_offset: int) -> bool:
    try:
        return load_footer(local / sealed_file_in(local, first_offset)).end_offset == end_offset
    except (OSError, SegmentError):
        return False


def _footer(files: ArchiveFiles, path: str) -> Footer:
    size = files.size(path)
    if size is None:
        raise ArchiveError(f"{path} is missing")
    try:
        return read_footer(partial(files.read, path), size)
    except SegmentError as error:
        raise ArchiveError(f"{path}: {error.reason}") from None


def _entry(footer: Footer, name: str) -> ArchivedSegment:
    if (footer.first_offset, footer.end_offset) != archived_offsets(name):
        raise ArchiveError(f"{name} has the offsets {footer.first_offset} to {footer.end_offset - 1}")
    times = [time for group in footer.groups for time in (group.first_timestamp, group.last_timestamp)]
    return ArchivedSegment(
        footer.first_offset, footer.end_offset, footer.size, min(times, default=0), max(times, default=0), footer.data_crc
    )


def _upload(files: ArchiveFiles, source: Path, path: str) -> ArchivedSegment:
    """Copy a sealed segment to the archive, unless it is there, and confirm it."""
    footer = load_footer(source)
    size = files.size(path)
    if size != footer.size or _read_back(files, path, size) != footer:
        files.write(path, _checked_parts(source, footer))
        size = files.size(path)
        if size != footer.size or _read_back(files, path, size) != footer:
            raise ArchiveError(f"{path} differs from the file that was written")
    return _entry(footer, path.rpartition("/")[2])


def _read_back(files: ArchiveFiles, path: str, size: int) -> Footer | None:
    try:
        return read_footer(partial(files.read, path), size)
    except (SegmentError, FileNotFoundError):
        return None


def _checked_parts(source: Path, footer: Footer) -> Iterator[bytes]:
    """The bytes of a file.  Raises `CorruptBatch` before the last ones if its checksum is wrong."""
    crc = 0
    with open(source, "rb", buffering=0) as file:
        left = footer.data_bytes
        while left and (data := os.read(file.fileno(), min(left, PART_BYTES))):
            crc, left = google_crc32c.extend(crc, data), left - len(data)
            yield data
        if left or crc != footer.data_crc:
            raise CorruptBatch(0, f"{source}: wrong checksum")
        yield from iter(lambda: os.read(file.fileno(), PART_BYTES), b"")


def _find_time(files: ArchiveFiles, path: str, timestamp: int) -> int:
    """The first offset of a file that was received at or after `timestamp`."""
    return search_row_groups(partial(files.read, path), _footer(files, path), timestamp)
