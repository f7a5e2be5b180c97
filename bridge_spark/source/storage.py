"""The interface to a stream's files, in a data directory or behind a broker's HTTP address.

A manifest is a snapshot: per partition, the committed offsets and the segment files that hold them.  Readers stay
inside a manifest, so they never see a record that is not committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from bridge_spark.log.incarnation import UNKNOWN, Incarnation, parse_incarnation
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.sealed.footer import read_footer
from bridge_spark.log.segment_names import is_sealed, sealed_file_name
from bridge_spark.log.sparse_index import IndexEntry, decode_index
from bridge_spark.log.stream_config import FORMAT_VERSION
from bridge_spark.source.errors import SourceError


class StreamError(SourceError):
    """The stream cannot be read; the message is one line."""


class UnknownStream(StreamError):
    """The storage has no such stream."""


class SegmentGone(StreamError):
    """A segment file no longer exists: it was sealed, or retention removed it."""


@dataclass(frozen=True)
class Segment:
    """The committed part of one segment file: ``size`` bytes, offsets ``first_offset`` to ``end_offset``, exclusive.

    ``times``: the smallest and largest receipt time in microseconds, if known without reading the file.  ``missing``: no
    file has these offsets, and reading this one raises `SegmentGone`.
    """

    file: str
    first_offset: int
    end_offset: int
    size: int
    times: tuple[int, int] | None = None
    missing: bool = False


@dataclass(frozen=True)
class Archive:
    """The archived segments of a partition: their number and bytes."""

    segments: int
    size: int


@dataclass(frozen=True)
class PartitionState:
    """The committed offsets of one partition, ``log_start`` to ``high_watermark``, exclusive; segments in order.

    ``segments`` are those in the data directory.  Offsets before them are in the ``archive``.
    """

    log_start: int
    high_watermark: int
    segments: tuple[Segment, ...]
    archive: Archive | None = None

    @property
    def local_start(self) -> int:
        """The first offset in the data directory."""
        return self.segments[0].first_offset if self.segments else self.high_watermark


class Manifest(dict[int, PartitionState]):
    """The states of the partitions by number, and the ``incarnation`` of the stream."""

    def __init__(
        self,
        partitions: Mapping[int, PartitionState] | Iterable[tuple[int, PartitionState]] = (),
        incarnation: Incarnation = UNKNOWN,
    ) -> None:
        super().__init__(partitions)
        self.incarnation = incarnation


@runtime_checkable
class RecordStorage(Protocol):
    """A storage without files."""

    def rows(self, part: Any, stored: Sequence[str]) -> Iterator[tuple[int, int, Any]]:
        """The first offset, the end offset and the rows of each record batch of a slice."""


class Storage(Protocol):
    """A stream's manifest and the bytes of its segment files."""

    chunk_bytes: int
    """The read size with the least cost per byte."""

    def manifest(self) -> Manifest:
        """The committed offsets and segments, by partition; raises `StreamError`."""

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        """Exactly ``length`` bytes; raises `SegmentGone` or `StreamError`."""

    def archived(self, partition: int, start: int, end: int) -> list[Segment]:
        """The archived segments with offsets from ``start`` up to ``end``, in order; raises `StreamError`."""

    def archived_at(self, partition: int, timestamp: int) -> Segment | None:
        """The first archived segment with a record received at or after ``timestamp`` (microseconds), if the storage
        has no `offsets_at`."""

    def index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        """The segment's sparse index in order; empty if there is none."""

    def offsets_at(self, timestamp: int) -> dict[int, int] | None:
        """Per partition, the first offset received at or after ``timestamp`` (microseconds); None if the storage has
        no such lookup."""

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        """Report the offsets that ``consumer`` has committed: per partition, the next one to read.  Never raises."""

    def describe(self, partition: int, file: str) -> str:
        """The file's full path or URL, for error messages."""

    def close(self) -> None:
        """Close open connections; a later call opens them again."""


