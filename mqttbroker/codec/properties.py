"""MQTT 5.0 properties and the wire forms they are made of.

The rule: bytes that break the standard never become a value. Everything decoded here is in
range, legal in its packet and, where it is text, free of control characters, or ``MQTTError``
names the code of the standard: 0x81 for what cannot be parsed, 0x82 for what is not allowed,
0x94 for topic alias 0. No byte at or beyond ``end`` is ever looked at. Encoders trust their
caller's values.
"""

from __future__ import annotations

import re
from typing import Final, Optional

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

WILL: Final = 0  # the Will Properties of CONNECT, beside the real packet types
MAX_VARINT: Final = 268_435_455

PAYLOAD_FORMAT_INDICATOR: Final = 0x01
MESSAGE_EXPIRY_INTERVAL: Final = 0x02
CONTENT_TYPE: Final = 0x03
RESPONSE_TOPIC: Final = 0x08
CORRELATION_DATA: Final = 0x09
SUBSCRIPTION_IDENTIFIER: Final = 0x0B
SESSION_EXPIRY_INTERVAL: Final = 0x11
ASSIGNED_CLIENT_IDENTIFIER: Final = 0x12
SERVER_KEEP_ALIVE: Final = 0x13
AUTHENTICATION_METHOD: Final = 0x15
AUTHENTICATION_DATA: Final = 0x16
REQUEST_PROBLEM_INFORMATION: Final = 0x17
WILL_DELAY_INTERVAL: Final = 0x18
REQUEST_RESPONSE_INFORMATION: Final = 0x19
RESPONSE_INFORMATION: Final = 0x1A
SERVER_REFERENCE: Final = 0x1C
REASON_STRING: Final = 0x1F
RECEIVE_MAXIMUM: Final = 0x21
TOPIC_ALIAS_MAXIMUM: Final = 0x22
TOPIC_ALIAS: Final = 0x23
MAXIMUM_QOS: Final = 0x24
RETAIN_AVAILABLE: Final = 0x25
USER_PROPERTY: Final = 0x26
MAXIMUM_PACKET_SIZE: Final = 0x27
WILDCARD_SUBSCRIPTION_AVAILABLE: Final = 0x28
SUBSCRIPTION_IDENTIFIER_AVAILABLE: Final = 0x29
SHARED_SUBSCRIPTION_AVAILABLE: Final = 0x2A

# Kinds of values; the first three are also their width in bytes.
BYTE: Final = 1
TWO_BYTES: Final = 2
FOUR_BYTES: Final = 4
VARINT: Final = 5
STRING: Final = 6
BINARY: Final = 7
STRING_PAIR: Final = 8

_ACKS: Final = (CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH)

