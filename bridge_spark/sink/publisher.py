"""Publishes packets over one connection: many in flight, each until it is acknowledged.

After a lost connection every packet that was not acknowledged is sent again, in order, as a new PUBLISH: at least once
for any broker, and once for a stream with deduplication.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NoReturn

from bridge_spark.sink import packets
from bridge_spark.sink.connection import Connection, Lost
from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.options import SinkOptions
from bridge_spark.sink.packets import BadPacket, Refusal
from bridge_spark.sink.rows import Packet

MAX_BYTES_IN_FLIGHT = 16 * 1024 * 1024
PACKETS_PER_WRITE = 500
BYTES_PER_WRITE = 1024 * 1024
FIRST_WAIT = 0.1  # seconds before the second attempt; doubles with each
LONGEST_WAIT = 5.0


class Publisher:
    """Publishes the packets of one task.

    A row counts as written when `finish` has returned.  `SinkError`: a packet was refused, or no packet was
    acknowledged for the delivery timeout.
    """

    def __init__(
        self,
        options: SinkOptions,
        client_id: str,
        describe: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``describe`` names a row in errors."""
        self._options = options
        self._connection = Connection(options, client_id)
        self._describe = describe
        self._clock = clock
        self._sleep = sleep
        self._connected = False
        self._in_flight: dict[int, Packet] = {}
        self._bytes_in_flight = 0
        self._refused: list[Packet] = []  # for now: they are sent again, before any other
        self._why_refused = ""
        self._packet_id = 0
        self._unconfirmed = False  # QoS 0 packets were sent since the last PINGRESP
        self._failing_since: float | None = None
        self._attempts = 0

    # -- publishing -------------------------------------------------------------

    def publish(self, found: Sequence[Packet]) -> None:
        """Send packets; wait while too many are in flight."""
        position = 0
        while position < len(found):
            if not self._connected:
                self._reconnect("")
            while self._room() <= 0 or self._refused:
                self._handle_answers()
            data, position = self._add(found, position, position + min(self._room(), PACKETS_PER_WRITE))
            self._send(data)
            if self._has_answers():
                self._handle_answers()

    def finish(self) -> None:
        """Return when the broker has everything, and disconnect."""
        while self._in_flight or self._refused:
            self._handle_answers()
        while self._unconfirmed:
            self._confirm()
        self._connection.close(politely=True)
        self._connected = False

    def close(self) -> None:
        self._connection.close()

    def _room(self) -> int:
        if self._bytes_in_flight >= MAX_BYTES_IN_FLIGHT:
            return 0
        most = self._most_in_flight()
        room = most - len(self._in_flight)
        # Sending a few packets at a time would cost a system call each.
        return room if room >= min(PACKETS_PER_WRITE, most) // 2 else 0

    def _send(self, data: bytes) -> None:
        try:
            self._connection.send(data)
        except Lost as lost:
            self._reconnect(str(lost))

    def _add(self, found: Sequence[Packet], position: int, end: int) -> tuple[bytes, int]:
        """Add packets to those in flight, up to ``end`` or `BYTES_PER_WRITE`; returns their bytes, and the position of
        the next."""
        capabilities = self._connection.capabilities
        in_flight, packet_id = self._in_flight, self._packet_id
        parts: list[bytes] = []
        total = 0
        while position < min(end, len(found)) and total < BYTES_PER_WRITE:
            packet = found[position]
            head, tail, _, qos = packet
            size = len(head) + len(tail) + 2
            total += size
            if (
                size > capabilities.maximum_packet_size
                or qos > capabilities.maximum_qos
                or (head[0] & 1 and not capabilities.retain_available)
            ):
                self._refuse_by_capabilities(packet)
            if qos:
                packet_id = packet_id % 65535 + 1
                while packet_id in in_flight:
                    packet_id = packet_id % 65535 + 1
                in_flight[packet_id] = packet
                self._bytes_in_flight += size
                parts += (head, packet_id.to_bytes(2, "big"), tail)
            else:
                self._unconfirmed = True
                parts += (head, tail)
            position += 1
        self._packet_id = packet_id
        return b"".join(parts), position

    def _refuse_by_capabilities(self, packet: Packet) -> NoReturn:
        capabilities, address = self._connection.capabilities, self._options.address
        where = self._describe(packet.row)
        if packet.qos > capabilities.maximum_qos:
            raise SinkError(f"column 'qos': {packet.qos}: {address} takes at most {capabilities.maximum_qos} ({where})")
        if packet.head[0] & 1 and not capabilities.retain_available:
            raise SinkError(f"column 'retain': true: {address} has no retained messages ({where})")
        raise SinkError(
            f"column 'payload': a packet of {packet.size} bytes: {address} takes at most {capabilities.maximum_packet_size} ({where})"
        )

    # -- answers ----------------------------------------------------------------

    def _has_answers(self) -> bool:
        return self._connected and self._connection.has_data()

    def _handle_answers(self) -> None:
        """Wait for acknowledgements and handle them; connect again if that is needed."""
        try:
            if self._refused and not self._in_flight:
                self._send_refused()
            if self._in_flight:
                self._handle(self._connection.receive())
        except Lost as lost:
            self._reconnect(str(lost))
        except BadPacket as error:
            raise SinkError(f"{self._options.address} does not answer in MQTT: {error}") from None

    def _handle(self, data: bytes) -> None:
        position, end, in_flight = 0, len(data), self._in_flight
        releases: list[bytes] = []
        while position < end:
            if data[position] == 0x40 and end - position >= 4 and data[position + 1] == 2:
                packet_id = data[position + 2] << 8 | data[position + 3]
                position += 4
                packet = in_flight.pop(packet_id, None)
                if packet is not None:
                    self._accepted(packet)
                continue
            found = packets.next_packet(data, position)
            if found is None:
                break
            first, start, position = found
            self._handle_packet(first >> 4, data[start:position], releases)
        self._connection.consumed(position)
        if releases:
            self._connection.send(b"".join(releases))

    def _handle_packet(self, kind: int, body: bytes, releases: list[bytes]) -> None:
        if kind == packets.PINGRESP:
            self._unconfirmed = False
            self._failing_since = None
        elif kind == packets.DISCONNECT:
            self._disconnected(packets.read_disconnect(body))
        elif kind in (packets.PUBACK, packets.PUBREC, packets.PUBCOMP):
            packet_id, refusal = packets.read_acknowledgement(body)
            if kind == packets.PUBREC and refusal is None:
                releases.append(packets.acknowledgement(0x62, packet_id))
                return
            packet = self._in_flight.pop(packet_id, None)
            if packet is None:
                return
            if refusal is None or kind == packets.PUBCOMP:
                self._accepted(packet)
            else:
                self._not_accepted(packet, refusal)

    def _accepted(self, packet: Packet) -> None:
        self._bytes_in_flight -= len(packet.head) + len(packet.tail) + 2
        self._failing_since = None
        self._attempts = 0

    def _not_accepted(self, packet: Packet, refusal: Refusal) -> None:
        self._bytes_in_flight -= len(packet.head) + len(packet.tail) + 2
        where = self._describe(packet.row)
        if refusal.code != packets.QUOTA_EXCEEDED:
            raise SinkError(f"{self._options.address} refused a message: {refusal.text} ({where})")
        self._refused.append(packet)
        self._why_refused = f"it refused a message: {refusal.text} ({where})"

    def _disconnected(self, refusal: Refusal) -> None:
        if refusal.code < 0x80 or refusal.transient:
            raise Lost(f"the broker disconnected: {refusal.text}")
        oldest = next(iter(self._in_flight.values()), None)
        where = f" ({self._describe(oldest.row)}, or one of the {len(self._in_flight)} in flight)" if oldest else ""
        raise SinkError(f"{self._options.address} disconnected: {refusal.text}{where}")

    def _send_refused(self) -> None:
        """Send refused packets again; nothing new is sent before the broker accepts them."""
        self._wait(self._why_refused)
        self._refused.sort(key=lambda packet: packet.row)
        data, sent = self._add(self._refused, 0, self._most_in_flight())
        self._refused = self._refused[sent:]
        self._send(data)

    def _confirm(self) -> None:
        """Have the broker confirm that it has read the QoS 0 packets."""
        try:
            self._connection.send(packets.PINGREQ)
            while self._unconfirmed:
                self._handle(self._connection.receive())
        except Lost as lost:
            self._reconnect(str(lost))
        except BadPacket as error:
            raise SinkError(f"{self._options.address} does not answer in MQTT: {error}") from None

    # -- connecting -------------------------------------------------------------

    def _reconnect(self, reason: str) -> None:
        """Connect and send everything in flight again; ``reason`` says why the connection was lost."""
        self._connected = False
        while True:
            if reason:
                self._wait(reason)
            try:
                self._connection.connect()
                self._connected = True
                self._resend()
                return
            except Lost as lost:
                reason = str(lost)

    def _resend(self) -> None:
        """Send the packets in flight again; those beyond what the broker takes at once are sent later."""
        in_flight = self._in_flight
        for packet_id in list(in_flight)[self._most_in_flight() :]:
            packet = in_flight.pop(packet_id)
            self._bytes_in_flight -= len(packet.head) + len(packet.tail) + 2
            self._refused.append(packet)
            self._why_refused = "it takes fewer messages in flight than before"
        items = iter(in_flight.items())
        while chunk := list(islice(items, PACKETS_PER_WRITE)):
            self._connection.send(b"".join(packet.head + packet_id.to_bytes(2, "big") + packet.tail for packet_id, packet in chunk))

    def _most_in_flight(self) -> int:
        return min(self._options.max_in_flight, self._connection.capabilities.receive_maximum)

    def _wait(self, reason: str) -> None:
        """Wait before another attempt; raises `SinkError` after the delivery timeout."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        timeout = self._options.delivery_timeout
        if now - self._failing_since >= timeout:
            oldest = next(iter(self._in_flight.values()), None)
            where = f" ({self._describe(oldest.row)})" if oldest is not None else ""
            raise SinkError(
                f"{self._options.address} accepted no message for {timeout:g} s (option "
                f"'delivery.timeoutMs'), the last time: {reason}{where}"
            )
        wait = FIRST_WAIT * 2**self._attempts * random.uniform(0.5, 1.5)
        self._attempts = min(self._attempts + 1, 10)
        self._sleep(min(wait, LONGEST_WAIT, max(0.0, self._failing_since + timeout - now)))
