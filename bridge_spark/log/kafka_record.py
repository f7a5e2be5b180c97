"""A message of a stream as a record of a Kafka topic.

The value is the payload, the timestamp the time of receipt in milliseconds. Headers, all UTF-8 texts but ``mqtt.correlation_data``:

``mqtt.topic``, ``mqtt.qos``, ``mqtt.retain`` (``true`` or ``false``), ``mqtt.client_id``, ``mqtt.received`` (µs since the Unix epoch)
    in every record
``mqtt.expires`` (µs since the Unix epoch), ``mqtt.payload_format``, ``mqtt.content_type``, ``mqtt.response_topic``, ``mqtt.correlation_data``
    if the message has them
other headers
    the user properties in their order; one whose name begins with ``mqtt.`` stands behind ``mqtt.user.``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sessions.message import Message

PREFIX = "mqtt."
TOPIC = "mqtt.topic"
QOS = "mqtt.qos"
RETAIN = "mqtt.retain"
CLIENT_ID = "mqtt.client_id"
RECEIVED = "mqtt.received"
EXPIRES = "mqtt.expires"
PAYLOAD_FORMAT = "mqtt.payload_format"
CONTENT_TYPE = "mqtt.content_type"
RESPONSE_TOPIC = "mqtt.response_topic"
CORRELATION_DATA = "mqtt.correlation_data"
USER_PREFIX = "mqtt.user."

_QOS = (b"0", b"1", b"2")
_TEXTS = {0x03: CONTENT_TYPE, 0x08: RESPONSE_TOPIC, 0x09: CORRELATION_DATA}  # properties with two bytes of length
_IDENTIFIERS = {name: identifier for identifier, name in _TEXTS.items()}
_USER_PROPERTY = 0x26
_PAYLOAD_FORMAT = 0x01

Headers = Sequence[tuple[str, bytes | None]]


class RecordError(ValueError):
    """The record is none of a stream; the text says why."""


def stream_topic(cluster: str, stream: str) -> str:
    """The Kafka topic of a stream in the cluster with this id."""
    return f"{cluster}.stream.{stream}"


def headers_of(message: Message) -> list[tuple[str, bytes]]:
    """The headers of a message. Raises `RecordError` if its properties are malformed."""
    headers = [
        (TOPIC, message.topic.encode("utf-8")),
        (QOS, _QOS[message.qos]),
        (RETAIN, b"true" if message.retain else b"false"),
        (CLIENT_ID, message.publisher.encode("utf-8")),
        (RECEIVED, str(message.timestamp).encode("ascii")),
    ]
    if message.expires_at:
        headers.append((EXPIRES, str(message.expires_at).encode("ascii")))
    if message.properties:
        headers += _property_headers(message.properties)
    return headers


def _property_headers(data: bytes) -> list[tuple[str, bytes]]:
    own: list[tuple[str, bytes]] = []
    users: list[tuple[str, bytes]] = []
    position = 0
    try:
        while position < len(data):
            identifier = data[position]
            position += 1
            if identifier == _PAYLOAD_FORMAT:
                own.append((PAYLOAD_FORMAT, str(data[position]).encode("ascii")))
                position += 1
            elif identifier in _TEXTS:
                value, position = _binary(data, position)
                own.append((_TEXTS[identifier], value))
            elif identifier == _USER_PROPERTY:
                encoded, position = _binary(data, position)
                value, position = _binary(data, position)
                name = encoded.decode("utf-8")
                users.append((USER_PREFIX + name if name.startswith(PREFIX) else name, value))
            else:
                raise RecordError(f"unknown property 0x{identifier:02x}")
    except (IndexError, UnicodeDecodeError):
        raise RecordError("malformed properties") from None
    return own + users


def _binary(data: bytes, position: int) -> tuple[bytes, int]:
    end = position + 2 + (data[position] << 8 | data[position + 1])
    if end > len(data):
        raise RecordError("malformed properties")
    return data[position + 2 : end], end


class RecordFields(NamedTuple):
    """The values of a record's headers; times in µs since the Unix epoch, ``received`` -1 if there is none."""

    topic: str
    qos: int
    retain: bool
    client_id: str
    received: int
    properties: bytes


def fields_of(headers: Headers) -> RecordFields:
    """The contents of headers that `headers_of` made. Raises `RecordError` for others."""
    found: dict[str, bytes] = {}
    properties: list[bytes] = []
    for name, value in headers:
        content = value or b""
        if not name.startswith(PREFIX):
            properties.append(_user_property(name, content))
        elif name.startswith(USER_PREFIX):
            properties.append(_user_property(name[len(USER_PREFIX) :], content))
        elif name in _IDENTIFIERS:
            properties.append(bytes((_IDENTIFIERS[name],)) + _sized(content))
        elif name == PAYLOAD_FORMAT:
            properties.append(bytes((_PAYLOAD_FORMAT, int(content) & 0xFF)))
        else:
            found.setdefault(name, content)
    try:
        return RecordFields(
            found[TOPIC].decode("utf-8"),
            int(found[QOS]) & 3,
            found[RETAIN] == b"true",
            found[CLIENT_ID].decode("utf-8"),
            int(found[RECEIVED]),
            b"".join(properties) if properties else b"",
        )
    except KeyError as error:
        raise RecordError(f"no header {error}") from None
    except ValueError as error:
        raise RecordError(str(error)) from None


def _user_property(name: str, value: bytes) -> bytes:
    return b"\x26" + _sized(name.encode("utf-8")) + _sized(value)


def _sized(data: bytes) -> bytes:
    if len(data) > 0xFFFF:
        raise RecordError(f"a header of {len(data)} bytes")
    return len(data).to_bytes(2, "big") + data
