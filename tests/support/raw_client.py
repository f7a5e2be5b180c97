"""A blocking MQTT client that sends and receives single packets.

It sends only what the test sends, acknowledgements included; a packet that the test has not received stays in the
inbox.
"""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import Any, TypeVar

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
    Unsuback,
    Unsubscribe,
    decode,
)
from mqttbroker.codec.properties import Properties
from support.patience import PATIENCE

P = TypeVar("P", bound=Packet)
TIMEOUT = PATIENCE


class RawClient:
    """One TCP connection of protocol version 3, 4 or 5; `connect` sends CONNECT."""

    def __init__(self, port: int, version: int = 5, host: str = "127.0.0.1") -> None:
        self.version = version
        self.socket = socket.create_connection((host, port), TIMEOUT)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.inbox: list[Packet] = []
        self._bytes = b""
        self._packet_id = 0

    # --- single packets -------------------------------------------------------------------------------------------

    def send(self, *packets: Packet | bytes) -> None:
        """Send packets, or bytes as they are, in one write."""
        self.socket.sendall(b"".join(p if isinstance(p, bytes) else p.encode(self.version) for p in packets))

    def receive(self, timeout: float = TIMEOUT) -> Packet:
        """The next packet; raises TimeoutError, and ConnectionError if the broker closes the connection."""
        if self.inbox:
            return self.inbox.pop(0)
        return self._receive(time.monotonic() + timeout)

    def expect(self, kind: type[P], timeout: float = TIMEOUT) -> P:
        """The next packet, which must be of this kind."""
        packet = self.receive(timeout)
        assert isinstance(packet, kind), f"expected {kind.__name__}, got {describe(packet)}"
        return packet

    def wait_for(self, kind: type[P], timeout: float = TIMEOUT) -> P:
        """The first packet of this kind; those before it stay in the inbox."""
        deadline = time.monotonic() + timeout
        for index, packet in enumerate(self.inbox):
            if isinstance(packet, kind):
                del self.inbox[index]
                return packet
        while True:
            packet = self._receive(deadline)
            if isinstance(packet, kind):
                return packet
            self.inbox.append(packet)

    def expect_closed(self, timeout: float = TIMEOUT) -> list[Packet]:
        """Wait until the broker has closed the connection; returns the packets that it sent before."""
        packets, self.inbox = self.inbox, []
        deadline = time.monotonic() + timeout
        while True:
            try:
                packets.append(self._receive(deadline))
            except TimeoutError:
                raise AssertionError("the broker did not close the connection") from None
            except ConnectionError:
                return packets

    def expect_nothing(self) -> None:
        """Assert that the broker has handled all packets of this client and has sent nothing."""
        before = self.ping()
        assert not before, f"expected nothing, got {[describe(packet) for packet in before]}"

    def _receive(self, deadline: float) -> Packet:
        while True:
            packet, used = decode(self._bytes, self.version)
            if packet is not None:
                self._bytes = self._bytes[used:]
                return packet
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError(f"closed by the broker, {len(self._bytes)} bytes of a packet left")
            self._bytes += data

    # --- exchanges ------------------------------------------------------------------------------------------------

    def connect(self, client_id: str = "", **fields: Any) -> Connack:
        """Send CONNECT with ``fields`` of ``packets.Connect``; returns the CONNACK, also one that refuses."""
        self.send(Connect(client_id, self.version, **fields))
        return self.expect(Connack)

    def ping(self) -> list[Packet]:
        """Send PINGREQ; returns the packets that arrived before its PINGRESP."""
        self.send(Pingreq())
        self.wait_for(Pingresp)
        packets, self.inbox = self.inbox, []
        return packets

    def subscribe(self, *filters: str, options: int = 2, properties: Properties | None = None) -> Suback:
        """Subscribe to all filters with the same options byte (section 3.8.3.1); the default is QoS 2."""
        packet_id = self.next_packet_id()
        self.send(Subscribe(packet_id, [Subscription(f, options) for f in filters], properties))
        suback = self.wait_for(Suback)
        assert suback.packet_id == packet_id
        return suback

    def unsubscribe(self, *filters: str) -> Unsuback:
        packet_id = self.next_packet_id()
        self.send(Unsubscribe(packet_id, list(filters)))
        unsuback = self.wait_for(Unsuback)
        assert unsuback.packet_id == packet_id
        return unsuback

    def publish(self, topic: str, payload: bytes = b"", qos: int = 0, retain: bool = False, properties: Properties | None = None) -> int:
        """Publish, with all acknowledgements of the QoS; returns the reason code of PUBACK or PUBREC, 0 at QoS 0."""
        packet_id = self.next_packet_id() if qos else 0
        self.send(Publish(topic, payload, qos, retain, False, packet_id, properties))
        if qos == 0:
            return 0
        answer = self.wait_for(Puback if qos == 1 else Pubrec)
        assert answer.packet_id == packet_id
        if qos == 2 and answer.reason_code < 0x80:
            self.send(Pubrel(packet_id))
            assert self.wait_for(Pubcomp).packet_id == packet_id
        return answer.reason_code

    def take(self, timeout: float = TIMEOUT) -> Publish:
        """The next PUBLISH, acknowledged as its QoS requires."""
        message = self.wait_for(Publish, timeout)
        if message.qos == 1:
            self.send(Puback(message.packet_id))
        elif message.qos == 2:
            self.send(Pubrec(message.packet_id))
            assert self.wait_for(Pubrel).packet_id == message.packet_id
            self.send(Pubcomp(message.packet_id))
        return message

    def next_packet_id(self) -> int:
        self._packet_id = self._packet_id % 65535 + 1
        return self._packet_id

    # --- the end --------------------------------------------------------------------------------------------------

    def disconnect(self, reason_code: int = 0, properties: Properties | None = None) -> None:
        """Send DISCONNECT, and wait until the broker has closed the connection."""
        self.send(Disconnect(reason_code, properties))
        self.expect_closed()
        self.close()

    def close(self) -> None:
        """Close without DISCONNECT."""
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def describe(packet: Packet) -> str:
    """A packet as text, for failed assertions."""
    names = ("topic", "payload", "qos", "retain", "dup", "packet_id", "reason_code", "reason_codes", "session_present")
    fields = [f"{name}={getattr(packet, name)!r}" for name in names if hasattr(packet, name)]
    return f"{type(packet).__name__}({', '.join(fields)})"
