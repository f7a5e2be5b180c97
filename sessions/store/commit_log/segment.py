"""One segment file of the commit log: its header, and records one behind the other.

Little-endian, each padded with zeros to 8 bytes::

    header, 64 B   magic b"MQCL" | u32 format version | 16 B identity of the store | u64 first position | 8 B salt
                   zeros | u32 crc32c of the first 60
    record, 32 B   magic b"MQCR" | u32 body length | u32 crc32c of the body | u32 format version | u64 position
                   u32 reserved 0 | u32 crc32c of salt + record[:28]
    body           `sessions.store.commit_log.records`

Positions count the records of a store from 1. A file may have bytes of earlier use behind its last record; the random
salt of each segment tells them, and payloads that clients make up, from records, before any body is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import google_crc32c

FORMAT_VERSION = 1
SUFFIX = ".log"
HEADER_BYTES = 64
RECORD_BYTES = 32
MAX_BODY_BYTES = (1 << 32) - 1

_MAGIC = b"MQCL"
_RECORD_MAGIC = b"MQCR"
_HEADER = Struct("<4sI16sQ8s20xI")
_RECORD = Struct("<4sIIIQI")
_PADDING = tuple(bytes(-length % 8) for length in range(8))


class BadHeader(ValueError):
    """The header of a segment cannot be read."""


class NewerRecord(ValueError):
    """A record of a newer format version."""


class Header(NamedTuple):
    version: int
    identity: bytes
    first_position: int
    salt: bytes


class Record(NamedTuple):
    """A whole record: its bytes in the file are from ``start`` to ``end``."""

    position: int
    start: int
    end: int
    body: bytes


def file_name(first_position: int) -> str:
    return f"{first_position:020d}{SUFFIX}"


def segment_files(directory: Path) -> list[Path]:
    """The segments of a log in the order of their positions. Raises `OSError`."""
    names = [name for name in os.listdir(directory) if len(name) == 20 + len(SUFFIX) and name.endswith(SUFFIX)]
    return [directory / name for name in sorted(names) if name[:20].isdigit()]


def encode_header(identity: bytes, first_position: int, salt: bytes) -> bytes:
    data = _HEADER.pack(_MAGIC, FORMAT_VERSION, identity, first_position, salt, 0)[:-4]
    crc: int = google_crc32c.value(data)
    return data + crc.to_bytes(4, "little")


def decode_header(data: bytes) -> Header:
    """Raises `BadHeader`."""
    if len(data) < HEADER_BYTES:
        raise BadHeader("its header is incomplete")
    magic, version, identity, first_position, salt, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC or google_crc32c.value(data[: HEADER_BYTES - 4]) != crc:
        raise BadHeader("its header is damaged")
    return Header(version, identity, first_position, salt)


def encode_record(salt: bytes, position: int, body: bytes) -> tuple[bytes, bytes, bytes]:
    """Header, body and padding of a record."""
    header = _RECORD.pack(_RECORD_MAGIC, len(body), google_crc32c.value(body), FORMAT_VERSION, position, 0)
    crc: int = google_crc32c.value(salt + header)
    return header + crc.to_bytes(4, "little"), body, _PADDING[len(body) & 7]


def read_record(data: bytes, at: int, salt: bytes, position: int) -> Record | None:
    """The record at this place, None if there is none; with a position of 0, of any position. Raises `NewerRecord`."""
    start = at + RECORD_BYTES
    if start > len(data) or not data.startswith(_RECORD_MAGIC, at):
        return None
    if google_crc32c.value(salt + data[at : start - 4]) != int.from_bytes(data[start - 4 : start], "little"):
        return None
    _, length, crc, version, found, _ = _RECORD.unpack_from(data, at)
    if version > FORMAT_VERSION:
        raise NewerRecord(f"format version {version} is newer than this program's {FORMAT_VERSION}")
    if position and found != position:
        return None
    body = data[start : start + length]
    if len(body) < length or google_crc32c.value(body) != crc:
        return None
    return Record(found, at, start + length + len(_PADDING[length & 7]), body)


def read_records(data: bytes, salt: bytes, at: int, position: int, before: int | None) -> Iterator[Record]:
    """The whole records from a place in a segment, where one with ``position`` begins, up to the position ``before``.

    Raises `NewerRecord`.
    """
    while before is None or position < before:
        record = read_record(data, at, salt, position)
        if record is None:
            return
        yield record
        at, position = record.end, position + 1


def later_record(data: bytes, salt: bytes, at: int, position: int) -> Record | None:
    """The first whole record behind a place without one; there is none behind the torn end of a log.

    ``position`` is the one that is missing there. Raises `NewerRecord`.
    """
    while True:
        at = data.find(_RECORD_MAGIC, at + 1)
        if at < 0:
            return None
        if at % 8 == 0:
            record = read_record(data, at, salt, 0)
            if record is not None and record.position > position:
                return record
