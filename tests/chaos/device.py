"""An MQTT client whose state survives its connections.

A `Device` updates its state before it sends the packet that depends on it.  A `Link` has no state that a later
connection needs.  So the connection may be cut, or taken over by the same client, at any byte.  Protocol errors of the
broker are recorded as faults.
"""

from __future__ import annotations

import asyncio
from collections import deque

from chaos.record import MISSING_2, ORDER, PROTOCOL, SESSION, Record, Sent
from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Subscription,
    Will,
    decode,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import NO_MATCHING_SUBSCRIBERS, SUCCESS, MQTTError

TIMEOUT = 30.0  # seconds for a required answer
NOT_FOUND = 0x92
Address = tuple[str, int]  # host and port
PACKET_IDS = 100  # few, so that each is reused soon


class Link(asyncio.Protocol):
    """One connection of a device; acknowledgements are sent in order, ``ack_delay`` seconds late."""

    def __init__(self, device: Device, ack_delay: float, receive_maximum: int) -> None:
        loop = asyncio.get_running_loop()
        self.device = device
        self.ack_delay = ack_delay
        self.receive_maximum = receive_maximum
        self.transport: asyncio.Transport | None = None
        self.abandoned = False  # the device ignores it
        self.up = False
        self.closed = asyncio.Event()
        self.connack: asyncio.Future[bool] = loop.create_future()
        self.reply: asyncio.Future[bool] | None = None  # to SUBSCRIBE or PINGREQ
        self.unanswered: set[int] = set()  # packet ids in use by the broker
        # Packet ids in the order in which their acknowledgements must arrive.
        self.order: dict[type[Packet], deque[int]] = {Puback: deque(), Pubrec: deque(), Pubrel: deque()}
        self._answers: list[tuple[bytes, int]] = []
        self._bytes = b""

    @property
    def is_slow(self) -> bool:
        return self.ack_delay > 0 or self.receive_maximum < 65535

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None  # it cannot be aborted any more
        self.up = False
        self.abandoned = True
        self.closed.set()
        for future in (self.connack, self.reply):
            if future is not None and not future.done():
                future.set_result(False)

    def data_received(self, data: bytes) -> None:
        if self.abandoned:
            return
        data = self._bytes + data
        position = 0
        while not self.abandoned:
            try:
                packet, after = decode(data, self.device.version, position)
            except MQTTError as error:
                self.device.fault(PROTOCOL, f"was sent {data[position : position + 20].hex()}: {error}")
                self.cut()
                return
            if packet is None:
                break
            position = after
            self.device.handle(self, packet)
        self._bytes = data[position:]

    def send(self, packet: Packet) -> None:
        self.write(packet.encode(self.device.version))

    def write(self, data: bytes) -> None:
        if not self.abandoned and self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def answer(self, packet: Packet, done: int = 0) -> None:
        """Send a packet after the delay; that frees the packet id ``done``."""
        if not self._answers:
            asyncio.get_running_loop().call_later(self.ack_delay, self._send_answers)
        self._answers.append((packet.encode(self.device.version), done))

    def _send_answers(self) -> None:
        self.write(b"".join(data for data, _ in self._answers))
        self.unanswered.difference_update(done for _, done in self._answers)
        self._answers = []

    def cut(self) -> None:
        """Abort the connection; packets in flight to the device are lost."""
        self.abandon()
        if self.transport is not None:
            self.transport.abort()

    def abandon(self) -> None:
        """Stop reading and writing without closing the connection."""
        self.abandoned = True
        self.up = False
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()


