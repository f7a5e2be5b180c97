"""What the commit log in a directory has: its whole records, and its damage. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sessions.store.commit_log.segment import (
    FORMAT_VERSION,
    HEADER_BYTES,
    BadHeader,
    Header,
    NewerRecord,
    Record,
    decode_header,
    later_record,
    read_records,
    segment_files,
)
from sessions.store.interface import StoreError


class LogDamage(NamedTuple):
    """Damage in one segment; ``reason`` names the place."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class SegmentExtent(NamedTuple):
    """The whole records of one segment; the next one would be at ``end`` in the file, which has ``size`` bytes."""

    path: Path
    header: Header
    next_position: int
    end: int
    size: int

    @property
    def first_position(self) -> int:
        return self.header.first_position


class Survey(NamedTuple):
    """The segments of a log in their order, and its damage; ``next_position`` is 0 if there is no segment."""

    segments: list[SegmentExtent]
    damage: list[LogDamage]

    @property
    def next_position(self) -> int:
        return self.segments[-1].next_position if self.segments else 0

    def records(self, after: int) -> Iterator[Record]:
        """The whole records behind a position, in their order. Raises `OSError`."""
        for index, segment in enumerate(self.segments):
            if segment.next_position <= after + 1:
                continue
            following = self.segments[index + 1].first_position if index + 1 < len(self.segments) else None
            data = segment.path.read_bytes()
            for found in _readable(data, segment.header, following):
                if found.position > after:
                    yield found


def survey(directory: Path, identity: bytes | None) -> Survey:
    """Read the log. Raises `StoreError` if it is of another store than ``identity`` or of a newer program; `OSError`."""
    segments: list[SegmentExtent] = []
    damage: list[LogDamage] = []
    files = segment_files(directory) if directory.is_dir() else []
    headers: list[tuple[Path, Header]] = []
    for path in files:
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES)
        try:
            header = decode_header(data)
        except BadHeader as error:
            damage.append(LogDamage(path, str(error)))
            continue
        if header.version > FORMAT_VERSION:
            raise StoreError(f"{path}: format version {header.version} is newer than this program's {FORMAT_VERSION}")
        if identity is not None and header.identity != identity:
            raise StoreError(f"{path}: belongs to the log of another store")
        if path.name[:20] != f"{header.first_position:020d}":
            damage.append(LogDamage(path, f"begins at position {header.first_position}"))
            continue
        headers.append((path, header))
    for index, (path, header) in enumerate(headers):
        following = headers[index + 1][1].first_position if index + 1 < len(headers) else None
        data = path.read_bytes()
        position, end = header.first_position, HEADER_BYTES
        try:
            for record in _readable(data, header, following):
                if record.position > position:
                    damage.append(LogDamage(path, f"the record of position {position} at byte {end} is damaged"))
                position, end = record.position + 1, record.end
        except NewerRecord as error:
            raise StoreError(f"{path}: position {position}: {error}") from None
        if following is not None and position != following:
            damage.append(LogDamage(path, f"positions {position} to {following - 1} are missing at byte {end}"))
            position = following
        segments.append(SegmentExtent(path, header, position, end, len(data)))
    return Survey(segments, damage)


def _readable(data: bytes, header: Header, before: int | None) -> Iterator[Record]:
    """All whole records of a segment up to a position, also those behind a damaged one."""
    at, position = HEADER_BYTES, header.first_position
    while True:
        for record in read_records(data, header.salt, at, position, before):
            yield record
            at, position = record.end, record.position + 1
        later = later_record(data, header.salt, at, position)
        if later is None or (before is not None and later.position >= before):
            return
        at, position = later.start, later.position


def last_position(directory: Path) -> int:
    """The position of the last whole record of a log that is in use; 0 if it has none. Raises `OSError`."""
    position = 0
    for path in segment_files(directory) if directory.is_dir() else []:
        with suppress(FileNotFoundError, BadHeader, NewerRecord):  # dropped meanwhile, or used again
            data = path.read_bytes()
            header = decode_header(data)
            for record in read_records(data, header.salt, HEADER_BYTES, header.first_position, None):
                position = max(position, record.position)
    return position