# id -> (name, kind, packets it is legal in): MQTT 5.0 table 2-4.
TABLE: Final[dict[int, tuple[str, int, tuple[int, ...]]]] = {
    0x01: ("Payload Format Indicator", BYTE, (PUBLISH, WILL)),
    0x02: ("Message Expiry Interval", FOUR_BYTES, (PUBLISH, WILL)),
    0x03: ("Content Type", STRING, (PUBLISH, WILL)),
    0x08: ("Response Topic", STRING, (PUBLISH, WILL)),
    0x09: ("Correlation Data", BINARY, (PUBLISH, WILL)),
    0x0B: ("Subscription Identifier", VARINT, (PUBLISH, SUBSCRIBE)),
    0x11: ("Session Expiry Interval", FOUR_BYTES, (CONNECT, CONNACK, DISCONNECT)),
    0x12: ("Assigned Client Identifier", STRING, (CONNACK,)),
    0x13: ("Server Keep Alive", TWO_BYTES, (CONNACK,)),
    0x15: ("Authentication Method", STRING, (CONNECT, CONNACK, AUTH)),
    0x16: ("Authentication Data", BINARY, (CONNECT, CONNACK, AUTH)),
    0x17: ("Request Problem Information", BYTE, (CONNECT,)),
    0x18: ("Will Delay Interval", FOUR_BYTES, (WILL,)),
    0x19: ("Request Response Information", BYTE, (CONNECT,)),
    0x1A: ("Response Information", STRING, (CONNACK,)),
    0x1C: ("Server Reference", STRING, (CONNACK, DISCONNECT)),
    0x1F: ("Reason String", STRING, _ACKS),
    0x21: ("Receive Maximum", TWO_BYTES, (CONNECT, CONNACK)),
    0x22: ("Topic Alias Maximum", TWO_BYTES, (CONNECT, CONNACK)),
    0x23: ("Topic Alias", TWO_BYTES, (PUBLISH,)),
    0x24: ("Maximum QoS", BYTE, (CONNACK,)),
    0x25: ("Retain Available", BYTE, (CONNACK,)),
    0x26: ("User Property", STRING_PAIR, (CONNECT, PUBLISH, WILL, SUBSCRIBE, UNSUBSCRIBE) + _ACKS),
    0x27: ("Maximum Packet Size", FOUR_BYTES, (CONNECT, CONNACK)),
    0x28: ("Wildcard Subscription Available", BYTE, (CONNACK,)),
    0x29: ("Subscription Identifier Available", BYTE, (CONNACK,)),
    0x2A: ("Shared Subscription Available", BYTE, (CONNACK,)),
}


def _kinds() -> bytes:
    kinds = bytearray(0x2B)
    for identifier, row in TABLE.items():
        kinds[identifier] = row[1]
    return bytes(kinds)


def _legal_masks() -> list[int]:
    masks = [0] * 16
    for identifier, row in TABLE.items():
        for packet_type in row[2]:
            masks[packet_type] |= 1 << identifier
    return masks


# What the standard advises against in a string and lets a server refuse (1.5.4): control
# characters, and code points that are none. U+0000 is forbidden outright [MQTT-1.5.4-2].
_REFUSED: Final = re.compile(
    "[\0-\x1f\x7f-\x9f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17))
    + "]"
)

_KINDS: Final = _kinds()  # by id; 0 = no such property
_ONE_BYTE: Final[list[bytes]] = [value.to_bytes(1, "big") for value in range(256)]
_LEGAL: Final = _legal_masks()  # by packet type; bit = id


class Properties:
    """The properties of one packet, each under its name in the standard.

    Absent numbers are -1, absent strings and binaries None. User properties and subscription
    identifiers keep the order of the wire; they alone may repeat.
    """

    def __init__(self) -> None:
        self.payload_format_indicator: int = -1
        self.message_expiry_interval: int = -1  # seconds
        self.content_type: Optional[str] = None
        self.response_topic: Optional[str] = None
        self.correlation_data: Optional[bytes] = None
        self.subscription_identifiers: list[int] = []
        self.session_expiry_interval: int = -1  # seconds; 0xFFFFFFFF = never
        self.assigned_client_identifier: Optional[str] = None
        self.server_keep_alive: int = -1  # seconds
        self.authentication_method: Optional[str] = None
        self.authentication_data: Optional[bytes] = None
        self.request_problem_information: int = -1
        self.will_delay_interval: int = -1  # seconds
        self.request_response_information: int = -1
        self.response_information: Optional[str] = None
        self.server_reference: Optional[str] = None
        self.reason_string: Optional[str] = None
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
        return f"Properties({encode_properties(self).hex()})"


