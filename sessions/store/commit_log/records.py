"""A write set as the body of a record, and back.

The body is a msgpack array of two: the extents of stream records, which a start reads of all records, and the rows, which it
skips where the tables have them. Rows are lists as `sessions.rows` has them. Each message occurs once, though a queue, the
retained messages and a stream may refer to it by its place in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from types import GenericAlias
from typing import Any, NamedTuple

import msgspec

from sessions.message import Message
from sessions.row_kinds import KINDS
from sessions.rows import EntryKey, EntryRow, EntryUpdate, MessageRow, ReceivedKey, received_key
from sessions.store.interface import Partition
from sessions.write_set import WriteSet, message_rows

# The places of what is not of `KINDS`, which have theirs in that table.
_MESSAGES, _QUEUED, _ENTRIES, _ENTRY_UPDATES, _DELETED_ENTRIES, _RECEIVED, _DELETED_RECEIVED, _STREAMS = 0, 1, 6, 7, 8, 9, 10, 13

_RECORDED = tuple(kind for kind in KINDS if kind.in_record)
_OF_MESSAGES = tuple(kind for kind in _RECORDED if kind.of_messages)


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


def _list_of(items: Any) -> GenericAlias:
    return GenericAlias(list, (items,))


def _types() -> dict[int, Any]:
    """The type of each place in the rows of a record. mypyc keeps no types of a NamedTuple's fields, so rows are plain tuples."""
    packet_ids = list[ReceivedKey | tuple[int, int]]  # older versions wrote session id and packet id
    types: dict[int, Any] = {
        _MESSAGES: list[MessageRow],
        _QUEUED: int,
        _ENTRIES: list[EntryRow],
        _ENTRY_UPDATES: list[EntryUpdate],
        _DELETED_ENTRIES: list[EntryKey],
        _RECEIVED: packet_ids,
        _DELETED_RECEIVED: packet_ids,
        _STREAMS: list[list[int]],
    }
    for kind in _RECORDED:
        types[kind.saved_at] = _list_of(int if kind.of_messages else GenericAlias(tuple, kind.types))
        if kind.removed_at >= 0:
            of_key = tuple(kind.types[kind.columns.index(column)] for column in kind.key)
            types[kind.removed_at] = _list_of(of_key[0] if len(of_key) == 1 else GenericAlias(tuple, of_key))
    return types


_TYPES = _types()
PLACES = len(_TYPES)
# The places that records of all versions have; older ones end before the others.
_ALWAYS = 16


def _places() -> list[int]:
    """For each place in the rows, which of the parts in `_encode_changes` is there."""
    fixed = (_MESSAGES, _QUEUED, _ENTRIES, _ENTRY_UPDATES, _DELETED_ENTRIES, _RECEIVED, _DELETED_RECEIVED, _STREAMS)
    part_of = {place: part for part, place in enumerate(fixed)}
    for kind in _RECORDED:
        part_of[kind.saved_at] = len(fixed) + kind.number
        part_of[kind.removed_at] = len(fixed) + len(KINDS) + kind.number
    return [part_of[place] for place in range(PLACES)]


_in_places = itemgetter(*_places())

# The first `_QUEUED` messages are inserted for the queue; `_STREAMS` has the places of the messages of each extent, and a kind of
# messages those of its own.
_Rows = msgspec.defstruct(
    "_Rows",
    [(f"at_{place}", _TYPES[place], *(() if place < _ALWAYS else (msgspec.field(default_factory=list),))) for place in range(PLACES)],
    array_like=True,
)


_encode = msgspec.msgpack.Encoder().encode
_decode_body = msgspec.msgpack.Decoder(_Body).decode
_decode_rows = msgspec.msgpack.Decoder(_Rows).decode


def encode(write_set: WriteSet, ends: dict[Partition, int]) -> bytes:
    """The body of a record; ``ends`` has the offset of the next record of each partition that the write set writes."""
    return _encode_changes(write_set, write_set.stream_messages, ends)


def encode_rows(write_set: WriteSet) -> bytes:
    """The body of a record without the records of streams."""
    return _encode_changes(write_set, {}, {})


def _encode_changes(write_set: WriteSet, stream_messages: dict[Partition, list[Message]], ends: dict[Partition, int]) -> bytes:
    messages: list[Message] = write_set.messages
    extents: list[tuple[str, int, int, int]] = []
    streams: list[list[int]] = []
    rows = list(write_set.rows)
    kept = [kind for kind in _OF_MESSAGES if write_set.rows[kind.number]]
    if kept or stream_messages:
        places = {id(message): place for place, message in enumerate(messages)}
        messages = list(messages)

        def place_of(message: Message) -> int:
            place = places.setdefault(id(message), len(messages))
            if place == len(messages):
                messages.append(message)
            return place

        for kind in kept:
            rows[kind.number] = [place_of(message) for message in write_set.rows[kind.number]]
        for (stream, partition), records in stream_messages.items():
            first = ends[stream, partition]
            extents.append((stream, partition, first, first + len(records)))
            streams.append([place_of(message) for message in records])
    parts = (
        message_rows(messages),
        len(write_set.messages),
        write_set.entries,
        write_set.entry_updates,
        write_set.deleted_entries,
        write_set.received,
        write_set.deleted_received,
        streams,
        *rows,
        *write_set.removed_keys,
    )
    return _encode((extents, _in_places(parts)))


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
        found: list[Any] = list(msgspec.structs.astuple(_decode_rows(outer.rows)))
        messages = list(map(_message, found[_MESSAGES]))
        write_set = WriteSet()
        write_set.messages = messages[: found[_QUEUED]]
        write_set.entries = found[_ENTRIES]
        write_set.entry_updates = found[_ENTRY_UPDATES]
        write_set.deleted_entries = found[_DELETED_ENTRIES]
        write_set.received = _received_keys(found[_RECEIVED])
        write_set.deleted_received = _received_keys(found[_DELETED_RECEIVED])
        for kind in _RECORDED:
            if kind.of_messages:
                rows = [messages[place] for place in found[kind.saved_at]]
            else:
                rows = list(map(kind.row_type._make, found[kind.saved_at]))
            write_set.rows[kind.number] = rows
            if kind.removed_at >= 0:
                write_set.removed_keys[kind.number] = found[kind.removed_at]
        streams = [
            StreamRecords(stream, partition, first, [messages[place] for place in places])
            for (stream, partition, first, _), places in zip(outer.extents, found[_STREAMS])
        ]
        return write_set, streams
    except (msgspec.MsgspecError, IndexError) as error:
        raise ValueError(f"not a write set: {error}") from None


def _message(row: Sequence[Any]) -> Message:
    message = Message(row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])
    message.id = row[0]
    return message
