"""Record batches, the contents of a segment file.

A batch carries one CRC32C and its columns fill its body exactly, so a torn, shifted or damaged batch is an error and
never yields a wrong record.

A segment file is a sequence of batches, little-endian::

    header, 32 B   magic b"MQB1" | u32 body_length | u32 crc32c of header[12:32] + body
                   u32 count | u64 first_offset | u32 format_version | u32 reserved 0
    body           timestamp  i64[count]  microseconds since the Unix epoch, UTC
                   flags      u8[count]   bits 0-1 QoS, bit 2 RETAIN
                   topic      i32[count + 1] offsets, the first 0 | UTF-8 bytes
                   payload    i32[count + 1] offsets              | bytes
                   client_id  i32[count + 1] offsets              | UTF-8 bytes
                   properties i32[count + 1] offsets              | encoded MQTT 5.0 properties

Every array of the body is padded with zeros to 8 bytes, so that Arrow arrays can view it without a copy.  A batch has
at least one record, and a body below 64 MiB unless a single record is larger.  A header with the magic b"MQL1" has no
body: the records of these offsets are lost to damage, and later records keep their offsets.

Measured with 64-byte payloads: encoding takes 0.5 µs per record in batches of 1000, checking and locating columns
0.01 µs.
"""

from __future__ import annotations

import mmap
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from struct import Struct, pack, unpack_from
from typing import BinaryIO

import google_crc32c

from sessions.message import Message

FORMAT_VERSION = 1
MAGIC = b"MQB1"
LOST_MAGIC = b"MQL1"
HEADER = Struct("<4sIIIQII")
HEADER_BYTES = HEADER.size
CHECKED_FROM = 12  # the checksum covers the header from here on
_CHECKED = Struct("<IQII")

BATCH_BYTES = 64 * 1024 * 1024  # limit of a body with more than one record
MAX_BODY_BYTES = 1024 * 1024 * 1024  # limit of any body; a larger one is damage
MAX_COUNT = 0xFFFFFFFF  # limit of the count in a header

QOS_MASK = 3
RETAIN_FLAG = 4

Buffer = bytes | memoryview | mmap.mmap
Span = tuple[int, int]  # position and length in the decoded buffer, in bytes


