"""The broker core under invalid input, without a socket, so that every exception is seen where it is raised.

After each round the state of its clients is gone, and two valid clients (the bystanders) were not affected: all their
messages arrived once and in order, and all their pings were answered.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from support.core import Core

from fuzz.generator import Conversation, Generator
from fuzz.verdict import Finding, judge, shown
from mqttbroker.codec.packets import Pingreq, Pingresp, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties
from mqttbroker.core.client.connection import CLOSED

CLIENTS = 10  # concurrent connections
BEAT = 12  # chunks between two messages of the bystanders
SESSION_EXPIRY = 2.0
LIMITS: dict[str, Any] = {
    "max_session_expiry": SESSION_EXPIRY,
    "max_packet_size": 80_000,
    "receive_maximum": 10,
    "max_subscriptions_per_client": 6,
    "max_retained_messages": 30,
    "max_queued_messages": 50,
    "max_outbox_bytes": 100_000,
    "route_cache_size": 100,
}
SLACK = 150  # objects of a type that bounded caches may still add after the warm-up
WARM_UP = 3  # rounds
OURS = ("mqttbroker.", "sessions.", "topic_matcher.", "bridge_spark.")


class Offender:
    """A connection and the conversation it sends."""

    def __init__(self, core: Core, conversation: Conversation) -> None:
        self.client = core.client()
        self.connection = self.client.connection
        self.conversation = conversation
        self.pieces = conversation.pieces[::-1]
        self.sent = bytearray()
        self.received = b""

    def feed(self, now: float) -> None:
        piece = self.pieces.pop()
        self.sent += piece
        self.client.reader.receive(piece, now)

    def take(self) -> None:
        if self.connection.outbox.parts and not self.connection.outbox.writing_paused:
            self.received += self.connection.outbox.drain()
            self.connection.resume_sending()

    @property
    def over(self) -> bool:
        return not self.pieces or self.connection.state == CLOSED


class Bystanders:
    """A publisher and a subscriber that follow the standard."""

    def __init__(self, core: Core) -> None:
        expiry = Properties()
        expiry.session_expiry_interval = 100
        self.core = core
        self.publisher = core.connect("bystander-publisher", 4)
        self.subscriber = core.connect("bystander-subscriber", 5, properties=expiry)
        self.subscriber.subscribe("bystander/+", options=2)
        self.sent = 0

    def beat(self) -> None:
        """Send one message, at each QoS in turn, and a ping from each client."""
        self.sent += 1
        qos = self.sent % 3
        payload = str(self.sent).encode()
        self.publisher.send(Publish("bystander/beat", payload, qos, packet_id=1 if qos else 0), Pingreq())
        self.subscriber.send(Pingreq())
        self.core.settle()
        if qos == 2:
            self.publisher.send(Pubrel(1))
            self.core.settle()
        answers = [Puback, Pingresp] if qos == 1 else [Pingresp]
        expected = sorted((*answers, *((Pubrec, Pubcomp) if qos == 2 else ())), key=str)
        got = sorted(map(type, self.publisher.arrived()), key=str)
        if got != expected:
            raise Finding(f"the publishing bystander got {got} after message {self.sent}")
        self._take(payload, qos)

    def _take(self, payload: bytes, qos: int) -> None:
        packets = self.subscriber.arrived()
        messages = [packet for packet in packets if isinstance(packet, Publish)]
        if [(message.payload, message.qos) for message in messages] != [(payload, qos)] or len(packets) != 2:
            raise Finding(f"the subscribed bystander got {packets} for message {self.sent}")
        for message in messages:
            if qos == 1:
                self.subscriber.send(Puback(message.packet_id))
            elif qos == 2:
                self.subscriber.send(Pubrec(message.packet_id))
                self.core.settle()
                if [type(packet) for packet in self.subscriber.arrived()] != [Pubrel]:
                    raise Finding(f"no PUBREL for message {self.sent}")
                self.subscriber.send(Pubcomp(message.packet_id))
        self.core.settle()


class CoreTarget:
    """A broker core and its bystanders; `round` sends the conversations of one seed."""

    def __init__(self, directory: Path, durability: str) -> None:
        self.core = Core(directory, durability, **LIMITS)
        self.durability = durability
        self.bystanders = Bystanders(self.core)
        self.rounds = 0
        self.connections = 0
        self.packets = 0
        self.bytes = 0
        self._before: Counter[str] = Counter()

    def close(self) -> None:
        self.core.close()

    def round(self, seed: str) -> None:
        """Raises Finding, or the exception that escaped, if the broker fails."""
        generator = Generator(seed)
        offenders = [Offender(self.core, generator.conversation()) for _ in range(CLIENTS)]
        self.core.eager = False
        self._send(offenders, generator.random)
        self.core.settle()
        for offender in offenders:
            self._end(offender)
        self.core.eager = True
        self.core.advance(SESSION_EXPIRY + 1)
        self.bystanders.beat()
        self._flushed()
        self.rounds += 1
        self._count()

    def _send(self, offenders: list[Offender], random: Random) -> None:
        core = self.core
        talking = [offender for offender in offenders if not offender.over]
        step = 0
        while talking:
            step += 1
            offender = random.choice(talking)
            self._feed(offender)
            if random.random() < 0.3:
                core.settle()
                offender.take()
            if random.random() < 0.01:
                if offender.connection.outbox.writing_paused:
                    offender.connection.outbox.resume()
                else:
                    offender.connection.outbox.pause()
            if random.random() < 0.005:
                core.advance(0.5)
            if step % BEAT == 0:
                self.bystanders.beat()
            if offender.over or random.random() < 0.001:
                talking.remove(offender)

    def _feed(self, offender: Offender) -> None:
        """Send one chunk; it may close its own connection and an older one of the same client, but no other."""
        clients = self.core.broker.clients
        if offender.connection.blocked:
            self.core.settle()
            offender.connection.outbox.resume()
            offender.take()
        before = dict(clients.connections)
        offender.feed(self.core.seconds)
        for connection in before:
            if connection.state == CLOSED and connection is not offender.connection:
                if connection.client_id != offender.connection.client_id:
                    raise Finding(f"{offender.connection.client_id} closed the connection of {connection.client_id}")

    def _end(self, offender: Offender) -> None:
        outbox = offender.connection.outbox
        outbox.resume()
        for _ in range(1000):
            if not outbox.parts:
                break
            offender.take()
            self.core.settle()
        sent = bytes(offender.sent)
        try:
            replies = judge(sent, offender.received, offender.connection.state == CLOSED)
        except Finding as finding:
            raise Finding(f"{finding}\n  sent {shown(sent)}\n  got {shown(offender.received)}") from None
        offender.client.protocol.lost("closed by the client")
        self.core.clients.remove(offender.client)
        self.connections += 1
        self.packets += len(replies.packets)
        self.bytes += len(sent)

    def _flushed(self) -> None:
        """Clear the list of connections with output, as a flush does."""
        for connection in self.core.broker.outbound.flush_queue:
            connection.flush_requested = False
        self.core.broker.outbound.flush_queue = []

    def _count(self) -> None:
        """Check that only the bystanders are left."""
        broker = self.core.broker
        left = [connection.client_id for connection in broker.clients.connections if not _stays(connection.client_id)]
        left += [client_id for client_id in broker.registry.sessions if not _stays(client_id)]
        if left or broker.clients.pending or broker.clients.connected != 2:
            raise Finding(f"left behind: {left} {list(broker.clients.pending)}, {broker.clients.connected} connected")
        if broker.journal.size or broker.journal.has_pending or not broker.journal.writer_idle:
            raise Finding(f"the journal has {broker.journal.size} unwritten bytes")
        now = live_objects()
        if self.rounds <= WARM_UP:
            self._before = now
        grown = {name: count - self._before[name] for name, count in now.items() if count > self._before[name] + SLACK}
        if grown:
            raise Finding(f"live objects have grown: {grown}")


def _stays(client_id: str) -> bool:
    return client_id.startswith("bystander-")


def live_objects() -> Counter[str]:
    """The number of objects of each of the broker's classes."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    return Counter(
        {f"{kind.__module__}.{kind.__qualname__}": count for kind, count in kinds.items() if str(kind.__module__).startswith(OURS)}
    )
