"""The fifteen control packets: a class for each, with a strict decoder and an encoder.

A packet is decoded completely or raises `MQTTError`, for everything that the standard forbids. Only the validity of
topic filters is left to the broker. Encoders trust their caller's values.

``version`` is the protocol level: 3 (MQTT 3.1), 4 (3.1.1) or 5. Below 5, packets have no properties, and only CONNACK
and SUBACK have codes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

from mqttbroker.codec import reason_codes as rc
from mqttbroker.codec.data_types import decode_binary, decode_utf8, encode_binary, encode_utf8
from mqttbroker.codec.frames import FLAGS, encode_frame
from mqttbroker.codec.frames import encode_ack as encode_ack
from mqttbroker.codec.frames import encode_fixed_header as encode_fixed_header
from mqttbroker.codec.frames import encode_publish as encode_publish
from mqttbroker.codec.properties import (
    WILL,
    Properties,
    decode_properties,
    encode_properties,
    forwarded_will_properties,
)
from mqttbroker.codec.reason_codes import MQTTError, is_legal

_BRIDGE: Final = 0x80  # of a protocol level


class Packet:
    """A control packet."""

    packet_type: ClassVar[int] = 0

    @abstractmethod
    def encode(self, version: int) -> bytes:
        """The packet's bytes, with its fixed header."""


def _properties(properties: Properties, version: int, packet_type: int) -> bytes:
    return encode_properties(properties, packet_type) if version >= 5 else b""


class Will:
    """The Will Message in CONNECT.

    ``forward`` holds the encoded properties of its publication (`forwarded_will_properties`); only a decoder sets it.
    """

    def __init__(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, properties: Properties | None = None) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.properties: Properties = Properties() if properties is None else properties
        self.forward = b""


class Connect(Packet):
    """CONNECT (3.1). ``clean_start`` is Clean Session below version 5.

    ``bridge`` is Mosquitto's mark of a connection of another broker, in the protocol level's highest bit.
    """

    packet_type: ClassVar[int] = rc.CONNECT

    def __init__(
        self,
        client_id: str,
        version: int = 5,
        clean_start: bool = True,
        keep_alive: int = 0,
        will: Will | None = None,
        username: str | None = None,
        password: bytes | None = None,
        properties: Properties | None = None,
    ) -> None:
        self.protocol_name: str = "MQIsdp" if version == 3 else "MQTT"
        self.version = version
        self.clean_start = clean_start
        self.keep_alive = keep_alive  # seconds; 0 = off
        self.client_id = client_id
        self.will = will
        self.username = username
        self.password = password
        self.properties: Properties = Properties() if properties is None else properties
        self.bridge = False

    def encode(self, version: int = 0) -> bytes:
        """The packet's bytes, at its own version; the argument is ignored."""
        will = self.will
        flags = 2 if self.clean_start else 0
        payload = encode_utf8(self.client_id)
        if will is not None:
            flags |= 4 | will.qos << 3 | (32 if will.retain else 0)
            payload += _properties(will.properties, self.version, WILL)
            payload += encode_utf8(will.topic) + encode_binary(will.payload)
        if self.username is not None:
            flags |= 128
            payload += encode_utf8(self.username)
        if self.password is not None:
            flags |= 64
            payload += encode_binary(self.password)
        level = self.version | (_BRIDGE if self.bridge else 0)
        head = encode_utf8(self.protocol_name) + bytes((level, flags))
        head += self.keep_alive.to_bytes(2, "big") + _properties(self.properties, self.version, rc.CONNECT)
        return encode_frame(rc.CONNECT, head + payload)


class Connack(Packet):
    """CONNACK (3.2). Below version 5 ``reason_code`` is the 3.1.1 return code, 0 to 5."""

    packet_type: ClassVar[int] = rc.CONNACK

    def __init__(self, session_present: bool, reason_code: int, properties: Properties | None = None) -> None:
        self.session_present = session_present
        self.reason_code = reason_code
        self.properties: Properties = Properties() if properties is None else properties

    def encode(self, version: int) -> bytes:
        head = bytes((1 if self.session_present else 0, self.reason_code))
        return encode_frame(rc.CONNACK, head + _properties(self.properties, version, self.packet_type))


