"""Chunks of a stream: the rows of record batches, and PUBLISH packets made of them.

A chunk holds whole batches as in a segment (`bridge_spark.log.record_batch` describes the format), wherever they come
from. Rows are read in place, by positions in the bytes, and no object is made for a record.
"""

from __future__ import annotations

from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.frames import encode_fixed_header, two_bytes
from sessions.message import Message

_HEADER: Final = 32  # bytes of the header of a batch
_CHECKED_FROM: Final = 12  # the checksum covers the header from here on, and the body
_QOS: Final = 3
_RETAIN: Final = 4

_TS: Final = b"\x26\x00\x02ts\x00"  # the user property `ts`, up to the second byte of its value's length
_OFFSET: Final = b"\x26\x00\x06offset\x00"

NO_BYTES: Final = b""


def user_property_bytes(name: bytes, value: bytes) -> bytes:
    """An encoded user property (section 3.3.2.3.7); a value that is too long is cut."""
    value = value[:65535]
    return b"\x26" + two_bytes(len(name)) + name + two_bytes(len(value)) + value


class Chunk:
    """Record batches of a partition, from the one with the record ``offset`` on.

    ``data`` begins at byte ``position`` of the segment whose first offset is ``segment``; its last batch may be
    incomplete. With ``made``, the batches were made for this chunk: then ``position`` is where its first batch was, or 0.
    ``source`` names the file in logs. ``users`` counts those that hold it, for `ChunkReads`.
    """

    def __init__(self, data: bytes, offset: int, segment: int, position: int, made: bool, source: str) -> None:
        self.data = data
        self.offset = offset
        self.segment = segment
        self.position = position
        self.made = made
        self.source = source
        self.users = 0


