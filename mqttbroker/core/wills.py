"""Will messages (section 3.1.2.5): delayed publication, and their form in the store."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import List, Optional, Tuple

from mqttbroker.codec.packets import Publish, decode, encode_publish
from mqttbroker.codec.properties import decode_publish_properties, decode_varint
from mqttbroker.core.publisher import Publisher
from sessions.context import Clock
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import Session


class Wills:
    """The wills of disconnected clients, published when their delay has passed."""

    def __init__(self, registry: Registry, publisher: Publisher, clock: Clock) -> None:
        self.registry = registry
        self.publisher = publisher
        self.clock = clock
        self._due: List[Tuple[float, str]] = []  # heap of Unix seconds and client ids; some are out of date

    def schedule(self, session: Session) -> None:
        """Publish the will at ``session.will_due``."""
        due = self._due
        heappush(due, (session.will_due, session.client_id))
        # A client adds an entry at each disconnect: drop the outdated ones before they are the majority.
        if len(due) > 2 * len(self.registry) + 1000:
            self._due = [
                (session.will_due, client_id)
                for client_id, session in self.registry.sessions.items()
                if session.connection is None and session.will is not None
            ]
            heapify(self._due)

    def next_due(self, now: float) -> Optional[Session]:
        """Unschedule and return a session whose will is due at ``now``, in Unix seconds; None if there is none."""
        due = self._due
        while due and due[0][0] <= now:
            _, client_id = heappop(due)
            session = self.registry.get(client_id)
            if session is not None and session.connection is None and session.will is not None:
                if session.will_due <= now:
                    return session
        return None

    def publish(self, session: Session) -> None:
        """Publish the session's will, if it still has one."""
        will = session.will
        if will is None:
            return
        session.will = None
        now = self.clock.now
        will.timestamp = now
        if session.will_expiry >= 0:
            will.expires_at = now + session.will_expiry * 1_000_000
        self.publisher.publish_message(will, session)


def encode_will(session: Session) -> Optional[bytes]:
    """A session's will as the store keeps it: delay, expiry + 1, then an MQTT 5.0 PUBLISH packet."""
    will = session.will
    if will is None:
        return None
    head = session.will_delay.to_bytes(4, "big") + (session.will_expiry + 1).to_bytes(5, "big")
    return head + encode_publish(
        will.topic.encode("utf-8"), will.payload, will.qos, will.retain, False, 1, 5, will.properties
    )


def load_will(session: Session, stored: bytes) -> None:
    """Give a session the will that `encode_will` encoded."""
    session.will_delay = int.from_bytes(stored[0:4], "big")
    session.will_expiry = int.from_bytes(stored[4:9], "big") - 1
    packet, end = decode(stored, 5, 9)
    assert isinstance(packet, Publish)
    _, body = decode_varint(stored, 10, end)
    start = body + 2 + len(packet.topic.encode("utf-8")) + (2 if packet.qos else 0)
    properties = decode_publish_properties(stored, start, end).forward
    session.will = Message(packet.topic, packet.payload, packet.qos, packet.retain, properties, session.client_id, 0, 0)
