"""One client's connection, the outgoing half: what leaves, in which order, and what must wait.

The rule kept here: acknowledgements leave in the order of what they
acknowledge [MQTT-4.6.0-2], each after the commit of what it stands for; a
client that does not read costs at most its own backlog, past which QoS 0 is
dropped and counted; nothing is sent after a DISCONNECT [MQTT-3.14.4-1].

No socket here: whoever owns one calls `take`, or `take_parts` where that is
`bulky`, and writes what it gets.
"""

from __future__ import annotations

from typing import Any, Dict, Final, List, Optional, cast

from mqttbroker.codec.frames import SHORT_ACKS, TWO_BYTES, publish_header
from mqttbroker.codec.packets import Disconnect, encode_ack
from mqttbroker.codec.properties import Properties, encode_varint
from mqttbroker.codec.reason_codes import PUBACK, PUBCOMP, PUBREC, PUBREL, QUOTA_EXCEEDED
from mqttbroker.core.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.policy import AuthenticationRequest
from mqttbroker.core.terms import ListenerTerms
from mqttbroker.core.topic_aliases import MOST_RENAMED, NO_NAME, RENAMED, TopicAliases
from sessions.context import Clock
from sessions.counters import Counters
from sessions.delivery import ClientConnection, Delivery
from sessions.journal import Gate
from sessions.message import Message
from sessions.session import Session

# States of a connection.
AWAIT_CONNECT: Final = 0
CONNECTING: Final = 1  # CONNECT came; its answer waits for the authenticator or the store
CONNECTED: Final = 2
CLOSED: Final = 3
AUTHENTICATING: Final = 4  # an AUTH of the client is awaited

# Of a client that has none yet; most never have, and each takes 64 bytes. Never filled: who has one makes its own.
_NO_DECISIONS: Final[Dict[str, bool]] = {}

PUBLISH_OVERHEAD: Final = 24  # bytes of a PUBLISH, at most, beside topic, payload and properties
BULKY: Final = 65_536  # bytes of a part that is not joined with others


class Outbound:
    """What all connections of one broker share: the clock, the counters, and who has output.

    ``max_backlog`` is in bytes of PUBLISHes, ``max_acks`` in acknowledgements that wait.
    """

    def __init__(self, clock: Clock, counters: Counters, max_backlog: int, max_acks: int) -> None:
        self.clock = clock
        self.counters = counters
        self.max_backlog = max_backlog
        self.max_acks = max_acks
        self.dirty: List[Connection] = []
        self.refusal = QUOTA_EXCEEDED  # of what the store could not keep when it last failed
        # Called when the first connection becomes dirty; the owner then flushes soon.
        self.wake: Any = None


