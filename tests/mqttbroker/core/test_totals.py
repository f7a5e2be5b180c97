"""Limits in bytes over all clients: wills, incomplete packets, and outboxes of clients that do not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient
from support.core_sessions import durable

from mqttbroker.codec.packets import Publish, Will
from mqttbroker.codec.properties import Properties


def kinds(client: CoreClient) -> list[tuple[str, int]]:
    """Types and reason codes of the packets sent to the client."""
    return [(type(packet).__name__, getattr(packet, "reason_code", -1)) for packet in client.arrived()]


# --- wills --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, code", [(5, 0x97), (4, 3)])
def test_wills_are_bounded_together(tmp_path: Path, version: int, code: int) -> None:
    with Core(tmp_path, max_total_will_bytes=2000) as core:
        context = core.broker.context
        will = Will("t/w", b"x" * 897)
        clients = [core.connect(f"c{number}", version, will=will) for number in range(2)]
        assert context.will_bytes == 1800
        refused = core.client(version)
        assert refused.connect("c2", will=will).reason_code == code and refused.closed
        core.connect("c2", version)  # without a will
        core.connect("c0", version, will=Will("t", b""))  # takes over, and replaces the will
        assert context.will_bytes == 901
        clients[1].disconnect()
        assert context.will_bytes == 1


def test_stored_and_delayed_wills_count(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        properties, delay = Properties(), Properties()
        properties.session_expiry_interval = 0xFFFFFFFF
        delay.will_delay_interval = 10
        client = core.connect("c", properties=properties, will=Will("t/w", b"x" * 97, 0, False, delay))
        client.close()
        assert core.broker.context.will_bytes == 100
        core.kill()
        assert core.broker.context.will_bytes == 100
        core.advance(11)
        assert core.broker.context.will_bytes == 0


# --- incomplete packets -------------------------------------------------------------------------------------------


def begun(size: int, sent: int) -> bytes:
    """The beginning of a PUBLISH with a payload of ``size`` bytes."""
    return Publish("t", b"x" * size, 0).encode(5)[:sent]


def test_incomplete_packets_are_bounded_together(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_incomplete_bytes=2_000_000) as core:
        incomplete = core.broker.outbound.incomplete
        clients = [core.connect(f"c{number}") for number in range(4)]
        for client in clients[:3]:
            client.send(begun(1_000_000, 600_000))
        assert incomplete.size == 1_800_000
        clients[1].send(begun(1_000_000, 1_000_100)[600_000:])  # complete
        assert incomplete.size < 1_200_100 and not clients[1].closed
        clients[3].send(begun(200_000, 100_000))
        clients[2].send(b"x" * 300_000)
        assert incomplete.size == 600_000 + 900_000 + 100_000
        clients[1].send(begun(500_000, 450_000))
        # The one that was begun first goes.
        assert [client.closed for client in clients] == [True, False, False, False]
        assert kinds(clients[0]) == [("Disconnect", 0x97)]
        assert incomplete.size == 900_000 + 100_000 + 450_000
        for client in clients:
            client.close()
        assert incomplete.size == 0


def test_one_packet_may_exceed_the_total(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_incomplete_bytes=10_000) as core:
        client, reader = core.connect("c"), core.connect("reader")
        reader.subscribe("t", options=0)
        packet = begun(100_000, 200_000)
        for start in range(0, len(packet), 30_000):
            client.send(packet[start : start + 30_000])
        (message,) = reader.arrived()
        assert len(message.payload) == 100_000 and core.broker.outbound.incomplete.size == 0


def test_packets_before_connect_count(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_incomplete_bytes=100_000) as core:
        clients = [core.client() for _ in range(3)]
        for client in clients:
            client.send(b"\x10\xff\xff\x03\x00\x04MQTT" + bytes(40_000))
        assert [client.closed for client in clients] == [True, False, False]
        assert 80_000 <= core.broker.outbound.incomplete.size <= 100_000


# --- outboxes -----------------------------------------------------------------------------------------------------


def test_outboxes_of_blocked_sockets_are_bounded_together(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_outbox_bytes=100_000, max_queued_messages=1000) as core:
        outbound = core.broker.outbound
        publisher, reading = core.connect("pub"), core.connect("reading")
        reading.subscribe("t/#", options=0)
        blocked = [core.connect(f"b{number}") for number in range(10)]
        for client in blocked:
            client.subscribe("t/#", options=0)
            client.connection.outbox.pause(1000)
        assert outbound.blocked_bytes == 10_000
        for _ in range(50):
            publisher.publish("t/1", b"x" * 1000)
        assert 95_000 < outbound.blocked_bytes <= 100_000
        assert core.control.status().drops["slow_subscriber"] > 400
        assert len(reading.arrived()) == 50  # the others are sent everything
        blocked[0].connection.outbox.resume()
        blocked[1].close()
        rest = outbound.blocked_bytes
        assert rest == sum(client.connection.outbox.blocked_bytes for client in blocked) < 90_000
        for client in blocked[2:]:
            client.connection.outbox.resume()
        assert outbound.blocked_bytes == 0


def test_beyond_the_total_messages_at_qos_1_wait_in_the_session(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_outbox_bytes=10_000) as core:
        publisher, client = core.connect("pub"), durable(core, "sub")
        client.subscribe("t/#", options=1)
        client.connection.outbox.pause()
        for number in range(50):
            assert publisher.publish("t/1", b"%04d" % number + b"x" * 996, 1) == 0
        assert core.broker.outbound.blocked_bytes < 12_000 and not client.connection.ready
        client.connection.outbox.resume()
        received: list[Any] = []
        while packets := client.arrived():
            client.connection.resume_sending()
            received += [packet for packet in packets if isinstance(packet, Publish)]
            client.connection.resume_sending()
        assert [int(packet.payload[:4]) for packet in received] == list(range(50))