class SegmentError(ValueError):
    """The bytes at `position` are not of this format."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"{reason} (at byte {position})")
        self.position = position
        self.reason = reason


class TornBatch(SegmentError):
    """The data ends inside a batch: the rest is missing or not yet written."""


class CorruptBatch(SegmentError):
    """The bytes are complete but not a valid batch."""


class BatchTooLarge(ValueError):
    """The records do not fit into one batch."""


class Batch:
    """A batch at `position` of a buffer; the next one begins at `end`."""

    __slots__ = ("position", "body_length", "crc", "count", "first_offset")

    def __init__(self, position: int, body_length: int, crc: int, count: int, first_offset: int) -> None:
        self.position = position
        self.body_length = body_length
        self.crc = crc
        self.count = count
        self.first_offset = first_offset

    @property
    def end(self) -> int:
        return self.position + HEADER_BYTES + self.body_length

    @property
    def end_offset(self) -> int:
        """The offset after the last record."""
        return self.first_offset + self.count

    @property
    def lost(self) -> bool:
        """Whether its records are lost to damage."""
        return self.body_length == 0


class Columns:
    """The `Span` of each array of a batch, without padding."""

    __slots__ = (
        "count",
        "timestamp",
        "flags",
        "topic_offsets",
        "topic",
        "payload_offsets",
        "payload",
        "client_id_offsets",
        "client_id",
        "properties_offsets",
        "properties",
    )

    def __init__(self, count: int, spans: Sequence[Span]) -> None:
        self.count = count
        self.timestamp = spans[0]
        self.flags = spans[1]
        self.topic_offsets, self.topic = spans[2], spans[3]
        self.payload_offsets, self.payload = spans[4], spans[5]
        self.client_id_offsets, self.client_id = spans[6], spans[7]
        self.properties_offsets, self.properties = spans[8], spans[9]


# -- encoding -----------------------------------------------------------------

_PADDING = tuple(bytes(-length % 8) for length in range(8))


def _offsets(values: Sequence[bytes]) -> list[int]:
    return list(accumulate(map(len, values), initial=0))


def _text_column(values: Sequence[str]) -> tuple[list[int], bytes]:
    text = "".join(values)
    if text.isascii():
        return list(accumulate(map(len, values), initial=0)), text.encode()
    encoded = [value.encode() for value in values]
    return _offsets(encoded), b"".join(encoded)


def encode_batch(records: Sequence[Message], first_offset: int) -> bytes:
    """One batch of `records`; `first_offset` is the offset of the first.

    Raises `BatchTooLarge` if several records exceed `BATCH_BYTES` or a single one exceeds the format, `ValueError` if
    there are no records.
    """
    count = len(records)
    if count == 0:
        raise ValueError("a batch has at least one record")
    payloads = [message.payload for message in records]
    properties = [message.properties for message in records]
    payload_offsets = _offsets(payloads)
    properties_offsets = _offsets(properties) if any(properties) else [0] * (count + 1)
    limit = BATCH_BYTES if count > 1 else MAX_BODY_BYTES
    if payload_offsets[-1] + properties_offsets[-1] >= limit:
        raise BatchTooLarge(f"{count} records in one batch")
    topic_offsets, topics = _text_column([message.topic for message in records])
    client_offsets, clients = _text_column([message.publisher for message in records])
    integers = f"<{count + 1}i"
    blocks: tuple[bytes, ...] = (
        pack(f"<{count}q", *[message.timestamp for message in records]),
        bytes([each.qos | RETAIN_FLAG if each.retain else each.qos for each in records]),
        pack(integers, *topic_offsets),
        topics,
        pack(integers, *payload_offsets),
        b"".join(payloads),
        pack(integers, *client_offsets),
        clients,
        pack(integers, *properties_offsets),
        b"".join(properties),
    )
    parts: list[bytes] = []
    for block in blocks:
        parts.append(block)
        parts.append(_PADDING[len(block) & 7])
    body = b"".join(parts)
    if len(body) >= limit:
        raise BatchTooLarge(f"{count} records in one batch")
    checked = _CHECKED.pack(count, first_offset, FORMAT_VERSION, 0)
    crc = google_crc32c.extend(google_crc32c.value(checked), body)
    return HEADER.pack(MAGIC, len(body), crc, count, first_offset, FORMAT_VERSION, 0) + body


def encode_rows(first_offset: int, timestamps: bytes, flags: bytes, columns: Sequence[tuple[array[int], bytes]]) -> bytes:
    """One batch of rows that are encoded already: ``timestamps`` and ``flags`` as in the body, and for `topic`, `payload`,
    `client_id` and `properties` the offsets, of which the first may be any, and the bytes between the first and the last.

    Raises `BatchTooLarge`.
    """
    count = len(flags)
    parts: list[bytes] = [timestamps, _PADDING[len(timestamps) & 7], flags, _PADDING[count & 7]]
    for offsets, data in columns:
        base = offsets[0]
        if base:
            offsets = array("i", [offset - base for offset in offsets])
        if sys.byteorder == "big":
            offsets = array("i", offsets)
            offsets.byteswap()
        block = offsets.tobytes()
        parts += (block, _PADDING[len(block) & 7], data, _PADDING[len(data) & 7])
    body = b"".join(parts)
    if len(body) > MAX_BODY_BYTES:
        raise BatchTooLarge(f"{count} records in one batch")
    checked = _CHECKED.pack(count, first_offset, FORMAT_VERSION, 0)
    crc = google_crc32c.extend(google_crc32c.value(checked), body)
    return HEADER.pack(MAGIC, len(body), crc, count, first_offset, FORMAT_VERSION, 0) + body


def encode_batches(records: Sequence[Message], first_offset: int) -> list[bytes]:
    """`records` as one batch, or as several if they are too large for one.

    Raises `BatchTooLarge` if a single record exceeds the format.
    """
    try:
        return [encode_batch(records, first_offset)]
    except BatchTooLarge:
        if len(records) == 1:
            raise
    half = len(records) // 2
    return encode_batches(records[:half], first_offset) + encode_batches(records[half:], first_offset + half)


def encode_lost(first_offset: int, end_offset: int) -> bytes:
    """Batches without records for these offsets, which are lost to damage."""
    batches = []
    while first_offset < end_offset:
        count = min(end_offset - first_offset, MAX_COUNT)
        crc = google_crc32c.value(_CHECKED.pack(count, first_offset, FORMAT_VERSION, 0))
        batches.append(HEADER.pack(LOST_MAGIC, 0, crc, count, first_offset, FORMAT_VERSION, 0))
        first_offset += count
    return b"".join(batches)


# -- decoding -----------------------------------------------------------------


def read_header(data: Buffer, position: int = 0, end: int | None = None) -> Batch:
    """The batch whose header is at `position`; its body is not read.

    Raises `TornBatch` or `CorruptBatch`.
    """
    end = len(data) if end is None else end
    if end - position < HEADER_BYTES:
        raise TornBatch(position, "the data ends inside a batch header")
    magic, body_length, crc, count, first_offset, version, reserved = HEADER.unpack_from(data, position)
    if magic not in (MAGIC, LOST_MAGIC):
        raise CorruptBatch(position, "no batch begins here")
    if version != FORMAT_VERSION or reserved != 0:
        raise CorruptBatch(position, f"unknown batch format {version}")
    fits = body_length == 0 if magic == LOST_MAGIC else count * 25 <= body_length <= MAX_BODY_BYTES
    if count == 0 or body_length % 8 or not fits:
        raise CorruptBatch(position, f"impossible batch: {count} records, {body_length} bytes")
    return Batch(position, body_length, crc, count, first_offset)


def read_batch(data: Buffer, position: int = 0, end: int | None = None) -> Batch:
    """The batch at `position`, complete and with a correct checksum.

    Raises `TornBatch` or `CorruptBatch`.
    """
    end = len(data) if end is None else end
    batch = read_header(data, position, end)
    if batch.end > end:
        raise TornBatch(position, "the data ends inside a batch")
    if google_crc32c.value(bytes(data[position + CHECKED_FROM : batch.end])) != batch.crc:
        raise CorruptBatch(position, "wrong checksum")
    return batch


def iter_batches(data: Buffer, position: int = 0, end: int | None = None) -> Iterator[Batch]:
    """The batches from `position` up to `end`, each checked, their offsets without a gap.

    Raises `TornBatch` if the data ends inside a batch, `CorruptBatch` on other damage.
    """
    end = len(data) if end is None else end
    expected = -1
    while position < end:
        batch = read_batch(data, position, end)
        if expected not in (-1, batch.first_offset):
            raise CorruptBatch(position, f"batch of offset {batch.first_offset} where {expected} comes next")
        yield batch
        position = batch.end
        expected = batch.end_offset


def scan_batches(file: BinaryIO, position: int, end: int, first_offset: int) -> Iterator[tuple[int, Batch, bytes]]:
    """The batches of an open file as (position in the file, batch, its bytes).

    ``batch.position`` is 0, relative to the bytes.  Starts at `position` with the record `first_offset`, stops at
    `end`, and holds one batch in memory.  Raises like `iter_batches`, with positions in the file.
    """
    file.seek(position)
    while position < end:
        try:
            header = file.read(min(HEADER_BYTES, end - position))
            batch = read_header(header)
            if position + batch.end > end:
                raise TornBatch(0, "the data ends inside a batch")
            data = header + file.read(batch.body_length)
            read_batch(data)
            if batch.first_offset != first_offset:
                raise CorruptBatch(0, f"batch of offset {batch.first_offset} where {first_offset} comes next")
        except SegmentError as error:
            raise type(error)(position, error.reason) from None
        yield position, batch, data
        position += batch.end
        first_offset = batch.end_offset


def decode_columns(data: Buffer, batch: Batch) -> Columns:
    """The spans of a checked batch's columns in `data`.

    Raises `CorruptBatch` unless the columns fill the body exactly.
    """
    if batch.lost:
        raise CorruptBatch(batch.position, f"{batch.count} records were lost to damage")
    count = batch.count
    position = batch.position + HEADER_BYTES
    end = batch.end
    spans: list[Span] = []
    for width in (8, 1):
        spans.append((position, count * width))
        position += (count * width + 7) & -8
    for _ in range(4):
        size = (count + 1) * 4
        if position + size > end:
            raise CorruptBatch(batch.position, "columns beyond the batch")
        first = unpack_from("<i", data, position)[0]
        last = unpack_from("<i", data, position + count * 4)[0]
        spans.append((position, size))
        position += (size + 7) & -8
        if first != 0 or last < 0 or position + last > end:
            raise CorruptBatch(batch.position, "columns beyond the batch")
        spans.append((position, last))
        position += (last + 7) & -8
    if position != end:
        raise CorruptBatch(batch.position, "columns do not fill the batch")
    return Columns(count, spans)


def _native(typecode: str, data: Buffer, span: Span) -> array[int]:
    values = array(typecode, bytes(data[span[0] : span[0] + span[1]]))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def timestamps(data: Buffer, batch: Batch) -> array[int]:
    """The receipt times of a checked batch, in microseconds since the Unix epoch; empty if the batch is lost."""
    size = 0 if batch.lost else batch.count * 8
    return _native("q", data, (batch.position + HEADER_BYTES, size))


def decode_messages(data: Buffer, batch: Batch) -> list[Message]:
    """The records of a checked batch.  A stream does not store the message expiry.  Raises `CorruptBatch`."""
    columns = decode_columns(data, batch)
    flags = bytes(data[columns.flags[0] : columns.flags[0] + columns.flags[1]])
    fields: list[list[bytes]] = []
    for offsets_span, (start, _length) in (
        (columns.topic_offsets, columns.topic),
        (columns.payload_offsets, columns.payload),
        (columns.client_id_offsets, columns.client_id),
        (columns.properties_offsets, columns.properties),
    ):
        offsets = _native("i", data, offsets_span)
        fields.append([bytes(data[start + a : start + b]) for a, b in zip(offsets, offsets[1:])])
    topics, payloads, clients, properties = fields
    try:
        return [
            Message(
                topics[index].decode(),
                payloads[index],
                flags[index] & QOS_MASK,
                flags[index] & RETAIN_FLAG != 0,
                properties[index],
                clients[index].decode(),
                timestamp,
                0,
            )
            for index, timestamp in enumerate(timestamps(data, batch))
        ]
    except UnicodeDecodeError:
        raise CorruptBatch(batch.position, "a topic or client id is not UTF-8") from None
