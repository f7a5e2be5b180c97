"""The connections of a load: they send and receive many packets with little CPU, and know nothing of the load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from mqttbroker.codec import reason_codes as rc
from mqttbroker.codec.data_types import decode_varint
from mqttbroker.codec.frames import encode_ack, encode_publish
from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Suback,
    Subscribe,
    Subscription,
    decode_body,
)
from mqttbroker.codec.reason_codes import MQTTError

_MAX_PACKET_ID = 65535
_FILTERS_PER_PACKET = 100
_MAX_QUEUED = 65_536  # bytes of payloads that are written together


class LoadError(Exception):
    """The load cannot run; one line."""


class Connection(asyncio.Protocol):
    """An MQTT connection, which sends ``connect`` when it is made. ``lost`` is why it has ended; "" while it has not."""

    def __init__(self, connect: Connect) -> None:
        self.client_id = connect.client_id
        self.version = connect.version
        self.lost = ""
        self.writable = True
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connect = connect
        self._answer: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        self._transport: Any = None
        self._held = b""  # of a packet that is not complete
        self._out: list[bytes] = []

    # --- of asyncio ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._out.append(self._connect.encode())
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
        try:
            self._held = data[self._read(data) :]
        except (MQTTError, IndexError) as error:
            self._lose(f"the broker sent a malformed packet: {error}")
        self.flush()

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(str(error) if error else "the broker closed the connection")
        if not self.ended.done():
            self.ended.set_result(None)

    # --- of the load --------------------------------------------------------------------------------------------------

    async def connected(self) -> Connack:
        """Wait for the CONNACK. Raises LoadError if it refuses."""
        packet = await self._answered()
        if not isinstance(packet, Connack):
            raise LoadError(f"{self.client_id}: no CONNACK but {type(packet).__name__} came")
        if packet.reason_code:
            code = packet.reason_code
            reason = rc.name(code) if self.version >= 5 else _REFUSALS.get(code, f"return code {code}")
            raise LoadError(f"connection refused: {reason}")
        return packet

    def flush(self) -> None:
        """Send what is waiting, in one write."""
        if self._out:
            data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
            self._out.clear()
            if not self._transport.is_closing():
                self._transport.write(data)

    def ping(self) -> None:
        """Send a PINGREQ, if the connection is open."""
        if self._transport is not None and not self.lost:
            self._out.append(Pingreq().encode(self.version))
            self.flush()

    def close(self) -> None:
        """Send DISCONNECT, and close; this is no loss."""
        if self._transport is not None:
            self.lost = self.lost or "closed"
            self._out.append(Disconnect().encode(self.version))
            self.flush()
            self._transport.close()

    def extra(self, name: str) -> Any:
        """Information of asyncio about the connection, as `get_extra_info` of its transport."""
        return self._transport.get_extra_info(name)

    async def _answered(self) -> Packet:
        try:
            return await self._answer
        finally:
            self._answer = asyncio.get_running_loop().create_future()

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        if not self._answer.done():
            self._answer.set_exception(LoadError(f"{self.client_id}: {self.lost}"))
            self._answer.exception()  # often nobody waits for it
        if self._transport is not None:
            self._transport.close()

    def _read(self, data: bytes) -> int:
        """Handle the complete packets; returns the position after them."""
        pos, size = 0, len(data)
        while size - pos >= 2:
            body, shift = pos + 2, 7
            remaining = data[pos + 1]
            if remaining > 127:
                remaining &= 127
                while True:
                    if body >= size:
                        return pos
                    byte = data[body]
                    body += 1
                    remaining |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                    if shift > 21:
                        raise MQTTError(rc.MALFORMED_PACKET, "Remaining Length of more than four bytes")
            end = body + remaining
            if end > size:
                return pos
            first = data[pos]
            kind = first >> 4
            if kind == rc.PUBLISH:
                self._published(first, data, body, end)
            elif rc.PUBACK <= kind <= rc.PUBCOMP and remaining >= 2:
                self._acknowledged(kind, data[body] << 8 | data[body + 1], data[body + 2] if remaining > 2 else 0)
            else:
                self._other(decode_body(kind, first & 15, data, body, end, self.version))
            pos = end
        return pos

    def _published(self, first: int, data: bytes, pos: int, end: int) -> None:
        raise MQTTError(rc.PROTOCOL_ERROR, "a PUBLISH without a subscription")

    def _acknowledged(self, kind: int, packet_id: int, code: int) -> None:
        raise MQTTError(rc.PROTOCOL_ERROR, "an acknowledgement of nothing")

    def _other(self, packet: Packet) -> None:
        if isinstance(packet, (Connack, Suback)):
            if not self._answer.done():
                self._answer.set_result(packet)
        elif isinstance(packet, Disconnect):
            text = packet.properties.reason_string
            self._lose(f"the broker disconnected: {rc.name(packet.reason_code)}{f' ({text})' if text else ''}")


# The return codes of 3.1.1 (3.2.2.3).
_REFUSALS = {
    1: "unacceptable protocol version",
    2: "identifier rejected",
    3: "server unavailable",
    4: "bad user name or password",
    5: "not authorized",
}


class Publisher(Connection):
    """Publishes to one topic. ``acknowledged(stamp, reason code)`` is called for each PUBACK, PUBCOMP or refusing PUBREC,
    ``ready()`` when packets may be sent that could not be before, and when the connection has ended."""

    def __init__(self, connect: Connect, topic: str, qos: int, acknowledged: Callable[[int, int], None], ready: Callable[[], None]) -> None:
        super().__init__(connect)
        self.in_flight: dict[int, int] = {}  # packet id -> stamp
        self._topic = topic.encode()
        self._qos = qos
        self._next_id = 0
        self._queued = 0  # bytes of payloads since the last `flush`
        self._on_acknowledged = acknowledged
        self._on_ready = ready

    def publish(self, payload: bytes, stamp: int) -> None:
        """Send a message, at the latest with the next `flush`; ``stamp`` comes back with its acknowledgement."""
        packet_id = 0
        if self._qos:
            packet_id = self._next_id
            while True:
                packet_id = packet_id % _MAX_PACKET_ID + 1
                if packet_id not in self.in_flight:
                    break
            self._next_id = packet_id
            self.in_flight[packet_id] = stamp
        self._out.append(encode_publish(self._topic, payload, self._qos, False, False, packet_id, self.version, b""))
        self._queued += len(payload)
        if self._queued > _MAX_QUEUED:  # so that `writable` is up to date before there is more
            self.flush()

    def flush(self) -> None:
        self._queued = 0
        super().flush()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._on_ready()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._on_ready()

    def _acknowledged(self, kind: int, packet_id: int, code: int) -> None:
        if self._qos == 2 and kind == rc.PUBREC and code < 0x80:
            self._out.append(encode_ack(rc.PUBREL, packet_id, 0, self.version))
            return
        stamp = self.in_flight.pop(packet_id, None)
        if stamp is not None:
            self._on_acknowledged(stamp, code)
            self._on_ready()


class Subscriber(Connection):
    """Subscribes, and acknowledges what comes. ``received(data, start, end)`` gets the payload of each PUBLISH."""

    def __init__(self, connect: Connect, qos: int, received: Callable[[bytes, int, int], None]) -> None:
        super().__init__(connect)
        self._qos = qos
        self._received = received

    async def subscribe(self, filters: list[str]) -> None:
        """Subscribe, and wait for the acknowledgement. Raises LoadError if the broker refuses, or grants less."""
        for start in range(0, len(filters), _FILTERS_PER_PACKET):
            some = filters[start : start + _FILTERS_PER_PACKET]
            self._out.append(Subscribe(1, [Subscription(each, self._qos) for each in some]).encode(self.version))
            self.flush()
            packet = await self._answered()
            for topic_filter, code in zip(some, packet.reason_codes if isinstance(packet, Suback) else []):
                if code != self._qos:
                    reason = rc.name(code) if code >= 0x80 else f"QoS {code} granted instead of {self._qos}"
                    raise LoadError(f"subscription to {topic_filter} refused: {reason}")

    def _published(self, first: int, data: bytes, pos: int, end: int) -> None:
        qos = first >> 1 & 3
        pos += 2 + (data[pos] << 8 | data[pos + 1])
        if qos:
            packet_id = data[pos] << 8 | data[pos + 1]
            self._out.append(encode_ack(rc.PUBACK if qos == 1 else rc.PUBREC, packet_id, 0, self.version))
            pos += 2
        if self.version >= 5:
            size, pos = decode_varint(data, pos, end)
            pos += size
        self._received(data, pos, end)

    def _acknowledged(self, kind: int, packet_id: int, code: int) -> None:
        if kind == rc.PUBREL:
            self._out.append(encode_ack(rc.PUBCOMP, packet_id, 0, self.version))
