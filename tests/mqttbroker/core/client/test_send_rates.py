"""Rates at which a client is sent PUBLISH packets: QoS 0 is dropped and counted, QoS 1 and 2 wait in the session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient, MemoryWire, believe_user_names

from mqttbroker.codec.packets import Publish

LIMITS: list[dict[str, Any]] = [
    {"max_delivery_rate": 10},
    {"max_send_rate": 1040},  # of packets of about 104 bytes
    {"max_delivery_rate_per_user": 10},
    {"max_send_rate_per_user": 1040},
]
PAYLOAD = bytes(100)


class Waits(MemoryWire):
    """The wire of a client: it notes for how long nothing is to be sent."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.seconds: list[float] = []

    def resume_sending_in(self, seconds: float) -> None:
        self.seconds.append(seconds)


def subscriber(core: Core, version: int = 5, client_id: str = "c") -> tuple[CoreClient, Waits]:
    client = core.connect(client_id, version, username="alice", clean_start=False)
    client.subscribe("a/#")
    wire = client.connection.wire = Waits(core)
    return client, wire


def flush(client: CoreClient) -> int:
    """Send what is due, as a flush does; returns the number of PUBLISH packets."""
    client.connection.resume_sending()
    packets = [packet for packet in client.arrived() if isinstance(packet, Publish)]
    for packet in packets:
        if packet.qos == 1:
            client.send(bytes([0x40, 2, packet.packet_id >> 8, packet.packet_id & 255]))
    return len(packets)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("version", [5, 4])
@pytest.mark.parametrize("durability", ["commit", "off"])
def test_qos_1_waits_and_is_sent_at_the_rate(tmp_path: Path, limits: dict[str, Any], version: int, durability: str) -> None:
    with Core(tmp_path, durability, others={"allow_anonymous": True}, **limits) as core:
        believe_user_names(core)
        client, wire = subscriber(core, version)
        publisher = core.connect("p")
        for number in range(60):
            publisher.publish(f"a/{number:02}", PAYLOAD, 1)
        sent = [flush(client)]
        assert 9 <= sent[0] <= 12
        assert wire.seconds and 0.0 < wire.seconds[-1] <= 1.0
        for _ in range(9):
            core.advance(1.0)
            sent.append(flush(client))
            assert sum(sent) <= 10 * len(sent) + 2  # the rate, and the first second's worth
        assert sum(sent) == 60 and core.control.status().drops["rate"] == 0


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("version", [5, 4])
def test_qos_0_is_dropped_and_counted(tmp_path: Path, limits: dict[str, Any], version: int) -> None:
    with Core(tmp_path, others={"allow_anonymous": True}, **limits) as core:
        believe_user_names(core)
        client, _ = subscriber(core, version)
        publisher = core.connect("p")
        other = core.connect("other", version)
        other.subscribe("a/#")
        sent = []
        for _ in range(3):
            for number in range(30):
                publisher.publish(f"a/{number:02}", PAYLOAD, 0)
            sent.append(flush(client))
            core.advance(1.0)
        assert 9 <= sent[0] <= 12 and 8 <= sent[1] <= 12
        to_other = flush(other)
        assert to_other == 90 if any("user" in name for name in limits) else abs(to_other - sum(sent)) <= 3
        dropped = core.control.status().drops
        assert dropped["rate"] == 180 - sum(sent) - to_other and dropped["slow_subscriber"] == 0


def test_retained_messages_wait_for_the_rate(tmp_path: Path) -> None:
    with Core(tmp_path, max_delivery_rate=10) as core:
        publisher = core.connect("p")
        for number in range(40):
            publisher.publish(f"r/{number}", PAYLOAD, 0, retain=True)
        client = core.connect("c")
        client.connection.wire = Waits(core)
        client.subscribe("r/#")
        sent = [flush(client)]
        for _ in range(6):
            core.advance(1.0)
            client.connection.resume_sending()
            core.settle()
            sent.append(flush(client))
        assert sum(sent) == 40 and max(sent) <= 13 and core.control.status().drops["rate"] == 0


def test_connections_of_a_user_share_its_rate(tmp_path: Path) -> None:
    with Core(tmp_path, max_delivery_rate_per_user=10) as core:
        believe_user_names(core)
        clients = [subscriber(core, client_id=f"c{number}")[0] for number in range(4)]
        publisher = core.connect("p")
        for number in range(20):
            publisher.publish("a/b", PAYLOAD, 0)
        assert 10 <= sum(map(flush, clients)) <= 14


@pytest.mark.parametrize(("rate", "paused"), [(10, False), (0, True)])
def test_a_rate_does_not_slow_down_publishers(tmp_path: Path, rate: int, paused: bool) -> None:
    """Without a rate, publishers wait for a subscriber whose queue is long."""
    limits = {"max_inflight": 5, "max_inflight_unpersisted": 5, "queue_high_watermark_messages": 20}
    with Core(tmp_path, max_delivery_rate=rate, **limits) as core:
        subscriber(core)
        publisher = core.connect("p")
        for _ in range(40):
            publisher.send(Publish("a/b", PAYLOAD, 1, packet_id=publisher.next_packet_id()))
        assert (core.broker.context.backpressure_monitor.pauses > 0) == paused


def test_other_packets_do_not_wait(tmp_path: Path) -> None:
    with Core(tmp_path, max_delivery_rate=1) as core:
        client, _ = subscriber(core)
        for _ in range(50):
            client.publish("a/b", PAYLOAD, 0)
        assert client.publish("x", PAYLOAD, 1) < 0x80
        client.ping()


def test_without_limits_there_is_no_throttle(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client, _ = subscriber(core)
        connection = client.connection
        assert connection.throttle is None and connection.outbox.throttle is None and not connection.outbox.restricted
        assert connection.user is None
