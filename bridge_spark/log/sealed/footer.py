"""The footer of a sealed segment: offsets, times, row groups, lost ranges and checksums, read without Arrow.

A sealed segment, `<first offset, 20 digits>.parquet`, has its rows in offset order.  The footer's key-value metadata
has one entry, `KEY`: JSON (`Footer.encode`) whose last two values are CRC32C checksums of eight hexadecimal digits: of
all bytes before the footer, and of the footer up to the end of the file with zeros in place of the checksum itself.  So
a truncated, damaged or renamed file is detected before any of its rows are used.

After each row group, in a gap that Parquet readers skip, is its time index: zlib of u32[n] | i64[n], little-endian.
It lists the records at which the latest receipt time increases, as differences to the entry before (the first: to the
group's first offset, and to 0).  It finds the first record at or after a time exactly, even if clocks went back.
"""

from __future__ import annotations

import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from io import FileIO
from itertools import accumulate
from pathlib import Path
from struct import Struct, pack, unpack_from
from typing import Any, NamedTuple

import google_crc32c

from bridge_spark.log.record_batch import CorruptBatch, SegmentError, TornBatch
from bridge_spark.log.sparse_index import IndexEntry

KEY = "mqttbroker.segment"
FORMAT_VERSION = 1
FORMAT_OF_COMPACTED = 2  # a row whose topic is null stands for a record that was removed
GAPS_ONLY = 1  # `Footer.compacted_at` of a file whose null rows never were records; the compaction has not read it
MAGIC = b"PAR1"
TAIL_BYTES = 64 * 1024  # first read from the end of a file; most footers are shorter
READ_BYTES = 1 << 20

_END = Struct("<I4s")  # length of the footer, magic
_BEGIN = '{"format":"mqttbroker sealed segment"'
_NO_CHECKSUM = "00000000"
_CHECKSUMS = ',"data_crc32c":"%s","footer_crc32c":"%s"}'

Read = Callable[[int, int], bytes]  # (position, length) -> exactly `length` bytes


class RowGroup(NamedTuple):
    """One row group, whose offsets have no gap.

    Its columns are the bytes from `position` to `times_position`, followed by its time index.  The timestamps, in
    microseconds, are the smallest and the largest.
    """

    first_offset: int
    end_offset: int
    position: int
    times_position: int
    times_bytes: int
    first_timestamp: int
    last_timestamp: int


class Footer(NamedTuple):
    """The contents of a sealed segment's footer.

    `lost` are ranges of offsets lost to damage.  Times are in microseconds: ``first_timestamp`` is the first record's,
    ``last_timestamp`` the largest.  ``unsealed_bytes`` is the size of the segment before it was sealed.
    """

    stream: str
    partition: int
    first_offset: int
    end_offset: int
    first_timestamp: int
    last_timestamp: int
    unsealed_bytes: int
    lost: tuple[tuple[int, int], ...]
    groups: tuple[RowGroup, ...]
    size: int
    data_bytes: int  # before the footer
    data_crc: int
    compacted_at: int = 0  # when it was first compacted; 0 = it was not, `GAPS_ONLY` = neither, but it has rows without a record

    @property
    def rows(self) -> int:
        return sum(group.end_offset - group.first_offset for group in self.groups)

    def encode(self) -> str:
        """The value of `KEY`, with zeros for the checksums."""
        version = FORMAT_OF_COMPACTED if self.compacted_at else FORMAT_VERSION
        fields: dict[str, Any] = {"format": "mqttbroker sealed segment", "version": version, **self._asdict()}
        del fields["size"], fields["data_bytes"], fields["data_crc"]
        if not self.compacted_at:
            del fields["compacted_at"]
        text = json.dumps(fields, separators=(",", ":"))
        return text[:-1] + _CHECKSUMS % (_NO_CHECKSUM, _NO_CHECKSUM)

    def sparse_index(self) -> list[IndexEntry]:
        """The row groups as a sparse index (`IndexEntry`)."""
        latest = accumulate((group.last_timestamp for group in self.groups), max, initial=self.first_timestamp)
        return [IndexEntry(group.first_offset, group.position, before) for group, before in zip(self.groups, latest)]


# -- writing ------------------------------------------------------------------


def with_checksums(ending: bytes, crc: int) -> bytes:
    """Fill in the checksums of a file's `ending`, which includes the footer; `crc` is that of all bytes before it."""
    at = len(ending) - _END.size - _END.unpack(ending[-_END.size :])[0]
    before, footer = ending[:at], ending[at:]
    data_crc = f"{google_crc32c.extend(crc, before):08x}"
    # Topics in the footer may contain the same text, but only before the metadata.
    head, _, tail = footer.rpartition((_CHECKSUMS % (_NO_CHECKSUM, _NO_CHECKSUM)).encode())
    footer_crc = f"{google_crc32c.value(head + (_CHECKSUMS % (data_crc, _NO_CHECKSUM)).encode() + tail):08x}"
    return before + head + (_CHECKSUMS % (data_crc, footer_crc)).encode() + tail


def encode_time_index(timestamps: Sequence[int]) -> bytes:
    """The time index of a row group."""
    positions: list[int] = []
    values: list[int] = []
    position = latest = 0
    for number, timestamp in enumerate(timestamps):
        if timestamp > latest or not number:
            positions.append(number - position)
            values.append(timestamp - latest)
            position, latest = number, timestamp
    count = len(positions)
    return zlib.compress(pack(f"<{count}I", *positions) + pack(f"<{count}q", *values))


