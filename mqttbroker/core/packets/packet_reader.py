"""Framing: the bytes of one connection become packets, however they are split between reads.

Packets are handled in order and in place, by offsets into the received buffer. After the first error nothing more is
read, and the connection ends.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from mqttbroker.codec.reason_codes import MALFORMED_PACKET, PUBLISH, MQTTError
from mqttbroker.core.client.connection import CLOSED, CONNECTED, CONNECTING
from mqttbroker.core.client.incomplete_packets import PacketBuffer
from mqttbroker.core.packets.long_packet import LONG_PACKET, LongPacket, payload_start
from mqttbroker.core.packets.protocol import Protocol
from mqttbroker.core.routing.router import WORK_LIMIT

# Shared by the connections without an incomplete packet, because an empty bytearray takes 56 bytes. Stays empty.
_NOTHING: Final = bytearray()


class PacketReader(PacketBuffer):
    """Passes each complete packet to ``protocol``, and buffers one incomplete packet."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol.connection)
        self.protocol = protocol
        self._incomplete = _NOTHING
        self._long: LongPacket | None = None  # an incomplete long PUBLISH
        self.held_before: i64 = 0  # bytes received that are not packets yet: WebSocket frames, reads cut into slices
        self._needed: i64 = 2  # bytes that the incomplete packet must have before it is parsed again

    @property
    def between_packets(self) -> bool:
        """Whether no part of a packet is buffered."""
        return not self._incomplete and self._long is None

    def receive(self, data: bytes, now: float, start: i64 = 0, stop: i64 = -1) -> i64:
        """Handle ``data[start:]``, or only the packets that begin before ``stop``.

        ``now`` is monotonic time in seconds. Returns the position after the last byte that was handled or buffered.
        """
        connection = self.connection
        connection.last_received = now
        counters = connection.outbound.counters
        published: i64 = counters.publish_received
        self.protocol.broker.router.work = 0
        position: i64 = start
        size: i64 = len(data)
        try:
            if self._incomplete:
                position = self._complete(data, position)
            elif self._long is not None:
                position = self._complete_long(self._long, data, position)
            if position < size:
                position = self._read_packets(data, position, size if stop < 0 else stop)
        except MQTTError as error:
            self.protocol.reject(error)
            position = size
        counters.bytes_received += position - start
        connection.bytes_received += position - start
        connection.publish_received += counters.publish_received - published
        if self._incomplete or self._long is not None or self.counted:
            self._count_incomplete()
        session = connection.session
        if session is not None and session.pending_retained:
            connection.request_flush()  # a replay may have waited for an acknowledgement in this data
        return position

    def resume(self) -> None:
        """Handle the bytes received while the connection was `CONNECTING` or halted."""
        self.connection.go_on()
        self.protocol.broker.router.work = 0
        if len(self._incomplete) >= self._needed and self.connection.state == CONNECTED and not self.connection.halted:
            data = bytes(self._incomplete)
            self._incomplete = _NOTHING
            counters = self.connection.outbound.counters
            published: i64 = counters.publish_received
            try:
                self._read_packets(data, 0, len(data))
            except MQTTError as error:
                self.protocol.reject(error)
            self.connection.publish_received += counters.publish_received - published
            self._count_incomplete()

    def hold_before(self, more: i64) -> None:
        """Count more bytes, or fewer, that the layers in front hold; they free them when the connection is closed."""
        self.held_before += more
        self._count_incomplete()

    def _count_incomplete(self) -> None:
        connection = self.connection
        size: i64 = len(self._incomplete) + self.held_before
        if self._long is not None:
            size += self._long.size - self._long.missing
        connection.outbound.incomplete.count(self, 0 if connection.state == CLOSED else size)

    def discard(self) -> None:
        self._incomplete = _NOTHING
        self._long = None

    def _complete(self, data: bytes, position: i64) -> i64:
        """Add the missing bytes to the incomplete packet, and no more, and handle it; returns the position after them.

        While the connection is `CONNECTING` or halted, everything is buffered.
        """
        connection = self.connection
        size: i64 = len(data)
        while self._incomplete and position < size:
            missing: i64 = self._needed - len(self._incomplete)
            end: i64 = position + missing
            if missing <= 0 or end > size or connection.state == CONNECTING or connection.halted:
                end = size
            self._incomplete += data if end - position == size else data[position:end]
            position = end
            if len(self._incomplete) < self._needed or connection.state == CONNECTING or connection.halted:
                return position
            packet = bytes(self._incomplete)
            self._incomplete = _NOTHING
            self._read_packets(packet, 0, len(packet))
            if self._long is not None and position < size:
                return self._complete_long(self._long, data, position)
        return position

    def _complete_long(self, packet: LongPacket, data: bytes, position: i64) -> i64:
        """`_complete` for a long PUBLISH."""
        size: i64 = len(data)
        end: i64 = min(size, position + packet.missing)
        packet.append(data if end - position == size else data[position:end])
        if packet.missing > 0:
            return end
        self._long = None
        connection = self.connection
        if connection.state != CONNECTED:
            return end
        pieces = packet.finish()
        head = pieces[0]
        body: i64 = 1
        while head[body] >= 128:
            body += 1
        body += 1
        if payload_start(head, body, (head[0] >> 1) & 3, connection.version) > len(head):
            whole = b"".join(pieces)
            self._read_packets(whole, 0, len(whole))
            return end
        if self.protocol.publish_handler().handle(head, 0, body, packet.size, head[0], pieces[1:]):
            connection.outbound.counters.messages_received += 1
        else:
            self._needed = 2
            self._incomplete = bytearray(b"".join(pieces))
            connection.halt()
        return end

    def _read_packets(self, data: bytes, position: i64, stop: i64) -> i64:
        """Handle the complete packets that begin before ``stop``, and buffer an incomplete one.

        Returns the position after the last byte that was handled or buffered.
        """
        protocol = self.protocol
        connection = self.connection
        router = protocol.broker.router
        size: i64 = len(data)
        count: i64 = 0
        self._needed = 2
        maximum_size: i64 = connection.terms.max_packet_size
        while position < stop and size - position >= 2:
            if connection.state == CONNECTING or connection.state == CLOSED or connection.halted:
                break
            first: i64 = data[position]
            remaining: i64 = data[position + 1]
            body: i64 = position + 2
            if remaining >= 128:
                remaining &= 127
                shift: i64 = 7
                byte: i64 = 128
                while byte >= 128 and body < size:
                    byte = data[body]
                    body += 1
                    remaining |= (byte & 127) << shift
                    shift += 7
                    if byte >= 128 and shift > 21:
                        raise MQTTError(MALFORMED_PACKET, "Remaining Length of more than 4 bytes")
                if byte >= 128:
                    protocol.check_allowed(first >> 4)
                    self._needed = body - position + 1
                    break
                if byte == 0:
                    raise MQTTError(MALFORMED_PACKET, "overlong Remaining Length")
            end: i64 = body + remaining
            if end - position > maximum_size:
                raise protocol.too_large(first, data, body, end - position)
            if end > size:
                self._needed = end - position
                protocol.check_allowed(first >> 4)
                protocol.check_connect_size(first, data, body, self._needed)
                break
            packet_type: i64 = first >> 4
            if packet_type == PUBLISH and connection.state == CONNECTED:
                if not protocol.publish_handler().handle(data, position, body, end, first):
                    connection.halt()
                    break
                if router.work >= WORK_LIMIT:
                    connection.halt()
            elif (
                # A PUBACK, PUBREC, PUBREL or PUBCOMP that is a packet id and nothing else.
                remaining == 2 and (first == 0x40 or first == 0x50 or first == 0x62 or first == 0x70) and connection.state == CONNECTED
            ):
                protocol.acknowledge(packet_type, (data[body] << 8) | data[body + 1], 0)
            else:
                protocol.check_connect_size(first, data, body, end - position)
                protocol.control(packet_type, first & 15, data, body, end)
                if router.work >= WORK_LIMIT:
                    connection.halt()
            count += 1
            position = end
        connection.outbound.counters.messages_received += count
        if position >= stop:
            return position
        if connection.state != CLOSED:
            self._buffer(data[position:] if position else data)
        return size

    def _buffer(self, data: bytes) -> None:
        """Buffer the beginning of a packet."""
        if self._needed >= LONG_PACKET and data[0] >> 4 == PUBLISH and self.connection.state == CONNECTED:
            self._long = LongPacket(data, self._needed)
        elif self._incomplete:  # a long packet that is to be handled again
            self._incomplete += data
        elif data:
            self._incomplete = bytearray(data)
