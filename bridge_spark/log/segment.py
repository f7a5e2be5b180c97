"""The bytes of a stream: record batches, their sparse index, the high watermark.

The rule kept here: whatever is decoded was written whole.  A batch stands under
one CRC32C and its columns fill its body exactly, so a torn, shifted or damaged
batch is an error and never a wrong record.

A segment file is a sequence of batches, little-endian::

    header, 32 B   magic b"MQB1" | u32 body_length | u32 crc32c of header[12:32] + body
                   u32 count | u64 first_offset | u32 format_version | u32 reserved 0
    body           timestamp  i64[count]  microseconds since the Unix epoch, UTC
                   flags      u8[count]   bits 0-1 QoS, bit 2 RETAIN
                   topic      i32[count + 1] offsets, the first 0 | UTF-8 bytes
                   payload    i32[count + 1] offsets              | bytes
                   client_id  i32[count + 1] offsets              | UTF-8 bytes
                   properties i32[count + 1] offsets              | encoded MQTT 5.0 properties

Every array of the body is padded with zeros to 8 bytes, so that Arrow arrays can
be laid over it.  A batch holds at least one record, and its body stays under
64 MiB unless one record alone is larger.  A header with the magic b"MQL1" has no
body: damage took the records of these offsets, and those behind keep theirs.

Measured with 64-byte payloads: encoding 0.5 µs per record in batches of 1000,
checking and locating columns 0.01 µs.
"""

from __future__ import annotations

import mmap
import sys
from array import array
from itertools import accumulate
from struct import Struct, pack, unpack_from
from typing import BinaryIO, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import google_crc32c

from sessions.message import Message

FORMAT_VERSION = 1
MAGIC = b"MQB1"
LOST_MAGIC = b"MQL1"
HEADER = Struct("<4sIIIQII")
HEADER_BYTES = HEADER.size
CHECKED_FROM = 12  # where in the header the checksum's cover begins
_CHECKED = Struct("<IQII")

BATCH_BYTES = 64 * 1024 * 1024  # bodies of more than one record stay below
MAX_BODY_BYTES = 1024 * 1024 * 1024  # no writer goes beyond; more is damage

INDEX_ENTRY = Struct("<QQq")
INDEX_INTERVAL = 64 * 1024

WATERMARK_MAGIC = b"MQHW"
_WATERMARK = Struct("<4sI4Q")
_WATERMARK_VALUES = Struct("<4Q")
WATERMARK_BYTES = _WATERMARK.size

QOS_MASK = 3
RETAIN_FLAG = 4

Buffer = Union[bytes, memoryview, mmap.mmap]
Span = Tuple[int, int]  # offset and length, in bytes, within the buffer decoded


