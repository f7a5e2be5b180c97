"""MQTT 5.0 properties (section 2.2.2).

Decoders return only values that the standard allows, or raise `MQTTError`: 0x81 for data that cannot be parsed, 0x82
for values that are not allowed, 0x94 for topic alias 0. They read no byte at or beyond ``end``. Encoders trust their
caller.

`PROPERTIES` is the only description of the properties: it drives `decode_properties` and `encode_properties`, and the
tests hold the faster `decode_publish_properties` to it.
"""

from __future__ import annotations

from typing import Final, cast

from mqttbroker.codec.data_types import (
    decode_binary,
    decode_utf8,
    decode_varint,
    encode_binary,
    encode_utf8,
    encode_varint,
)
from mqttbroker.codec.reason_codes import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    MALFORMED_PACKET,
    PROTOCOL_ERROR,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    TOPIC_ALIAS_INVALID,
    UNSUBACK,
    UNSUBSCRIBE,
    MQTTError,
)

WILL: Final = 0  # stands for the Will Properties of CONNECT among the packet types

# Types of values. The first three are also the width in bytes.
BYTE: Final = 1  # 0 or 1 in every property
TWO_BYTES: Final = 2
FOUR_BYTES: Final = 4
VARINT: Final = 5
STRING: Final = 6
TOPIC_NAME: Final = 7
BINARY: Final = 8
STRING_PAIR: Final = 9

_ACKS: Final = (CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH)
_ALL: Final = (CONNECT, PUBLISH, WILL, SUBSCRIBE, UNSUBSCRIBE) + _ACKS


class Property:
    """One row of `PROPERTIES`: a property's name in the standard, type, and the packets it may stand in.

    ``repeatable`` names the packets in which it may stand more than once, and ``zero_error`` the reason code for the
    value 0 where that is not allowed. Its value is in `Properties` under ``attribute``.
    """

    def __init__(
        self,
        identifier: int,
        name: str,
        kind: int,
        packets: tuple[int, ...],
        repeatable: tuple[int, ...] = (),
        attribute: str = "",
        zero_error: int = 0,
    ) -> None:
        self.identifier = identifier
        self.name = name
        self.kind = kind
        self.packets = packets
        self.repeatable = repeatable
        self.attribute: str = attribute or name.lower().replace(" ", "_")
        self.zero_error = zero_error
        self.id_byte: bytes = identifier.to_bytes(1, "big")
        self.is_list: bool = bool(repeatable)


# MQTT 5.0 table 2-4, in ascending order of identifiers.
PROPERTIES: Final[list[Property]] = [
    Property(0x01, "Payload Format Indicator", BYTE, (PUBLISH, WILL)),
    Property(0x02, "Message Expiry Interval", FOUR_BYTES, (PUBLISH, WILL)),
    Property(0x03, "Content Type", STRING, (PUBLISH, WILL)),
    Property(0x08, "Response Topic", TOPIC_NAME, (PUBLISH, WILL)),
    Property(0x09, "Correlation Data", BINARY, (PUBLISH, WILL)),
    Property(
        0x0B, "Subscription Identifier", VARINT, (PUBLISH, SUBSCRIBE), (PUBLISH,),
        attribute="subscription_identifiers", zero_error=PROTOCOL_ERROR,
    ),
    Property(0x11, "Session Expiry Interval", FOUR_BYTES, (CONNECT, CONNACK, DISCONNECT)),
    Property(0x12, "Assigned Client Identifier", STRING, (CONNACK,)),
    Property(0x13, "Server Keep Alive", TWO_BYTES, (CONNACK,)),
    Property(0x15, "Authentication Method", STRING, (CONNECT, CONNACK, AUTH)),
    Property(0x16, "Authentication Data", BINARY, (CONNECT, CONNACK, AUTH)),
    Property(0x17, "Request Problem Information", BYTE, (CONNECT,)),
    Property(0x18, "Will Delay Interval", FOUR_BYTES, (WILL,)),
    Property(0x19, "Request Response Information", BYTE, (CONNECT,)),
    Property(0x1A, "Response Information", STRING, (CONNACK,)),
    Property(0x1C, "Server Reference", STRING, (CONNACK, DISCONNECT)),
    Property(0x1F, "Reason String", STRING, _ACKS),
    Property(0x21, "Receive Maximum", TWO_BYTES, (CONNECT, CONNACK), zero_error=PROTOCOL_ERROR),
    Property(0x22, "Topic Alias Maximum", TWO_BYTES, (CONNECT, CONNACK)),
    Property(0x23, "Topic Alias", TWO_BYTES, (PUBLISH,), zero_error=TOPIC_ALIAS_INVALID),  # [MQTT-3.3.2-8]
    Property(0x24, "Maximum QoS", BYTE, (CONNACK,)),
    Property(0x25, "Retain Available", BYTE, (CONNACK,)),
    Property(0x26, "User Property", STRING_PAIR, _ALL, _ALL, attribute="user_properties"),
    Property(0x27, "Maximum Packet Size", FOUR_BYTES, (CONNECT, CONNACK), zero_error=PROTOCOL_ERROR),
    Property(0x28, "Wildcard Subscription Available", BYTE, (CONNACK,)),
    Property(0x29, "Subscription Identifier Available", BYTE, (CONNACK,)),
    Property(0x2A, "Shared Subscription Available", BYTE, (CONNACK,)),
]  # fmt: skip

