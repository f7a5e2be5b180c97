"""Decoder of Mosquitto's database file (``mosquitto.db``), in the formats 5 and 6 that Mosquitto 1.6 to 2.1 write.

The file is a header and chunks (`src/persist.h` of Mosquitto 2.1). Lengths and packet ids are big-endian; 64-bit numbers
have the byte order of the machine that wrote them, little-endian here, as on x86 and ARM.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from mqttbroker.codec.data_types import decode_varint
from mqttbroker.codec.properties import decode_publish_properties
from mqttbroker.codec.reason_codes import MQTTError

MAGIC: Final = b"\x00\xb5\x00mosquitto db"
SUPPORTED: Final = (5, 6)

# Chunks, as `DB_CHUNK_*`.
_CONFIGURATION: Final = 1
_MESSAGE: Final = 2
_CLIENT_MESSAGE: Final = 3
_RETAIN: Final = 4
_SUBSCRIPTION: Final = 5
_CLIENT: Final = 6

_HEADER = struct.Struct(">II")
_CLIENT_V5 = struct.Struct("<q4s2s2s")
_CLIENT_V6 = struct.Struct("<q4s2s2s2s2s4x")
_CLIENT_MESSAGE_FIELDS = struct.Struct("<Q2s2sBBBB")
_MESSAGE_FIELDS = struct.Struct("<Qq4s2s2s2s2s2sBB")
_SUBSCRIPTION_FIELDS = struct.Struct("<4s2s2sBB2x")
_STORE_ID = struct.Struct("<Q")

# States of a message to or from a client, as `mosq_ms_*`.
WAIT_FOR_PUBACK: Final = 3
WAIT_FOR_PUBREC: Final = 5
RESEND_PUBREL: Final = 6
WAIT_FOR_PUBREL: Final = 7
WAIT_FOR_PUBCOMP: Final = 9


class DatabaseError(Exception):
    """The file cannot be read; the text says where and why, without the file's name."""


class Client(NamedTuple):
    """A session. Times are Unix seconds; ``expires_at`` is 0 for a client that was connected."""

    client_id: str
    username: str
    expires_at: int
    expiry_interval: int


class StoredMessage(NamedTuple):
    """A message; ``expires_at`` is in Unix seconds, 0 if it never expires, and ``properties`` are those to forward."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    publisher: str
    properties: bytes
    expires_at: int


class ClientMessage(NamedTuple):
    """A message that a client sent (``incoming``) or is to get; ``packet_id`` is 0 if it was never sent."""

    client_id: str
    store_id: int
    packet_id: int
    qos: int
    state: int
    retain: bool
    incoming: bool
    subscription_id: int


class ClientSubscription(NamedTuple):
    """A subscription; ``options`` is the byte on the wire."""

    client_id: str
    topic_filter: str
    options: int
    identifier: int


class Database(NamedTuple):
    """The contents of a file, in its order; ``retained`` are ids of ``messages``."""

    clients: list[Client]
    messages: dict[int, StoredMessage]
    client_messages: list[ClientMessage]
    subscriptions: list[ClientSubscription]
    retained: list[int]


def decode_database(data: bytes) -> Database:
    """Raises `DatabaseError`."""
    if data[: len(MAGIC)] != MAGIC:
        raise DatabaseError("not a database of Mosquitto")
    at = len(MAGIC) + 4  # behind a checksum that is never set
    if len(data) < at + 4:
        raise DatabaseError(f"byte {len(data)}: the header is cut off")
    version = int.from_bytes(data[at : at + 4], "big")
    if version not in SUPPORTED:
        raise DatabaseError(f"format {version}, not one of 5 and 6: start and stop Mosquitto 2 once, which converts it")
    at += 4
    found = Database([], {}, [], [], [])
    while at < len(data):
        if at + _HEADER.size > len(data):
            raise DatabaseError(f"byte {at}: a chunk is cut off")
        kind, size = _HEADER.unpack_from(data, at)
        chunk = data[at + _HEADER.size : at + _HEADER.size + size]
        if len(chunk) < size:
            raise DatabaseError(f"byte {at}: a chunk is cut off")
        try:
            _decode_chunk(found, kind, chunk, version)
        except (struct.error, UnicodeDecodeError, MQTTError, _Short) as error:
            raise DatabaseError(f"byte {at}: a chunk of type {kind} is damaged: {error}") from error
        at += _HEADER.size + size
    return found


class _Short(Exception):
    def __init__(self) -> None:
        super().__init__("it ends early")


class _Chunk:
    """Reads a chunk from its beginning to its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        """Byte strings in the layout are big-endian numbers."""
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return tuple(int.from_bytes(value, "big") if isinstance(value, bytes) else value for value in values)

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise _Short
        self._at += size
        return taken

    def text(self, size: int) -> str:
        return self.take(size).decode("utf-8")

    def rest(self) -> bytes:
        return self._data[self._at :]


def _decode_chunk(found: Database, kind: int, data: bytes, version: int) -> None:
    chunk = _Chunk(data)
    if kind == _CLIENT:
        found.clients.append(_decode_client(chunk, version))
    elif kind == _MESSAGE:
        store_id, message = _decode_message(chunk)
        found.messages[store_id] = message
    elif kind == _CLIENT_MESSAGE:
        found.client_messages.append(_decode_client_message(chunk))
    elif kind == _SUBSCRIPTION:
        identifier, id_size, topic_size, qos, options = chunk.fields(_SUBSCRIPTION_FIELDS)
        client_id, topic_filter = chunk.text(id_size), chunk.text(topic_size)
        found.subscriptions.append(ClientSubscription(client_id, topic_filter, options & ~3 | qos, identifier))
    elif kind == _RETAIN:
        found.retained.append(chunk.fields(_STORE_ID)[0])
    elif kind == _CONFIGURATION:
        if len(data) > 9 and data[9] != _STORE_ID.size:
            raise DatabaseError(f"ids of {data[9]} bytes are not supported")


def _decode_client(chunk: _Chunk, version: int) -> Client:
    if version == 5:
        expires_at, expiry_interval, _, id_size = chunk.fields(_CLIENT_V5)
        return Client(chunk.text(id_size), "", expires_at, expiry_interval)
    expires_at, expiry_interval, _, id_size, _, name_size = chunk.fields(_CLIENT_V6)
    return Client(chunk.text(id_size), chunk.text(name_size), expires_at, expiry_interval)


def _decode_message(chunk: _Chunk) -> tuple[int, StoredMessage]:
    store_id, expires_at, payload_size, _, id_size, name_size, topic_size, _, qos, retain = chunk.fields(_MESSAGE_FIELDS)
    publisher = chunk.text(id_size)
    chunk.take(name_size)
    topic = chunk.text(topic_size)
    payload = chunk.take(payload_size)
    encoded = chunk.rest()
    properties = decode_publish_properties(encoded, 0, len(encoded)).forward if encoded else b""
    return store_id, StoredMessage(topic, payload, qos, retain != 0, publisher, properties, expires_at)


def _decode_client_message(chunk: _Chunk) -> ClientMessage:
    store_id, packet_id, id_size, qos, state, flags, direction = chunk.fields(_CLIENT_MESSAGE_FIELDS)
    client_id = chunk.text(id_size)
    encoded = chunk.rest()
    identifier = 0
    if encoded:
        size, at = decode_varint(encoded, 0, len(encoded))
        if size > 1 and encoded[at] == 0x0B:
            identifier, _ = decode_varint(encoded, at + 1, len(encoded))
    return ClientMessage(client_id, store_id, packet_id, qos, state, flags & 0xF0 != 0, direction == 0, identifier)
