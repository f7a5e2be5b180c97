"""Topic aliases (section 3.3.2.3.4): numbers that stand for a topic's name, in either direction.

The rule kept here: all other parts know topics by their names.  An alias is taken out where a PUBLISH comes in and put in
where it leaves, and towards a client none is used before the packet that teaches it was queued.
"""

from __future__ import annotations

from typing import Dict, Final, List

from mqttbroker.codec.frames import TWO_BYTES, publish_header
from mqttbroker.codec.properties import MAX_VARINT, TOPIC_ALIAS
from mqttbroker.codec.reason_codes import PACKET_TOO_LARGE, MQTTError

NO_NAME: Final = b"\0\0"  # where an alias stands for it
# How properties begin that an alias was put before, by the length they had; longer ones take another way.
MOST_RENAMED: Final = 125
RENAMED: Final[List[bytes]] = [bytes((properties + 3, TOPIC_ALIAS)) for properties in range(MOST_RENAMED)]


class TopicAliases:
    """Those that one client is sent, ``maximum`` at most [MQTT-3.1.2-26]."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._known: Dict[bytes, int] = {}

    def find(self, topic: bytes) -> int:
        """The alias of a topic; negative if the client has to be taught it with this packet, 0 if it has room for none."""
        alias: int = self._known.get(topic, 0)
        if alias == 0 and len(self._known) < self.maximum:
            alias = -1 - len(self._known)
        return alias

    def teach(self, topic: bytes) -> None:
        """A packet with the alias that `find` gave for a topic, and the topic's name, was queued."""
        self._known[topic] = len(self._known) + 1


def named_publish(first: int, topic: bytes, packet_id: bytes, section: bytes, payload: bytes, beyond: int) -> bytes:
    """A PUBLISH with that first byte as it would have come with its topic's name; of a long one what is here of it.

    ``packet_id`` is empty at QoS 0, ``section`` the properties with their length; ``beyond`` bytes of the payload are not
    here.  MQTTError if no packet can be so large.
    """
    remaining: int = 2 + len(topic) + len(packet_id) + len(section) + len(payload) + beyond
    if remaining > MAX_VARINT:
        raise MQTTError(PACKET_TOO_LARGE, "the packet is too large for its topic's name")
    return b"".join((publish_header(first & 7, remaining), TWO_BYTES[len(topic)], topic, packet_id, section, payload))