class Publish(Packet):
    """PUBLISH (3.3). ``packet_id`` is 0 at QoS 0."""

    packet_type: ClassVar[int] = rc.PUBLISH

    def __init__(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        retain: bool = False,
        dup: bool = False,
        packet_id: int = 0,
        properties: Properties | None = None,
    ) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        self.dup = dup
        self.packet_id = packet_id
        self.properties: Properties = Properties() if properties is None else properties

    def encode(self, version: int) -> bytes:
        first = rc.PUBLISH << 4 | (8 if self.dup else 0) | self.qos << 1 | (1 if self.retain else 0)
        body = encode_utf8(self.topic)
        if self.qos:
            body += self.packet_id.to_bytes(2, "big")
        body += _properties(self.properties, version, self.packet_type) + self.payload
        return encode_fixed_header(first, len(body)) + body


class _Acknowledgement(Packet):
    """PUBACK, PUBREC, PUBREL or PUBCOMP."""

    def __init__(self, packet_id: int, reason_code: int = 0, properties: Properties | None = None) -> None:
        self.packet_id = packet_id
        self.reason_code = reason_code
        self.properties: Properties = Properties() if properties is None else properties

    def encode(self, version: int) -> bytes:
        encoded = _properties(self.properties, version, self.packet_type)
        if len(encoded) <= 1:
            return encode_ack(self.packet_type, self.packet_id, self.reason_code, version)
        head = self.packet_id.to_bytes(2, "big") + self.reason_code.to_bytes(1, "big")
        return encode_frame(self.packet_type, head + encoded)


class Puback(_Acknowledgement):
    """PUBACK (3.4)."""

    packet_type: ClassVar[int] = rc.PUBACK


class Pubrec(_Acknowledgement):
    """PUBREC (3.5)."""

    packet_type: ClassVar[int] = rc.PUBREC


class Pubrel(_Acknowledgement):
    """PUBREL (3.6)."""

    packet_type: ClassVar[int] = rc.PUBREL


class Pubcomp(_Acknowledgement):
    """PUBCOMP (3.7)."""

    packet_type: ClassVar[int] = rc.PUBCOMP


class Subscription:
    """One topic filter of a SUBSCRIBE and its options byte (3.8.3.1)."""

    def __init__(self, topic_filter: str, options: int) -> None:
        self.topic_filter = topic_filter
        self.options = options
        self.qos: int = options & 3
        self.no_local: bool = options & 4 != 0
        self.retain_as_published: bool = options & 8 != 0
        self.retain_handling: int = options >> 4 & 3


class Subscribe(Packet):
    """SUBSCRIBE (3.8)."""

    packet_type: ClassVar[int] = rc.SUBSCRIBE

    def __init__(self, packet_id: int, subscriptions: list[Subscription], properties: Properties | None = None) -> None:
        self.packet_id = packet_id
        self.subscriptions = subscriptions
        self.properties: Properties = Properties() if properties is None else properties

    def encode(self, version: int) -> bytes:
        body = self.packet_id.to_bytes(2, "big") + _properties(self.properties, version, self.packet_type)
        for subscription in self.subscriptions:
            body += encode_utf8(subscription.topic_filter) + subscription.options.to_bytes(1, "big")
        return encode_frame(rc.SUBSCRIBE, body)


class _Codes(Packet):
    """SUBACK or UNSUBACK: one reason code per filter of the request, in its order."""

    def __init__(self, packet_id: int, reason_codes: list[int], properties: Properties | None = None) -> None:
        self.packet_id = packet_id
        self.reason_codes = reason_codes
        self.properties: Properties = Properties() if properties is None else properties


class Suback(_Codes):
    """SUBACK (3.9). Below version 5 every failure is encoded as 0x80."""

    packet_type: ClassVar[int] = rc.SUBACK

    def encode(self, version: int) -> bytes:
        head = self.packet_id.to_bytes(2, "big") + _properties(self.properties, version, self.packet_type)
        codes = self.reason_codes
        if version < 5:
            codes = [min(code, 0x80) for code in codes]  # 3.1.1 [MQTT-3.9.3-2]
        return encode_frame(rc.SUBACK, head + bytes(codes))