# The identifiers with special handling in the decoders of PUBLISH and Will Properties.
PAYLOAD_FORMAT_INDICATOR: Final = 0x01
MESSAGE_EXPIRY_INTERVAL: Final = 0x02
SUBSCRIPTION_IDENTIFIER: Final = 0x0B
WILL_DELAY_INTERVAL: Final = 0x18
TOPIC_ALIAS: Final = 0x23


def _rows_by_id() -> list[Property | None]:
    rows: list[Property | None] = [None] * 256
    for row in PROPERTIES:
        rows[row.identifier] = row
    return rows


def _rows_by_packet_type() -> list[list[Property]]:
    return [[row for row in PROPERTIES if packet_type in row.packets] for packet_type in range(16)]


def _kinds() -> bytes:
    kinds = bytearray(256)
    for row in PROPERTIES:
        kinds[row.identifier] = row.kind
    return bytes(kinds)


def _masks(repeatable: bool) -> list[int]:
    masks = [0] * 16
    for row in PROPERTIES:
        for packet_type in row.repeatable if repeatable else row.packets:
            masks[packet_type] |= 1 << row.identifier
    return masks


_ROWS: Final = _rows_by_id()
_ROWS_OF: Final = _rows_by_packet_type()
_KINDS: Final = _kinds()  # by identifier; 0 = no such property
_LEGAL: Final = _masks(False)  # bits of identifiers by packet type
_REPEATABLE: Final = _masks(True)  # likewise


class Properties:
    """The properties of one packet, each under its name in the standard.

    Absent numbers are -1, absent strings and binary data None. The two that may repeat are lists, in the packet's
    order.
    """

    def __init__(self) -> None:
        self.payload_format_indicator: int = -1
        self.message_expiry_interval: int = -1  # seconds
        self.content_type: str | None = None
        self.response_topic: str | None = None
        self.correlation_data: bytes | None = None
        self.subscription_identifiers: list[int] = []
        self.session_expiry_interval: int = -1  # seconds; 0xFFFFFFFF = never
        self.assigned_client_identifier: str | None = None
        self.server_keep_alive: int = -1  # seconds
        self.authentication_method: str | None = None
        self.authentication_data: bytes | None = None
        self.request_problem_information: int = -1
        self.will_delay_interval: int = -1  # seconds
        self.request_response_information: int = -1
        self.response_information: str | None = None
        self.server_reference: str | None = None
        self.reason_string: str | None = None
        self.receive_maximum: int = -1
        self.topic_alias_maximum: int = -1
        self.topic_alias: int = -1
        self.maximum_qos: int = -1
        self.retain_available: int = -1
        self.user_properties: list[tuple[str, str]] = []
        self.maximum_packet_size: int = -1  # bytes
        self.wildcard_subscription_available: int = -1
        self.subscription_identifier_available: int = -1
        self.shared_subscription_available: int = -1

    def __repr__(self) -> str:
        values = [(row.attribute, getattr(self, row.attribute)) for row in PROPERTIES]
        return f"Properties({', '.join(f'{name}={value!r}' for name, value in values if value not in (None, -1, []))})"