class PublishProperties:
    """What the broker needs of a client's PUBLISH properties.

    ``forward`` holds the properties to pass on, encoded, in the publisher's order, without
    length prefix; topic alias and message expiry are taken out of it.
    """

    def __init__(self, forward: bytes, topic_alias: int, message_expiry: int, payload_format: int, next: int) -> None:
        self.forward = forward
        self.topic_alias = topic_alias  # 0 = none
        self.message_expiry = message_expiry  # seconds; -1 = none
        self.payload_format = payload_format  # 0 = bytes or not said, 1 = UTF-8
        self.next = next  # position after the properties
        self._named = b""

    def named(self) -> bytes:
        """All of them but the topic alias, with length prefix: what the packet would have held under its topic's name."""
        if not self._named:
            properties = self.forward
            if self.message_expiry >= 0:
                properties += b"\x02" + self.message_expiry.to_bytes(4, "big")
            self._named = encode_varint(len(properties)) + properties
        return self._named


def decode_varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """A Variable Byte Integer: (value, position after it)."""
    if pos >= end:
        raise MQTTError(MALFORMED_PACKET, "packet ends inside a variable byte integer")
    byte = data[pos]
    pos += 1
    if byte < 128:
        return byte, pos
    value = byte & 127
    shift = 7
    while shift <= 21:
        if pos >= end:
            raise MQTTError(MALFORMED_PACKET, "packet ends inside a variable byte integer")
        byte = data[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if byte == 0:
                raise MQTTError(MALFORMED_PACKET, "overlong variable byte integer")  # [MQTT-1.5.5-1]
            return value, pos
        shift += 7
    raise MQTTError(MALFORMED_PACKET, "variable byte integer of more than four bytes")


def encode_varint(value: int) -> bytes:
    """A Variable Byte Integer in its shortest form; ValueError outside 0..268,435,455."""
    if 0 <= value < 128:
        return _ONE_BYTE[value]
    if value < 0 or value > MAX_VARINT:
        raise ValueError(f"not a variable byte integer: {value}")
    if value < 16_384:
        return ((value & 127 | 128) << 8 | value >> 7).to_bytes(2, "big")
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_binary(data: bytes, pos: int, end: int) -> tuple[bytes, int]:
    """Binary Data with its two-byte length: (value, position after it)."""
    start = pos + 2
    if start > end:
        raise MQTTError(MALFORMED_PACKET, "packet ends inside a length")
    stop = start + (data[pos] << 8 | data[pos + 1])
    if stop > end:
        raise MQTTError(MALFORMED_PACKET, "packet ends inside a field")
    return data[start:stop], stop


def decode_utf8(data: bytes, pos: int, end: int) -> tuple[str, int]:
    """A UTF-8 Encoded String with its two-byte length: (value, position after it)."""
    raw, pos = decode_binary(data, pos, end)
    return text_of(raw), pos


def text_of(raw: bytes) -> str:
    """The characters of a UTF-8 Encoded String (1.5.4); MQTTError if it has any that it may not."""
    try:
        # Python's strict decoder refuses surrogates and keeps U+FEFF.
        text = raw.decode("utf-8")  # [MQTT-1.5.4-1] [MQTT-1.5.4-3]
    except UnicodeDecodeError:
        raise MQTTError(MALFORMED_PACKET, "string is not UTF-8") from None
    # All that is refused does not print, and that is quickly told.
    if not text.isprintable():
        found = _REFUSED.search(text)
        if found is not None:
            raise MQTTError(MALFORMED_PACKET, f"U+{ord(found[0]):04X} in a string")
    return text


def encode_binary(value: bytes) -> bytes:
    """Binary Data with its length; ValueError above 65,535 bytes."""
    size = len(value)
    if size > 65_535:
        raise ValueError(f"field of {size} bytes does not fit a two-byte length")
    return size.to_bytes(2, "big") + value


def encode_utf8(text: str) -> bytes:
    """A UTF-8 Encoded String with its length; ValueError above 65,535 bytes."""
    return encode_binary(text.encode("utf-8"))


def _decode_int(data: bytes, pos: int, end: int, kind: int) -> tuple[int, int]:
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


def _check_int(identifier: int, kind: int, value: int) -> None:
    """Refuse numbers that are encodable but not allowed; every one-byte property is 0 or 1."""
    if kind == BYTE:
        if value > 1:
            raise MQTTError(PROTOCOL_ERROR, f"{TABLE[identifier][0]} is {value}")
    elif value == 0:
        if identifier == TOPIC_ALIAS:
            raise MQTTError(TOPIC_ALIAS_INVALID, "Topic Alias is 0")  # [MQTT-3.3.2-8]
        if identifier == RECEIVE_MAXIMUM or identifier == MAXIMUM_PACKET_SIZE or identifier == SUBSCRIPTION_IDENTIFIER:
            raise MQTTError(PROTOCOL_ERROR, f"{TABLE[identifier][0]} is 0")


def _check_response_topic(topic: str) -> None:
    if topic == "":
        raise MQTTError(PROTOCOL_ERROR, "empty Response Topic")  # [MQTT-4.7.3-1]
    if "+" in topic or "#" in topic:
        raise MQTTError(PROTOCOL_ERROR, "wildcard in Response Topic")  # [MQTT-3.3.2-14]


def _section(data: bytes, pos: int, end: int) -> tuple[int, int]:
    """The first property's position and the end of the last."""
    length, pos = decode_varint(data, pos, end)
    stop = pos + length
    if stop > end:
        raise MQTTError(MALFORMED_PACKET, "properties reach beyond the packet")
    return pos, stop


def _identify(data: bytes, pos: int, packet_type: int, seen: int) -> int:
    """The property id at ``pos`` if it may stand here, given the ids seen before."""
    identifier = data[pos]
    if identifier >= len(_KINDS) or _KINDS[identifier] == 0:
        raise MQTTError(MALFORMED_PACKET, f"unknown property 0x{identifier:02X}")
    bit = 1 << identifier
    if _LEGAL[packet_type] & bit == 0:
        raise MQTTError(MALFORMED_PACKET, f"{TABLE[identifier][0]} is not legal in this packet")
    if seen & bit and identifier != USER_PROPERTY:
        if identifier != SUBSCRIPTION_IDENTIFIER or packet_type != PUBLISH:
            raise MQTTError(PROTOCOL_ERROR, f"{TABLE[identifier][0]} more than once")
    return identifier


def decode_properties(data: bytes, pos: int, end: int, packet_type: int) -> tuple[Properties, int]:
    """Properties with their length prefix: (properties, position after them).

    ``packet_type`` is 1 to 15, or ``WILL``.
    """
    properties = Properties()
    pos, stop = _section(data, pos, end)
    seen = 0
    while pos < stop:
        identifier = _identify(data, pos, packet_type, seen)
        pos += 1
        seen |= 1 << identifier
        kind: int = _KINDS[identifier]
        if kind <= VARINT:
            number, pos = _decode_int(data, pos, stop, kind)
            _check_int(identifier, kind, number)
            _set_number(properties, identifier, number)
        elif kind == STRING:
            text, pos = decode_utf8(data, pos, stop)
            _set_text(properties, identifier, text)
        elif kind == BINARY:
            binary, pos = decode_binary(data, pos, stop)
            if identifier == CORRELATION_DATA:
                properties.correlation_data = binary
            else:
                properties.authentication_data = binary
        else:
            key, pos = decode_utf8(data, pos, stop)  # [MQTT-1.5.7-1]
            text, pos = decode_utf8(data, pos, stop)
            properties.user_properties.append((key, text))
    if properties.authentication_data is not None and properties.authentication_method is None:
        raise MQTTError(PROTOCOL_ERROR, "Authentication Data without Authentication Method")
    return properties, pos


def _set_number(properties: Properties, identifier: int, value: int) -> None:
    if identifier == PAYLOAD_FORMAT_INDICATOR:
        properties.payload_format_indicator = value
    elif identifier == MESSAGE_EXPIRY_INTERVAL:
        properties.message_expiry_interval = value
    elif identifier == SUBSCRIPTION_IDENTIFIER:
        properties.subscription_identifiers.append(value)
    elif identifier == SESSION_EXPIRY_INTERVAL:
        properties.session_expiry_interval = value
    elif identifier == SERVER_KEEP_ALIVE:
        properties.server_keep_alive = value
    elif identifier == REQUEST_PROBLEM_INFORMATION:
        properties.request_problem_information = value
    elif identifier == WILL_DELAY_INTERVAL:
        properties.will_delay_interval = value
    elif identifier == REQUEST_RESPONSE_INFORMATION:
        properties.request_response_information = value
    elif identifier == RECEIVE_MAXIMUM:
        properties.receive_maximum = value
    elif identifier == TOPIC_ALIAS_MAXIMUM:
        properties.topic_alias_maximum = value
    elif identifier == TOPIC_ALIAS:
        properties.topic_alias = value
    elif identifier == MAXIMUM_QOS:
        properties.maximum_qos = value
    elif identifier == RETAIN_AVAILABLE:
        properties.retain_available = value
    elif identifier == MAXIMUM_PACKET_SIZE:
        properties.maximum_packet_size = value
    elif identifier == WILDCARD_SUBSCRIPTION_AVAILABLE:
        properties.wildcard_subscription_available = value
    elif identifier == SUBSCRIPTION_IDENTIFIER_AVAILABLE:
        properties.subscription_identifier_available = value
    else:
        properties.shared_subscription_available = value


def _set_text(properties: Properties, identifier: int, value: str) -> None:
    if identifier == CONTENT_TYPE:
        properties.content_type = value
    elif identifier == RESPONSE_TOPIC:
        _check_response_topic(value)
        properties.response_topic = value
    elif identifier == ASSIGNED_CLIENT_IDENTIFIER:
        properties.assigned_client_identifier = value
    elif identifier == AUTHENTICATION_METHOD:
        properties.authentication_method = value
    elif identifier == RESPONSE_INFORMATION:
        properties.response_information = value
    elif identifier == SERVER_REFERENCE:
        properties.server_reference = value
    else:
        properties.reason_string = value


def encode_properties(properties: Properties) -> bytes:
    """The properties in ascending order of their ids, with the length prefix."""
    p = properties
    out: list[bytes] = []
    _put_number(out, PAYLOAD_FORMAT_INDICATOR, p.payload_format_indicator)
    _put_number(out, MESSAGE_EXPIRY_INTERVAL, p.message_expiry_interval)
    _put_text(out, CONTENT_TYPE, p.content_type)
    _put_text(out, RESPONSE_TOPIC, p.response_topic)
    _put_binary(out, CORRELATION_DATA, p.correlation_data)
    for identifier in p.subscription_identifiers:
        out.append(b"\x0b" + encode_varint(identifier))
    _put_number(out, SESSION_EXPIRY_INTERVAL, p.session_expiry_interval)
    _put_text(out, ASSIGNED_CLIENT_IDENTIFIER, p.assigned_client_identifier)
    _put_number(out, SERVER_KEEP_ALIVE, p.server_keep_alive)
    _put_text(out, AUTHENTICATION_METHOD, p.authentication_method)
    _put_binary(out, AUTHENTICATION_DATA, p.authentication_data)
    _put_number(out, REQUEST_PROBLEM_INFORMATION, p.request_problem_information)
    _put_number(out, WILL_DELAY_INTERVAL, p.will_delay_interval)
    _put_number(out, REQUEST_RESPONSE_INFORMATION, p.request_response_information)
    _put_text(out, RESPONSE_INFORMATION, p.response_information)
    _put_text(out, SERVER_REFERENCE, p.server_reference)
    _put_text(out, REASON_STRING, p.reason_string)
    _put_number(out, RECEIVE_MAXIMUM, p.receive_maximum)
    _put_number(out, TOPIC_ALIAS_MAXIMUM, p.topic_alias_maximum)
    _put_number(out, TOPIC_ALIAS, p.topic_alias)
    _put_number(out, MAXIMUM_QOS, p.maximum_qos)
    _put_number(out, RETAIN_AVAILABLE, p.retain_available)
    for key, text in p.user_properties:  # [MQTT-3.3.2-18]
        out.append(b"\x26" + encode_utf8(key) + encode_utf8(text))
    _put_number(out, MAXIMUM_PACKET_SIZE, p.maximum_packet_size)
    _put_number(out, WILDCARD_SUBSCRIPTION_AVAILABLE, p.wildcard_subscription_available)
    _put_number(out, SUBSCRIPTION_IDENTIFIER_AVAILABLE, p.subscription_identifier_available)
    _put_number(out, SHARED_SUBSCRIPTION_AVAILABLE, p.shared_subscription_available)
    if not out:
        return b"\x00"  # [MQTT-2.2.2-1]
    body = b"".join(out)
    return encode_varint(len(body)) + body


def _put_number(out: list[bytes], identifier: int, value: int) -> None:
    if value >= 0:
        width: int = _KINDS[identifier]
        out.append(_ONE_BYTE[identifier] + value.to_bytes(width, "big"))


def _put_text(out: list[bytes], identifier: int, value: Optional[str]) -> None:
    if value is not None:
        out.append(_ONE_BYTE[identifier] + encode_utf8(value))


def _put_binary(out: list[bytes], identifier: int, value: Optional[bytes]) -> None:
    if value is not None:
        out.append(_ONE_BYTE[identifier] + encode_binary(value))


def decode_publish_properties(data: bytes, pos: int, end: int) -> PublishProperties:
    """The properties of a PUBLISH that a client sent, ready to be passed on.

    A Subscription Identifier is a protocol error here [MQTT-3.3.4-6].
    """
    pos, stop = _section(data, pos, end)
    forward = b""
    kept = pos  # start of the run of bytes that goes on unchanged
    topic_alias = 0
    message_expiry = -1
    payload_format = 0
    seen = 0
    while pos < stop:
        start = pos
        identifier = _identify(data, pos, PUBLISH, seen)
        pos += 1
        seen |= 1 << identifier
        kind: int = _KINDS[identifier]
        if kind == STRING_PAIR:
            _key, pos = decode_utf8(data, pos, stop)
            _text, pos = decode_utf8(data, pos, stop)
        elif kind == STRING:
            text, pos = decode_utf8(data, pos, stop)
            if identifier == RESPONSE_TOPIC:
                _check_response_topic(text)
        elif kind == BINARY:
            _binary, pos = decode_binary(data, pos, stop)
        else:
            if identifier == SUBSCRIPTION_IDENTIFIER:
                raise MQTTError(PROTOCOL_ERROR, "Subscription Identifier from a client")
            number, pos = _decode_int(data, pos, stop, kind)
            _check_int(identifier, kind, number)
            if identifier == PAYLOAD_FORMAT_INDICATOR:
                payload_format = number
                continue
            if identifier == TOPIC_ALIAS:
                topic_alias = number
            else:
                message_expiry = number
            forward += data[kept:start]
            kept = pos
    forward += data[kept:stop]
    return PublishProperties(forward, topic_alias, message_expiry, payload_format, stop)


def forward_of_will(data: bytes, pos: int, end: int) -> bytes:
    """Of Will Properties that were decoded before: those to pass on, in the client's order,
    without length prefix; Will Delay Interval and Message Expiry Interval are taken out."""
    pos, stop = _section(data, pos, end)
    forward = b""
    kept = pos  # start of the run of bytes that goes on unchanged
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
            forward += data[kept:start]
            kept = pos
    return forward + data[kept:stop]


def user_property(forward: bytes, name: bytes) -> bytes:
    """The first user property of that name among forwardable PUBLISH properties; empty if none."""
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
