"""The packets of a link to another core of a cluster: messages at QoS 0 that the other core's clients published.

They go to sessions of this core only: neither to other links nor to the log, streams or retained messages. So no message
can come back to where it was published.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from mypy_extensions import i64, mypyc_attr

from mqttbroker.codec.data_types import decode_utf8, decode_varint
from mqttbroker.codec.frames import encode_publish, two_bytes
from mqttbroker.codec.properties import PublishProperties, decode_publish_properties
from mqttbroker.codec.reason_codes import MALFORMED_PACKET, PROTOCOL_ERROR, MQTTError
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.connection import CONNECTED, Connection
from mqttbroker.core.client.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.delivery.fan_out import deliver
from mqttbroker.core.packets.publish_handler import VERSION_4_PUBLISH, PublishHandler
from mqttbroker.core.routing.route import Route
from sessions.message import Message
from sessions.session import Session

CORE_TOPICS: Final = b"$core/"  # of messages between cores, which are not routed
SHARED_TOPIC: Final = b"$core/share"  # of a message for a member of a shared subscription


@mypyc_attr(allow_interpreted_subclasses=True)
class LinkReceiver:
    """Receives the messages of another core that are not for ordinary subscriptions."""

    @abstractmethod
    def core_message(self, topic: bytes, payload: bytes) -> None:
        """A message of the other core itself; the topic begins with `CORE_TOPICS`."""

    @abstractmethod
    def shared_message(self, key: str, message: Message) -> None:
        """A message at QoS 0 for a member of the shared subscription ``key``, its name and filter."""


def open_link(connection: Connection, session: Session) -> None:
    """Have a new connection be a link: ``session`` stands for the sessions of the other core."""
    connection.owner.release(connection)
    connection.is_link = True
    connection.restricted = False
    connection.version = 5
    connection.zero_copy_version = 5
    connection.client_id = session.client_id
    connection.session = session
    connection.state = CONNECTED
    session.version = 5
    session.connection = connection


def shared_packet(key: str, outgoing: Outgoing) -> bytes:
    """The packet over a link of a message at QoS 0 for a member of a shared subscription; `MQTTError` if it is too large."""
    message = outgoing.message
    inner = outgoing.encode(5, 0, message.retain, False, 0, NO_BYTES)
    name = key.encode("utf-8")
    return encode_publish(SHARED_TOPIC, two_bytes(len(name)) + name + inner, 0, False, False, 0, 5, NO_BYTES)


class LinkHandler(PublishHandler):
    """Handles the PUBLISH packets of a link."""

    def __init__(self, broker: Broker, connection: Connection, receiver: LinkReceiver) -> None:
        super().__init__(broker, connection)
        self.receiver = receiver

    def handle(self, data: bytes, start: i64, body: i64, end: i64, first: i64, more: list[bytes] | None = None) -> bool:
        if first & 6:
            raise MQTTError(PROTOCOL_ERROR, "a message over a link that is not at QoS 0")
        if more is not None:
            data = b"".join((data, *more))
        if end - body < 2:
            raise MQTTError(MALFORMED_PACKET, "malformed PUBLISH header")
        topic_end: i64 = body + 2 + ((data[body] << 8) | data[body + 1])
        if topic_end > end:
            raise MQTTError(MALFORMED_PACKET, "PUBLISH ends inside its topic")
        topic: bytes = data[body + 2 : topic_end]
        payload: i64 = topic_end + 1
        properties: PublishProperties | None = None
        version: i64 = 5
        if first == VERSION_4_PUBLISH[0]:
            version = 4
            first = 0x30
            payload = topic_end
        elif topic_end == end:
            raise MQTTError(MALFORMED_PACKET, "PUBLISH ends before its properties")
        elif data[topic_end] != 0:
            properties = self._decode_properties(data, topic_end, end, None)
            payload = properties.end
        if topic.startswith(CORE_TOPICS):
            self._core_message(topic, data[payload:end])
            return True
        try:
            route = self._route(topic)
        except MQTTError:  # a limit of topics is lower here
            self.connection.drops().not_authorized += 1
            return True
        if route is None:
            return False
        if not route.has_targets:
            return True
        if first == 0x30 and not route.large:
            packet = data[start:end]
            if version < 5:
                packet = b"\x30" + packet[1:]
            self._forward_qos0(packet, topic_end - start, payload - start, version, route, route.targets, properties, None)
            return True
        return self._deliver(route, data[payload:end], first, properties)

    def _deliver(self, route: Route, payload: bytes, first: i64, properties: PublishProperties | None) -> bool:
        """Deliver a message with RETAIN, or one to very many targets; false if that has to wait for another one."""
        fan_out = self.broker.publisher.fan_out
        if route.large and not fan_out.done:
            fan_out.wait(self.connection)
            return False
        message = self._message(route, payload, first, properties)
        cluster = self.broker.cluster
        if message.retain and cluster is not None:
            cluster.linked(message.topic)
        outgoing = Outgoing(route.topic_bytes, message, message.timestamp)
        if route.large:
            fan_out.begin(outgoing, route.targets, None, None)
        else:
            self.broker.router.work += route.work
            for target in route.targets:
                deliver(target, outgoing, None, None)
        return True

    def _core_message(self, topic: bytes, payload: bytes) -> None:
        if topic != SHARED_TOPIC:
            self.receiver.core_message(topic, payload)
            return
        size: i64 = len(payload)
        key, start = decode_utf8(payload, 0, size)
        if start >= size:
            raise MQTTError(MALFORMED_PACKET, "no message for a member of a shared subscription")
        first: i64 = payload[start]
        _, body = decode_varint(payload, start + 1, size)
        inner, topic_end = decode_utf8(payload, body, size)
        properties = decode_publish_properties(payload, topic_end, size)
        now: i64 = self.connection.outbound.clock.now
        expires_at: i64 = now + properties.message_expiry * 1_000_000 if properties.message_expiry >= 0 else 0
        message = Message(
            inner,
            payload[properties.end :],
            0,
            first & 1 == 1,
            properties.forward,
            self.connection.client_id,
            now,
            expires_at,
        )
        self.receiver.shared_message(key, message)
