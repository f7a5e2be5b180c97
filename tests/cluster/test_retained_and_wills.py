"""Three nodes on Kafka: retained messages of all shards on each node, and the wills of cores and nodes that are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.cluster_nodes import ClusterNode, ClusterNodes
from support.clustered_broker import shared_kafka
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import Disconnect, Packet, Pingreq, Pingresp, Pubcomp, Publish, Pubrec, Pubrel, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.core.sessions.own_shard import shard_of

SHARDS = 3
TAKEN_OVER = 60.0  # seconds

pytestmark = [
    pytest.mark.slow("three nodes on three Kafka brokers, of which some are killed"),
    pytest.mark.one_build,
]


def client_id(name: str, shard: int) -> str:
    return next(f"{name}{number}" for number in range(99) if shard_of(f"{name}{number}", SHARDS) == shard)


def connected(port: int, name: str, **fields: object) -> RawClient:
    """A connected client; a shard that moves or is taken over refuses for a while."""
    deadline = time.monotonic() + TAKEN_OVER
    while True:
        with suppress(OSError):
            client = RawClient(port)
            client.connack = client.connect(name, **fields)
            if client.connack.reason_code == 0:
                return client
        assert time.monotonic() < deadline, "the client was not accepted"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterNodes]:
    with ClusterNodes(shared_kafka(), 3, SHARDS, {"allow_anonymous": True}) as cluster:
        yield cluster


@pytest.fixture
def nodes(cluster: ClusterNodes, request: pytest.FixtureRequest) -> Iterator[ClusterNodes]:
    failed = request.session.testsfailed
    yield cluster
    if request.session.testsfailed > failed:
        cluster.print_logs()


def core(nodes: ClusterNodes, shard: int) -> tuple[ClusterNode, int]:
    """The node that owns a shard, and the process id of its core."""
    node = nodes.owner(shard)
    return node, node.cores()[shard]


def retained(port: int, name: str, topic_filter: str, count: int) -> dict[str, bytes]:
    """The first ``count`` retained messages for a new subscription, by topic; no more may come."""
    with connected(port, name) as client:
        client.subscribe(topic_filter, options=1)
        found = [client.take() for _ in range(count)]
        client.expect_nothing()
        assert all(one.retain for one in found)
        client.disconnect()
    return {one.topic: one.payload for one in found}


def test_each_node_has_the_retained_messages_of_all(nodes: ClusterNodes) -> None:
    topics = [f"r/{number}" for number in range(12)]
    assert {shard_of(topic, SHARDS) for topic in topics} == set(range(SHARDS))
    for number, topic in enumerate(topics):
        with connected(nodes.ports[number % 3], client_id("p", number // 3 % SHARDS)) as publisher:
            publisher.publish(topic, b"old", 1, retain=True)
            publisher.publish(topic, b"new", 2, retain=True)
            publisher.disconnect()
    for shard in range(SHARDS):
        for port in nodes.ports:
            assert retained(port, client_id("s", shard), "r/+", 12) == {topic: b"new" for topic in topics}
            assert retained(port, client_id("s", shard), topics[0], 1) == {topics[0]: b"new"}
    with connected(nodes.ports[0], "deleter") as publisher:
        for topic in topics[1:]:
            publisher.publish(topic, b"", 1, retain=True)
    assert retained(nodes.ports[1], "s", "r/#", 1) == {topics[0]: b"new"}


class Watcher:
    """A persistent session that gets messages at QoS 2; it connects again whenever its connection is lost."""

    def __init__(self, nodes: ClusterNodes, name: str, topic_filter: str) -> None:
        self.topics: list[str] = []  # of the messages, in their order
        self._nodes = nodes
        self._name = name
        self._unreleased: set[int] = set()
        self._client = connected(self._port(), name, properties=session_expiry())
        self._client.subscribe(topic_filter, options=2 | 2 << 4)  # no retained messages

    def wait_for(self, topic: str) -> None:
        """Read until the message has come."""
        deadline = time.monotonic() + TAKEN_OVER
        while topic not in self.topics:
            assert time.monotonic() < deadline, f"no message for {topic}"
            self._read()

    def settle(self) -> list[str]:
        """The topics of all messages that have come."""
        while True:
            try:
                self._client.send(Pingreq())
                while not self._read(Pingresp):
                    pass
            except OSError:
                self._connect()
                continue
            return self.topics

    def close(self) -> None:
        self._client.close()

    def _connect(self) -> None:
        self._client.close()
        self._client = connected(self._port(), self._name, clean_start=False, properties=session_expiry())
        assert self._client.connack.session_present, "the session is lost"

    def _port(self) -> int:
        return next(node.port for node in self._nodes.nodes if node.running)

    def _read(self, kind: type[Packet] = Packet) -> bool:
        """Handle one packet, or connect again; whether it was of this kind."""
        try:
            packet = self._client.receive(1.0)
        except TimeoutError:
            return False
        except OSError:
            self._connect()
            return kind is Pingresp and self._again()
        if isinstance(packet, Publish):
            if packet.packet_id not in self._unreleased:
                self._unreleased.add(packet.packet_id)
                self.topics.append(packet.topic)
            self._client.send(Pubrec(packet.packet_id))
        elif isinstance(packet, Pubrel):
            self._unreleased.discard(packet.packet_id)
            self._client.send(Pubcomp(packet.packet_id))
        return isinstance(packet, kind)

    def _again(self) -> bool:
        self._client.send(Pingreq())
        return False


@pytest.mark.parametrize("kill_node", [False, True])
def test_a_will_is_published_once_and_retained_messages_stay(nodes: ClusterNodes, kill_node: bool) -> None:
    """The core of the client's shard, or its whole node, is killed; and the next owner as well."""
    shard = 1
    watcher = Watcher(nodes, client_id("watch", 0), "will/#")
    expected = []
    for turn in range(2):
        node, pid = core(nodes, shard)
        port = next(other.port for other in nodes.nodes if other is not node)
        dying, left = (client_id(f"{name}-{kill_node}-{turn}-", shard) for name in ("dying", "left"))
        kept = next(name for name in (f"kept-{dying}/{n}" for n in range(99)) if shard_of(name, SHARDS) == shard)
        clients = [
            connected(port, dying, will=Will(f"will/{dying}", b"gone", 2, True)),
            connected(port, left, will=Will(f"will/{left}", b"gone", 2)),
        ]
        clients[1].send(Disconnect(0x00))
        clients[1].expect_closed()
        with connected(port, client_id("p", shard)) as publisher:
            publisher.publish(kept, b"kept", 1, retain=True)  # committed behind the DISCONNECT
        if kill_node:
            node.kill()
        else:
            os.kill(pid, signal.SIGKILL)
        expected.append(f"will/{dying}")
        watcher.wait_for(f"will/{dying}")
        if kill_node:
            node.start()
        nodes.wait_until_ready()
        assert watcher.settle() == expected
        assert retained(port, client_id("s", shard), kept, 1) == {kept: b"kept"}
        assert retained(node.port, client_id("s", 0), f"will/{dying}", 1) == {f"will/{dying}": b"gone"}
        for client in clients:
            client.close()
    watcher.close()


def test_a_will_waits_for_its_delay_in_the_next_owner(nodes: ClusterNodes) -> None:
    shard = 2
    node, pid = core(nodes, shard)
    port = next(other.port for other in nodes.nodes if other is not node)
    watcher = Watcher(nodes, client_id("watch", 0), "delayed/#")
    delay = Properties()
    delay.will_delay_interval = 20
    names = [client_id("stays", shard), client_id("returns", shard)]
    clients = [
        connected(port, name, properties=session_expiry(), will=Will(f"delayed/{name}", b"gone", 1, properties=delay)) for name in names
    ]
    os.kill(pid, signal.SIGKILL)
    nodes.wait_until_ready()
    returned = connected(port, names[1], clean_start=False, properties=session_expiry())
    assert returned.connack.session_present
    assert watcher.settle() == []
    watcher.wait_for(f"delayed/{names[0]}")
    assert watcher.settle() == [f"delayed/{names[0]}"]
    for client in (*clients, returned, watcher):
        client.close()
