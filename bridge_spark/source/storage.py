"""Where a stream's files are: a data directory or a broker's HTTP address.

The rule kept here: what is not committed is never seen.  A manifest is taken
at one moment and names per partition what is kept and committed; every read
stays inside it, and the two kinds of storage answer alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional, Protocol

from bridge_spark.log.sealed import SUFFIX, first_of, is_sealed, read_sealed
from bridge_spark.log.segment import IndexEntry, SegmentError, Watermark, decode_index, decode_watermark
from bridge_spark.log.stream_config import FORMAT_VERSION
from bridge_spark.source.consumers import DIRECTORY, Reporter, write_report
from bridge_spark.source.options import SourceOptions

_TORN_READS = 100


class StreamError(Exception):
    """A stream that cannot be read, said in one line."""


class UnknownStream(StreamError):
    """There is no such stream at the place that was named."""


class SegmentGone(StreamError):
    """A segment's file is no longer there: it was sealed, or retention has taken it."""


@dataclass(frozen=True)
class Segment:
    """The committed part of one segment file: ``size`` bytes with the offsets
    from ``first_offset`` up to ``end_offset``, exclusive."""

    file: str
    first_offset: int
    end_offset: int
    size: int


@dataclass(frozen=True)
class PartitionState:
    """What one partition holds: offsets from ``log_start`` up to
    ``high_watermark``, exclusive, in ``segments`` by ascending offset."""

    log_start: int
    high_watermark: int
    segments: tuple[Segment, ...]


Manifest = dict[int, PartitionState]


class Storage(Protocol):
    """A stream's manifest and the bytes of its segment files."""

    chunk_bytes: int
    """How much of a file is best read at a time."""

    def manifest(self) -> Manifest:
        """What is kept and committed now, by partition; raises `StreamError`."""

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        """Exactly ``length`` bytes; raises `SegmentGone` or `StreamError`."""

    def index(self, partition: int, segment: Segment) -> list[IndexEntry]:
        """The segment's sparse index in order; empty when there is none."""

    def offsets_at(self, timestamp: int) -> Optional[dict[int, int]]:
        """Per partition the first offset received at or after ``timestamp``
        (microseconds), as far as there is someone to ask; else None."""

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        """Tell operators how far ``consumer`` has come: per partition the
        offset after the last that it is done with.  Never raises: reading
        goes on whether or not anyone is told."""

    def describe(self, partition: int, file: str) -> str:
        """The file's full name for error messages."""

    def close(self) -> None:
        """Free what is open; the storage opens it again when it is needed."""


def open_storage(options: SourceOptions) -> Storage:
    """The storage that the options name.  Nothing is read yet."""
    if options.url is not None:
        from bridge_spark.source.http_storage import HttpStorage

        return HttpStorage(
            options.url, options.stream, options.token, options.ca_file, options.fetch_retries,
            options.fetch_retry_interval_ms / 1000, options.request_timeout_ms / 1000)
    assert options.path is not None
    return DirectoryStorage(options.path, options.stream)


def usable_index(data: bytes, segment: Segment) -> list[IndexEntry]:
    """The entries of an index file that lie inside the segment's committed part."""
    return [entry for entry in decode_index(data)
            if segment.first_offset <= entry.first_offset < segment.end_offset and entry.position < segment.size]


def sealed_index(storage: Storage, partition: int, segment: Segment) -> list[IndexEntry]:
    """The row groups of a sealed segment; empty when it is gone or damaged, which who reads it will say."""
    try:
        found = read_sealed(partial(storage.read, partition, segment.file), segment.size)
    except (SegmentGone, SegmentError):
        return []
    return found.sparse_index()


def segment_times(storage: Storage, partition: int, segment: Segment) -> tuple[Optional[int], Optional[int]]:
    """The smallest and the largest receipt time of a sealed segment (microseconds); None of any other, and of one
    that is gone or damaged, which who reads it will say."""
    if not is_sealed(segment.file):
        return None, None
    try:
        groups = read_sealed(partial(storage.read, partition, segment.file), segment.size).groups
    except (SegmentGone, SegmentError):
        return None, None
    return (min((group.first_timestamp for group in groups), default=None),
            max((group.last_timestamp for group in groups), default=None))


def index_file(segment_file: str) -> str:
    """The name of the index beside a segment file."""
    return segment_file.removesuffix(".seg") + ".idx"