class Connection(ClientConnection):
    """A client's connection as the broker sees it.

    ``peer`` is its address, for logs; ``terms`` are those of the listener it came by.
    """

    def __init__(self, outbound: Outbound, peer: str, terms: ListenerTerms) -> None:
        super().__init__()
        self.outbound = outbound
        self.peer = peer
        self.terms = terms
        self.wire: Any = None  # the owner of the socket, opaque here
        self.state = AWAIT_CONNECT
        self.session: Optional[Session] = None
        self.client_id = ""
        self.username: Optional[str] = None  # as authenticated; None = anonymous
        self.method: Optional[str] = None  # of enhanced authentication, from CONNECT
        self.authenticator: Any = None  # what judges it
        self.authentication: Optional[AuthenticationRequest] = None  # while it is going on
        self.may_publish = _NO_DECISIONS  # by topic, bounded
        self.keep_alive = 0.0  # seconds; 0 = off
        self.accepted = 0.0  # monotonic seconds
        self.last_received = 0.0
        self.maximum_packet_size = 0xFFFFFFFF
        self.problem_information = True
        # The version whose packets may be passed on to this client as they came; 0 for none.
        self.plain_version = 0
        self.topic_aliases: Optional[TopicAliases] = None  # of a client that takes some
        self.outbox: List[bytes] = []
        self.dirty = False
        self.congested = False  # the socket took no more at the last flush
        self.behind = False  # what was sent before the last flush has not all left
        self.bulky = False  # a PUBLISH of BULKY bytes or more is in the outbox: joining it would cost too much
        self.backlog = 0  # bytes of PUBLISHes in the outbox, and while behind of all packets
        self.replies = 0  # bytes of others than PUBLISHes in the outbox while behind
        self.longest = 0  # bytes of the longest PUBLISH in the outbox that made it too long
        self.written = 0  # bytes of the first part in the outbox that left before
        self.acks = AckQueue()
        self.unanswered = 0  # PUBACKs and PUBCOMPs among them
        self.spare_gate: Optional[AckGate] = None
        self.closing_reason = ""

    def congest(self) -> None:
        """The socket takes no more for now."""
        self.congested = True
        self.behind = True

    # -- output -------------------------------------------------------------

    def send(self, packet: bytes) -> None:
        """Queue any packet but a PUBLISH."""
        if self.state == CLOSED:
            return
        size: int = len(packet)
        if size > self.maximum_packet_size:  # [MQTT-3.1.2-24]
            self.too_small()
            return
        if self.behind:
            self.replies += size
            self.backlog += size
        self.outbound.counters.messages_sent += 1
        self.outbox.append(packet)
        if not self.dirty:
            self._mark()

    def send_ack(self, packet_type: int, packet_id: int) -> None:
        """Queue a PUBACK, PUBREC, PUBREL or PUBCOMP with reason code 0."""
        if self.state == CLOSED:
            return
        if self.maximum_packet_size < 4:
            self.too_small()
            return
        if self.behind:
            self.replies += 4
            self.backlog += 4
        self.outbound.counters.messages_sent += 1
        outbox = self.outbox
        outbox.append(SHORT_ACKS[packet_type])
        outbox.append(TWO_BYTES[packet_id])
        if not self.dirty:
            self._mark()

    def too_small(self) -> None:
        """The client's Maximum Packet Size leaves no room for a packet it must get."""

    def send_publish(self, packet: bytes, droppable: bool) -> bool:
        """Queue a PUBLISH; ``droppable`` at QoS 0.  False if it was dropped."""
        if not self._admit(len(packet), droppable):
            return False
        self.outbox.append(packet)
        return True

    def send_pieces(self, head: bytes, more: List[bytes], size: int) -> None:
        """Queue a QoS 0 PUBLISH of ``size`` bytes in the pieces in which it came, or drop it."""
        if self._admit(size, True):
            self.outbox.append(head)
            self.outbox += more

    def send_numbered(self, head: bytes, packet_id: int, tail: bytes, size: int) -> None:
        """Queue a QoS 1 or 2 PUBLISH of ``size`` bytes in the parts that others share with it."""
        self._admit(size, False)
        outbox = self.outbox
        outbox.append(head)
        outbox.append(TWO_BYTES[packet_id])
        outbox.append(tail)

    def renames(self, size: int, properties: int) -> bool:
        """Whether a PUBLISH of version 5 that came in ``size`` bytes may be sent with `send_renamed`; ``properties`` is
        the first byte of their length."""
        return self.topic_aliases is not None and properties < MOST_RENAMED and size + 4 <= self.maximum_packet_size

    def send_renamed(self, flags: int, topic: bytes, packet_id: int, properties: int, rest: bytes) -> None:
        """Queue a PUBLISH, under a topic alias as long as the client has room for one, or drop it; only if `renames`.

        ``packet_id`` is 0 at QoS 0; ``rest`` is what follows the byte that is the length of its ``properties``.
        """
        aliases = cast(TopicAliases, self.topic_aliases)
        alias: int = aliases.find(topic)
        name: bytes = NO_NAME if alias > 0 else TWO_BYTES[len(topic)] + topic
        remaining: int = len(name) + (2 if packet_id else 0) + (4 if alias else 1) + len(rest)
        head = publish_header(flags, remaining)
        if not self._admit(len(head) + remaining, packet_id == 0):
            return
        outbox = self.outbox
        outbox.append(head)
        outbox.append(name)
        if packet_id:
            outbox.append(TWO_BYTES[packet_id])
        if alias:
            outbox.append(RENAMED[properties])
            outbox.append(TWO_BYTES[abs(alias)])
        else:
            outbox.append(encode_varint(properties))
        outbox.append(rest)
        if alias < 0:
            aliases.teach(topic)

    def _admit(self, size: int, droppable: bool) -> bool:
        """Count a PUBLISH of ``size`` bytes, which the caller queues; False if it is dropped."""
        backlog: int = self.backlog + size
        if backlog > self.outbound.max_backlog:
            if droppable and self.congested:
                self.outbound.counters.publish_dropped_slow += 1
                return False
            self.ready = False
            if size > self.longest:
                self.longest = size
        if size >= BULKY:
            self.bulky = True
        self.backlog = backlog
        counters = self.outbound.counters
        counters.messages_sent += 1
        counters.publish_sent += 1
        counters.publish_bytes_sent += size
        if not self.dirty:
            self._mark()
        return True

    def take(self) -> bytes:
        """The bytes to write now."""
        parts = self.outbox
        if self.written:
            parts[0] = parts[0][self.written :]
        data: bytes = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self.outbound.counters.bytes_sent += len(data)
        self._emptied()
        return data

    def _emptied(self) -> None:
        self.written = 0
        self.backlog = 0
        self.replies = 0
        self.longest = 0
        self.behind = False
        self.bulky = False

    @property
    def excess(self) -> int:
        """Bytes that have to leave now: beside a PUBLISH that is too long for it, no more than the outbox may hold stays."""
        return self.backlog - self.outbound.max_backlog - self.longest

    def take_parts(self, limit: int) -> List[Any]:
        """About ``limit`` bytes to write now, or all: long parts as they lie there, short ones joined; the others stay."""
        parts = self.outbox
        taken: List[Any] = []
        short: List[bytes] = []
        room: int = limit
        count: int = 0
        while room > 0 and count < len(parts):
            part = parts[count]
            left: int = len(part) - self.written
            if len(part) < BULKY:
                short.append(part)
            else:
                if short:
                    taken.append(b"".join(short))
                    short.clear()
                if left > room:
                    taken.append(memoryview(part)[self.written : self.written + room])
                    self.written += room
                    room = 0
                    break
                taken.append(memoryview(part)[self.written :] if self.written else part)
                self.written = 0
            room -= left
            count += 1
        if short:
            taken.append(b"".join(short))
        del parts[:count]
        size: int = limit - room
        self.outbound.counters.bytes_sent += size
        if parts:
            self.backlog = max(0, self.backlog - size)
            self.behind = True
        else:
            self._emptied()
        return taken

    def relieved(self) -> None:
        """The socket takes more: what waited for that goes on."""
        if not self.ready and self.backlog <= self.outbound.max_backlog:
            self.ready = True
            session = self.session
            if session is not None and session.connection is self:
                session.send_queued()
                if session.pending_retained:
                    self.touch()  # a replay goes on at the next flush

    @property
    def blocked(self) -> bool:
        """Whether nothing should be read from the client for now."""
        return False

    def resume_reading(self) -> None:
        self.touch()

    def release(self) -> None:
        """The socket is gone: let go of what was to be sent."""
        self.outbox.clear()
        self._emptied()
        self.acks.clear()
        self.spare_gate = None

    def _mark(self) -> None:
        self.dirty = True
        outbound = self.outbound
        outbound.dirty.append(self)
        if len(outbound.dirty) == 1 and outbound.wake is not None:
            outbound.wake()

    def touch(self) -> None:
        """Have the owner look at this connection at the next flush."""
        if not self.dirty:
            self._mark()

    # -- deliveries ---------------------------------------------------------

    def send_at_most_once(self, outgoing: Outgoing, retain: bool, own: bytes) -> None:
        """A QoS 0 delivery that is not the publisher's packet as it came."""
        packet: bytes
        if self.topic_aliases is not None:
            self._send_aliased(outgoing, 0, retain, False, 0, own)
            return
        if retain or own:
            packet = outgoing.encode(self.version, 0, retain, False, 0, own)
        else:
            packet = outgoing.at_most_once(self.version)
        if len(packet) > self.maximum_packet_size:  # [MQTT-3.1.2-25]
            self.outbound.counters.publish_dropped_too_large += 1
            return
        self.send_publish(packet, True)

    def send_retained(self, message: Message, own: bytes) -> None:
        """A retained message at QoS 0, in its parts."""
        if self.topic_aliases is not None or message.expires_at:
            outgoing = Outgoing(message.topic.encode("utf-8"), message, self.outbound.clock.now)
            self.send_at_most_once(outgoing, True, own)
            return
        topic = message.topic.encode("utf-8")
        payload = message.payload
        properties: bytes = NO_BYTES
        remaining: int = 2 + len(topic) + len(payload)
        if self.version >= 5:
            properties = message.properties + own
            properties = encode_varint(len(properties)) + properties
            remaining += len(properties)
        head: bytes = publish_header(1, remaining)
        size: int = len(head) + remaining
        if size > self.maximum_packet_size:  # [MQTT-3.1.2-25]
            self.outbound.counters.publish_dropped_too_large += 1
        elif self._admit(size, True):
            outbox = self.outbox
            outbox.append(head)
            outbox.append(TWO_BYTES[len(topic)])
            outbox.append(topic)
            if properties:
                outbox.append(properties)
            outbox.append(payload)

    def send_unpersisted(self, outgoing: Outgoing, qos: int, retain: bool, own: bytes) -> bool:
        """A QoS 1 or 2 delivery that nobody keeps; false if it has to be offered to the session."""
        session = self.session
        message = outgoing.message
        size: int = len(outgoing.topic) + len(message.payload) + len(message.properties) + len(own)
        if (
            session is None
            or self.topic_aliases is not None
            or size + PUBLISH_OVERHEAD > self.maximum_packet_size
        ):
            return False
        packet_id = session.allocate_unpersisted(qos)
        if packet_id == 0:
            return False
        packet = outgoing.encode(self.version, qos, retain, False, packet_id, own)
        return self.send_publish(packet, False)

    def send_delivery(self, entry: Delivery, outgoing: Outgoing, duplicate: bool) -> None:
        """The PUBLISH of a QoS 1 or 2 delivery."""
        if self.topic_aliases is not None:
            if not self._send_aliased(
                outgoing,
                entry.qos,
                entry.retain,
                duplicate,
                entry.packet_id,
                entry.subscription_ids,
            ):
                entry.session.abandon(entry)
            return
        packet: bytes = NO_BYTES
        head: bytes = NO_BYTES
        tail: bytes = NO_BYTES
        size: int
        if duplicate or entry.retain or entry.subscription_ids:
            packet = outgoing.encode(
                self.version,
                entry.qos,
                entry.retain,
                duplicate,
                entry.packet_id,
                entry.subscription_ids,
            )
            size = len(packet)
        else:
            head = outgoing.head(self.version, entry.qos)
            tail = outgoing.tail(self.version)
            size = len(head) + 2 + len(tail)
        if size > self.maximum_packet_size:
            # Too large for this client: as if it had been delivered [MQTT-3.1.2-25].
            self.outbound.counters.publish_dropped_too_large += 1
            entry.session.abandon(entry)
        elif packet:
            self.send_publish(packet, False)
        else:
            self.send_numbered(head, entry.packet_id, tail, size)

    def _send_aliased(
        self,
        outgoing: Outgoing,
        qos: int,
        retain: bool,
        dup: bool,
        packet_id: int,
        own: bytes,
    ) -> bool:
        """Send a PUBLISH under a topic alias, as long as the client has room for one; false if it is too large for
        the client."""
        aliases = cast(TopicAliases, self.topic_aliases)
        topic = outgoing.topic
        alias: int = aliases.find(topic)
        packet: bytes = NO_BYTES
        if alias:
            name = NO_BYTES if alias > 0 else topic
            told = own + b"\x23" + TWO_BYTES[abs(alias)]
            packet = outgoing.encode_as(name, 5, qos, retain, dup, packet_id, told)
        if alias == 0 or len(packet) > self.maximum_packet_size:
            alias = 0
            packet = outgoing.encode_as(topic, 5, qos, retain, dup, packet_id, own)
            if len(packet) > self.maximum_packet_size:  # [MQTT-3.1.2-25]
                self.outbound.counters.publish_dropped_too_large += 1
                return False
        if self.send_publish(packet, qos == 0) and alias < 0:
            aliases.teach(topic)
        return True

    def send_entry(self, entry: Delivery, duplicate: bool) -> None:
        message = entry.message
        outgoing = Outgoing(message.topic.encode("utf-8"), message, self.outbound.clock.now)
        self.send_delivery(entry, outgoing, duplicate)

    def send_pubrel(self, packet_id: int) -> None:
        self.send_ack(PUBREL, packet_id)

    # -- acknowledgements ---------------------------------------------------

    def gate(self, packet_type: int, packet_id: int) -> AckGate:
        """A gate for an acknowledgement; give it back through `answer`."""
        gate = self.spare_gate
        if gate is None:
            gate = AckGate(self)
        else:
            self.spare_gate = None
        gate.packet_type = packet_type
        gate.packet_id = packet_id
        gate.reason_code = 0
        return gate

    def answer(self, gate: AckGate) -> None:
        """Send a gate's acknowledgement, now or when its turn comes."""
        if gate.pending == 0 and self.acks.length == 0:
            self._acknowledge(gate)
            if gate.packet is None:
                self.spare_gate = gate
        else:
            self.acks.push(gate)
            if gate.packet_type == PUBACK or gate.packet_type == PUBCOMP:
                self.unanswered += 1

    def release_acks(self) -> None:
        """Send the acknowledgements whose turn has come."""
        acks = self.acks
        if acks.length > self.outbound.max_acks:
            self.touch()
        while self.state != CLOSED:
            gate = acks.pop_open()
            if gate is None:
                return
            if gate.packet_type == PUBACK or gate.packet_type == PUBCOMP:
                self.unanswered -= 1
            self._acknowledge(gate)

    def _acknowledge(self, gate: AckGate) -> None:
        if gate.failed:
            self._refuse(gate)
            return
        if gate.packet is not None:
            self.send(gate.packet)
        elif gate.reason_code == 0:
            self.send_ack(gate.packet_type, gate.packet_id)
        else:
            self.send(encode_ack(gate.packet_type, gate.packet_id, gate.reason_code, self.version))
        if gate.sequel is not None:
            gate.sequel()

    def _refuse(self, gate: AckGate) -> None:
        """The store failed: no acknowledgement that is not true."""
        if self.version >= 5 and (gate.packet_type == PUBACK or gate.packet_type == PUBREC):
            self.send(encode_ack(gate.packet_type, gate.packet_id, self.outbound.refusal, self.version))
        else:
            # What was asked stays wanted and is tried again; the client asks anew.
            self.disconnect(self.outbound.refusal, "the store failed")

    # -- the end ------------------------------------------------------------

    def farewell(self, reason_code: int, detail: str, server_reference: Optional[str]) -> None:
        """Tell a v5 client why [MQTT-4.13.1-1], and where to go; nothing leaves after this."""
        if self.version >= 5 and self.state == CONNECTED:
            properties = Properties()
            properties.server_reference = server_reference
            if self.problem_information and detail and server_reference is None:
                properties.reason_string = detail
            packet = Disconnect(reason_code, properties).encode(5)
            if len(packet) > self.maximum_packet_size:
                packet = Disconnect(reason_code).encode(5)
            self.send(packet)


