"""One application message on its way out, encoded once per variant.

The rule kept here: however many subscribers a message has, each combination of
protocol version and QoS is encoded at most once; what came in leaves as it
came wherever the standard lets it.  Retained flags and subscription
identifiers make a variant of their own, encoded for its one subscriber.
"""

from __future__ import annotations

from typing import Final, List

from mypy_extensions import mypyc_attr

from mqttbroker.codec.frames import TWO_BYTES, encode_fixed_header, encode_publish
from mqttbroker.codec.properties import encode_varint
from sessions.message import Message

_FIRST_BYTES: Final[List[bytes]] = [b"\x30", b"\x32", b"\x34"]  # PUBLISH by QoS, no DUP, no RETAIN

NO_BYTES: Final = b""


def expiry_property(expires_at: int, now: int) -> bytes:
    """Message Expiry Interval: what is left of it [MQTT-3.3.2-6]; nothing if it never expires.

    Times are microseconds since the Unix epoch.
    """
    if expires_at == 0:
        return NO_BYTES
    left: int = max(0, (expires_at - now + 999_999) // 1_000_000)
    return b"\x02" + min(left, 0xFFFFFFFF).to_bytes(4, "big")


@mypyc_attr(acyclic=True, free_list_len=1)
class Outgoing:
    """The variants of one message.  ``properties`` are v5 properties without length prefix.

    The parts from the publisher's own packet, where they may be used again:
    ``packet`` (the whole, at QoS 0 without flags), ``middle`` (Remaining Length
    and topic) and ``tail`` (what follows the packet id), all of ``version``.
    """

    def __init__(self, topic: bytes, message: Message, now: int) -> None:
        self.topic = topic
        self.message = message
        self.now = now
        self.head_version = 0
        self.head1: bytes = NO_BYTES
        self.packet4: bytes = NO_BYTES
        self.packet5: bytes = NO_BYTES
        self.middle4: bytes = NO_BYTES
        self.middle5: bytes = NO_BYTES
        self.tail4: bytes = NO_BYTES
        self.tail5: bytes = NO_BYTES

    def reuse(self, version: int, middle: bytes, head: bytes, tail: bytes) -> None:
        """Take over the parts of a publisher's QoS 1 or 2 packet; ``head`` is the one of QoS 1."""
        self.head_version = version
        self.head1 = head
        if version >= 5:
            self.middle5 = middle
            self.tail5 = tail
        else:
            self.middle4 = middle
            self.tail4 = tail

    def at_most_once(self, version: int) -> bytes:
        """The QoS 0 packet, RETAIN 0."""
        if version >= 5:
            if not self.packet5:
                self.packet5 = self.encode(5, 0, False, False, 0, NO_BYTES)
            return self.packet5
        if not self.packet4:
            self.packet4 = self.encode(4, 0, False, False, 0, NO_BYTES)
        return self.packet4

    def head(self, version: int, qos: int) -> bytes:
        """What goes before the packet id of a QoS 1 or 2 packet, RETAIN 0, DUP 0."""
        if qos == 1 and version == self.head_version:
            return self.head1
        if version >= 5:
            if not self.middle5:
                self._split(5)
            return _FIRST_BYTES[qos] + self.middle5
        if not self.middle4:
            self._split(4)
        return _FIRST_BYTES[qos] + self.middle4

    def tail(self, version: int) -> bytes:
        """What goes after the packet id; to be asked for after `head`."""
        return self.tail5 if version >= 5 else self.tail4

    def encode(
        self, version: int, qos: int, retain: bool, dup: bool, packet_id: int, own: bytes
    ) -> bytes:
        """Any variant; ``own`` are the properties of this one delivery, already encoded."""
        return self.encode_as(self.topic, version, qos, retain, dup, packet_id, own)

    def encode_as(
        self,
        topic: bytes,
        version: int,
        qos: int,
        retain: bool,
        dup: bool,
        packet_id: int,
        own: bytes,
    ) -> bytes:
        """`encode` with another topic name, such as the empty one of a topic alias."""
        message = self.message
        properties: bytes = NO_BYTES
        if version >= 5:
            properties = self._properties(own)
        return encode_publish(
            topic, message.payload, qos, retain, dup, packet_id, version, properties
        )

    def _properties(self, own: bytes) -> bytes:
        message = self.message
        # A clock that was set back gives no message more time than it came with.
        now: int = max(self.now, message.timestamp)
        return message.properties + expiry_property(message.expires_at, now) + own

    def _split(self, version: int) -> None:
        """Encode once what goes around the packet id."""
        topic = self.topic
        tail: bytes = self.message.payload
        if version >= 5:
            properties = self._properties(NO_BYTES)
            tail = b"".join((encode_varint(len(properties)), properties, tail))
        size: int = 4 + len(topic) + len(tail)
        head: bytes = b"".join((encode_fixed_header(0x32, size), TWO_BYTES[len(topic)], topic))
        self.reuse(version, head[1:], head, tail)