def segments_between(storage: Storage, partition: int, state: PartitionState, start: int, end: int) -> Iterator[tuple[Segment, int, int]]:
    """The segments that hold the offsets from ``start`` up to ``end``: each offset once, in order.

    Yields each with the first and end offset to read of it.  Where both have it, that of the data directory.
    """
    local = state.local_start
    has_archived = start < local and state.archive is not None
    archived = storage.archived(partition, start, min(end, local)) if has_archived else []
    reached = start
    for segment, limit in [*((each, local) for each in archived), *((each, end) for each in state.segments)]:
        first, last = max(reached, segment.first_offset), min(segment.end_offset, limit, end)
        if first >= last:
            continue
        if first > reached:
            yield _missing(reached, first), reached, first
        yield segment, first, last
        reached = last
    if reached < end:
        yield _missing(reached, end), reached, end


def _missing(start: int, end: int) -> Segment:
    return Segment(sealed_file_name(start), start, end, 1, missing=True)


def usable_index(data: bytes, segment: Segment) -> list[IndexEntry]:
    """The index entries that lie inside the segment's committed part."""
    return [
        entry
        for entry in decode_index(data)
        if segment.first_offset <= entry.first_offset < segment.end_offset and entry.position < segment.size
    ]


def sealed_index(storage: Storage, partition: int, segment: Segment) -> list[IndexEntry]:
    """An index entry per row group of a sealed segment; empty if the file is gone or damaged (reading it raises)."""
    try:
        found = read_footer(partial(storage.read, partition, segment.file), segment.size)
    except (SegmentGone, SegmentError):
        return []
    return found.sparse_index()


def segment_times(storage: Storage, partition: int, segment: Segment) -> tuple[int | None, int | None]:
    """The smallest and largest receipt time of a sealed segment, in microseconds.

    (None, None) for other segments, and for a file that is gone or damaged (reading it raises).
    """
    if segment.times is not None:
        return segment.times
    if not is_sealed(segment.file):
        return None, None
    try:
        groups = read_footer(partial(storage.read, partition, segment.file), segment.size).groups
    except (SegmentGone, SegmentError):
        return None, None
    return (min((group.first_timestamp for group in groups), default=None), max((group.last_timestamp for group in groups), default=None))


def index_file(segment_file: str) -> str:
    """The name of the index beside a segment file."""
    return segment_file.removesuffix(".seg") + ".idx"


def check_version(document: Any, where: str) -> None:
    """Raise `StreamError` for a stream format that is newer than this source."""
    version = int(document["format_version"])
    if version > FORMAT_VERSION:
        broker = document.get("broker_version")
        raise StreamError(
            f"mqtt source: {where}: the broker{f', version {broker},' if broker else ''} keeps streams in "
            f"format {version}, this source knows format {FORMAT_VERSION}: "
            f"install the broker's version of mqttbroker for Spark too"
        )


def parse_manifest(document: Any, where: str) -> Manifest:
    """Decode the broker's JSON manifest; raises `StreamError`."""
    try:
        check_version(document, where)
        manifest = Manifest((), parse_incarnation(document.get("incarnation")))
        for partition in document["partitions"]:
            segments = [
                Segment(str(entry["file"]), int(entry["first_offset"]), int(entry["end_offset"]), int(entry["bytes"]))
                for entry in partition["segments"]
                if entry["end_offset"] > entry["first_offset"]
            ]
            archive = partition.get("archive")
            manifest[int(partition["partition"])] = PartitionState(
                int(partition["log_start_offset"]),
                int(partition["high_watermark"]),
                tuple(sorted(segments, key=lambda segment: segment.first_offset)),
                None if archive is None else Archive(int(archive["segments"]), int(archive["bytes"])),
            )
        return manifest
    except (KeyError, TypeError, ValueError) as error:
        raise StreamError(
            f"mqtt source: {where} did not answer with a stream's manifest ({error!r}): is it a broker of another version?"
        ) from None