class SegmentError(ValueError):
    """The bytes at `position` are not what a writer of this format leaves."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"{reason} (at byte {position})")
        self.position = position
        self.reason = reason


class TornBatch(SegmentError):
    """The data ends inside a batch: the rest is missing or not yet there."""


class CorruptBatch(SegmentError):
    """The bytes are there and are not a batch."""


class BatchTooLarge(ValueError):
    """The records do not fit into one batch."""


class Batch:
    """A batch found at `position` of a buffer; `end` is where the next one begins."""

    __slots__ = ("position", "body_length", "crc", "count", "first_offset")

    def __init__(
        self, position: int, body_length: int, crc: int, count: int, first_offset: int
    ) -> None:
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
        """Whether damage took its records."""
        return self.body_length == 0


class Columns:
    """Where the arrays of a batch lie, each as (offset, length) in bytes, padding left out."""

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


def _offsets(values: Sequence[bytes]) -> List[int]:
    return list(accumulate(map(len, values), initial=0))


def _text_column(values: Sequence[str]) -> Tuple[List[int], bytes]:
    text = "".join(values)
    if text.isascii():
        return list(accumulate(map(len, values), initial=0)), text.encode()
    encoded = [value.encode() for value in values]
    return _offsets(encoded), b"".join(encoded)


def encode_batch(records: Sequence[Message], first_offset: int) -> bytes:
    """One batch of `records`, the first at `first_offset`.

    Raises `BatchTooLarge` when several records fill more than `BATCH_BYTES` or
    one does not fit the format, `ValueError` when there is none.
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
    blocks: Tuple[bytes, ...] = (
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
    parts: List[bytes] = []
    for block in blocks:
        parts.append(block)
        parts.append(_PADDING[len(block) & 7])
    body = b"".join(parts)
    if len(body) >= limit:
        raise BatchTooLarge(f"{count} records in one batch")
    checked = _CHECKED.pack(count, first_offset, FORMAT_VERSION, 0)
    crc = google_crc32c.extend(google_crc32c.value(checked), body)
    return HEADER.pack(MAGIC, len(body), crc, count, first_offset, FORMAT_VERSION, 0) + body


def encode_batches(records: Sequence[Message], first_offset: int) -> List[bytes]:
    """`records` as one batch, or as several when they are too large for one.

    Raises `BatchTooLarge` when a single record does not fit the format.
    """
    try:
        return [encode_batch(records, first_offset)]
    except BatchTooLarge:
        if len(records) == 1:
            raise
    half = len(records) // 2
    return encode_batches(records[:half], first_offset) + encode_batches(
        records[half:], first_offset + half
    )


# -- decoding -----------------------------------------------------------------


def read_header(data: Buffer, position: int = 0, end: Optional[int] = None) -> Batch:
    """The batch whose header stands at `position`; its body is neither needed nor checked.

    Raises `TornBatch` or `CorruptBatch`.
    """
    end = len(data) if end is None else end
    if end - position < HEADER_BYTES:
        raise TornBatch(position, "the data ends inside a batch header")
    magic, body_length, crc, count, first_offset, version, reserved = HEADER.unpack_from(
        data, position
    )
    if magic not in (MAGIC, LOST_MAGIC):
        raise CorruptBatch(position, "no batch begins here")
    if version != FORMAT_VERSION or reserved != 0:
        raise CorruptBatch(position, f"unknown batch format {version}")
    fits = body_length == 0 if magic == LOST_MAGIC else count * 25 <= body_length <= MAX_BODY_BYTES
    if count == 0 or body_length % 8 or not fits:
        raise CorruptBatch(position, f"impossible batch: {count} records, {body_length} bytes")
    return Batch(position, body_length, crc, count, first_offset)


def read_batch(data: Buffer, position: int = 0, end: Optional[int] = None) -> Batch:
    """The batch at `position`, there in full and with the right checksum.

    Raises `TornBatch` or `CorruptBatch`.
    """
    end = len(data) if end is None else end
    batch = read_header(data, position, end)
    if batch.end > end:
        raise TornBatch(position, "the data ends inside a batch")
    if google_crc32c.value(bytes(data[position + CHECKED_FROM : batch.end])) != batch.crc:
        raise CorruptBatch(position, "wrong checksum")
    return batch


def iter_batches(data: Buffer, position: int = 0, end: Optional[int] = None) -> Iterator[Batch]:
    """The batches from `position` up to `end`, each checked, their offsets without a gap.

    Raises `TornBatch` when the data ends inside a batch, `CorruptBatch` on
    anything else that no writer leaves.
    """
    end = len(data) if end is None else end
    expected = -1
    while position < end:
        batch = read_batch(data, position, end)
        if expected not in (-1, batch.first_offset):
            raise CorruptBatch(
                position, f"batch of offset {batch.first_offset} where {expected} comes next"
            )
        yield batch
        position = batch.end
        expected = batch.end_offset


def scan(
    file: BinaryIO, position: int, end: int, first_offset: int
) -> Iterator[Tuple[int, Batch, bytes]]:
    """The batches of an open file as (position in the file, batch, its bytes).

    ``batch.position`` is 0, as it belongs to the bytes.  Begins at `position`
    with the record `first_offset`, stops at `end`, holds one batch at a time;
    raises like `iter_batches`, with positions of the file.
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
                raise CorruptBatch(
                    0, f"batch of offset {batch.first_offset} where {first_offset} comes next"
                )
        except SegmentError as error:
            raise type(error)(position, error.reason) from None
        yield position, batch, data
        position += batch.end
        first_offset = batch.end_offset


def decode_columns(data: Buffer, batch: Batch) -> Columns:
    """Where the columns of a checked batch lie in `data`.

    The columns fill the body exactly, else `CorruptBatch`.
    """
    if batch.lost:
        raise CorruptBatch(batch.position, f"{batch.count} records were lost to damage")
    count = batch.count
    position = batch.position + HEADER_BYTES
    end = batch.end
    spans: List[Span] = []
    for width in (8, 1):
        spans.append((position, count * width))
        position += (count * width + 7) & -8
    for _ in range(4):
        size = (count + 1) * 4
        if position + size > end:
            raise CorruptBatch(batch.position, "columns beyond the batch")
        first, last = (
            unpack_from("<i", data, position)[0],
            unpack_from("<i", data, position + count * 4)[0],
        )
        spans.append((position, size))
        position += (size + 7) & -8
        if first != 0 or last < 0 or position + last > end:
            raise CorruptBatch(batch.position, "columns beyond the batch")
        spans.append((position, last))
        position += (last + 7) & -8
    if position != end:
        raise CorruptBatch(batch.position, "columns do not fill the batch")
    return Columns(count, spans)


def _native(typecode: str, data: Buffer, span: Span) -> "array[int]":
    values = array(typecode, bytes(data[span[0] : span[0] + span[1]]))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def timestamps(data: Buffer, batch: Batch) -> "array[int]":
    """The receipt times of a checked batch, microseconds since the Unix epoch; none if it is lost."""
    size = 0 if batch.lost else batch.count * 8
    return _native("q", data, (batch.position + HEADER_BYTES, size))


def decode_messages(data: Buffer, batch: Batch) -> List[Message]:
    """The records of a checked batch; expiry is not part of a stream."""
    columns = decode_columns(data, batch)
    flags = bytes(data[columns.flags[0] : columns.flags[0] + columns.flags[1]])
    fields: List[List[bytes]] = []
    for offsets_span, (start, _length) in (
        (columns.topic_offsets, columns.topic),
        (columns.payload_offsets, columns.payload),
        (columns.client_id_offsets, columns.client_id),
        (columns.properties_offsets, columns.properties),
    ):
        offsets = _native("i", data, offsets_span)
        fields.append(
            [bytes(data[start + a : start + b]) for a, b in zip(offsets, offsets[1:])]
        )
    topics, payloads, clients, properties = fields
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


# -- sparse index -------------------------------------------------------------


class IndexEntry(NamedTuple):
    """The batch of `first_offset` begins at `position` of the segment.

    Every record before it was received at or before `timestamp`; in the first
    entry of a segment that is the first record's own time.
    """

    first_offset: int
    position: int
    timestamp: int


def decode_index(data: bytes) -> List[IndexEntry]:
    """The entries up to the first that cannot be right; the file is never synced."""
    entries: List[IndexEntry] = []
    whole = len(data) - len(data) % INDEX_ENTRY.size
    for values in INDEX_ENTRY.iter_unpack(data[:whole]):
        entry = IndexEntry(*values)
        if entries:
            last = entries[-1]
            if (
                entry.first_offset <= last.first_offset
                or entry.position - last.position < INDEX_INTERVAL
            ):
                break
        elif entry.position != 0:
            break
        entries.append(entry)
    return entries


# -- high watermark -----------------------------------------------------------


class Watermark(NamedTuple):
    """What readers of one partition may see: offsets from `log_start_offset` up to,
    and without, `high_watermark`; of the segment that begins with `segment` the
    first `position` bytes, of earlier segments everything, of later ones nothing.
    """

    high_watermark: int
    segment: int
    position: int
    log_start_offset: int


def encode_watermark(watermark: Watermark) -> bytes:
    values = _WATERMARK_VALUES.pack(*watermark)
    crc: int = google_crc32c.value(values)
    return _WATERMARK.pack(WATERMARK_MAGIC, crc, *watermark)


def decode_watermark(data: bytes) -> Watermark:
    """Raises `SegmentError` when the file is damaged, or was read while it was written:
    a reader then reads it again."""
    if len(data) != WATERMARK_BYTES:
        raise TornBatch(0, f"a high watermark has {WATERMARK_BYTES} bytes, not {len(data)}")
    magic, crc, *values = _WATERMARK.unpack(data)
    if magic != WATERMARK_MAGIC or google_crc32c.value(data[8:]) != crc:
        raise CorruptBatch(0, "damaged high watermark")
    return Watermark(*values)