class Unsubscribe(Packet):
    """UNSUBSCRIBE (3.10)."""

    packet_type: ClassVar[int] = rc.UNSUBSCRIBE

    def __init__(self, packet_id: int, topic_filters: list[str], properties: Properties | None = None) -> None:
        self.packet_id = packet_id
        self.topic_filters = topic_filters
        self.properties: Properties = Properties() if properties is None else properties

    def encode(self, version: int) -> bytes:
        body = self.packet_id.to_bytes(2, "big") + _properties(self.properties, version, self.packet_type)
        for topic_filter in self.topic_filters:
            body += encode_utf8(topic_filter)
        return encode_frame(rc.UNSUBSCRIBE, body)


class Unsuback(_Codes):
    """UNSUBACK (3.11). Below version 5 it has no codes."""

    packet_type: ClassVar[int] = rc.UNSUBACK

    def encode(self, version: int) -> bytes:
        body = self.packet_id.to_bytes(2, "big")
        if version >= 5:
            body += encode_properties(self.properties, self.packet_type) + bytes(self.reason_codes)
        return encode_frame(rc.UNSUBACK, body)


class Pingreq(Packet):
    """PINGREQ (3.12)."""

    packet_type: ClassVar[int] = rc.PINGREQ

    def encode(self, version: int) -> bytes:
        return b"\xc0\x00"


class Pingresp(Packet):
    """PINGRESP (3.13)."""

    packet_type: ClassVar[int] = rc.PINGRESP

    def encode(self, version: int) -> bytes:
        return b"\xd0\x00"


class _Reason(Packet):
    """DISCONNECT or AUTH."""

    def __init__(self, reason_code: int = 0, properties: Properties | None = None) -> None:
        self.reason_code = reason_code
        self.properties: Properties = Properties() if properties is None else properties

    def encode(self, version: int) -> bytes:
        if version < 5:
            return encode_frame(self.packet_type, b"")
        encoded = encode_properties(self.properties, self.packet_type)
        if self.reason_code == 0 and len(encoded) == 1:
            return encode_frame(self.packet_type, b"")
        return encode_frame(self.packet_type, self.reason_code.to_bytes(1, "big") + encoded)


class Disconnect(_Reason):
    """DISCONNECT (3.14)."""

    packet_type: ClassVar[int] = rc.DISCONNECT


class Auth(_Reason):
    """AUTH (3.15); version 5 only."""

    packet_type: ClassVar[int] = rc.AUTH


def decode(data: bytes, version: int, pos: int = 0) -> tuple[Packet | None, int]:
    """Decode the packet at ``pos``; returns it and the position after it, or (None, pos) if it is incomplete."""
    size = len(data)
    remaining = 0
    shift = 0
    body = pos + 1
    while True:
        if body >= size:
            return None, pos
        byte: int = data[body]
        body += 1
        remaining |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 21:
            raise MQTTError(rc.MALFORMED_PACKET, "Remaining Length of more than four bytes")
    if byte == 0 and shift:
        raise MQTTError(rc.MALFORMED_PACKET, "overlong Remaining Length")  # [MQTT-1.5.5-1]
    end = body + remaining
    if end > size:
        return None, pos
    first: int = data[pos]
    return decode_body(first >> 4, first & 15, data, body, end, version), end


