"""The broker's end of a link: the room that a client has, and that the link has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.core import Core
from support.manual_loop import Loop, Transport

from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import Connect, Publish, Subscribe, Subscription
from mqttbroker.codec.properties import Properties
from mqttbroker.net.flush import LARGE_WRITE, FlushScheduler
from mqttbroker.net.link import RESUME_BELOW, SEND_WINDOW, Link, LinkTransport
from mqttbroker.net.link_frames import CLOSED, DATA, TAKEN, FrameHandler, FrameReader, FrameWriter, data_prefix, number_bytes
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import READ_PAUSE, Endpoint, Wire
from sessions.counters import Counters

PAYLOAD = bytes(100_000)


class LinkSocket(Transport):
    def set_write_buffer_limits(self, high: int) -> None:
        pass


class Sizes(FrameHandler):
    """Counts the bytes for each client in a link's frames."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def handle(self, kind: int, number: int, data: bytes, start: int, end: int) -> None:
        if kind == DATA:
            self.of[number] = self.of.get(number, 0) + end - start


class Clients:
    """Clients 1 and 2 behind one link, and a publisher beside it."""

    def __init__(self, core: Core) -> None:
        self.loop = Loop()
        self.scheduler = FlushScheduler(core.broker, self.loop, lambda _: None, True)
        self.socket = LinkSocket()
        self.link = Link(self.scheduler, 1, None, None)
        self.link.connection_made(self.socket)
        security = Security(core.settings)
        policy = ListenerPolicy(security.policy, core.terms, None, core.broker.outbound.counters)
        self.endpoint = Endpoint(self.scheduler, policy, OpenSockets(1000, 1000, Counters()), lambda: "", print)
        for number in (1, 2):
            wire = Wire(self.endpoint)
            transport = LinkTransport(self.link, number, wire, "127.0.0.1:1", None, False)
            self.link.clients[number] = transport
            wire.connection_made(transport)
            self.receive(number, Connect(f"c{number}", 5).encode(5))
            self.receive(number, Subscribe(1, [Subscription("t", 0)]).encode(5))
        self.publisher = Wire(self.endpoint)
        self.publisher.connection_made(Transport())
        self.publisher.data_received(Connect("publisher", 5).encode(5))
        self.loop.run()

    def frame(self, kind: int, number: int, body: bytes) -> None:
        writer = FrameWriter()
        writer.add_data(data_prefix(kind, number), body)
        self.link.data_received(b"".join(writer.take()))

    def receive(self, number: int, data: bytes) -> None:
        self.frame(DATA, number, data)

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.publisher.data_received(Publish("t", PAYLOAD, 0, False, False, 0).encode(5))
            self.loop.run()

    def written(self) -> dict[int, int]:
        """How many bytes were written for each client since the last call."""
        sizes = Sizes()
        reader = FrameReader(sizes)
        reader.feed(self.socket.written)
        reader.read(1_000_000)
        self.socket.written = b""
        return sizes.of


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[Clients]:
    with Core(tmp_path, durability="off", max_outbox_bytes=16 << 20) as core:
        yield Clients(core)


def test_a_client_gets_no_more_than_its_window_until_it_has_taken_some(clients: Clients) -> None:
    clients.publish(20)
    written = clients.written()[1]
    assert SEND_WINDOW < written <= SEND_WINDOW + LARGE_WRITE
    clients.frame(TAKEN, 1, number_bytes(written - RESUME_BELOW))
    clients.loop.run()
    assert clients.written() == {}
    clients.frame(TAKEN, 1, number_bytes(1))
    clients.loop.run()
    assert list(clients.written()) == [1]


def test_a_congested_link_is_written_to_once_for_each_client(clients: Clients) -> None:
    clients.written()
    clients.link.pause_writing()
    clients.publish(10)
    assert all(len(PAYLOAD) < size <= LARGE_WRITE for size in clients.written().values())
    clients.publish(10)
    assert clients.written() == {}
    clients.link.resume_writing()
    clients.loop.run()
    assert sorted(clients.written()) == [1, 2]


def test_a_client_that_took_all_while_the_link_was_congested_gets_the_rest(clients: Clients) -> None:
    clients.publish(20)
    written = clients.written()[1]
    clients.link.pause_writing()
    clients.frame(TAKEN, 1, number_bytes(written))
    clients.loop.run()
    assert clients.written() == {}
    clients.link.resume_writing()
    clients.loop.run()
    assert list(clients.written()) == [1]


def test_a_link_with_much_data_is_read_once_per_iteration(clients: Clients) -> None:
    clients.receive(1, Publish("t", bytes(1000), 0, False, False, 0).encode(5))
    assert clients.socket.reading
    clients.receive(1, Publish("t", bytes(READ_PAUSE), 0, False, False, 0).encode(5))
    assert not clients.socket.reading
    clients.loop.turn()
    assert clients.socket.reading
    assert clients.written()[2] > 1000 + READ_PAUSE


def test_what_a_waiting_publisher_left_is_dropped_when_the_worker_has_lost_it(tmp_path: Path) -> None:
    limits = {"queue_high_watermark_messages": 10, "backpressure_wait": 60.0}
    with Core(tmp_path, durability="off", **limits) as core:
        clients = Clients(core)
        slow = Wire(clients.endpoint)
        slow.connection_made(Transport())
        properties = Properties()
        properties.receive_maximum = 2
        slow.data_received(Connect("slow", 5, properties=properties).encode(5))
        slow.data_received(Subscribe(1, [Subscription("slow", 1)]).encode(5))
        clients.receive(1, Publish("slow", b"", 1, False, False, 1).encode(5) * 300)
        clients.loop.run()
        wire = clients.link.clients[1].wire
        assert wire is not None and wire.connection.paused_by is not None
        incomplete = core.broker.outbound.incomplete.size
        for _ in range(20):
            clients.receive(1, Publish("t", PAYLOAD, 0, False, False, 0).encode(5))
        assert core.broker.outbound.incomplete.size > incomplete + 19 * len(PAYLOAD)
        clients.frame(CLOSED, 1, b"reset")
        assert wire.transport is None and wire.connection.wire is None
        assert core.broker.outbound.incomplete.size <= incomplete
