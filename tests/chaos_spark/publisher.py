"""One publisher as a process: publishes numbered QoS 2 readings in a persistent session until told to finish.

    python -m chaos_spark.publisher NAME PORTS DIRECTORY VERSION RATE

``PORTS``: that of the broker, or those of all nodes of a cluster, with commas. With several ports it goes to the next one when a
connection fails, ends or is refused because the server is unavailable.

Its only state is its outbox, so it may be killed at any time: after a restart it sends PUBLISH again with DUP under the
same packet id, or PUBREL if PUBREC had arrived.  Files in ``DIRECTORY`` control it: ``hold`` stops new readings;
``NAME.finish`` makes it complete its handshakes and exit with status 0.  Errors of the broker go to ``NAME.faults``.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random, randrange

from chaos_spark.outbox import Outbox, Reading
from mqttbroker.codec.packets import Connack, Connect, Disconnect, Packet, Pubcomp, Publish, Pubrec, Pubrel, decode
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import MQTTError

WINDOW = 60  # incomplete readings, at most
BURST = 40  # readings per burst, at most
PATIENCE = 60.0  # seconds for an expected answer
AGAIN = 0.05  # seconds between attempts to connect
LOOK = 0.02  # seconds between polls of the control files
NOT_FOUND = 0x92
UNAVAILABLE = (3, 0x88)  # of MQTT 3.1.1 and 5, in CONNACK: a node that knows no owner of the client's shard


class Gone(Exception):
    """The connection is over."""


class Publisher:
    """Publisher ``name``, MQTT ``version`` 4 or 5, ``rate`` readings per second on average."""

    def __init__(self, name: str, ports: Sequence[int], directory: Path, version: int, rate: float, outbox: Outbox) -> None:
        self.name = name
        self.ports = ports
        self._attempt = randrange(len(ports))
        self.directory = directory
        self.version = version
        self.rate = rate
        self.outbox = outbox
        self.socket = socket.socket()
        self._bytes = b""
        self._heard = 0.0

    def run(self) -> None:
        """Connect and publish until finished."""
        while True:
            try:
                self._connect()
                self._publish()
                return
            except (Gone, OSError):
                self.socket.close()
                self._attempt += 1
                time.sleep(AGAIN)

    def fault(self, text: str) -> None:
        with (self.directory / f"{self.name}.faults").open("a") as file:
            file.write(f"{self.name}: {text}\n")

    # --- a connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        port = self.ports[self._attempt % len(self.ports)]
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._bytes = b""
        self._heard = time.monotonic()
        properties = Properties()
        if self.version == 5:
            properties.session_expiry_interval = 0xFFFFFFFF
        self._send(Connect(self.name, self.version, False, properties=properties))
        packets: list[Packet] = []
        while not packets:
            packets = self._receive(PATIENCE)
        welcome = packets[0]
        if len(self.ports) > 1 and isinstance(welcome, Connack) and welcome.reason_code in UNAVAILABLE:
            raise Gone
        if not isinstance(welcome, Connack) or welcome.reason_code:
            self.fault(f"was sent {type(welcome).__name__} where CONNACK comes")
            raise Gone
        if self.outbox.known and not welcome.session_present:
            self.fault("came back and found no session")
        for packet_id, (number, received) in self.outbox.outgoing.items():
            self._resume(packet_id, number, received, welcome.session_present)
        for packet in packets[1:]:
            self._hear(packet)

    def _resume(self, packet_id: int, number: int, received: bool, present: bool) -> None:
        if received:
            self._send(Pubrel(packet_id))
        else:
            self._send_reading(packet_id, number, dup=present)

    def _publish(self) -> None:
        random = Random()
        due = time.monotonic()
        while True:
            finishing = (self.directory / f"{self.name}.finish").exists()
            if finishing and not self.outbox.outgoing:
                self._send(Disconnect())
                self.socket.close()
                return
            quiet = finishing or (self.directory / "hold").exists()
            if not quiet and time.monotonic() >= due:
                count = min(random.randint(1, BURST), WINDOW - len(self.outbox.outgoing))
                for _ in range(count):
                    packet_id, number = self.outbox.next_reading()
                    self._send_reading(packet_id, number, dup=False)
                due = max(due, time.monotonic() - 1.0) + count / self.rate
            for packet in self._receive(LOOK if quiet else min(LOOK, max(0.0, due - time.monotonic()))):
                self._hear(packet)
            if not self.outbox.outgoing:
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > PATIENCE:
                self.fault(f"got no answer within {PATIENCE} s, {len(self.outbox.outgoing)} readings incomplete")
                raise Gone

    # --- packets --------------------------------------------------------------------------------------------------

    def _send_reading(self, packet_id: int, number: int, dup: bool) -> None:
        reading = Reading(self.name, number)
        self._send(Publish(reading.topic, reading.payload, reading.qos, False, dup, packet_id))

    def _send(self, packet: Packet) -> None:
        self.socket.sendall(packet.encode(self.version))

    def _receive(self, seconds: float) -> list[Packet]:
        """The packets received within ``seconds``; raises `Gone` at the end of the connection."""
        if not select.select([self.socket], [], [], seconds)[0]:
            return []
        data = self.socket.recv(1 << 16)
        if not data:
            raise Gone
        self._bytes += data
        self._heard = time.monotonic()
        packets: list[Packet] = []
        position = 0
        while True:
            try:
                packet, position = decode(self._bytes, self.version, position)
            except MQTTError as error:
                self.fault(f"was sent {self._bytes[position : position + 20].hex()}: {error}")
                raise Gone from None
            if packet is None:
                break
            packets.append(packet)
        self._bytes = self._bytes[position:]
        return packets

    def _hear(self, packet: Packet) -> None:
        if isinstance(packet, Pubrec):
            self._received(packet)
        elif isinstance(packet, Pubcomp):
            number, received = self.outbox.outgoing.get(packet.packet_id, (0, False))
            if not received or packet.reason_code not in (0, NOT_FOUND):
                self.fault(f"was sent PUBCOMP {packet.packet_id} with reason code {packet.reason_code:#x}, number {number}")
            if number:
                self.outbox.complete(packet.packet_id)
        elif isinstance(packet, Disconnect):
            raise Gone
        else:
            self.fault(f"was sent {type(packet).__name__}")

    def _received(self, packet: Pubrec) -> None:
        number, received = self.outbox.outgoing.get(packet.packet_id, (0, False))
        if not number or packet.reason_code >= 0x80:
            self.fault(f"was sent PUBREC {packet.packet_id} with reason code {packet.reason_code:#x}, number {number}")
            return
        if not received:
            self.outbox.received(packet.packet_id)
        self._send(Pubrel(packet.packet_id))


def main(arguments: list[str]) -> int:
    name, ports, directory, version, rate = arguments
    outbox = Outbox(Path(directory) / f"{name}.outbox")
    Publisher(name, [int(port) for port in ports.split(",")], Path(directory), int(version), float(rate), outbox).run()
    outbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