def decode_body(packet_type: int, flags: int, data: bytes, pos: int, end: int, version: int) -> Packet:
    """Decode the packet of this type and flags whose variable header and payload are ``data[pos:end]``.

    For CONNECT ``version`` is ignored.
    """
    if packet_type == rc.PUBLISH:
        return _decode_publish(flags, data, pos, end, version)
    # [MQTT-2.1.3-1] [MQTT-3.6.1-1] [MQTT-3.8.1-1] [MQTT-3.10.1-1] [MQTT-3.14.1-1] [MQTT-3.15.1-1]
    if flags != FLAGS[packet_type]:
        raise MQTTError(rc.MALFORMED_PACKET, f"flags {flags} on packet type {packet_type}")
    if rc.PUBACK <= packet_type <= rc.PUBCOMP:
        return _decode_acknowledgement(packet_type, data, pos, end, version)
    if packet_type == rc.SUBSCRIBE:
        return _decode_subscribe(data, pos, end, version)
    if packet_type == rc.UNSUBSCRIBE:
        return _decode_unsubscribe(data, pos, end, version)
    if packet_type == rc.PINGREQ or packet_type == rc.PINGRESP:
        _check_end(pos, end)
        return Pingreq() if packet_type == rc.PINGREQ else Pingresp()
    if packet_type == rc.CONNECT:
        return _decode_connect(data, pos, end)
    if packet_type == rc.DISCONNECT:
        code, properties = _decode_reason(rc.DISCONNECT, data, pos, end, version)
        return Disconnect(code, properties)
    if packet_type == rc.AUTH and version >= 5:
        return _decode_auth(data, pos, end, version)
    if packet_type == rc.CONNACK:
        return _decode_connack(data, pos, end, version)
    if packet_type == rc.SUBACK or packet_type == rc.UNSUBACK:
        return _decode_codes(packet_type, data, pos, end, version)
    raise MQTTError(rc.MALFORMED_PACKET, f"packet type {packet_type} at version {version}")


def _check_end(pos: int, end: int) -> None:
    if pos != end:
        raise MQTTError(rc.MALFORMED_PACKET, "bytes left over at the end of the packet")


def _u16(data: bytes, pos: int, end: int) -> int:
    if pos + 2 > end:
        raise MQTTError(rc.MALFORMED_PACKET, "packet too short")
    return data[pos] << 8 | data[pos + 1]


def _packet_id(data: bytes, pos: int, end: int) -> int:
    packet_id = _u16(data, pos, end)
    if packet_id == 0:
        raise MQTTError(rc.PROTOCOL_ERROR, "packet identifier 0")  # [MQTT-2.2.1-3]
    return packet_id


def _legal_code(packet_type: int, code: int) -> int:
    if not is_legal(packet_type, code):
        raise MQTTError(rc.PROTOCOL_ERROR, f"code 0x{code:02X} on packet type {packet_type}")
    return code


def _check_topic(topic: str, field: str) -> None:
    if "+" in topic or "#" in topic:
        raise MQTTError(rc.MALFORMED_PACKET, f"wildcard in {field}")  # [MQTT-3.3.2-2]


def _decode_properties(data: bytes, pos: int, end: int, version: int, packet_type: int) -> tuple[Properties, int]:
    if version < 5:
        return Properties(), pos
    return decode_properties(data, pos, end, packet_type)


def _decode_publish(flags: int, data: bytes, pos: int, end: int, version: int) -> Publish:
    qos = flags >> 1 & 3
    if qos == 3:
        raise MQTTError(rc.MALFORMED_PACKET, "PUBLISH with QoS 3")  # [MQTT-3.3.1-4]
    if qos == 0 and flags & 8:
        raise MQTTError(rc.MALFORMED_PACKET, "DUP with QoS 0")  # [MQTT-3.3.1-2]
    topic, pos = decode_utf8(data, pos, end)  # [MQTT-3.3.2-1]
    _check_topic(topic, "Topic Name")
    packet_id = 0
    if qos:
        packet_id = _packet_id(data, pos, end)
        pos += 2
    properties, pos = _decode_properties(data, pos, end, version, rc.PUBLISH)
    if topic == "" and properties.topic_alias < 0:
        raise MQTTError(rc.PROTOCOL_ERROR, "empty Topic Name without Topic Alias")  # [MQTT-4.7.3-1]
    return Publish(topic, data[pos:end], qos, flags & 1 != 0, flags & 8 != 0, packet_id, properties)


def _decode_reason(packet_type: int, data: bytes, pos: int, end: int, version: int) -> tuple[int, Properties]:
    """Decode the optional reason code and properties at the end of a packet."""
    code = 0
    properties = Properties()
    if version >= 5 and pos < end:
        code = _legal_code(packet_type, data[pos])
        pos += 1
        if pos < end:
            properties, pos = decode_properties(data, pos, end, packet_type)
    _check_end(pos, end)
    return code, properties