# -- reading ------------------------------------------------------------------


def read_footer(read: Read, size: int) -> Footer:
    """The footer of a file of `size` bytes; reads only the end of the file.

    Raises `SegmentError` if the file is not a sealed segment, or the footer is damaged.
    """
    return parse_footer(fetch_footer(read, size), size)


def fetch_footer(read: Read, size: int) -> bytes:
    """The bytes from the footer to the end of the file, unchecked.  Raises `SegmentError` if there is no footer."""
    tail = read(max(0, size - TAIL_BYTES), min(size, TAIL_BYTES))
    if len(tail) < len(MAGIC) + _END.size:
        raise TornBatch(0, "not a Parquet file")
    length, magic = _END.unpack(tail[-_END.size :])
    if magic != MAGIC:
        raise TornBatch(size, "the end of the file is not that of a Parquet file")
    length += _END.size
    if length > size - len(MAGIC):
        raise CorruptBatch(size, "impossible footer")
    return tail[-length:] if length <= len(tail) else read(size - length, length)


def parse_footer(footer: bytes, size: int) -> Footer:
    """Parse the result of `fetch_footer` for a file of `size` bytes.  Raises `CorruptBatch`."""
    start = size - len(footer)
    text = footer.decode("latin-1")
    # Topics in the footer may contain the same text, but only before the metadata.
    begin = text.rfind(_BEGIN)
    if begin < 0:
        raise CorruptBatch(start, "not the footer of a sealed segment")
    try:
        fields, end = json.JSONDecoder().raw_decode(text, begin)
        position = end - len('00000000"}')
        blank = footer[:position] + _NO_CHECKSUM.encode() + footer[position + 8 :]
        if google_crc32c.value(blank) != int(fields["footer_crc32c"], 16):
            raise CorruptBatch(start, "wrong checksum of the footer")
        if fields["version"] not in (FORMAT_VERSION, FORMAT_OF_COMPACTED):
            raise CorruptBatch(start, f"unknown format {fields['version']} of a sealed segment")
        lost = tuple((first, last) for first, last in fields["lost"])
        groups = tuple(RowGroup(*values) for values in fields["groups"])
        named = {name: fields[name] for name in Footer._fields[:7]}
        crc = int(fields["data_crc32c"], 16)
        at = int(fields.get("compacted_at", 0))
        found = Footer(**named, lost=lost, groups=groups, size=size, data_bytes=start, data_crc=crc, compacted_at=at)
        return _checked(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, SegmentError):
            raise
        raise CorruptBatch(start, "the footer is not that of a sealed segment") from None


def _checked(footer: Footer) -> Footer:
    """Raises `CorruptBatch` unless row groups and lost ranges cover all offsets."""
    reached = footer.first_offset
    for first, end in sorted([(group.first_offset, group.end_offset) for group in footer.groups] + [*footer.lost]):
        if first != reached or end <= first:
            raise CorruptBatch(footer.data_bytes, f"offset {first} where {reached} comes next")
        reached = end
    if reached != footer.end_offset:
        raise CorruptBatch(footer.data_bytes, f"ends at offset {reached}, not {footer.end_offset}")
    return footer


def load_footer(path: Path) -> Footer:
    """The footer of the sealed segment `path`.

    Raises `SegmentError` if the footer is damaged or belongs to another file, or `OSError`.
    """
    with open(path, "rb", buffering=0) as file:
        found = _read_file(file)
    if not path.name.startswith(f"{found.first_offset:020d}."):
        raise CorruptBatch(0, f"begins with offset {found.first_offset}")
    return found


def _read_file(file: FileIO) -> Footer:
    return read_footer(_reader(file), os.fstat(file.fileno()).st_size)


def _reader(file: FileIO) -> Read:
    return lambda position, length: os.pread(file.fileno(), length, position)


def search_sealed_file(path: Path, timestamp: int) -> int:
    """`search_row_groups` in a file.  Raises `SegmentError`, or `OSError`."""
    with open(path, "rb", buffering=0) as file:
        return search_row_groups(_reader(file), _read_file(file), timestamp)


def verify_file(path: Path) -> Footer:
    """Read every byte of a sealed segment and return its footer.  Raises `SegmentError` on any damage, or `OSError`."""
    found = load_footer(path)
    crc, left = 0, found.data_bytes
    with open(path, "rb", buffering=0) as file:
        while left and (data := file.read(min(left, READ_BYTES))):
            crc, left = google_crc32c.extend(crc, data), left - len(data)
    if left or crc != found.data_crc:
        raise CorruptBatch(0, "wrong checksum")
    return found


def search_row_groups(read: Read, footer: Footer, timestamp: int) -> int:
    """The first offset received at or after `timestamp`, or the end offset if there is none.  Raises `SegmentError`."""
    for group in footer.groups:
        if group.last_timestamp < timestamp:
            continue
        try:
            data = zlib.decompress(read(group.times_position, group.times_bytes))
            count = len(data) // 12
            positions = list(accumulate(unpack_from(f"<{count}I", data)))
            values = list(accumulate(unpack_from(f"<{count}q", data, count * 4)))
            return int(group.first_offset + positions[bisect_left(values, timestamp)])
        except (zlib.error, IndexError):
            raise CorruptBatch(group.times_position, "damaged time index") from None
    return footer.end_offset
