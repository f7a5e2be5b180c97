"""A sealed segment: one Parquet file that says by itself which offsets it holds, and whether it is whole.

The rule kept here: what the broker needs of a sealed segment it reads without Arrow.  Its own part of the footer tells
offsets, times, row groups and lost ranges; one checksum covers the footer and another all bytes before it, so a file
that was cut, damaged or renamed is noticed before a row of it is believed.

`<first offset, 20 digits>.parquet` holds the rows in the order of their offsets.  Behind each row group, where no reader
of Parquet looks, stands the group's time index: zlib of u32[n] | i64[n], little-endian, the steps in which the latest
receipt time rises, as differences to the step before (the first: to the group's first offset, and to 0).  So the first
record at or after a time is found exactly, whichever way clocks went.

The footer's key-value metadata has one entry, `KEY`: JSON (`Sealed.describe`), whose last two values are checksums of
eight hexadecimal digits: CRC32C of all bytes before the footer, and of the footer up to the end of the file with zeros
in place of the second.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from bisect import bisect_left
from io import FileIO
from itertools import accumulate
from pathlib import Path
from struct import Struct, pack, unpack_from
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import google_crc32c

from bridge_spark.log.segment import CorruptBatch, IndexEntry, SegmentError, TornBatch

SUFFIX = ".parquet"
UNFINISHED = ".sealing"  # how the name of a file ends that is no sealed segment yet
KEY = "mqttbroker.segment"
FORMAT_VERSION = 1
MAGIC = b"PAR1"
TAIL_BYTES = 64 * 1024  # read at once from the end of a file; most footers are shorter
READ_BYTES = 1 << 20

_SEGMENT_FILE = re.compile(r"(\d{20})\.(?:seg|parquet)")
_END = Struct("<I4s")  # length of the footer, magic
_BEGIN = '{"format":"mqttbroker sealed segment"'
_NO_CHECKSUM = "00000000"
_CHECKSUMS = ',"data_crc32c":"%s","footer_crc32c":"%s"}'

Read = Callable[[int, int], bytes]  # position and length; exactly so many bytes


class Group(NamedTuple):
    """One row group: offsets without a gap, between the bytes `position` and `times_position`.

    Its time index is behind it; the times, in microseconds, are the smallest and the largest.
    """

    first_offset: int
    end_offset: int
    position: int
    times_position: int
    times_bytes: int
    first_timestamp: int
    last_timestamp: int


class Sealed(NamedTuple):
    """What a sealed segment says of itself; times in microseconds, `lost` are ranges of offsets that damage took.

    ``first_timestamp`` is the first record's, ``last_timestamp`` the largest; ``unsealed_bytes`` is how large the
    segment was before.
    """

    stream: str
    partition: int
    first_offset: int
    end_offset: int
    first_timestamp: int
    last_timestamp: int
    unsealed_bytes: int
    lost: Tuple[Tuple[int, int], ...]
    groups: Tuple[Group, ...]
    size: int
    data_bytes: int  # before the footer
    data_crc: int

    @property
    def rows(self) -> int:
        return sum(group.end_offset - group.first_offset for group in self.groups)

    def describe(self) -> str:
        """The value of `KEY`, with zeros for checksums."""
        fields: Dict[str, Any] = {"format": "mqttbroker sealed segment", "version": FORMAT_VERSION, **self._asdict()}
        del fields["size"], fields["data_bytes"], fields["data_crc"]
        text = json.dumps(fields, separators=(",", ":"))
        return text[:-1] + _CHECKSUMS % (_NO_CHECKSUM, _NO_CHECKSUM)

    def sparse_index(self) -> List[IndexEntry]:
        """The row groups as a sparse index (`IndexEntry`)."""
        latest = accumulate((group.last_timestamp for group in self.groups), max, initial=self.first_timestamp)
        return [IndexEntry(group.first_offset, group.position, before) for group, before in zip(self.groups, latest)]


def file_name(first_offset: int) -> str:
    return f"{first_offset:020d}{SUFFIX}"


def first_of(file: str) -> Optional[int]:
    """The first offset of the segment, sealed or not, that has this file name; None for any other file."""
    match = _SEGMENT_FILE.fullmatch(file)
    return None if match is None else int(match[1])


def is_sealed(file: str) -> bool:
    """Whether the segment of that file name is sealed."""
    return file.endswith(SUFFIX)


# -- writing ------------------------------------------------------------------


def with_checksums(ending: bytes, crc: int) -> bytes:
    """The `ending` of a file, footer included, with its checksums; `crc` is of all bytes before it."""
    at = len(ending) - _END.size - _END.unpack(ending[-_END.size:])[0]
    before, footer = ending[:at], ending[at:]
    data_crc = f"{google_crc32c.extend(crc, before):08x}"
    # A topic may be the same text, and stands in the footer too, but before the metadata.
    head, _, tail = footer.rpartition((_CHECKSUMS % (_NO_CHECKSUM, _NO_CHECKSUM)).encode())
    footer_crc = f"{google_crc32c.value(head + (_CHECKSUMS % (data_crc, _NO_CHECKSUM)).encode() + tail):08x}"
    return before + head + (_CHECKSUMS % (data_crc, footer_crc)).encode() + tail


def encode_times(timestamps: Sequence[int]) -> bytes:
    """The time index of a row group."""
    places: List[int] = []
    values: List[int] = []
    place = latest = 0
    for number, timestamp in enumerate(timestamps):
        if timestamp > latest or not number:
            places.append(number - place)
            values.append(timestamp - latest)
            place, latest = number, timestamp
    count = len(places)
    return zlib.compress(pack(f"<{count}I", *places) + pack(f"<{count}q", *values))


# -- reading ------------------------------------------------------------------


def read_sealed(read: Read, size: int) -> Sealed:
    """What a file of `size` bytes says of itself; only its end is read.

    Raises `SegmentError` when the end is not that of a sealed segment, whole and undamaged.
    """
    return parse_footer(read_footer(read, size), size)


def read_footer(read: Read, size: int) -> bytes:
    """The footer up to the end of the file, unchecked; raises `SegmentError` where there is none."""
    tail = read(max(0, size - TAIL_BYTES), min(size, TAIL_BYTES))
    if len(tail) < len(MAGIC) + _END.size:
        raise TornBatch(0, "no Parquet file")
    length, magic = _END.unpack(tail[-_END.size:])
    if magic != MAGIC:
        raise TornBatch(size, "the file does not end as a Parquet file does")
    length += _END.size
    if length > size - len(MAGIC):
        raise CorruptBatch(size, "impossible footer")
    return tail[-length:] if length <= len(tail) else read(size - length, length)


def parse_footer(footer: bytes, size: int) -> Sealed:
    """What the footer of a file of `size` bytes says; raises `CorruptBatch`."""
    start = size - len(footer)
    text = footer.decode("latin-1")
    # Topics stand in the footer too, but all of them before the metadata.
    begin = text.rfind(_BEGIN)
    if begin < 0:
        raise CorruptBatch(start, "not the footer of a sealed segment")
    try:
        fields, end = json.JSONDecoder().raw_decode(text, begin)
        place = end - len('00000000"}')
        blank = footer[:place] + _NO_CHECKSUM.encode() + footer[place + 8:]
        if google_crc32c.value(blank) != int(fields["footer_crc32c"], 16):
            raise CorruptBatch(start, "wrong checksum of the footer")
        if fields["version"] != FORMAT_VERSION:
            raise CorruptBatch(start, f"unknown format {fields['version']} of a sealed segment")
        lost = tuple((first, last) for first, last in fields["lost"])
        groups = tuple(Group(*values) for values in fields["groups"])
        named = {name: fields[name] for name in Sealed._fields[:7]}
        crc = int(fields["data_crc32c"], 16)
        return _checked(Sealed(**named, lost=lost, groups=groups, size=size, data_bytes=start, data_crc=crc))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, SegmentError):
            raise
        raise CorruptBatch(start, "the footer is not that of a sealed segment") from None


def _checked(part: Sealed) -> Sealed:
    """Raises `CorruptBatch` unless row groups and lost ranges make up all offsets."""
    reached = part.first_offset
    for first, end in sorted([(group.first_offset, group.end_offset) for group in part.groups] + [*part.lost]):
        if first != reached or end <= first:
            raise CorruptBatch(part.data_bytes, f"offset {first} where {reached} comes next")
        reached = end
    if reached != part.end_offset:
        raise CorruptBatch(part.data_bytes, f"ends at offset {reached}, not {part.end_offset}")
    return part


def inspect(path: Path) -> Sealed:
    """What the sealed segment `path` says of itself.

    Raises `SegmentError` if its footer is damaged or of another file, or `OSError`.
    """
    with open(path, "rb", buffering=0) as file:
        found = _read_file(file)
    if not path.name.startswith(file_name(found.first_offset)):
        raise CorruptBatch(0, f"begins with offset {found.first_offset}")
    return found


def _read_file(file: FileIO) -> Sealed:
    return read_sealed(_reading(file), os.fstat(file.fileno()).st_size)


def _reading(file: FileIO) -> Read:
    return lambda position, length: os.pread(file.fileno(), length, position)


def search_sealed(path: Path, timestamp: int) -> int:
    """`first_at` in a file.  Raises `SegmentError`, or `OSError`."""
    with open(path, "rb", buffering=0) as file:
        return first_at(_reading(file), _read_file(file), timestamp)


def verify(path: Path) -> Sealed:
    """The same after every byte was read.  Raises `SegmentError` on any damage, or `OSError`."""
    found = inspect(path)
    crc, left = 0, found.data_bytes
    with open(path, "rb", buffering=0) as file:
        while left and (data := file.read(min(left, READ_BYTES))):
            crc, left = google_crc32c.extend(crc, data), left - len(data)
    if left or crc != found.data_crc:
        raise CorruptBatch(0, "wrong checksum")
    return found


def first_at(read: Read, part: Sealed, timestamp: int) -> int:
    """The first offset received at or after `timestamp`, the end offset if there is none.  Raises `SegmentError`."""
    for group in part.groups:
        if group.last_timestamp < timestamp:
            continue
        try:
            data = zlib.decompress(read(group.times_position, group.times_bytes))
            count = len(data) // 12
            places = list(accumulate(unpack_from(f"<{count}I", data)))
            values = list(accumulate(unpack_from(f"<{count}q", data, count * 4)))
            return int(group.first_offset + places[bisect_left(values, timestamp)])
        except (zlib.error, IndexError):
            raise CorruptBatch(group.times_position, "damaged time index") from None
    return part.end_offset
