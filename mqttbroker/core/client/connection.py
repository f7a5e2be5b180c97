"""One client's connection: its identity, state and limits, and the packets that the client is sent.

A session sends through its `ClientConnection`, which is a `Connection`. It queues packets in its `Outbox` and
acknowledgements in its `AckQueue`; `FlushScheduler` writes them. The outbox of a client that does not read is bounded:
above the high-water mark QoS 0 is dropped and counted, and QoS 1 and 2 stay in the session's queue.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final, cast

from mypy_extensions import i32, i64, u8

from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.frames import SHORT_ACKS, publish_header, two_bytes
from mqttbroker.codec.packets import Disconnect
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import PACKET_TOO_LARGE, PUBREL, name
from mqttbroker.core.access.policy import AuthenticationRequest, Authenticator
from mqttbroker.core.client.acknowledgements import AckQueue
from mqttbroker.core.client.client_wire import ClientWire
from mqttbroker.core.client.outbox import Outbound, Outbox
from mqttbroker.core.client.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.client.topic_aliases import ALIASED_PROPERTIES, EMPTY_TOPIC, MAX_ALIASED_PROPERTIES, TopicAliases
from mqttbroker.core.terms.rates import Rate, Throttle
from mqttbroker.core.terms.terms import ListenerTerms
from mqttbroker.core.terms.users import User
from sessions.counters import Drops
from sessions.delivery import ClientConnection, Delivery
from sessions.message import Message
from sessions.session import Session
from topic_matcher.filters import text_bytes

# States of a connection.
AWAIT_CONNECT: Final = 0
CONNECTING: Final = 1  # CONNECT was received; its answer waits for the authenticator or the store
CONNECTED: Final = 2
CLOSED: Final = 3
AUTHENTICATING: Final = 4  # waiting for an AUTH of the client

# Shared by the clients that have not published yet, because an empty dictionary takes 64 bytes. Stays empty.
_NO_DECISIONS: Final[dict[str, bool]] = {}

FREE_BYTES: Final = 4096  # of one client, for each kind of memory, that do not depend on what others hold
ALIAS_BYTES: Final = 120  # memory of a topic alias beside its topic

DECISION_BYTES: Final = 100  # memory of a decision beside its topic
MAX_DECISION_BYTES: Final = 33_554_432  # of the decisions of all clients

MAX_PUBLISH_OVERHEAD: Final = 24  # bytes of a PUBLISH, at most, beside topic, payload and properties


class ConnectionOwner:
    """Has connections, and ends each of them once."""

    @abstractmethod
    def close(self, connection: Connection, with_will: bool, reason: str, username: str | None = None) -> None:
        """End a connection, whether client or broker closed it; its will is published if ``with_will``.

        ``username`` is what a refused client claims to be, for the log.
        """

    @abstractmethod
    def release(self, connection: Connection) -> None:
        """Have an open connection no more, as it is not a client's."""


