"""Reads the records of a stream in the data directory of a broker that does not run, sealed and archived segments too.

Nothing is written. A batch in memory is one record batch of a segment or one row group of a sealed one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bridge_spark.log.archive.files import ArchiveError, ArchiveFiles, open_files
from bridge_spark.log.archive.index import INDEX_FILE, IndexReader
from bridge_spark.log.archive.location import parse_location
from bridge_spark.log.high_watermark import read_watermark
from bridge_spark.log.record_batch import QOS_MASK, RETAIN_FLAG, CorruptBatch, SegmentError, decode_messages, scan_batches
from bridge_spark.log.segment_names import is_sealed, sealed_file_in, segment_file_name, segment_offsets
from bridge_spark.log.stream_config import StreamLogDamage, can_seal
from bridge_spark.log.stream_files import read_description
from sessions.message import Message

Row = tuple[int, Message]

_COLUMNS = ("timestamp", "flags", "topic", "payload", "client_id", "properties")


class StoredStream:
    """A stream of the directory ``streams``. The constructor raises `StreamLogError`."""

    def __init__(self, streams: Path, name: str) -> None:
        self.name = name
        self.directory = streams / name
        found = read_description(self.directory)
        if found is None:
            raise StreamLogDamage(f"{self.directory}: has no description")
        self.partitions = int(found["partitions"])
        self._location = str(found.get("archive", ""))

    def partition(self, number: int) -> StoredPartition:
        """Raises `StreamLogDamage` if the partition's files are not all there, or `OSError`."""
        archive = _Archive(self._location, self.name, number) if self._location else None
        return StoredPartition(self.directory / str(number), archive)


class _File(NamedTuple):
    """A segment's file, from which the offsets ``first`` to before ``end`` are read; ``size`` in bytes."""

    name: str
    archived: bool
    first: int
    end: int
    size: int


class StoredPartition:
    """The offsets ``start`` to before ``end`` of a partition. ``lost`` are the ranges of which `rows` has found that damage took them."""

    def __init__(self, directory: Path, archive: _Archive | None) -> None:
        self.lost: list[tuple[int, int]] = []
        self._directory = directory
        self._archive = archive
        try:
            watermark = read_watermark(directory)
        except SegmentError as error:
            raise StreamLogDamage(f"{directory / 'high_watermark'}: {error}") from None
        self.end = watermark.high_watermark
        self._files = self._local(watermark.log_start_offset, watermark.segment, watermark.position)
        self.start = self._files[0].first if self._files else self.end
        if self.start != watermark.log_start_offset:  # a broker that was stopped in order has written the begin that retention left
            raise StreamLogDamage(f"{directory}: offsets {watermark.log_start_offset} to {self.start - 1} are missing")
        if archive is not None:
            self._files = [*self._archived(self.start), *self._files]
            self.start = self._files[0].first if self._files else self.end
        reached = self.start
        for file in self._files:
            if file.first != reached:
                raise StreamLogDamage(f"{directory}: offsets {reached} to {file.first - 1} are missing")
            reached = file.end
        if reached != self.end:
            raise StreamLogDamage(f"{directory}: offsets {reached} to {self.end - 1} are missing")

    def rows(self) -> Iterator[list[Row]]:
        """All records with their offsets, in order; offsets that are left out have no record.

        Raises `StreamLogDamage`, `ArchiveError` or `OSError`.
        """
        for file in self._files:
            try:
                yield from self._sealed(file) if is_sealed(file.name) else self._unsealed(file)
            except SegmentError as error:
                raise StreamLogDamage(f"{self._path(file)}: {error}: run mqttbroker repair-store") from None
            except FileNotFoundError:
                raise StreamLogDamage(f"{self._path(file)}: is missing") from None

    def check(self) -> None:
        """Raise `ArchiveError` or `StreamLogDamage` unless all files are there with their sizes."""
        for file in self._files:
            size = self._archive.size(file.name) if file.archived and self._archive is not None else _size(self._directory / file.name)
            if size is None or size < file.size:
                raise StreamLogDamage(f"{self._path(file)}: {'is missing' if size is None else 'is cut off'}")
            if is_sealed(file.name) and not can_seal():
                raise StreamLogDamage(f'{self._path(file)}: sealed segments need pyarrow: pip install "mqttbroker[parquet]"')

    def _path(self, file: _File) -> str:
        if file.archived and self._archive is not None:
            return self._archive.describe(file.name)
        return str(self._directory / file.name)

    def _local(self, log_start: int, last: int, position: int) -> list[_File]:
        """The files of the data directory; the segment that begins with ``last`` ends at byte ``position`` if it is not sealed."""
        try:
            firsts = [first for first in segment_offsets(self._directory) if log_start <= first < self.end]
        except FileNotFoundError:
            return []
        files = []
        for number, first in enumerate(firsts):
            end = firsts[number + 1] if number + 1 < len(firsts) else self.end
            name = sealed_file_in(self._directory, first)
            if not (self._directory / name).exists():
                name = segment_file_name(first)
            size = _size(self._directory / name) or 0
            if first == last and not is_sealed(name):
                size = position
            files.append(_File(name, False, first, end, size))
        return files

    def _archived(self, until: int) -> list[_File]:
        """The archived segments with offsets before ``until``."""
        index = IndexReader(self._directory / INDEX_FILE)
        try:
            state = index.state()
            found = index.between(state.start, until) if state.segments else []
        except SegmentError as error:
            raise StreamLogDamage(f"{index.path}: {error}") from None
        return [_File(each.file, True, max(each.first_offset, state.start), min(each.end_offset, until), each.size) for each in found]

    def _unsealed(self, file: _File) -> Iterator[list[Row]]:
        reached = file.first
        with open(self._directory / file.name, "rb") as opened:
            for _, batch, data in scan_batches(opened, 0, file.size, file.first):
                if batch.end_offset > file.end:
                    raise CorruptBatch(file.size, f"offset {batch.end_offset - 1} is beyond the end of the segment")
                if batch.lost:
                    self.lost.append((batch.first_offset, batch.end_offset))
                else:
                    yield list(enumerate(decode_messages(data, batch), batch.first_offset))
                reached = batch.end_offset
        if reached != file.end:
            raise CorruptBatch(file.size, f"ends at offset {reached}, not {file.end}")

    def _sealed(self, file: _File) -> Iterator[list[Row]]:
        from bridge_spark.log.sealed.reader import SealedFile  # needs pyarrow

        if file.archived and self._archive is not None:
            yield from self._groups(SealedFile(partial(self._archive.read, file.name), file.size), file)
            return
        descriptor = os.open(self._directory / file.name, os.O_RDONLY)
        try:
            sealed = SealedFile(lambda position, length: os.pread(descriptor, length, position), file.size)
            yield from self._groups(sealed, file)
        finally:
            os.close(descriptor)

    def _groups(self, sealed: Any, file: _File) -> Iterator[list[Row]]:
        if sealed.footer.end_offset < file.end or sealed.footer.first_offset > file.first:
            raise CorruptBatch(file.size, f"has the offsets {sealed.footer.first_offset} to {sealed.footer.end_offset - 1}")
        for first, end, rows in sealed.rows(_COLUMNS, file.first, file.end):
            if rows is None:
                self.lost.append((max(first, file.first), min(end, file.end)))
            else:
                yield _messages(rows)