class PublishProperties:
    """The properties of a PUBLISH from a client, as far as the broker needs them.

    ``forward`` holds the properties that subscribers receive, encoded in the publisher's order and without length
    prefix: all but topic alias and message expiry interval.
    """

    def __init__(self, forward: bytes, topic_alias: int, message_expiry: int, payload_format: int, end: int) -> None:
        self.forward = forward
        self.topic_alias = topic_alias  # 0 = none
        self.message_expiry = message_expiry  # seconds; -1 = none
        self.payload_format = payload_format  # 1 = UTF-8; 0 = unspecified
        self.end = end  # position after the properties
        self._without_alias = b""

    def without_alias(self) -> bytes:
        """All properties but the topic alias, with length prefix, for a PUBLISH with a topic name."""
        if not self._without_alias:
            properties = self.forward
            if self.message_expiry >= 0:
                properties += b"\x02" + self.message_expiry.to_bytes(4, "big")
            self._without_alias = encode_varint(len(properties)) + properties
        return self._without_alias


def _decode_number(data: bytes, pos: int, end: int, kind: int) -> tuple[int, int]:
    if kind == VARINT:
        return decode_varint(data, pos, end)
    stop = pos + kind
    if stop > end:
        raise MQTTError(MALFORMED_PACKET, "packet ends inside a property")
    value = 0
    while pos < stop:
        value = value << 8 | data[pos]
        pos += 1
    return value, pos


def _check_number(row: Property, value: int) -> None:
    """Raise MQTTError for a number that can be encoded but is not allowed."""
    if value == 0 and row.zero_error:
        raise MQTTError(row.zero_error, f"{row.name} is 0")
    if value > 1 and row.kind == BYTE:
        raise MQTTError(PROTOCOL_ERROR, f"{row.name} is {value}")


def _check_topic_name(row: Property, topic: str) -> None:
    if topic == "":
        raise MQTTError(PROTOCOL_ERROR, f"empty {row.name}")  # [MQTT-4.7.3-1]
    if "+" in topic or "#" in topic:
        raise MQTTError(PROTOCOL_ERROR, f"wildcard in {row.name}")  # [MQTT-3.3.2-14]


