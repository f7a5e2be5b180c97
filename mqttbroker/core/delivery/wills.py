"""Will messages (section 3.1.2.5): delayed publication, and their form in the store."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from mqttbroker.codec.data_types import decode_varint
from mqttbroker.codec.packets import Publish, decode, encode_publish
from mqttbroker.codec.properties import decode_publish_properties
from mqttbroker.core.delivery.broker_messages import BrokerMessages
from sessions.context import Clock
from sessions.message import Message
from sessions.registry import Registry
from sessions.session import Session
from sessions.will import SessionWill


class Wills:
    """The wills of disconnected clients, published when their delay has passed."""

    def __init__(self, registry: Registry, messages: BrokerMessages, clock: Clock) -> None:
        self.registry = registry
        self.messages = messages
        self.clock = clock
        self._due: list[tuple[float, str]] = []  # heap of Unix seconds and client ids; some are out of date

    def schedule(self, session: Session) -> None:
        """Publish the will when it is due."""
        will = session.will
        if will is None:
            return
        due = self._due
        heappush(due, (will.due, session.client_id))
        # A client adds an entry at each disconnect: drop the outdated ones before they are the majority.
        if len(due) > 2 * len(self.registry) + 1000:
            self._due = [
                (session.will.due, client_id)
                for client_id, session in self.registry.sessions.items()
                if session.connection is None and session.will is not None
            ]
            heapify(self._due)

    def next_due(self, now: float) -> Session | None:
        """Unschedule and return a session whose will is due at ``now``, in Unix seconds; None if there is none."""
        due = self._due
        while due and due[0][0] <= now:
            _, client_id = heappop(due)
            session = self.registry.get(client_id)
            if session is not None and session.connection is None and session.will is not None:
                if session.will.due <= now:
                    return session
        return None

    def publish(self, session: Session) -> bool:
        """Publish the session's will, if it still has one; false if it waits to be published."""
        will = session.will
        if will is None:
            return True
        session.set_will(None)
        message = will.message
        now = self.clock.now
        message.timestamp = now
        if will.expiry >= 0:
            message.expires_at = now + will.expiry * 1_000_000
        return self.messages.publish_will(message, session)


def encode_will(session: Session) -> bytes | None:
    """A session's will in the form of the store: delay, expiry + 1, then an MQTT 5.0 PUBLISH packet."""
    will = session.will
    if will is None:
        return None
    message = will.message
    head = will.delay.to_bytes(4, "big") + (will.expiry + 1).to_bytes(5, "big")
    return head + encode_publish(
        message.topic.encode("utf-8"), message.payload, message.qos, message.retain, False, 1, 5, message.properties
    )


def load_will(session: Session, stored: bytes, due: float) -> None:
    """Give a session the will that `encode_will` encoded; ``due`` as in `SessionWill`."""
    delay = int.from_bytes(stored[0:4], "big")
    expiry = int.from_bytes(stored[4:9], "big") - 1
    packet, end = decode(stored, 5, 9)
    assert isinstance(packet, Publish)
    _, body = decode_varint(stored, 10, end)
    start = body + 2 + len(packet.topic.encode("utf-8")) + (2 if packet.qos else 0)
    properties = decode_publish_properties(stored, start, end).forward
    message = Message(packet.topic, packet.payload, packet.qos, packet.retain, properties, session.client_id, 0, 0)
    will = SessionWill(message, delay, expiry)
    will.due = due
    session.set_will(will)