class Device:
    """A client; ``persistent`` sessions survive disconnects."""

    will: Will | None = None  # of the next connection

    def __init__(self, name: str, version: int, record: Record, persistent: bool = True) -> None:
        self.name = name
        self.label = name  # key of its deliveries in the record
        self.version = version
        self.record = record
        self.persistent = persistent
        self.known = False  # the broker has acknowledged something in this session, so it must have the session
        self.outgoing: dict[int, tuple[Sent, bool]] = {}  # packet id -> message, whether PUBREC arrived
        self.incoming: dict[int, int] = {}  # QoS 2 packet id -> number, until its PUBREL
        self.last_packet_id = 0
        self.link: Link | None = None

    @property
    def up(self) -> bool:
        return self.link is not None and self.link.up

    # --- connection -----------------------------------------------------------------------------------------------

    async def connect(self, address: Address, ack_delay: float = 0.0, receive_maximum: int = 65535) -> Link | None:
        """Connect and wait for CONNACK, taking over an open connection.  None if the broker is down."""
        if not self.persistent:
            self.incoming.clear()
            self.label = f"{self.name}, connection {self.record.counts[self.name]}"
            self.record.counts[self.name] += 1
        old = self.link
        link = Link(self, ack_delay, receive_maximum)
        try:
            await asyncio.get_running_loop().create_connection(lambda: link, *address)
        except OSError:
            return None
        self.link = link
        properties = Properties()
        if self.version == 5:
            properties.session_expiry_interval = 0xFFFFFFFF if self.persistent else 0
            properties.receive_maximum = receive_maximum
        link.send(Connect(self.name, self.version, not self.persistent, will=self.will, properties=properties))
        accepted = await self._wait(link, link.connack, "CONNACK")
        if old is not None:
            old.cut()
        return link if accepted else None

    async def subscribe(self, topic_filter: str, qos: int) -> bool:
        assert self.link is not None
        self.link.send(Subscribe(self.next_packet_id(), [Subscription(topic_filter, qos)]))
        return await self._reply("SUBACK")

    async def ping(self) -> bool:
        """Wait until the broker has handled all packets sent before; False if the connection ended."""
        assert self.link is not None
        self.link.send(Pingreq())
        return await self._reply("PINGRESP")

    async def _reply(self, packet_name: str) -> bool:
        link = self.link
        if link is None or link.closed.is_set():
            return False
        link.reply = asyncio.get_running_loop().create_future()
        return await self._wait(link, link.reply, packet_name)

    async def _wait(self, link: Link, future: asyncio.Future[bool], packet_name: str) -> bool:
        try:
            return await asyncio.wait_for(future, TIMEOUT)
        except TimeoutError:
            self.fault(PROTOCOL, f"got no {packet_name} within {TIMEOUT} s")
            link.cut()
            return False

    def leave(self) -> None:
        """Send DISCONNECT and close; the session remains."""
        if self.link is not None:
            self.link.send(Disconnect())
            self.link.abandoned = True
            if self.link.transport is not None:
                self.link.transport.close()

    # --- received packets -----------------------------------------------------------------------------------------

    def handle(self, link: Link, packet: Packet) -> None:
        self.record.on_packet(type(packet).__name__)
        self.record.progressed()
        if isinstance(packet, Publish):
            self.receive(link, packet)
        elif isinstance(packet, Pubrel):
            self._released(link, packet)
        elif isinstance(packet, (Puback, Pubrec, Pubcomp)):
            self._acknowledged(link, packet)
        elif isinstance(packet, Connack):
            self._connacked(link, packet)
        elif isinstance(packet, (Suback, Pingresp)) and link.reply is not None:
            self.known = self.known or isinstance(packet, Suback)
            if not link.reply.done():
                link.reply.set_result(True)
        elif not isinstance(packet, Disconnect) or (
            link is self.link and packet.reason_code not in self.record.unavailable | self.record.undecided
        ):
            code = getattr(packet, "reason_code", 0)
            self.fault(PROTOCOL, f"was sent {type(packet).__name__} with reason code {code:#x}")

    def _connacked(self, link: Link, packet: Connack) -> None:
        if link.connack.cancelled():
            link.cut()  # the run ends, and nobody waits for it
            return
        if packet.reason_code in self.record.unavailable and not link.connack.done():
            link.connack.set_result(False)
            link.cut()
            return
        self.record.checked[SESSION] += self.known
        if packet.reason_code or link.connack.done():
            self.fault(PROTOCOL, f"was sent CONNACK with reason code {packet.reason_code:#x}")
            link.cut()
            return
        if not packet.session_present:
            if self.known and self.persistent:
                self.fault(SESSION, "reconnected and the session was gone")
            self.incoming.clear()
            self.outgoing = {key: value for key, value in self.outgoing.items() if not value[1]}
        link.up = True
        link.connack.set_result(True)
        for packet_id, (message, received) in self.outgoing.items():
            if received:
                link.send(Pubrel(packet_id))
            else:
                self._send(link, packet_id, message, packet.session_present)
        self.connected()

    def connected(self) -> None:
        """Called after CONNACK and after in-flight packets were sent again."""

    def fault(self, row: str, text: str) -> None:
        self.record.fault(row, f"{self.name} {text}")

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, link: Link, packet: Publish) -> None:
        """Record a PUBLISH unless it was received before, and acknowledge it."""
        message = self.record.identify(self.name, packet.topic, packet.payload, packet.qos)
        if message is None:
            return
        packet_id = packet.packet_id
        if packet_id in link.unanswered:
            self.fault(PROTOCOL, f"was sent {message} under packet id {packet_id}, which is in use")
        link.unanswered.add(packet_id)
        if self.version == 5 and len(link.unanswered) > link.receive_maximum:
            self.fault(PROTOCOL, f"was sent more than {link.receive_maximum} messages at a time")
        if packet.qos == 1:
            self.record.deliver(self.label, message, 1)
            link.answer(Puback(packet_id), packet_id)
            return
        known = self.incoming.get(packet_id)
        if known is None:
            self.incoming[packet_id] = message.number
            self.record.deliver(self.label, message, 2)
        elif known != message.number:
            self.fault(MISSING_2, f"was sent {message} under packet id {packet_id} of incomplete message {known}")
        elif not packet.dup:
            self.fault(PROTOCOL, f"was sent {message} again without DUP")
        link.order[Pubrel].append(packet_id)
        link.answer(Pubrec(packet_id))

    def _released(self, link: Link, packet: Pubrel) -> None:
        self._in_order(link, packet, packet.packet_id in link.order[Pubrel])
        self.incoming.pop(packet.packet_id, None)
        link.answer(Pubcomp(packet.packet_id), packet.packet_id)

    # --- sending --------------------------------------------------------------------------------------------------

    def publish(self, message: Sent) -> None:
        """Record and send a new message."""
        assert self.link is not None
        packet_id = self.next_packet_id()
        self.outgoing[packet_id] = (message, False)
        self._send(self.link, packet_id, message, False)

    def publish_half(self, message: Sent) -> None:
        """Record a new message, send half of its packet and cut the connection."""
        assert self.link is not None
        packet_id = self.next_packet_id()
        self.outgoing[packet_id] = (message, False)
        data = _packet(packet_id, message, False).encode(self.version)
        self.link.write(data[: len(data) // 2])
        self.link.cut()

    def _send(self, link: Link, packet_id: int, message: Sent, dup: bool) -> None:
        link.order[Puback if message.qos == 1 else Pubrec].append(packet_id)
        link.send(_packet(packet_id, message, dup))

    def _acknowledged(self, link: Link, packet: Packet) -> None:
        assert isinstance(packet, (Puback, Pubrec, Pubcomp))
        packet_id = packet.packet_id
        message, received = self.outgoing.get(packet_id, (None, False))
        if isinstance(packet, Pubcomp):
            if message is None or not received or packet.reason_code not in (0, NOT_FOUND):
                self.fault(PROTOCOL, f"was sent PUBCOMP {packet_id} with reason code {packet.reason_code:#x}")
            self.outgoing.pop(packet_id, None)
            self.settled()
            return
        if (
            message is None
            or received
            or (message.qos == 1) != isinstance(packet, Puback)
            or packet.reason_code not in ((SUCCESS, NO_MATCHING_SUBSCRIBERS) if message.retain else (SUCCESS,))
        ):
            kind = type(packet).__name__.upper()
            self.fault(PROTOCOL, f"was sent {kind} {packet_id} with reason code {packet.reason_code:#x} for {message}")
            return
        self._in_order(link, packet, True)
        self.record.acknowledge(message)
        self.known = self.known or bool(message.payload)
        if message.qos == 1:
            del self.outgoing[packet_id]
            self.settled()
        else:
            self.outgoing[packet_id] = (message, True)
            link.answer(Pubrel(packet_id))

    def settled(self) -> None:
        """Called when a packet id is free again."""

    def _in_order(self, link: Link, packet: Packet, expected: bool) -> None:
        """Check the order of acknowledgements on this connection [MQTT-4.6.0-2] [MQTT-4.6.0-3] [MQTT-4.6.0-4]."""
        assert isinstance(packet, (Puback, Pubrec, Pubrel))
        order = link.order[type(packet)]
        if not expected:
            return
        self.record.checked[ORDER] += 1
        if order[0] == packet.packet_id:
            order.popleft()
        else:
            kind = type(packet).__name__.upper()
            self.fault(ORDER, f"was sent {kind} {packet.packet_id} before {kind} {order[0]}")
            order.remove(packet.packet_id)

    def next_packet_id(self) -> int:
        while True:
            self.last_packet_id = self.last_packet_id % PACKET_IDS + 1
            if self.last_packet_id not in self.outgoing:
                return self.last_packet_id


def _packet(packet_id: int, message: Sent, dup: bool) -> Publish:
    return Publish(message.topic, message.payload, message.qos, message.retain, dup, packet_id)