def _decode_acknowledgement(packet_type: int, data: bytes, pos: int, end: int, version: int) -> Packet:
    packet_id = _packet_id(data, pos, end)
    code, properties = _decode_reason(packet_type, data, pos + 2, end, version)
    if packet_type == rc.PUBACK:
        return Puback(packet_id, code, properties)
    if packet_type == rc.PUBREC:
        return Pubrec(packet_id, code, properties)
    if packet_type == rc.PUBREL:
        return Pubrel(packet_id, code, properties)
    return Pubcomp(packet_id, code, properties)


def _decode_subscribe(data: bytes, pos: int, end: int, version: int) -> Subscribe:
    packet_id = _packet_id(data, pos, end)
    properties, pos = _decode_properties(data, pos + 2, end, version, rc.SUBSCRIBE)
    subscriptions: list[Subscription] = []
    while pos < end:
        topic_filter, pos = decode_utf8(data, pos, end)  # [MQTT-3.8.3-1]
        if pos >= end:
            raise MQTTError(rc.MALFORMED_PACKET, "topic filter without options")
        options: int = data[pos]
        pos += 1
        if options & (0xC0 if version >= 5 else 0xFC):
            raise MQTTError(rc.MALFORMED_PACKET, "reserved subscription options")  # [MQTT-3.8.3-5]
        if options & 3 == 3 or options & 0x30 == 0x30:
            raise MQTTError(rc.PROTOCOL_ERROR, "QoS 3 or Retain Handling 3")
        if options & 4 and topic_filter.startswith("$share/"):
            # [MQTT-3.8.3-4]
            raise MQTTError(rc.PROTOCOL_ERROR, "No Local on a shared subscription")
        subscriptions.append(Subscription(topic_filter, options))
    if not subscriptions:
        raise MQTTError(rc.PROTOCOL_ERROR, "SUBSCRIBE without topic filter")  # [MQTT-3.8.3-2]
    return Subscribe(packet_id, subscriptions, properties)


def _decode_unsubscribe(data: bytes, pos: int, end: int, version: int) -> Unsubscribe:
    packet_id = _packet_id(data, pos, end)
    properties, pos = _decode_properties(data, pos + 2, end, version, rc.UNSUBSCRIBE)
    topic_filters: list[str] = []
    while pos < end:
        topic_filter, pos = decode_utf8(data, pos, end)  # [MQTT-3.10.3-1]
        topic_filters.append(topic_filter)
    if not topic_filters:
        raise MQTTError(rc.PROTOCOL_ERROR, "UNSUBSCRIBE without topic filter")  # [MQTT-3.10.3-2]
    return Unsubscribe(packet_id, topic_filters, properties)


def _decode_connect(data: bytes, pos: int, end: int) -> Connect:
    protocol_name, pos = decode_utf8(data, pos, end)
    if protocol_name != "MQTT" and protocol_name != "MQIsdp":
        raise MQTTError(rc.UNSUPPORTED_PROTOCOL_VERSION, "unknown protocol name")  # [MQTT-3.1.2-1]
    if pos >= end:
        raise MQTTError(rc.MALFORMED_PACKET, "packet too short")
    bridge: bool = data[pos] & _BRIDGE != 0
    level: int = data[pos] & ~_BRIDGE
    if (level != 3) if protocol_name == "MQIsdp" else (level != 4 and level != 5):
        detail = f"{protocol_name} level {level}"
        raise MQTTError(rc.UNSUPPORTED_PROTOCOL_VERSION, detail, level)  # [MQTT-3.1.2-2]
    try:
        packet = _decode_connect_rest(data, pos + 1, end, level)
        packet.bridge = bridge
        return packet
    except MQTTError as error:
        error.protocol_level = level
        raise


