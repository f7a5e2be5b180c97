"""Packets: the codec and a broker core against the reference decoder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from support.core import Core

from fuzz.core_target import LIMITS, SESSION_EXPIRY
from fuzz.generator import Generator
from fuzz.guided.target import Target, pieces_of
from fuzz.near_misses import near_miss
from fuzz.packet_target import CodecTarget, Exchange, valid_end
from fuzz.reference import Bad, split
from fuzz.verdict import Finding, judge
from mqttbroker.core.client.connection import CLOSED

INPUTS = 2000  # for one core; a new one then has no retained messages and sessions of earlier inputs
PACKETS = 8  # in a seed, at most


def packets_in(data: bytes) -> list[bytes]:
    """The data cut where packets end; the last part may be incomplete."""
    found: list[bytes] = []
    position = 0
    while position < len(data):
        try:
            packet = split(data, position)
        except Bad:
            packet = None
        end = len(data) if packet is None else packet[2]
        found.append(data[position:end])
        position = end
    return found


def changed_packets(data: bytes, version: int, random: Random) -> bytes:
    """One packet changed a little, inserted, removed or moved."""
    generator = Generator(str(random.random()))
    packets = packets_in(data)
    at = random.randrange(len(packets) + 1)
    how = random.random()
    if not packets or how < 0.25:
        packets.insert(at, generator.client_packet(version))
    elif how < 0.35:
        packets.insert(at, random.choice(packets))
    elif how < 0.45:
        del packets[min(at, len(packets) - 1)]
    else:
        at = min(at, len(packets) - 1)
        packets[at] = near_miss(generator, packets[at], version)
    return b"".join(packets)


class _Packets(Target):
    """Packets of one version, as `decode` reads them and as a connected client sends them."""

    modules = (
        "mqttbroker.codec.packets",
        "mqttbroker.codec.data_types",
        "mqttbroker.codec.properties",
        "mqttbroker.core.packets.protocol",
        "mqttbroker.core.packets.packet_reader",
        "mqttbroker.core.packets.publish_handler",
    )
    version = 5

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.codec = CodecTarget()
        self.inputs = 0
        self._begin()

    def _begin(self) -> None:
        place = self.directory / str(self.inputs)
        place.mkdir()
        self.exchange = Exchange(place)

    def close(self) -> None:
        self.exchange.core.close()

    def check(self, data: bytes) -> None:
        self.inputs += 1
        if self.inputs % INPUTS == 0:
            self.close()
            self._begin()
        position = size = 0
        while position == 0 or (size and position < len(data)):
            size = self.codec.compare(data[position:], self.version)
            position += size
            if not size:
                break
        self.exchange.send(self.version, data, [*pieces_of(data), valid_end(self.version)])

    def seeds(self) -> Iterator[bytes]:
        generator = Generator("seeds")
        yield from (vector for vector in generator.vectors if len(vector) <= self.max_bytes)
        for count in range(1, PACKETS):
            for _ in range(10):
                seed = b"".join(generator.client_packet(self.version) for _ in range(count))
                if len(seed) <= self.max_bytes:
                    yield seed

    def changed(self, data: bytes, random: Random) -> bytes:
        return changed_packets(data, self.version, random)


class Version3(_Packets):
    version = 3


class Version4(_Packets):
    version = 4


class Version5(_Packets):
    version = 5


class Conversations(Target):
    """All bytes of a connection, from before CONNECT, of any version."""

    modules = (
        "mqttbroker.core.packets.protocol",
        "mqttbroker.core.packets.packet_reader",
        "mqttbroker.core.sessions.connect_handler",
        "mqttbroker.core.sessions.authentications",
        "mqttbroker.core.sessions.connack",
        "mqttbroker.core.packets.publish_handler",
        "mqttbroker.core.sessions.subscriptions",
    )

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.inputs = 0
        self._begin()

    def _begin(self) -> None:
        place = self.directory / str(self.inputs)
        place.mkdir()
        self.core = Core(place, "off", **LIMITS)

    def close(self) -> None:
        self.core.close()

    def check(self, data: bytes) -> None:
        self.inputs += 1
        if self.inputs % INPUTS == 0:
            self.close()
            self._begin()
        core = self.core
        client = core.client()
        received = b""
        for piece in pieces_of(data):
            client.send(piece)
            received += client.connection.outbox.drain()
        judge(data, received, client.connection.state == CLOSED)
        client.close()
        core.clients.remove(client)
        core.advance(SESSION_EXPIRY + 1)
        for connection in core.broker.outbound.flush_queue:
            connection.flush_requested = False
        core.broker.outbound.flush_queue = []
        broker = core.broker
        if broker.clients.connections or broker.registry.sessions or broker.clients.pending:
            raise Finding(f"left behind: {list(broker.clients.connections)} {list(broker.registry.sessions)}")

    def seeds(self) -> Iterator[bytes]:
        for number in range(60):
            data = Generator(f"seeds:{number}").conversation().data
            if len(data) <= self.max_bytes:
                yield data

    def changed(self, data: bytes, random: Random) -> bytes:
        return changed_packets(data, random.choice((4, 5, 5)), random)
