"""Traces: the packets of one client, address or topic, for an operator who asks for them.

During a trace a `Tap` replaces the transport of a connection and sees the packets that are sent; the `Wire` gives it
the packets that are received. Passwords and authentication data are always masked, payloads unless the request asks for
them.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network
from typing import Any, NamedTuple

from mqttbroker.codec import packets
from mqttbroker.codec.properties import decode_properties
from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.broker import Broker
from mqttbroker.core.client.client_wire import ClientWire
from mqttbroker.core.terms.networks import address_of
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.packet_log import fixed_header
from mqttbroker.net.pcap import Conversation
from mqttbroker.net.wire import Wire
from topic_matcher.filters import matches

KEPT = 65_536  # bytes of a packet that a trace has at most
TAPPED_AT_ONCE = 256  # connections in one iteration of the event loop
SWEPT = 1000
RETRY = 0.05  # seconds until a connection in the middle of a packet is looked at again
MAX_ALIASES = 1000  # topics by alias that are remembered for one direction
_CONNECT, _CONNACK, _PUBLISH, _AUTH = 1, 2, 3, 15


class TraceFilter(NamedTuple):
    """Which packets are traced: those that satisfy each condition that is not ""."""

    client_id: str = ""
    network: str = ""  # an address, or a network
    topic_filter: str = ""  # PUBLISH packets only

    def admits(self, client_id: str, peer: str) -> bool:
        if self.client_id and self.client_id != client_id:
            return False
        if not self.network:
            return True
        address = address_of(peer)
        return address is not None and address in ip_network(self.network, False)


class TracedPacket(NamedTuple):
    """One packet. ``head`` is its beginning, masked; ``size`` that of the whole packet in bytes."""

    microseconds: int  # since the Unix epoch
    from_client: bool
    client_id: str
    peer: str
    version: int
    topic: str  # of a PUBLISH, also if the packet has an alias only
    head: bytes
    size: int
    conversation: Conversation


class PacketSplitter:
    """Finds the packets in one direction of a connection. The first byte given to it must begin a packet."""

    def __init__(self) -> None:
        self._pending = b""
        self._skip = 0  # bytes of the last packet that have not arrived
        self._lost = False  # a packet is malformed, so the beginning of the next one is unknown

    def feed(self, data: bytes) -> list[tuple[bytes, int]]:
        """Take bytes; returns the first `KEPT` bytes and the size of each packet of which these bytes are there now."""
        found: list[tuple[bytes, int]] = []
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = self._pending + data[skipped:]
        position = 0
        while len(data) - position >= 2 and not self._lost:
            _, size = fixed_header(data, position)
            self._lost = size < 0
            kept = min(size, KEPT)
            if size <= 0 or len(data) - position < kept:
                break
            found.append((data[position : position + kept], size))
            end = position + size
            self._skip = max(0, end - len(data))
            position = min(end, len(data))
        self._pending = b"" if self._lost else data[position:]
        return found


class _Direction:
    """The bytes that a client sends, or is sent."""

    def __init__(self) -> None:
        self.splitter = PacketSplitter()
        self.aliases: dict[int, str] = {}

    def topic_and_payload(self, head: bytes, version: int) -> tuple[str, int]:
        """The topic of a PUBLISH, and where its payload begins."""
        body, _ = fixed_header(head, 0)
        end = body + 2 + int.from_bytes(head[body : body + 2], "big")
        topic = head[body + 2 : end].decode("utf-8", "replace")
        position = end + 2 if head[0] & 6 else end
        if version < 5:
            return topic, position
        properties, position = decode_properties(head, position, len(head), _PUBLISH)
        alias = properties.topic_alias
        if alias is not None and topic and len(self.aliases) < MAX_ALIASES:
            self.aliases[alias] = topic
        elif alias is not None and not topic:
            topic = self.aliases.get(alias, "")
        return topic, position


class Tap:
    """The packets of one wire for a trace; a transport for the wire."""

    def __init__(self, trace: Trace, wire: Wire) -> None:
        self.transport = wire.transport
        self._trace = trace
        self._wire = wire
        self._received = _Direction()
        self._sent = _Direction()
        self._conversation = Conversation(wire.connection.peer)
        self._client_id = ""  # as in CONNECT, which is handled after it is traced
        self._version = 4
        wire.transport = self
        wire.traced = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def remove(self) -> None:
        if self._wire.transport is self:
            self._wire.transport = self.transport
        self._wire.traced = False

    def trace_received(self, data: bytes) -> None:
        self._feed(self._received, data, True)

    def write(self, data: bytes) -> None:
        self._feed(self._sent, bytes(data), False)
        self.transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        for part in parts:
            self._feed(self._sent, bytes(part), False)
        self.transport.writelines(parts)

    def _feed(self, direction: _Direction, data: bytes, from_client: bool) -> None:
        for head, size in direction.splitter.feed(data):
            try:
                self._packet(direction, head, size, from_client)
            except (MQTTError, IndexError, ValueError):
                continue  # malformed; the broker refuses it

    def _packet(self, direction: _Direction, head: bytes, size: int, from_client: bool) -> None:
        trace, connection = self._trace, self._wire.connection
        kind = head[0] >> 4
        topic = ""
        if kind == _CONNECT and from_client:
            connect = packets.decode(head, 5)[0]
            assert isinstance(connect, packets.Connect)
            self._client_id, self._version = connect.client_id, connect.version
            head = masked(connect, self._version)
            size = len(head)
        version = connection.version if connection.session is not None else self._version
        client_id = connection.client_id or self._client_id
        if not trace.where.admits(client_id, connection.peer):
            if connection.session is not None or self._client_id:
                self.remove()
            return
        if kind == _PUBLISH:
            topic, payload = direction.topic_and_payload(head, version)
            if not trace.payloads:
                head = head[:payload]
        elif kind in (_CONNACK, _AUTH) and version >= 5:
            packet = packets.decode(head, version)[0]
            if packet is not None:
                head = masked(packet, version)
        if trace.where.topic_filter and not (topic and matches(trace.where.topic_filter, topic)):
            return
        now: int = connection.outbound.clock.now
        trace.emit(TracedPacket(now, from_client, client_id, connection.peer, version, topic, head, size,
                                self._conversation))  # fmt: skip


def masked(packet: Any, version: int) -> bytes:
    """The packet with asterisks for password, authentication data and the payload of a will."""
    if isinstance(packet, packets.Connect):
        if packet.password is not None:
            packet.password = b"*" * len(packet.password)
        if packet.will is not None:
            packet.will.payload = b"*" * len(packet.will.payload)
    properties = packet.properties
    if properties is not None and properties.authentication_data is not None:
        properties.authentication_data = b"*" * len(properties.authentication_data)
    return bytes(packet.encode(version))


class Trace:
    """One trace. ``emit`` is called on the event loop with each packet."""

    def __init__(self, where: TraceFilter, payloads: bool, emit: Callable[[TracedPacket], None]) -> None:
        self.where = where
        self.payloads = payloads
        self.emit = emit


class Tracer:
    """Taps the connections of a broker for one trace at a time."""

    def __init__(self, broker: Broker, scheduler: FlushScheduler) -> None:
        self._broker = broker
        self._scheduler = scheduler
        self._trace: Trace | None = None
        self._taps: dict[Wire, Tap] = {}
        self._sweep_at = SWEPT  # taps at which those of closed connections are forgotten

    @property
    def active(self) -> bool:
        return self._trace is not None

    def begin(self, trace: Trace) -> None:
        """Tap the connections that may have such packets, and new ones from their CONNECT on."""
        assert self._trace is None
        self._trace = trace
        self._scheduler.on_opened = self._opened
        self._tap(trace, [one for one in self._broker.clients.connections if not one.closed])

    def _opened(self, wire: ClientWire) -> None:
        if len(self._taps) >= self._sweep_at:
            self._forget_closed()
            self._sweep_at = 2 * len(self._taps) + SWEPT
        if self._trace is not None and isinstance(wire, Wire):
            self._taps[wire] = Tap(self._trace, wire)

    def _tap(self, trace: Trace, left: list[Any]) -> None:
        """Tap connections between two packets; look again at the others."""
        if self._trace is not trace:
            return
        again = []
        for connection in left[:TAPPED_AT_ONCE]:
            wire = connection.wire
            if connection.closed or not isinstance(wire, Wire) or wire.traced:
                continue
            if connection.session is not None and not trace.where.admits(connection.client_id, connection.peer):
                continue
            if wire.between_packets:
                self._taps[wire] = Tap(trace, wire)
            else:
                again.append(connection)
        left = left[TAPPED_AT_ONCE:]
        if left:
            self._scheduler.loop.call_soon(self._tap, trace, left + again)
        elif again:
            self._scheduler.loop.call_later(RETRY, self._tap, trace, again)

    def _forget_closed(self) -> None:
        self._taps = {wire: tap for wire, tap in self._taps.items() if wire.traced and not wire.closing}

    def end(self) -> None:
        """Give all wires their transports back."""
        self._trace = None
        self._scheduler.on_opened = None
        for tap in self._taps.values():
            tap.remove()
        self._taps.clear()