# mypyc frees the weak references to an exception of a native class once too often.
@mypyc_attr(native_class=False)
class DamagedChunk(Exception):
    """The records from ``offset`` up to ``end`` cannot be read; ``end`` is 0 if it is not known."""

    def __init__(self, offset: int, end: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.end = end
        self.reason = reason


class ChunkRows:
    """The rows of a chunk from an offset on, one after the other.

    `next` moves to the next row; the attributes and methods that follow are about that row. ``checksum`` returns the CRC32C of bytes.
    """

    def __init__(self, chunk: Chunk, offset: int, checksum: Any) -> None:
        self.chunk = chunk
        self._checksum = checksum
        self._data: bytes = chunk.data
        self._first: i64 = offset  # rows before it are left out
        self.next_position: i64 = 0  # of the batch behind the current one, in the chunk
        self.next_offset: i64 = offset  # that the next row has at least
        self._remaining: i64 = 0  # rows of the current batch behind the current row
        self.offset: i64 = 0
        self.flags: i64 = 0
        self.payload_size: i64 = 0
        # Positions in the chunk, of the current row or its column.
        self._time_at: i64 = 0
        self._flags_at: i64 = 0
        self._topic_ends: i64 = 0
        self._payload_ends: i64 = 0
        self._client_ends: i64 = 0
        self._property_ends: i64 = 0
        self._topics: i64 = 0
        self._payloads: i64 = 0
        self._clients: i64 = 0
        self._properties: i64 = 0
        self._topic_start: i64 = 0
        self._topic_end: i64 = 0
        self._payload_start: i64 = 0
        self._payload_end: i64 = 0
        self._property_start: i64 = 0
        self._property_end: i64 = 0

    def next(self) -> bool:
        """Move to the next row; false if there is none. Raises DamagedChunk."""
        while self._remaining == 0:
            if not self._next_batch():
                return False
        data = self._data
        self._remaining -= 1
        self.offset = self.next_offset
        self.next_offset += 1
        self._time_at += 8
        self._flags_at += 1
        self.flags = data[self._flags_at]
        self._topic_ends += 4
        self._topic_start = self._topic_end
        self._topic_end = self._topics + _number(data, self._topic_ends)
        self._payload_ends += 4
        self._payload_start = self._payload_end
        self._payload_end = self._payloads + _number(data, self._payload_ends)
        self.payload_size = self._payload_end - self._payload_start
        self._client_ends += 4
        self._property_ends += 4
        self._property_start = self._property_end
        self._property_end = self._properties + _number(data, self._property_ends)
        return True

    def _next_batch(self) -> bool:
        """Move before the first wanted row of the next complete batch; false if there is none."""
        data = self._data
        size: i64 = len(data)
        at: i64 = self.next_position
        if size - at < _HEADER:
            return False
        offset: i64 = self.next_offset
        magic = data[at : at + 4]
        if magic != b"MQB1" and magic != b"MQL1":
            raise DamagedChunk(offset, 0, f"no batch begins at byte {self.chunk.position + at}")
        body: i64 = _number(data, at + 4)
        count: i64 = _number(data, at + 12)
        first: i64 = _number(data, at + 16) | _number(data, at + 20) << 32
        end: i64 = at + _HEADER + body
        if magic == b"MQL1":
            if first + count > offset:
                raise DamagedChunk(max(first, offset), first + count, "the records were lost to damage")
            self.next_position = end
            return True
        if end > size:
            return False
        if self._checksum(data[at + _CHECKED_FROM : end]) != _number(data, at + 8):
            raise DamagedChunk(offset, 0, f"wrong checksum at byte {self.chunk.position + at}")
        self.next_position = end
        if first + count <= offset:
            return True
        if first > offset and not self.chunk.made:
            raise DamagedChunk(offset, first, f"offset {first} where {offset} comes next")
        self._locate_columns(at + _HEADER, end, count, max(0, offset - first))
        self.next_offset = max(first, offset)
        return True

    def _locate_columns(self, at: i64, end: i64, count: i64, skipped: i64) -> None:
        """Set the positions for the row before the first wanted one."""
        data = self._data
        batch = at - _HEADER
        self._time_at = at + (skipped - 1) * 8
        at += count * 8
        self._flags_at = at + skipped - 1
        at += (count + 7) & -8
        offsets_size: i64 = ((count + 1) * 4 + 7) & -8
        starts: list[i64] = []
        column: i64 = 0
        while column < 4:
            if at + offsets_size > end:
                raise self._misfit(batch)
            starts.append(at)
            last: i64 = _number(data, at + count * 4)
            at += offsets_size
            starts.append(at)
            at += (last + 7) & -8
            if at > end:
                raise self._misfit(batch)
            column += 1
        if at != end:
            raise self._misfit(batch)
        self._topic_ends = starts[0] + skipped * 4
        self._topics = starts[1]
        self._payload_ends = starts[2] + skipped * 4
        self._payloads = starts[3]
        self._client_ends = starts[4] + skipped * 4
        self._clients = starts[5]
        self._property_ends = starts[6] + skipped * 4
        self._properties = starts[7]
        self._topic_end = self._topics + _number(data, self._topic_ends)
        self._payload_end = self._payloads + _number(data, self._payload_ends)
        self._property_end = self._properties + _number(data, self._property_ends)
        self._remaining = count - skipped

    def _misfit(self, batch: i64) -> DamagedChunk:
        return DamagedChunk(self.next_offset, 0, f"columns do not fill the batch at byte {self.chunk.position + batch}")

    @property
    def torn(self) -> bool:
        """Whether the chunk ended before a whole batch of it, after `next` returned false."""
        return self.next_position == 0 and self.next_position < len(self._data)

    # -- the current row ------------------------------------------------------

    @property
    def qos(self) -> i64:
        return self.flags & _QOS

    @property
    def retain(self) -> bool:
        return self.flags & _RETAIN != 0

    @property
    def topic(self) -> bytes:
        return self._data[self._topic_start : self._topic_end]

    @property
    def payload(self) -> bytes:
        return self._data[self._payload_start : self._payload_end]

    @property
    def properties(self) -> bytes:
        """The encoded MQTT 5.0 properties, without those of one delivery."""
        return self._data[self._property_start : self._property_end]

    @property
    def client_id(self) -> bytes:
        data = self._data
        ends = self._client_ends
        return data[self._clients + _number(data, ends - 4) : self._clients + _number(data, ends)]

    @property
    def timestamp(self) -> i64:
        """The time of receipt, in µs since the epoch."""
        data = self._data
        return _number(data, self._time_at) | _number(data, self._time_at + 4) << 32

    def place_properties(self) -> bytes:
        """The user properties `ts` and `offset`, encoded."""
        time = str(self.timestamp).encode()
        offset = str(self.offset).encode()
        return b"".join((_TS, _SIZES[len(time)], time, _OFFSET, _SIZES[len(offset)], offset))

    def message(self, properties: bytes) -> Message:
        """The record as a message with other properties."""
        return Message(
            self.topic.decode("utf-8"),
            self.payload,
            self.qos,
            self.retain,
            properties,
            self.client_id.decode("utf-8"),
            self.timestamp,
            0,
        )

    def append_packet(
        self,
        parts: list[bytes],
        version: i64,
        first_byte: i64,
        topic_field: bytes,
        packet_id: i64,
        added: bytes,
        maximum: i64,
    ) -> i64:
        """Append the PUBLISH of this row in pieces; returns its size, 0 if it would exceed ``maximum``.

        ``topic_field`` is the topic with its length, ``added`` encoded properties behind those of the message.
        """
        data = self._data
        remaining: i64 = len(topic_field) + self.payload_size
        if first_byte & 6:
            remaining += 2
        before: bytes = topic_field
        if version >= 5:
            place = self.place_properties()
            stored: i64 = self._property_end - self._property_start
            size: i64 = stored + len(place) + len(added)
            length = _SIZES[size] if size < 128 else encode_varint(size)
            remaining += len(length) + size
            header = encode_fixed_header(first_byte, remaining)
            if len(header) + remaining > maximum:
                return 0
            parts.append(header)
            parts.append(before)
            if first_byte & 6:
                parts.append(two_bytes(packet_id))
            parts.append(length)
            if stored:
                parts.append(data[self._property_start : self._property_end])
            parts.append(place)
            parts.append(added)
        else:
            header = encode_fixed_header(first_byte, remaining)
            if len(header) + remaining > maximum:
                return 0
            parts.append(header)
            parts.append(before)
            if first_byte & 6:
                parts.append(two_bytes(packet_id))
        parts.append(data[self._payload_start : self._payload_end])
        return len(header) + remaining


_SIZES: Final[list[bytes]] = [bytes((size,)) for size in range(128)]


def _number(data: bytes, at: i64) -> i64:
    """The unsigned 32-bit number at a position, little-endian."""
    first: i64 = data[at]
    second: i64 = data[at + 1]
    third: i64 = data[at + 2]
    fourth: i64 = data[at + 3]
    return first | second << 8 | third << 16 | fourth << 24