def _decode_connect_rest(data: bytes, pos: int, end: int, version: int) -> Connect:
    if pos >= end:
        raise MQTTError(rc.MALFORMED_PACKET, "packet too short")
    flags: int = data[pos]
    _check_connect_flags(flags, version)
    keep_alive = _u16(data, pos + 1, end)
    properties, pos = _decode_properties(data, pos + 3, end, version, rc.CONNECT)
    client_id, pos = decode_utf8(data, pos, end)  # [MQTT-3.1.3-3] [MQTT-3.1.3-4]
    will: Will | None = None
    username: str | None = None
    password: bytes | None = None
    if flags & 4:
        start = pos
        will_properties, pos = _decode_properties(data, pos, end, version, WILL)
        forward = forwarded_will_properties(data, start, end) if version >= 5 else b""
        topic, pos = decode_utf8(data, pos, end)  # [MQTT-3.1.3-11]
        _check_topic(topic, "Will Topic")
        if topic == "":
            raise MQTTError(rc.MALFORMED_PACKET, "empty Will Topic")  # [MQTT-4.7.3-1]
        payload, pos = decode_binary(data, pos, end)
        will = Will(topic, payload, flags >> 3 & 3, flags & 32 != 0, will_properties)
        will.forward = forward
    if flags & 128:
        username, pos = decode_utf8(data, pos, end)  # [MQTT-3.1.3-12]
    if flags & 64:
        password, pos = decode_binary(data, pos, end)
    _check_end(pos, end)
    return Connect(client_id, version, flags & 2 != 0, keep_alive, will, username, password, properties)


def _check_connect_flags(flags: int, version: int) -> None:
    if flags & 1:
        raise MQTTError(rc.MALFORMED_PACKET, "reserved CONNECT flag set")  # [MQTT-3.1.2-3]
    if flags & 0x18 == 0x18:
        raise MQTTError(rc.MALFORMED_PACKET, "Will QoS 3")  # [MQTT-3.1.2-12]
    if flags & 4 == 0 and flags & 0x38:
        # [MQTT-3.1.2-11] [MQTT-3.1.2-13]
        raise MQTTError(rc.MALFORMED_PACKET, "Will QoS or Will Retain without Will Flag")
    if version < 5 and flags & 0xC0 == 0x40:
        # 3.1.1 [MQTT-3.1.2-22]
        raise MQTTError(rc.MALFORMED_PACKET, "password without user name")


def _decode_connack(data: bytes, pos: int, end: int, version: int) -> Connack:
    head = _u16(data, pos, end)
    code = head & 0xFF
    if head > 0x1FF:
        raise MQTTError(rc.MALFORMED_PACKET, "reserved CONNACK flags set")  # [MQTT-3.2.2-1]
    if version >= 5:
        _legal_code(rc.CONNACK, code)
    elif code > 5:
        raise MQTTError(rc.PROTOCOL_ERROR, f"CONNACK return code {code}")
    if head > 0x100:
        raise MQTTError(rc.PROTOCOL_ERROR, "session present on a refusal")  # [MQTT-3.2.2-6]
    properties, pos = _decode_properties(data, pos + 2, end, version, rc.CONNACK)
    _check_end(pos, end)
    return Connack(head > 0xFF, code, properties)


def _decode_codes(packet_type: int, data: bytes, pos: int, end: int, version: int) -> Packet:
    """SUBACK or UNSUBACK."""
    packet_id = _packet_id(data, pos, end)
    properties, pos = _decode_properties(data, pos + 2, end, version, packet_type)
    codes: list[int] = list(data[pos:end])
    if version < 5 and packet_type == rc.UNSUBACK:
        _check_end(pos, end)
    elif not codes:
        raise MQTTError(rc.PROTOCOL_ERROR, "acknowledgement without codes")
    for code in codes:
        _legal_code(packet_type, code)
        if version < 5 and code > 0x80:
            raise MQTTError(rc.PROTOCOL_ERROR, f"SUBACK return code {code}")  # 3.1.1 [MQTT-3.9.3-2]
    if packet_type == rc.SUBACK:
        return Suback(packet_id, codes, properties)
    return Unsuback(packet_id, codes, properties)


def _decode_auth(data: bytes, pos: int, end: int, version: int) -> Auth:
    if pos == end:
        return Auth()
    code, properties = _decode_reason(rc.AUTH, data, pos, end, version)
    if properties.authentication_method is None:
        raise MQTTError(rc.PROTOCOL_ERROR, "AUTH without Authentication Method")
    return Auth(code, properties)
