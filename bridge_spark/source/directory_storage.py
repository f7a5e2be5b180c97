"""A stream's files in a data directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bridge_spark.log.archive.index import INDEX_FILE, IndexReader
from bridge_spark.log.high_watermark import Watermark, decode_watermark
from bridge_spark.log.incarnation import read_incarnation
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.segment_names import archived_offsets, first_offset_of, is_sealed, sealed_file_in
from bridge_spark.log.sparse_index import IndexEntry
from bridge_spark.source.archive_reader import ArchiveOptions, ArchiveReader, segment_of
from bridge_spark.source.consumers import DIRECTORY, Reporter, write_report
from bridge_spark.source.storage import (
    Archive,
    Manifest,
    PartitionState,
    Segment,
    SegmentGone,
    StreamError,
    UnknownStream,
    check_version,
    index_file,
    sealed_index,
    usable_index,
)

_TORN_READS = 100

T = TypeVar("T")


class DirectoryStorage:
    """A stream in the data directory ``path``, or in its ``streams`` directory."""

    chunk_bytes = 1024 * 1024  # fits the CPU cache: larger chunks cost a third more per row

    def __init__(self, path: str, stream: str, archive: ArchiveOptions = ArchiveOptions()) -> None:
        local = path.removeprefix("file://") if path.startswith("file:///") else path.removeprefix("file:")
        self._root = Path(local)
        self._stream = stream
        self._reporter = Reporter(self._write_report)
        self._archive_options = archive
        self._archive: ArchiveReader | None = None

    def manifest(self) -> Manifest:
        directory, description = self._directory(), self._description()
        try:
            partitions = int(description["partitions"])
        except (ValueError, KeyError, TypeError) as error:
            raise StreamError(f"mqtt source: {directory / 'stream.json'}: {error!r}") from None
        try:
            incarnation = read_incarnation(directory)
        except (OSError, ValueError) as error:
            raise StreamError(f"mqtt source: {error}") from None
        return Manifest({number: _partition_state(directory / str(number)) for number in range(partitions)}, incarnation)

    def _description(self) -> Mapping[str, Any]:
        path = self._directory() / "stream.json"
        try:
            description: Mapping[str, Any] = json.loads(path.read_bytes())
            check_version(description, str(path.parent))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StreamError(f"mqtt source: {path}: {error}") from None
        return description

    def archived(self, partition: int, start: int, end: int) -> list[Segment]:
        index = self._archive_index(partition)
        return _lookup(index, lambda: [segment_of(each) for each in index.between(start, end)])

    def archived_at(self, partition: int, timestamp: int) -> Segment | None:
        index = self._archive_index(partition)
        found = _lookup(index, lambda: index.at_time(timestamp))
        return None if found is None else segment_of(found)

    def _archive_index(self, partition: int) -> IndexReader:
        return IndexReader(self._directory() / str(partition) / INDEX_FILE)

    def _open_archive(self) -> ArchiveReader:
        if self._archive is None:
            location = str(self._description().get("archive", ""))
            self._archive = ArchiveReader(self._archive_options, location, self._stream)
        return self._archive

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        if archived_offsets(file) is not None:
            return self._open_archive().read(partition, file, position, length)
        path = self._directory() / str(partition) / file
        try:
            with open(path, "rb", buffering=0) as segment:
                segment.seek(position)
                data = segment.read(length)
                while len(data) < length:
                    more = segment.read(length - len(data))
                    if not more:
                        raise StreamError(f"mqtt source: {path} ends at byte {position + len(data)}, before its committed end")
                    data += more
                return data
        except FileNotFoundError:
            raise SegmentGone(f"mqtt source: {path} is gone") from None
        except OSError as error:
            raise StreamError(f"mqtt source: {path}: {error.strerror}") from None

    def index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        if is_sealed(segment.file):
            return sealed_index(self, partition, segment)
        path = self._directory() / str(partition) / index_file(segment.file)
        try:
            return usable_index(path.read_bytes(), segment)
        except OSError:
            return []

    def offsets_at(self, timestamp: int) -> dict[int, int] | None:
        return None

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        self._reporter.report(consumer, offsets)

    def _write_report(self, consumer: str, report: bytes) -> None:
        write_report(self._directory() / DIRECTORY, consumer, report)

    def describe(self, partition: int, file: str) -> str:
        if archived_offsets(file) is not None:
            return self._open_archive().describe(partition, file)
        return str(self._directory() / str(partition) / file)

    def close(self) -> None:
        """No file stays open between reads."""

    def _directory(self) -> Path:
        for streams in (self._root / "streams", self._root):
            if (streams / self._stream / "stream.json").is_file():
                return streams / self._stream
        if not self._root.is_dir():
            raise UnknownStream(f"mqtt source: option 'path': {str(self._root)!r} is not a directory")
        names = sorted(found.parent.name for pattern in ("streams/*/stream.json", "*/stream.json") for found in self._root.glob(pattern))
        raise UnknownStream(
            f"mqtt source: option 'stream': no stream {self._stream!r} below {str(self._root)!r} "
            f"({'there are: ' + ', '.join(names) if names else 'it holds none'})"
        )


def _partition_state(directory: Path) -> PartitionState:
    watermark = _read_watermark(directory / "high_watermark")
    if watermark is None:
        return PartitionState(0, 0, ())
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise StreamError(f"mqtt source: {directory}: {error.strerror}") from None
    firsts = sorted({first for name in names if (first := first_offset_of(name)) is not None and first <= watermark.segment})
    segments: list[Segment] = []
    for first_offset, next_first in zip(firsts, [*firsts[1:], watermark.segment]):
        last = first_offset == watermark.segment
        end_offset = watermark.high_watermark if last else next_first
        if end_offset <= max(first_offset, watermark.log_start_offset):
            continue
        # After a power loss the watermark may still name the segment that has been sealed since.
        if last and f"{first_offset:020d}.seg" in names:
            found: tuple[str, int] | None = (f"{first_offset:020d}.seg", watermark.position)
        else:
            found = _size(directory, first_offset)
        if found is not None:
            segments.append(Segment(found[0], first_offset, end_offset, found[1]))
    kept_from = segments[0].first_offset if segments else watermark.high_watermark
    log_start = max(watermark.log_start_offset, kept_from)
    # Read after the files: a segment that retention has removed since is in the archive's index.
    index = IndexReader(directory / INDEX_FILE)
    archive = _lookup(index, index.state)
    if not archive.segments:
        return PartitionState(log_start, watermark.high_watermark, tuple(segments))
    return PartitionState(min(log_start, archive.start), watermark.high_watermark, tuple(segments), Archive(archive.segments, archive.size))


def _lookup(index: IndexReader, look_up: Callable[[], T]) -> T:
    try:
        return look_up()
    except (OSError, SegmentError) as error:
        raise StreamError(f"mqtt source: {index.path}: {error}") from None


def _size(directory: Path, first_offset: int) -> tuple[str, int] | None:
    """The file of a closed segment and its size; None if retention removed it."""
    for sealed in (True, False, True):  # it may be sealed or compacted between two checks
        file = sealed_file_in(directory, first_offset) if sealed else f"{first_offset:020d}.seg"
        try:
            return file, os.path.getsize(directory / file)
        except FileNotFoundError:
            continue
    return None


def _read_watermark(path: Path) -> Watermark | None:
    """The partition's watermark; None before the first commit.

    The broker overwrites the file in place, so a torn read is repeated.
    """
    for _ in range(_TORN_READS):
        try:
            return decode_watermark(path.read_bytes())
        except FileNotFoundError:
            return None
        except SegmentError:
            continue
        except OSError as error:
            raise StreamError(f"mqtt source: {path}: {error.strerror}") from None
    raise StreamError(f"mqtt source: {path} is corrupt")
