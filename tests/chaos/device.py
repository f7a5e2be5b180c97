"""A client as a device is one: state that survives its death, and connections that do not.

Rule: what a `Device` holds is what it has written down, always before the packet that tells of it leaves; a `Link` has
nothing that a later one needs. So a device may be cut off, or taken over by itself, at any byte. Whatever a broker
must not do towards such a client is written into the record as a fault.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Optional

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
    decode,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import NO_MATCHING_SUBSCRIBERS, SUCCESS, MQTTError

PATIENCE = 30.0  # seconds for an answer that must come
NOT_FOUND = 0x92
PACKET_IDS = 100  # few, so that each is soon used again


class Link(asyncio.Protocol):
    """One connection of a device; ``laziness`` is how many seconds its answers wait, in their order."""

    def __init__(self, device: Device, laziness: float, receive_maximum: int) -> None:
        loop = asyncio.get_running_loop()
        self.device = device
        self.laziness = laziness
        self.receive_maximum = receive_maximum
        self.transport: Optional[asyncio.Transport] = None
        self.dead = False  # the device no longer looks at it
        self.up = False
        self.closed = asyncio.Event()
        self.connack: asyncio.Future[bool] = loop.create_future()
        self.reply: Optional[asyncio.Future[bool]] = None  # to SUBSCRIBE or PINGREQ
        self.unanswered: set[int] = set()  # packet ids that the broker may not use again yet
        # Packet ids in the order in which their acknowledgements must come.
        self.order: dict[type[Packet], deque[int]] = {Puback: deque(), Pubrec: deque(), Pubrel: deque()}
        self._answers: list[tuple[bytes, int]] = []
        self._bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.up = False
        self.dead = True
        self.closed.set()
        for future in (self.connack, self.reply):
            if future is not None and not future.done():
                future.set_result(False)

    def data_received(self, data: bytes) -> None:
        if self.dead:
            return
        data = self._bytes + data
        position = 0
        while not self.dead:
            try:
                packet, after = decode(data, self.device.version, position)
            except MQTTError as error:
                self.device.fault(PROTOCOL, f"was sent {data[position : position + 20].hex()}: {error}")
                self.cut()
                return
            if packet is None:
                break
            position = after
            self.device.hear(self, packet)
        self._bytes = data[position:]

    def send(self, packet: Packet) -> None:
        self.write(packet.encode(self.device.version))

    def write(self, data: bytes) -> None:
        if not self.dead and self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def answer(self, packet: Packet, done: int = 0) -> None:
        """Send it when the link gets round to it; that frees the packet id ``done``."""
        if not self._answers:
            asyncio.get_running_loop().call_later(self.laziness, self._send_answers)
        self._answers.append((packet.encode(self.device.version), done))

    def _send_answers(self) -> None:
        self.write(b"".join(data for data, _ in self._answers))
        self.unanswered.difference_update(done for _, done in self._answers)
        self._answers = []

    def cut(self) -> None:
        """End it without a word; what is on its way to the device is lost."""
        self.forsake()
        if self.transport is not None:
            self.transport.abort()

    def forsake(self) -> None:
        """The device has lost sight of it, and the broker does not know."""
        self.dead = True
        self.up = False
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()


class Device:
    """A client with a session that lasts, unless ``lasting`` is false."""

    def __init__(self, name: str, version: int, record: Record, lasting: bool = True) -> None:
        self.name = name
        self.label = name  # of its deliveries in the record
        self.version = version
        self.record = record
        self.lasting = lasting
        self.known = False  # the broker has acknowledged something in this session
        self.outgoing: dict[int, tuple[Sent, bool]] = {}  # packet id -> message, whether its PUBREC came
        self.incoming: dict[int, int] = {}  # QoS 2 packet id -> number, until its PUBREL
        self.last_packet_id = 0
        self.link: Optional[Link] = None

    @property
    def up(self) -> bool:
        return self.link is not None and self.link.up

    # --- connecting -----------------------------------------------------------------------------------------------

    async def connect(self, port: int, laziness: float = 0.0, receive_maximum: int = 65535) -> Optional[Link]:
        """A connection that has its CONNACK; it takes over one that is still open. None if the broker is gone."""
        if not self.lasting:
            self.incoming.clear()
            self.label = f"{self.name}, connection {self.record.counts[self.name]}"
            self.record.counts[self.name] += 1
        old = self.link
        link = Link(self, laziness, receive_maximum)
        try:
            await asyncio.get_running_loop().create_connection(lambda: link, "127.0.0.1", port)
        except OSError:
            return None
        self.link = link
        properties = Properties()
        if self.version == 5:
            properties.session_expiry_interval = 0xFFFFFFFF if self.lasting else 0
            properties.receive_maximum = receive_maximum
        link.send(Connect(self.name, self.version, not self.lasting, properties=properties))
        welcome = await self._wait(link, link.connack, "CONNACK")
        if old is not None:
            old.cut()
        return link if welcome else None

    async def subscribe(self, topic_filter: str, qos: int) -> bool:
        assert self.link is not None
        self.link.send(Subscribe(self.next_packet_id(), [Subscription(topic_filter, qos)]))
        return await self._reply("SUBACK")

    async def ping(self) -> bool:
        """Whether the broker has handled all that was sent before; false if the connection ended."""
        assert self.link is not None
        self.link.send(Pingreq())
        return await self._reply("PINGRESP")

    async def _reply(self, what: str) -> bool:
        link = self.link
        if link is None or link.closed.is_set():
            return False
        link.reply = asyncio.get_running_loop().create_future()
        return await self._wait(link, link.reply, what)

    async def _wait(self, link: Link, future: asyncio.Future[bool], what: str) -> bool:
        try:
            return await asyncio.wait_for(future, PATIENCE)
        except TimeoutError:
            self.fault(PROTOCOL, f"got no {what} within {PATIENCE} s")
            link.cut()
            return False

    def leave(self) -> None:
        """DISCONNECT; the session stays."""
        if self.link is not None:
            self.link.send(Disconnect())
            self.link.dead = True
            if self.link.transport is not None:
                self.link.transport.close()

    # --- packets that come ----------------------------------------------------------------------------------------

    def hear(self, link: Link, packet: Packet) -> None:
        self.record.heard(type(packet).__name__)
        self.record.progressed()
        if isinstance(packet, Publish):
            self.receive(link, packet)
        elif isinstance(packet, Pubrel):
            self._released(link, packet)
        elif isinstance(packet, (Puback, Pubrec, Pubcomp)):
            self._acknowledged(link, packet)
        elif isinstance(packet, Connack):
            self._welcome(link, packet)
        elif isinstance(packet, (Suback, Pingresp)) and link.reply is not None:
            self.known = self.known or isinstance(packet, Suback)
            if not link.reply.done():
                link.reply.set_result(True)
        elif not isinstance(packet, Disconnect) or link is self.link:
            code = getattr(packet, "reason_code", 0)
            self.fault(PROTOCOL, f"was sent {type(packet).__name__} with reason code {code:#x}")

    def _welcome(self, link: Link, packet: Connack) -> None:
        self.record.checked[SESSION] += self.known
        if packet.reason_code or link.connack.done():
            self.fault(PROTOCOL, f"was sent CONNACK with reason code {packet.reason_code:#x}")
            link.cut()
            return
        if not packet.session_present:
            if self.known and self.lasting:
                self.fault(SESSION, "came back and found no session")
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
        """The connection is there and what was under way is sent again."""

    def fault(self, row: str, text: str) -> None:
        self.record.fault(row, f"{self.name} {text}")

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, link: Link, packet: Publish) -> None:
        """A PUBLISH: write it down unless it is one that was received before, and answer."""
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
            self.fault(MISSING_2, f"takes {message} for message {known}, which had its packet id {packet_id}")
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
        """Write down and send a new message."""
        assert self.link is not None
        packet_id = self.next_packet_id()
        self.outgoing[packet_id] = (message, False)
        self._send(self.link, packet_id, message, False)

    def publish_half(self, message: Sent) -> None:
        """The same, and die in the middle of it."""
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
        """A packet id is free again."""

    def _in_order(self, link: Link, packet: Packet, expected: bool) -> None:
        """[MQTT-4.6.0-2] [MQTT-4.6.0-3] [MQTT-4.6.0-4], on the connection where the exchange began."""
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
