"""Topic aliases (section 3.3.2.3.4): two-byte numbers that replace topic names on one connection, per direction.

Routing knows topics by name only. The alias of a received PUBLISH is replaced by the topic name first, and an alias is
added when a packet is queued. An alias is used without the topic name only after a packet with both was queued.
"""

from __future__ import annotations

from typing import Final

from mqttbroker.codec.data_types import MAX_VARINT
from mqttbroker.codec.frames import publish_header, two_bytes
from mqttbroker.codec.properties import TOPIC_ALIAS
from mqttbroker.codec.reason_codes import PACKET_TOO_LARGE, MQTTError

EMPTY_TOPIC: Final = b"\0\0"  # the encoded topic name of a packet that has only an alias

# By size of the properties that follow: their new length and the identifier of the alias, whose value comes next.
# The length stays one byte as long as the size is below MAX_ALIASED_PROPERTIES.
MAX_ALIASED_PROPERTIES: Final = 125
ALIASED_PROPERTIES: Final[list[bytes]] = [bytes((size + 3, TOPIC_ALIAS)) for size in range(MAX_ALIASED_PROPERTIES)]


class TopicAliases:
    """The aliases that one client is sent, at most ``maximum`` [MQTT-3.1.2-26]."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._assigned: dict[bytes, int] = {}

    def find(self, topic: bytes) -> int:
        """The alias of a topic. If it is negative, the client does not know it yet: send its absolute value together
        with the topic name, then call `assign`. 0 if no alias is free."""
        alias: int = self._assigned.get(topic, 0)
        if alias == 0 and len(self._assigned) < self.maximum:
            alias = -1 - len(self._assigned)
        return alias

    def stop(self) -> None:
        """Assign no more aliases."""
        self.maximum = len(self._assigned)

    def assign(self, topic: bytes) -> None:
        """A packet with the topic name and the alias that `find` returned for it was queued."""
        self._assigned[topic] = len(self._assigned) + 1


def publish_with_topic_name(first: int, topic: bytes, packet_id: bytes, properties: bytes, payload: bytes, missing: int) -> bytes:
    """Encode a received PUBLISH as if it had come with its topic name instead of an alias.

    ``first`` is its first byte; ``packet_id`` is empty at QoS 0; ``properties`` include their length; ``missing`` bytes
    of the payload of a long packet are not in ``payload``. MQTTError if the packet would be larger than any may be.
    """
    remaining: int = 2 + len(topic) + len(packet_id) + len(properties) + len(payload) + missing
    if remaining > MAX_VARINT:
        raise MQTTError(PACKET_TOO_LARGE, "the packet is too large for its topic's name")
    header = publish_header(first & 7, remaining)
    return b"".join((header, two_bytes(len(topic)), topic, packet_id, properties, payload))
