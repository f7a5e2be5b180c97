"""A write set as the body of a record, and back.

The body is a msgpack array of two: the extents of stream records, which a start reads of all records, and the rows, which it
skips where the tables have them. Rows are lists as `sessions.rows` has them. Each message occurs once, though a queue, the
retained messages and a stream may refer to it by its place in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from sessions.message import Message
from sessions.rows import (
    EntryKey,
    EntryRow,
    EntryUpdate,
    MessageRow,
    OffsetsRow,
    ProducerKey,
    ProducerRow,
    ReaderRow,
    ReceivedKey,
    SessionRow,
    SubscriptionKey,
    SubscriptionRow,
    received_key,
)
from sessions.store.interface import Partition
from sessions.write_set import WriteSet, message_rows

# mypyc keeps no types of a NamedTuple's fields, so msgspec decodes plain tuples.
_SessionRow = tuple[int, str, int, int, float | None, bytes | None, float | None, str | None, str | None, str | None]
_SubscriptionRow = tuple[int, str, int, int, int]
_ProducerRow = tuple[str, str, str, int, bytes, int]
_ReaderRow = tuple[int, int, int, str, str, str, str, int, int]
_OffsetsRow = tuple[int, int, int, int, bytes]


class StreamExtent(NamedTuple):
    """The place of records of one partition."""

    stream: str
    partition: int
    first_offset: int
    end_offset: int


class StreamRecords(NamedTuple):
    """Records of one partition, and the offset of the first."""

    stream: str
    partition: int
    first_offset: int
    messages: list[Message]


class _Body(msgspec.Struct, array_like=True):
    """``rows`` are `_Rows`, not decoded."""

    extents: list[tuple[str, int, int, int]]
    rows: msgspec.Raw


class _Rows(msgspec.Struct, array_like=True):
    """``queued`` messages at the beginning of ``messages`` are inserted for the queue; ``streams`` has the places of the
    messages of each extent. Records of older versions end before the fields that have a default."""

    messages: list[MessageRow]
    queued: int
    deleted_sessions: list[int]
    sessions: list[_SessionRow]
    subscriptions: list[_SubscriptionRow]
    deleted_subscriptions: list[SubscriptionKey]
    entries: list[EntryRow]
    entry_updates: list[EntryUpdate]
    deleted_entries: list[EntryKey]
    received: list[ReceivedKey | tuple[int, int]]  # older versions wrote session id and packet id
    deleted_received: list[ReceivedKey | tuple[int, int]]
    retained: list[int]
    deleted_retained: list[str]
    streams: list[list[int]]
    deleted_producers: list[ProducerKey]
    producers: list[_ProducerRow]
    deleted_readers: list[int] = []
    readers: list[_ReaderRow] = []
    offsets: list[_OffsetsRow] = []


_encode = msgspec.msgpack.Encoder().encode
_decode_body = msgspec.msgpack.Decoder(_Body).decode
_decode_rows = msgspec.msgpack.Decoder(_Rows).decode


def encode(write_set: WriteSet, ends: dict[Partition, int]) -> bytes:
    """The body of a record; ``ends`` has the offset of the next record of each partition that the write set writes."""
    messages: list[Message] = write_set.messages
    retained: list[int] = []
    extents: list[tuple[str, int, int, int]] = []
    streams: list[list[int]] = []
    if write_set.retained or write_set.stream_messages:
        places = {id(message): place for place, message in enumerate(messages)}
        messages = list(messages)

        def place_of(message: Message) -> int:
            place = places.setdefault(id(message), len(messages))
            if place == len(messages):
                messages.append(message)
            return place

        retained = [place_of(message) for message in write_set.retained]
        for (stream, partition), records in write_set.stream_messages.items():
            first = ends[stream, partition]
            extents.append((stream, partition, first, first + len(records)))
            streams.append([place_of(message) for message in records])
    rows = (
        message_rows(messages),
        len(write_set.messages),
        write_set.deleted_sessions,
        write_set.sessions,
        write_set.subscriptions,
        write_set.deleted_subscriptions,
        write_set.entries,
        write_set.entry_updates,
        write_set.deleted_entries,
        write_set.received,
        write_set.deleted_received,
        retained,
        write_set.deleted_retained,
        streams,
        write_set.deleted_producers,
        write_set.producers,
        write_set.deleted_readers,
        write_set.readers,
        write_set.offsets,
    )
    return _encode((extents, rows))


def decode_extents(body: bytes) -> list[StreamExtent]:
    """The places of the stream records. Raises `ValueError` if the bytes are no body of a record."""
    try:
        return list(map(StreamExtent._make, _decode_body(body).extents))
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a write set: {error}") from None


def _received_keys(found: Sequence[ReceivedKey | tuple[int, int]]) -> list[ReceivedKey]:
    return [key if isinstance(key, int) else received_key(*key) for key in found]


def decode(body: bytes) -> tuple[WriteSet, list[StreamRecords]]:
    """The write set, whose ``stream_messages`` are empty, and the records of its streams.

    Raises `ValueError` if the bytes are no body of a record.
    """
    try:
        outer = _decode_body(body)
        found = _decode_rows(outer.rows)
        messages = list(map(_message, found.messages))
        write_set = WriteSet()
        write_set.messages = messages[: found.queued]
        write_set.deleted_sessions = found.deleted_sessions
        write_set.sessions = list(map(SessionRow._make, found.sessions))
        write_set.subscriptions = list(map(SubscriptionRow._make, found.subscriptions))
        write_set.deleted_subscriptions = found.deleted_subscriptions
        write_set.entries = found.entries
        write_set.entry_updates = found.entry_updates
        write_set.deleted_entries = found.deleted_entries
        write_set.received = _received_keys(found.received)
        write_set.deleted_received = _received_keys(found.deleted_received)
        write_set.retained = [messages[place] for place in found.retained]
        write_set.deleted_retained = found.deleted_retained
        write_set.deleted_producers = found.deleted_producers
        write_set.producers = list(map(ProducerRow._make, found.producers))
        write_set.deleted_readers = found.deleted_readers
        write_set.readers = list(map(ReaderRow._make, found.readers))
        write_set.offsets = list(map(OffsetsRow._make, found.offsets))
        streams = [
            StreamRecords(stream, partition, first, [messages[place] for place in places])
            for (stream, partition, first, _), places in zip(outer.extents, found.streams)
        ]
        return write_set, streams
    except (msgspec.MsgspecError, IndexError) as error:
        raise ValueError(f"not a write set: {error}") from None


def _message(row: Sequence[Any]) -> Message:
    message = Message(row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])
    message.id = row[0]
    return message