class DirectoryStorage:
    """A stream below a data directory, or below its ``streams`` directory."""

    chunk_bytes = 1024 * 1024  # fits into a cache: larger ones cost a third more per row

    def __init__(self, path: str, stream: str) -> None:
        local = path.removeprefix("file://") if path.startswith("file:///") else path.removeprefix("file:")
        self._root = Path(local)
        self._stream = stream
        self._reporter = Reporter(self._write_report)

    def manifest(self) -> Manifest:
        directory = self._directory()
        try:
            description = json.loads((directory / "stream.json").read_bytes())
            check_version(description, str(directory))
            partitions = int(description["partitions"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StreamError(f"mqtt source: {directory / 'stream.json'}: {error}") from None
        return {number: _partition_state(directory / str(number)) for number in range(partitions)}

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        path = self._directory() / str(partition) / file
        try:
            with open(path, "rb", buffering=0) as segment:
                segment.seek(position)
                data = segment.read(length)
                while len(data) < length:
                    more = segment.read(length - len(data))
                    if not more:
                        raise StreamError(f"mqtt source: {path} ends at byte {position + len(data)}, "
                                          f"before its committed end")
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

    def offsets_at(self, timestamp: int) -> Optional[dict[int, int]]:
        return None

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        self._reporter.report(consumer, offsets)

    def _write_report(self, consumer: str, report: bytes) -> None:
        write_report(self._directory() / DIRECTORY, consumer, report)

    def describe(self, partition: int, file: str) -> str:
        return str(self._directory() / str(partition) / file)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _directory(self) -> Path:
        for streams in (self._root / "streams", self._root):
            if (streams / self._stream / "stream.json").is_file():
                return streams / self._stream
        if not self._root.is_dir():
            raise UnknownStream(f"mqtt source: option 'path': {str(self._root)!r} is not a directory")
        names = sorted(found.parent.name for pattern in ("streams/*/stream.json", "*/stream.json")
                       for found in self._root.glob(pattern))
        raise UnknownStream(f"mqtt source: option 'stream': no stream {self._stream!r} below {str(self._root)!r} "
                            f"({'there are: ' + ', '.join(names) if names else 'it holds none'})")


def _partition_state(directory: Path) -> PartitionState:
    watermark = _read_watermark(directory / "high_watermark")
    if watermark is None:
        return PartitionState(0, 0, ())
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise StreamError(f"mqtt source: {directory}: {error.strerror}") from None
    firsts = sorted({first for name in names if (first := first_of(name)) is not None and first <= watermark.segment})
    segments: list[Segment] = []
    for first_offset, next_first in zip(firsts, [*firsts[1:], watermark.segment]):
        last = first_offset == watermark.segment
        end_offset = watermark.high_watermark if last else next_first
        if end_offset <= max(first_offset, watermark.log_start_offset):
            continue
        # A power loss may leave a watermark of a time before its segment was sealed.
        if last and f"{first_offset:020d}.seg" in names:
            found: Optional[tuple[str, int]] = (f"{first_offset:020d}.seg", watermark.position)
        else:
            found = _size(directory, first_offset)
        if found is not None:
            segments.append(Segment(found[0], first_offset, end_offset, found[1]))
    kept_from = segments[0].first_offset if segments else watermark.high_watermark
    return PartitionState(max(watermark.log_start_offset, kept_from), watermark.high_watermark, tuple(segments))


def _size(directory: Path, first_offset: int) -> Optional[tuple[str, int]]:
    """The file of a closed segment and its size; None when it is gone."""
    for suffix in (SUFFIX, ".seg", SUFFIX):  # it may be sealed between two looks
        file = f"{first_offset:020d}{suffix}"
        try:
            return file, os.path.getsize(directory / file)
        except FileNotFoundError:
            continue
    return None


def _read_watermark(path: Path) -> Optional[Watermark]:
    """None where nothing was committed yet.  The broker overwrites the file in
    place, so a reading in mid-write is repeated."""
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


def check_version(document: Any, where: str) -> None:
    """Refuse what a newer broker than this source wrote; raises `StreamError`."""
    version = int(document["format_version"])
    if version > FORMAT_VERSION:
        broker = document.get("broker_version")
        raise StreamError(f"mqtt source: {where}: the broker{f', version {broker},' if broker else ''} keeps streams in "
                          f"format {version}, this source knows format {FORMAT_VERSION}: "
                          f"install the broker's version of mqttbroker for Spark too")


def parse_manifest(document: Any, where: str) -> Manifest:
    """The broker's JSON manifest as a `Manifest`; raises `StreamError`."""
    try:
        check_version(document, where)
        manifest: Manifest = {}
        for partition in document["partitions"]:
            segments = [
                Segment(str(entry["file"]), int(entry["first_offset"]), int(entry["end_offset"]), int(entry["bytes"]))
                for entry in partition["segments"]
                if entry["end_offset"] > entry["first_offset"]
            ]
            manifest[int(partition["partition"])] = PartitionState(
                int(partition["log_start_offset"]), int(partition["high_watermark"]),
                tuple(sorted(segments, key=lambda segment: segment.first_offset)),
            )
        return manifest
    except (KeyError, TypeError, ValueError) as error:
        raise StreamError(f"mqtt source: {where} did not answer with a stream's manifest ({error!r}): "
                          f"is it a broker of another version?") from None