class Connection(ClientConnection):
    """A client as the broker sees it.

    ``peer`` is its address, for logs; ``terms`` are those of its listener; ``now`` is monotonic time in seconds.
    """

    def __init__(self, outbound: Outbound, owner: ConnectionOwner, peer: str, terms: ListenerTerms, now: float) -> None:
        super().__init__()
        # Flags and small numbers stand side by side, so that a compiled object has no gaps.
        self.restricted = True  # the rules are asked before a PUBLISH is accepted
        self.problem_information = True
        self.is_link = False  # to another core of a cluster, and no client
        self.bridge = False  # of a broker that cannot ask for No Local and Retain As Published
        self.flush_requested = False
        self.halted = False  # no more packets are handled in this iteration of the event loop
        self.state: u8 = AWAIT_CONNECT
        self.zero_copy_version: u8 = 0  # protocol version whose PUBLISH packets are sent unchanged; 0 = none
        self.waits: i32 = 0  # long work of the broker that must be done before the next packet is handled
        self.outbound = outbound
        self.owner = owner
        self.peer = peer
        self.terms = terms
        self.outbox = Outbox(outbound)
        self.acks = AckQueue()
        self.wire: ClientWire | None = None  # the owner of the socket
        self.session: Session | None = None
        self.client_id = ""
        self.username: str | None = None  # as authenticated; None = anonymous
        self.method: str | None = None  # of enhanced authentication, from CONNECT
        self.authenticator: Authenticator | None = None  # the one that accepted the client, or that enhanced authentication began with
        self.expires_at = 0.0  # Unix seconds at which the login expires; 0 = never
        self.authentication: AuthenticationRequest | None = None  # an enhanced authentication in progress
        self.may_publish = _NO_DECISIONS  # decisions of the rules by topic, bounded
        self.connect_bytes: i64 = 0  # part of `Outbound.connect_bytes`
        self.alias_bytes: i64 = 0  # part of `Outbound.alias_bytes`
        self.keep_alive = 0.0  # seconds; 0 = off
        self.accepted = now
        self.last_received = now
        self.bytes_received: i64 = 0
        self.publish_received: i64 = 0  # PUBLISH packets
        self.maximum_packet_size: i64 = 0xFFFFFFFF
        self.topic_aliases: TopicAliases | None = None  # None if the client accepts none
        self.user: User | None = None  # if it is counted
        self.throttle: Throttle | None = None  # the rates at which the client may send

    @property
    def closed(self) -> bool:
        return self.state == CLOSED

    @property
    def blocked(self) -> bool:
        """Whether nothing is to be read from the client for now."""
        if self.state == CONNECTED:
            if self.is_link:  # what it is sent is bounded, and two cores that do not read would wait for each other
                return self.halted or self.outbound.backlogged
            outbound = self.outbound
            unsent = self.outbox.control_bytes
            return (
                self.halted
                or outbound.backlogged
                # A client that has messages to acknowledge is read, so that no two clients wait for each other.
                or (self.paused_by is not None and cast(Session, self.session).deliveries.packet_ids_in_use == 0)
                or unsent > outbound.max_backlog
                or (unsent > FREE_BYTES and outbound.blocked_bytes > outbound.max_blocked)
                or self.acks.length > outbound.max_acks
                or self.acks.awaited
            )
        return self.state == CONNECTING

    # -- rates ----------------------------------------------------------------

    def limit_received(self, rate: Rate) -> None:
        """Let ``rate`` apply to what the client sends, if it has a limit."""
        if rate.limited:
            if self.throttle is None:
                self.throttle = Throttle()
            self.throttle.rates.append(rate)

    def limit_sent(self, rate: Rate) -> None:
        """Let ``rate`` apply to the PUBLISH packets that the client is sent, if it has a limit."""
        outbox = self.outbox
        if rate.limited:
            self.has_send_rate = True
            if outbox.throttle is None:
                outbox.throttle = Throttle()
                outbox.restricted = True
            outbox.throttle.rates.append(rate)

    # -- packets --------------------------------------------------------------

    def send(self, packet: bytes) -> None:
        """Queue a packet other than PUBLISH. Nothing follows a DISCONNECT [MQTT-3.14.4-1]."""
        if self.state == CLOSED:
            return
        size: i64 = len(packet)
        if size > self.maximum_packet_size:  # [MQTT-3.1.2-24]
            self._disconnect_too_large()
            return
        outbox = self.outbox
        outbox.count_control(size)
        outbox.parts.append(packet)
        self.outbound.counters.messages_sent += 1
        if not self.flush_requested:
            self._enter_flush_queue()

    def send_ack(self, packet_type: i64, packet_id: i64) -> None:
        """Queue a PUBACK, PUBREC, PUBREL or PUBCOMP with reason code 0."""
        if self.state == CLOSED:
            return
        if self.maximum_packet_size < 4:
            self._disconnect_too_large()
            return
        outbox = self.outbox
        outbox.count_control(4)
        parts = outbox.parts
        parts.append(SHORT_ACKS[packet_type])
        parts.append(two_bytes(packet_id))
        self.outbound.counters.messages_sent += 1
        if not self.flush_requested:
            self._enter_flush_queue()

    def send_pubrel(self, packet_id: int) -> None:
        self.send_ack(PUBREL, packet_id)

    def send_publish(self, packet: bytes, payload: i64, droppable: bool) -> bool:
        """Queue a PUBLISH with ``payload`` bytes of payload; ``droppable`` at QoS 0. False if it was dropped."""
        if not self._admit(len(packet), payload, droppable):
            return False
        self.outbox.parts.append(packet)
        return True

    def send_publish_pieces(self, first: bytes, pieces: list[bytes], size: i64, payload: i64) -> None:
        """Queue or drop a QoS 0 PUBLISH of ``size`` bytes, ``payload`` of them payload, in the pieces in which it was
        received."""
        if self._admit(size, payload, True):
            parts = self.outbox.parts
            parts.append(first)
            parts += pieces

    def send_publish_parts(self, header: bytes, packet_id: i64, rest: bytes, size: i64, payload: i64) -> None:
        """Queue a QoS 1 or 2 PUBLISH of ``size`` bytes, ``payload`` of them payload; all but the packet id is shared with
        other subscribers."""
        self._admit(size, payload, False)
        parts = self.outbox.parts
        parts.append(header)
        parts.append(two_bytes(packet_id))
        parts.append(rest)

    def send_publish_packets(self, parts: list[bytes], size: i64, count: i64, payload: i64) -> None:
        """Queue ``count`` whole PUBLISH packets, ``size`` bytes in all, ``payload`` of them payload; none is dropped."""
        self._admit(size, payload, False)
        outbox = self.outbox
        counters = self.outbound.counters
        outbox.publish_sent += count - 1
        counters.messages_sent += count - 1
        counters.publish_sent += count - 1
        outbox.parts.append(b"".join(parts))

    def can_alias(self, size: i64, properties_size: i64) -> bool:
        """Whether a version 5 PUBLISH that was received in ``size`` bytes may be sent with `send_publish_aliased`."""
        return self.topic_aliases is not None and properties_size < MAX_ALIASED_PROPERTIES and size + 4 <= self.maximum_packet_size

    def send_publish_aliased(self, flags: int, topic: bytes, packet_id: i64, properties_size: i64, rest: bytes) -> None:
        """Queue or drop a received PUBLISH with a topic alias added, if one is free; only if `can_alias`.

        ``packet_id`` is 0 at QoS 0. ``properties_size`` is the byte of the packet that holds the length of its
        properties, ``rest`` the bytes after it.
        """
        aliases = cast(TopicAliases, self.topic_aliases)
        alias: i64 = aliases.find(topic)
        topic_field: bytes = EMPTY_TOPIC if alias > 0 else two_bytes(len(topic)) + topic
        remaining: i64 = len(topic_field) + (2 if packet_id else 0) + (4 if alias else 1) + len(rest)
        header = publish_header(flags, remaining)
        if not self._admit(len(header) + remaining, len(rest) - properties_size, packet_id == 0):
            return
        parts = self.outbox.parts
        parts.append(header)
        parts.append(topic_field)
        if packet_id:
            parts.append(two_bytes(packet_id))
        if alias:
            parts.append(ALIASED_PROPERTIES[properties_size])
            parts.append(two_bytes(alias if alias > 0 else -alias))
        else:
            parts.append(encode_varint(properties_size))
        parts.append(rest)
        if alias < 0:
            self._assign_alias(aliases, topic)

    def _admit(self, size: i64, payload: i64, droppable: bool) -> bool:
        """Count a PUBLISH of ``size`` bytes, ``payload`` of them payload, which the caller queues; false if it is
        dropped."""
        outbox = self.outbox
        counters = self.outbound.counters
        if droppable and outbox.restricted and self._is_dropped(size):
            return False
        if outbox.count_publish(size):
            self.ready = False
        counters.messages_sent += 1
        counters.publish_sent += 1
        counters.publish_bytes_sent += payload
        counters.publish_packet_bytes_sent += size
        if not self.flush_requested:
            self._enter_flush_queue()
        return True

    def _is_dropped(self, size: i64) -> bool:
        """Whether a QoS 0 PUBLISH of ``size`` bytes is to be dropped, because the client does not read or its rate is
        exceeded; counts it. Never unless the outbox is `restricted`, which callers test first: mypyc inlines no long
        method."""
        outbox = self.outbox
        if outbox.is_blocked(size):
            if self.outbound.shedding:
                self.drops().memory += 1
            else:
                self.drops().slow_subscriber += 1
            return True
        if outbox.exceeds_rate():
            self.drops().rate += 1
            return True
        return False

    def drops(self) -> Drops:
        return self.outbound.counters.drops_of(self.terms.listener)

    # -- deliveries -----------------------------------------------------------

    def send_at_most_once(self, outgoing: Outgoing, retain: bool, subscription_ids: bytes) -> None:
        """Send or drop a message at QoS 0."""
        packet: bytes
        if self.topic_aliases is not None:
            self._send_encoded_aliased(outgoing, 0, retain, False, 0, subscription_ids)
            return
        if retain or subscription_ids:
            packet = outgoing.encode(self.version, 0, retain, False, 0, subscription_ids)
        else:
            packet = outgoing.qos0_packet(self.version)
        if len(packet) > self.maximum_packet_size:  # [MQTT-3.1.2-25]
            self.drops().too_large += 1
            return
        self.send_publish(packet, len(outgoing.message.payload), True)

    def send_retained(self, message: Message, subscription_ids: bytes) -> None:
        """Send or drop a retained message at QoS 0, without a copy of its payload."""
        if self.topic_aliases is not None or message.expires_at:
            outgoing = Outgoing(message.topic.encode("utf-8"), message, self.outbound.clock.now)
            self.send_at_most_once(outgoing, True, subscription_ids)
            return
        topic = message.topic.encode("utf-8")
        payload = message.payload
        properties: bytes = NO_BYTES
        remaining: i64 = 2 + len(topic) + len(payload)
        if self.version >= 5:
            properties = message.properties + subscription_ids
            properties = encode_varint(len(properties)) + properties
            remaining += len(properties)
        header: bytes = publish_header(1, remaining)
        size: i64 = len(header) + remaining
        if size > self.maximum_packet_size:  # [MQTT-3.1.2-25]
            self.drops().too_large += 1
        elif self._admit(size, len(payload), True):
            parts = self.outbox.parts
            parts.append(header)
            parts.append(two_bytes(len(topic)))
            parts.append(topic)
            if properties:
                parts.append(properties)
            parts.append(payload)

    def send_unpersisted(self, outgoing: Outgoing, qos: int, retain: bool, subscription_ids: bytes) -> bool:
        """Send a message at QoS 1 or 2 without an entry in the session; false if the session has to queue it."""
        session = self.session
        message = outgoing.message
        size: i64 = len(outgoing.topic) + len(message.payload) + len(message.properties) + len(subscription_ids)
        if session is None or self.topic_aliases is not None or size + MAX_PUBLISH_OVERHEAD > self.maximum_packet_size:
            return False
        packet_id = session.deliveries.allocate_unpersisted(qos)
        if packet_id == 0:
            return False
        packet = outgoing.encode(self.version, qos, retain, False, packet_id, subscription_ids)
        return self.send_publish(packet, len(message.payload), False)

    def send_entry(self, entry: Delivery, duplicate: bool) -> None:
        """Send the PUBLISH of an entry of the session, which has its packet id."""
        message = entry.message
        outgoing = Outgoing(message.topic.encode("utf-8"), message, self.outbound.clock.now)
        self.send_delivery(entry, outgoing, duplicate)

    def send_delivery(self, entry: Delivery, outgoing: Outgoing, duplicate: bool) -> None:
        """`send_entry` for a message that other subscribers get, too."""
        retain = entry.retain
        subscription_ids = entry.subscription_ids
        qos = entry.qos
        packet_id = entry.packet_id
        if self.topic_aliases is not None:
            if not self._send_encoded_aliased(outgoing, qos, retain, duplicate, packet_id, subscription_ids):
                entry.owner.abandon(entry)
            return
        packet: bytes = NO_BYTES
        header: bytes = NO_BYTES
        rest: bytes = NO_BYTES
        size: i64
        if duplicate or retain or subscription_ids:
            packet = outgoing.encode(self.version, qos, retain, duplicate, packet_id, subscription_ids)
            size = len(packet)
        else:
            header = outgoing.header(self.version, qos)
            rest = outgoing.rest(self.version)
            size = len(header) + 2 + len(rest)
        if size > self.maximum_packet_size:
            # Completed as if it had been delivered [MQTT-3.1.2-25].
            self.drops().too_large += 1
            entry.owner.abandon(entry)
        elif packet:
            self.send_publish(packet, len(outgoing.message.payload), False)
        else:
            self.send_publish_parts(header, packet_id, rest, size, len(outgoing.message.payload))

    def _send_encoded_aliased(
        self, outgoing: Outgoing, qos: int, retain: bool, duplicate: bool, packet_id: i64, subscription_ids: bytes
    ) -> bool:
        """Encode and send a PUBLISH, with a topic alias if one is free; false if it is too large for the client."""
        aliases = cast(TopicAliases, self.topic_aliases)
        topic = outgoing.topic
        alias: i64 = aliases.find(topic)
        packet: bytes = NO_BYTES
        if alias:
            topic_name = NO_BYTES if alias > 0 else topic
            added = subscription_ids + b"\x23" + two_bytes(alias if alias > 0 else -alias)
            packet = outgoing.encode_as(topic_name, 5, qos, retain, duplicate, packet_id, added)
        if alias == 0 or len(packet) > self.maximum_packet_size:
            alias = 0
            packet = outgoing.encode_as(topic, 5, qos, retain, duplicate, packet_id, subscription_ids)
            if len(packet) > self.maximum_packet_size:  # [MQTT-3.1.2-25]
                self.drops().too_large += 1
                return False
        if self.send_publish(packet, len(outgoing.message.payload), qos == 0) and alias < 0:
            self._assign_alias(aliases, topic)
        return True

    # -- memory that clients share --------------------------------------------

    def hold_connect(self, size: i64) -> bool:
        """Count bytes of a CONNECT or AUTH until the client has its answer; false if there is no room."""
        outbound = self.outbound
        if self.connect_bytes + size < FREE_BYTES:
            return True
        self.connect_bytes += size
        outbound.connect_bytes += size
        if outbound.connect_bytes <= outbound.terms.max_total_connect_bytes:
            return True
        outbound.counters.limit_reached("max_total_connect_bytes")
        return False

    def release_connect(self) -> None:
        """The client has its answer."""
        self.outbound.connect_bytes -= self.connect_bytes
        self.connect_bytes = 0

    def hold_alias(self, size: i64) -> bool:
        """Count the bytes by which the topics of aliases grow; false, and nothing is counted, if there is no room."""
        outbound = self.outbound
        if size > 0 and self.alias_bytes + size > FREE_BYTES and outbound.alias_bytes + size > outbound.terms.max_total_alias_bytes:
            outbound.counters.limit_reached("max_total_alias_bytes")
            return False
        self.alias_bytes += size
        outbound.alias_bytes += size
        return True

    def _assign_alias(self, aliases: TopicAliases, topic: bytes) -> None:
        if self.hold_alias(ALIAS_BYTES + len(topic)):
            aliases.assign(topic)
        else:
            aliases.stop()

    # -- decisions of the rules -----------------------------------------------

    def remember_decision(self, topic: str, decision: bool) -> None:
        """Remember whether the client may publish to the topic, unless all clients together remember too much."""
        outbound = self.outbound
        size: i64 = text_bytes(topic) + DECISION_BYTES
        if outbound.decision_bytes + size > MAX_DECISION_BYTES:
            return
        outbound.decision_bytes += size
        if not self.may_publish:
            self.may_publish = {}
        self.may_publish[topic] = decision

    def forget_decisions(self) -> None:
        """Forget all decisions: the rules have changed, there are too many, or the connection is closed."""
        for topic in self.may_publish:
            self.outbound.decision_bytes -= text_bytes(topic) + DECISION_BYTES
        self.may_publish = _NO_DECISIONS

    # -- flushing -------------------------------------------------------------

    def request_flush(self) -> None:
        """Include this connection in the flush at the end of this event-loop iteration."""
        if not self.flush_requested:
            self._enter_flush_queue()

    def _enter_flush_queue(self) -> None:
        self.flush_requested = True
        outbound = self.outbound
        outbound.flush_queue.append(self)
        if len(outbound.flush_queue) == 1 and outbound.on_flush_needed is not None:
            outbound.on_flush_needed()

    def resume_sending(self) -> None:
        """Send from the session's queue again once the outbox is below its high-water mark and the rates permit it."""
        if not self.ready and self.outbox.backlog <= self.outbound.max_backlog:
            throttle = self.outbox.throttle
            if throttle is not None:
                seconds = throttle.wait(self.outbound.clock.monotonic)
                if seconds > 0.0:
                    if self.wire is not None:
                        self.wire.resume_sending_in(seconds)
                    return
            self.ready = True
            session = self.session
            if session is not None and session.connection is self:
                session.deliveries.send_queued()
                if session.pending_retained:
                    self.request_flush()  # the flush continues the replay
        elif self.session is not None:
            room_user = self.session.deliveries.room_user
            if room_user is not None:
                room_user.resume()

    def halt(self) -> None:
        """Handle no more packets in this iteration of the event loop: the limit of work per iteration is reached."""
        self.halted = True
        self.request_flush()

    def go_on(self) -> None:
        """A new iteration of the event loop: packets may be handled, unless the client waits for long work."""
        self.halted = self.waits > 0

    def wait_for_turn(self) -> None:
        """Handle no more packets until `take_turn`."""
        self.waits += 1
        self.halt()

    def take_turn(self) -> None:
        """The long work is done."""
        self.waits -= 1
        self.request_flush()

    def resume_reading(self) -> None:
        self.request_flush()

    # -- the end --------------------------------------------------------------

    def disconnect(self, reason_code: int, detail: str) -> None:
        """Close the connection; a version 5 client gets a DISCONNECT with the reason first [MQTT-4.13.1-1]."""
        if self.state == CLOSED:
            return
        self._send_disconnect(reason_code, detail, self.outbound.terms.server_reference(reason_code))
        self.owner.close(self, True, f"{name(reason_code)}: {detail}")

    def _send_disconnect(self, reason_code: int, detail: str, server_reference: str | None) -> None:
        if self.version >= 5 and self.state == CONNECTED:
            properties = Properties()
            properties.server_reference = server_reference
            if self.problem_information and detail and server_reference is None:
                properties.reason_string = detail
            packet = Disconnect(reason_code, properties).encode(5)
            if len(packet) > self.maximum_packet_size:
                packet = Disconnect(reason_code).encode(5)
            self.send(packet)

    def _disconnect_too_large(self) -> None:
        # The DISCONNECT fits: a client whose Maximum Packet Size excludes a CONNACK was not accepted.
        self.disconnect(PACKET_TOO_LARGE, "an answer is above the client's Maximum Packet Size")

    def dispose(self) -> None:
        """The socket is closed: free the memory of packets, acknowledgements and caches."""
        self.outbox.clear()
        self.outbound.incomplete.forget(self)
        self.forget_decisions()
        self.hold_alias(-self.alias_bytes)
        self.acks.clear()
        self.topic_aliases = None
        self.authentication = None  # an unfinished one refers to this connection
        self.authenticator = None
