"""Reads archived segments straight from the archive's storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge_spark.log.archive.files import ArchiveError, ArchiveFiles, S3Options, open_files
from bridge_spark.log.archive.index import ArchivedSegment
from bridge_spark.log.archive.location import ArchiveLocation, parse_location
from bridge_spark.source.storage import Segment, SegmentGone, StreamError


@dataclass(frozen=True)
class ArchiveOptions:
    """How readers reach the archive: ``location`` None is the one that the broker writes to."""

    location: str | None = None
    s3: S3Options = S3Options()


class ArchiveReader:
    """The archive of one stream, at `written_to` according to the broker, unless the options name another location."""

    def __init__(self, options: ArchiveOptions, written_to: str, stream: str) -> None:
        try:
            self._location: ArchiveLocation = parse_location(options.location or written_to)
        except ValueError as error:
            raise StreamError(f"mqtt source: the archive {written_to!r} of the stream {error}") from None
        self._s3 = options.s3
        self._stream = stream
        self._files: ArchiveFiles | None = None

    def read(self, partition: int, file: str, position: int, length: int) -> bytes:
        """Exactly ``length`` bytes; raises `SegmentGone` or `StreamError`."""
        path = self._location.path(self._stream, str(partition), file)
        try:
            if self._files is None:
                self._files = open_files(self._location, self._s3)
            data = self._files.read(path, position, length)
        except FileNotFoundError:
            raise SegmentGone(f"mqtt source: {self.describe(partition, file)} is gone") from None
        except ArchiveError as error:
            raise StreamError(f"mqtt source: the archive {self._location} cannot be read: {error}") from None
        if len(data) != length:
            where = self.describe(partition, file)
            raise StreamError(f"mqtt source: {where} ends at byte {position + len(data)}, before its end")
        return data

    def describe(self, partition: int, file: str) -> str:
        """The file's path or URL, for error messages."""
        path = self._location.path(self._stream, str(partition), file)
        return f"s3://{path}" if self._location.s3 else path


def segment_of(archived: ArchivedSegment) -> Segment:
    times = (archived.first_timestamp, archived.last_timestamp)
    return Segment(archived.file, archived.first_offset, archived.end_offset, archived.size, times)


def parse_segments(document: Mapping[str, Any]) -> list[Segment]:
    """The segments in an answer of the broker; raises `KeyError`, `TypeError` or `ValueError`."""
    return [
        Segment(
            str(entry["file"]),
            int(entry["first_offset"]),
            int(entry["end_offset"]),
            int(entry["bytes"]),
            (int(entry["first_timestamp_us"]), int(entry["last_timestamp_us"])),
        )
        for entry in document["segments"]
    ]