def _messages(rows: Any) -> list[Row]:
    values: dict[str, list[Any]] = {
        name: rows.column(name).to_pylist() for name in ("flags", "topic", "payload", "client_id", "properties", "offset")
    }
    values["timestamp"] = rows.column("timestamp").cast("int64").to_pylist()
    return [
        (offset, Message(topic, payload, flags & QOS_MASK, flags & RETAIN_FLAG != 0, properties, client, timestamp, 0))
        for offset, topic, payload, flags, properties, client, timestamp in zip(
            *(values[name] for name in ("offset", "topic", "payload", "flags", "properties", "client_id", "timestamp"))
        )
    ]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


class _Archive:
    """The archived segments of one partition."""

    def __init__(self, location: str, stream: str, partition: int) -> None:
        try:
            self._location = parse_location(location)
        except ValueError as error:
            raise StreamLogDamage(f"stream {stream!r}: its archive {location!r} {error}") from None
        self._stream = stream
        self._partition = str(partition)
        self._opened: ArchiveFiles | None = None

    def size(self, file: str) -> int | None:
        """The size of a file; None if it is missing. Raises `ArchiveError`."""
        return self._files().size(self._path(file))

    def read(self, file: str, position: int, length: int) -> bytes:
        """Exactly ``length`` bytes. Raises `ArchiveError`, `FileNotFoundError` or `CorruptBatch`."""
        data = self._files().read(self._path(file), position, length)
        if len(data) != length:
            raise CorruptBatch(position + len(data), "the file ends here")
        return data

    def describe(self, file: str) -> str:
        return f"s3://{self._path(file)}" if self._location.s3 else self._path(file)

    def _path(self, file: str) -> str:
        return self._location.path(self._stream, self._partition, file)

    def _files(self) -> ArchiveFiles:
        if self._opened is None:
            try:
                self._opened = open_files(self._location)
            except ArchiveError as error:
                raise ArchiveError(f"the archive {self._location} of stream {self._stream!r}: {error}") from None
        return self._opened