class AckGate(Gate):
    """An acknowledgement of one connection, waiting for its turn and for the disk.

    ``packet`` is the packet to send where it is not one of the four short
    acknowledgements; ``sequel`` is called after it was sent.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.packet_type = PUBACK
        self.packet_id = 0
        self.reason_code = 0
        self.packet: Optional[bytes] = None
        self.sequel: Any = None
        self.behind: Optional[AckGate] = None  # in the queue of its connection

    def opened(self) -> None:
        connection = self.connection
        session = connection.session
        if self.failed and self.packet_type == PUBREC and session is not None:
            # The message was not kept; whether or not the client is still there to be
            # told, its PUBLISH must not pass for a duplicate when it comes again.
            session.received.pop(self.packet_id, None)
        connection.release_acks()


class AckQueue:
    """The acknowledgements of one connection that wait, in order; an idle one costs nothing."""

    def __init__(self) -> None:
        self.length = 0
        self._first: Optional[AckGate] = None
        self._last: Optional[AckGate] = None

    def push(self, gate: AckGate) -> None:
        if self._last is None:
            self._first = gate
        else:
            self._last.behind = gate
        self._last = gate
        self.length += 1

    def pop_open(self) -> Optional[AckGate]:
        """Take out the first one if nothing holds it any more."""
        gate = self._first
        if gate is None or gate.pending > 0:
            return None
        self._first = gate.behind
        if self._first is None:
            self._last = None
        gate.behind = None
        self.length -= 1
        return gate

    def clear(self) -> None:
        gate = self._first
        while gate is not None:
            after = gate.behind
            gate.behind = None
            gate = after
        self._first = self._last = None
        self.length = 0


def connection_of(session: Session) -> Optional[Connection]:
    """The connection of a session, None while its client is away."""
    return cast(Optional[Connection], session.connection)
