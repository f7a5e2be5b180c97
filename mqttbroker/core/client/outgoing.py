"""One application message as PUBLISH packets, encoded once per protocol version and QoS.

Parts of the publisher's packet are reused where they are the same. A packet with RETAIN or with subscription
identifiers is encoded for its one subscriber.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.frames import encode_fixed_header, encode_publish, two_bytes
from sessions.message import Message

_FIRST_BYTES: Final[list[bytes]] = [b"\x30", b"\x32", b"\x34"]  # PUBLISH by QoS, no DUP, no RETAIN

NO_BYTES: Final = b""


def expiry_property(expires_at: int, now: int) -> bytes:
    """Message Expiry Interval: the seconds that remain [MQTT-3.3.2-6]; empty for a message that never expires.

    Times are microseconds since the Unix epoch.
    """
    if expires_at == 0:
        return NO_BYTES
    remaining: int = max(0, (expires_at - now + 999_999) // 1_000_000)
    return b"\x02" + min(remaining, 0xFFFFFFFF).to_bytes(4, "big")


@mypyc_attr(acyclic=True, free_list_len=1)
class Outgoing:
    """A message and its packets, encoded when they are first asked for."""

    def __init__(self, topic: bytes, message: Message, now: int) -> None:
        self.topic = topic
        self.message = message
        self.now = now
        # The QoS 0 packet, by version.
        self.packet4: bytes = NO_BYTES
        self.packet5: bytes = NO_BYTES
        # Of a QoS 1 or 2 packet, by version: Remaining Length and topic, and the bytes after its packet id.
        self.length_and_topic4: bytes = NO_BYTES
        self.length_and_topic5: bytes = NO_BYTES
        self.rest4: bytes = NO_BYTES
        self.rest5: bytes = NO_BYTES
        self.qos1_header: bytes = NO_BYTES  # in `qos1_header_version`
        self.qos1_header_version = 0

    def set_parts(self, version: int, length_and_topic: bytes, qos1_header: bytes, rest: bytes) -> None:
        """Use these parts of the publisher's QoS 1 or 2 packet, of that version."""
        self.qos1_header_version = version
        self.qos1_header = qos1_header
        if version >= 5:
            self.length_and_topic5 = length_and_topic
            self.rest5 = rest
        else:
            self.length_and_topic4 = length_and_topic
            self.rest4 = rest

    def qos0_packet(self, version: int) -> bytes:
        """The whole packet at QoS 0 without RETAIN."""
        if version >= 5:
            if not self.packet5:
                self.packet5 = self.encode(5, 0, False, False, 0, NO_BYTES)
            return self.packet5
        if not self.packet4:
            self.packet4 = self.encode(4, 0, False, False, 0, NO_BYTES)
        return self.packet4

    def header(self, version: int, qos: int) -> bytes:
        """The bytes before the packet id at QoS 1 or 2, without RETAIN and DUP."""
        if qos == 1 and version == self.qos1_header_version:
            return self.qos1_header
        if version >= 5:
            if not self.length_and_topic5:
                self._encode_parts(5)
            return _FIRST_BYTES[qos] + self.length_and_topic5
        if not self.length_and_topic4:
            self._encode_parts(4)
        return _FIRST_BYTES[qos] + self.length_and_topic4

    def rest(self, version: int) -> bytes:
        """The bytes after the packet id; call `header` first."""
        return self.rest5 if version >= 5 else self.rest4

    def encode(self, version: int, qos: int, retain: bool, duplicate: bool, packet_id: int, added_properties: bytes) -> bytes:
        """Any variant; ``added_properties`` belong to this one delivery and are encoded."""
        return self.encode_as(self.topic, version, qos, retain, duplicate, packet_id, added_properties)

    def encode_as(
        self,
        topic: bytes,
        version: int,
        qos: int,
        retain: bool,
        duplicate: bool,
        packet_id: int,
        added_properties: bytes,
    ) -> bytes:
        """`encode` with another topic name, such as the empty one of a packet with a topic alias."""
        properties: bytes = NO_BYTES
        if version >= 5:
            properties = self._properties(added_properties)
        return encode_publish(topic, self.message.payload, qos, retain, duplicate, packet_id, version, properties)

    def _properties(self, added_properties: bytes) -> bytes:
        message = self.message
        # A clock that was set back must not extend a message's life.
        now: int = max(self.now, message.timestamp)
        return message.properties + expiry_property(message.expires_at, now) + added_properties

    def _encode_parts(self, version: int) -> None:
        topic = self.topic
        rest: bytes = self.message.payload
        if version >= 5:
            properties = self._properties(NO_BYTES)
            rest = b"".join((encode_varint(len(properties)), properties, rest))
        size: int = 4 + len(topic) + len(rest)
        header: bytes = b"".join((encode_fixed_header(0x32, size), two_bytes(len(topic)), topic))
        self.set_parts(version, header[1:], header, rest)