def _section(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """The position of the first property, and the end of the last."""
    length, pos = decode_varint(data, pos, end)
    stop = pos + length
    if stop > end:
        raise MQTTError(MALFORMED_PACKET, "properties reach beyond the packet")
    return pos, stop


def _property_at(data: bytes, pos: int, packet_type: int, seen: int) -> Property:
    """The property whose identifier is at ``pos``; ``seen`` has the bits of those before it in the packet."""
    identifier: int = data[pos]
    row = _ROWS[identifier]
    if row is None:
        raise MQTTError(MALFORMED_PACKET, f"unknown property 0x{identifier:02X}")
    bit = 1 << identifier
    if _LEGAL[packet_type] & bit == 0:
        raise MQTTError(MALFORMED_PACKET, f"{row.name} is not legal in this packet")
    if seen & bit and _REPEATABLE[packet_type] & bit == 0:
        raise MQTTError(PROTOCOL_ERROR, f"{row.name} more than once")
    return row


def decode_properties(data: bytes, pos: int, end: int, packet_type: int) -> tuple[Properties, int]:
    """Decode properties with their length prefix; returns them and the position after them.

    ``packet_type`` is 1 to 15, or ``WILL``.
    """
    properties = Properties()
    pos, stop = _section(data, pos, end)
    seen = 0
    while pos < stop:
        row = _property_at(data, pos, packet_type, seen)
        seen |= 1 << row.identifier
        value, pos = _decode_value(row, data, pos + 1, stop)
        if row.is_list:
            cast(list[object], getattr(properties, row.attribute)).append(value)
        else:
            setattr(properties, row.attribute, value)
    if properties.authentication_data is not None and properties.authentication_method is None:
        raise MQTTError(PROTOCOL_ERROR, "Authentication Data without Authentication Method")
    return properties, pos


def _decode_value(row: Property, data: bytes, pos: int, end: int) -> tuple[object, int]:
    kind = row.kind
    if kind <= VARINT:
        number, pos = _decode_number(data, pos, end, kind)
        _check_number(row, number)
        return number, pos
    if kind == BINARY:
        return decode_binary(data, pos, end)
    text, pos = decode_utf8(data, pos, end)
    if kind == STRING_PAIR:
        value, pos = decode_utf8(data, pos, end)  # [MQTT-1.5.7-1]
        return (text, value), pos
    if kind == TOPIC_NAME:
        _check_topic_name(row, text)
    return text, pos


def encode_properties(properties: Properties, packet_type: int) -> bytes:
    """Encode those properties that are legal in a packet type (or ``WILL``), with the length prefix.

    They are in ascending order of their identifiers.
    """
    out: list[bytes] = []
    for row in _ROWS_OF[packet_type]:
        value: object = getattr(properties, row.attribute)
        kind = row.kind
        if row.is_list:
            for item in cast(list[object], value):  # [MQTT-3.3.2-18]
                out.append(row.id_byte + _encode_value(kind, item))
        elif kind <= FOUR_BYTES:
            number = cast(int, value)
            if number >= 0:
                out.append(row.id_byte + number.to_bytes(kind, "big"))
        elif value is not None:
            out.append(row.id_byte + _encode_value(kind, value))
    if not out:
        return b"\x00"  # [MQTT-2.2.2-1]
    body = b"".join(out)
    return encode_varint(len(body)) + body


def _encode_value(kind: int, value: object) -> bytes:
    if kind == VARINT:
        return encode_varint(cast(int, value))
    if kind == BINARY:
        return encode_binary(cast(bytes, value))
    if kind == STRING_PAIR:
        name, text = cast(tuple[str, str], value)
        return encode_utf8(name) + encode_utf8(text)
    return encode_utf8(cast(str, value))


def decode_publish_properties(data: bytes, pos: int, end: int) -> PublishProperties:
    """Decode the properties, with their length prefix, of a PUBLISH from a client.

    A Subscription Identifier is a protocol error here [MQTT-3.3.4-6].
    """
    pos, stop = _section(data, pos, end)
    forward = b""
    copy_from = pos  # start of the bytes that are not in ``forward`` yet
    topic_alias = 0
    message_expiry = -1
    payload_format = 0
    seen = 0
    while pos < stop:
        start = pos
        row = _property_at(data, pos, PUBLISH, seen)
        identifier = row.identifier
        kind = row.kind
        pos += 1
        seen |= 1 << identifier
        if kind == BINARY:
            _binary, pos = decode_binary(data, pos, stop)
        elif kind >= STRING:
            text, pos = decode_utf8(data, pos, stop)
            if kind == STRING_PAIR:
                _text, pos = decode_utf8(data, pos, stop)
            elif kind == TOPIC_NAME:
                _check_topic_name(row, text)
        else:
            if identifier == SUBSCRIPTION_IDENTIFIER:
                raise MQTTError(PROTOCOL_ERROR, "Subscription Identifier from a client")
            number, pos = _decode_number(data, pos, stop, kind)
            _check_number(row, number)
            if identifier == PAYLOAD_FORMAT_INDICATOR:
                payload_format = number
                continue
            if identifier == TOPIC_ALIAS:
                topic_alias = number
            else:
                message_expiry = number
            forward += data[copy_from:start]
            copy_from = pos
    forward += data[copy_from:stop]
    return PublishProperties(forward, topic_alias, message_expiry, payload_format, stop)


def forwarded_will_properties(data: bytes, pos: int, end: int) -> bytes:
    """The Will Properties that subscribers receive: all but Will Delay Interval and Message Expiry Interval.

    ``data[pos:end]`` begins with their length and is valid. The result has the client's order and no length prefix.
    """
    pos, stop = _section(data, pos, end)
    forward = b""
    copy_from = pos  # start of the bytes that are not in ``forward`` yet
    while pos < stop:
        start = pos
        identifier: int = data[pos]
        pos += 1
        kind: int = _KINDS[identifier]
        if kind >= STRING:
            _value, pos = decode_binary(data, pos, stop)
            if kind == STRING_PAIR:
                _value, pos = decode_binary(data, pos, stop)
            continue
        pos += kind
        if identifier == WILL_DELAY_INTERVAL or identifier == MESSAGE_EXPIRY_INTERVAL:
            forward += data[copy_from:start]
            copy_from = pos
    return forward + data[copy_from:stop]


def user_property(forward: bytes, name: bytes) -> bytes:
    """The value of the first user property of that name in `PublishProperties.forward`; empty if there is none."""
    pos = 0
    end = len(forward)
    while pos < end:
        identifier: int = forward[pos]
        pos += 1
        kind: int = _KINDS[identifier]
        if kind == BYTE:
            pos += 1
            continue
        size: int = forward[pos] << 8 | forward[pos + 1]
        pos += 2 + size
        if kind == STRING_PAIR:
            length: int = forward[pos] << 8 | forward[pos + 1]
            if forward[pos - size : pos] == name:
                return forward[pos + 2 : pos + 2 + length]
            pos += 2 + length
    return b""
