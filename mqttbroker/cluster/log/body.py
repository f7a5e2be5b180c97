"""The body of a record of changes: a write set, the marks that it stores, and the messages that it publishes.

The body is a msgpack array of three: the changes, as bytes of `sessions.store.commit_log.records` (empty if there are none);
the marks; the sections of published messages. A section has the topics and the rest of its messages apart, so that a reader
passes over a message that it does not want at the cost of its topic.

The name of a section says where its messages go: "" = to all shards, ``$share/NAME/FILTER`` = to a member of that shared subscription
in the shard that is its partition, any other without ``$`` = to a partition of the stream of this name.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from sessions.message import Message
from sessions.row_kinds import MARKS
from sessions.rows import MarkRow
from sessions.store.commit_log.records import decode, encode_rows
from sessions.write_set import TO_ALL, TO_MEMBER, TO_OTHERS, TO_STREAM, WriteSet

_Row = tuple[bytes, int, bool, bytes, str, int, int]


_Mark = tuple[int, int, int, int, bytes, int, bool]


class _Section(msgspec.Struct, array_like=True):
    name: str
    partition: int
    topics: list[bytes]
    retained: list[int]
    rows: memoryview  # a msgpack array; as bytes, it is passed over at once


class _Changes(msgspec.Struct, array_like=True):
    changes: bytes
    marks: list[_Mark]


class _Published(msgspec.Struct, array_like=True):
    changes: memoryview
    marks: list[_Mark]
    sections: list[_Section]


_ALL: Final = ""
_SHARED_PREFIX: Final = "$share/"


class Section:
    """Published messages: ``topics`` are those of all messages, ``retained`` the indexes of those with the RETAIN flag.

    ``destination`` is one of `TO_ALL` … `TO_OTHERS`; ``name`` is that of the stream with its ``partition``, or "name/filter" of the
    shared subscription with the shard of the member.
    """

    def __init__(self, found: _Section) -> None:
        self.name = found.name
        self.partition = found.partition
        if found.name == _ALL:
            self.destination = TO_ALL
        elif found.name.startswith(_SHARED_PREFIX):
            self.destination = TO_MEMBER
            self.name = found.name[len(_SHARED_PREFIX) :]
        else:
            self.destination = TO_OTHERS if found.name.startswith("$") else TO_STREAM
        self.topics = found.topics
        self.retained = found.retained
        self._encoded = found.rows
        self._rows: list[msgspec.Raw] | None = None

    def message(self, index: int) -> Message:
        """A new `Message`, decoded now. Raises `ValueError` if the bytes are no message."""
        try:
            if self._rows is None:
                self._rows = _decode_rows(self._encoded)
            return Message(self.topics[index].decode("utf-8"), *_decode_row(self._rows[index]))
        except (msgspec.MsgspecError, IndexError) as error:
            raise ValueError(f"not a message: {error}") from None


class Published(NamedTuple):
    """The part of a body that other shards read."""

    marks: list[MarkRow]
    sections: list[Section]


_encode = msgspec.msgpack.Encoder().encode
_decode_changes = msgspec.msgpack.Decoder(_Changes).decode
_decode_published = msgspec.msgpack.Decoder(_Published).decode
_decode_rows = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_row = msgspec.msgpack.Decoder(_Row).decode


def encode_body(write_set: WriteSet) -> bytes:
    """The body for a write set, of which pages and queries are no part."""
    sections: dict[tuple[str, int], list[Message]] = write_set.stream_messages
    if write_set.bus is not None:
        sections = {**write_set.bus.to_members, **sections}
        if write_set.bus.to_all:
            sections[_ALL, 0] = write_set.bus.to_all
    changes = encode_rows(write_set) if write_set.has_rows() else b""
    return _encode((changes, write_set.saved(MARKS), _sections(sections)))


def _sections(messages_by_place: dict[tuple[str, int], list[Message]]) -> list[tuple[Any, ...]]:
    return [
        (
            name,
            partition,
            [message.topic.encode("utf-8") for message in messages],
            [index for index, message in enumerate(messages) if message.retain],
            _encode(
                [
                    (
                        message.payload,
                        message.qos,
                        message.retain,
                        message.properties,
                        message.publisher,
                        message.timestamp,
                        message.expires_at,
                    )
                    for message in messages
                ]
            ),
        )
        for (name, partition), messages in messages_by_place.items()
    ]


def changes_of(body: bytes) -> tuple[WriteSet | None, list[MarkRow]]:
    """The changes of the shard's rows, None if there are none, and its marks. Raises `ValueError` if the bytes are no body."""
    try:
        found = _decode_changes(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a write set: {error}") from None
    return decode(found.changes)[0] if found.changes else None, [MarkRow(*mark) for mark in found.marks]


def published_of(body: bytes | memoryview) -> Published:
    """The marks and the published messages. Raises `ValueError` if the bytes are no body."""
    try:
        found = _decode_published(body)
        return Published([MarkRow(*mark) for mark in found.marks], [Section(each) for each in found.sections])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a write set: {error}") from None
