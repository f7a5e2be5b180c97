"""One node with two shards on Kafka: each QoS between clients of both shards, queues, retained messages, and a start again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.cluster_nodes import ClusterNodes
from support.clustered_broker import shared_kafka
from support.patience import PATIENCE
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import Publish
from mqttbroker.core.sessions.own_shard import shard_of

SHARDS = 2

pytestmark = [pytest.mark.one_build, pytest.mark.slow("starts a node and three Kafka brokers")]


def client_id(name: str, shard: int) -> str:
    return next(f"{name}{number}" for number in range(99) if shard_of(f"{name}{number}", SHARDS) == shard)


@pytest.fixture(scope="module")
def nodes() -> Iterator[ClusterNodes]:
    with ClusterNodes(shared_kafka(), 1, SHARDS, {"allow_anonymous": True, "sys_interval": "200ms"}) as cluster:
        yield cluster


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_message_reaches_the_clients_of_all_shards(nodes: ClusterNodes, qos: int, shard: int) -> None:
    port = nodes.ports[0]
    topic = f"one/{qos}/{shard}"
    subscribers = [RawClient(port) for _ in range(SHARDS)]
    for number, subscriber in enumerate(subscribers):
        subscriber.connect(client_id("sub", number))
        subscriber.subscribe(topic, options=qos)
    publisher = RawClient(port)
    publisher.connect(client_id("pub", shard))
    for number in range(20):
        publisher.publish(topic, b"%d" % number, qos)
    for subscriber in subscribers:
        found = [subscriber.take() for _ in range(20)]
        assert [one.payload for one in found] == [b"%d" % number for number in range(20)]
        assert {(one.topic, one.qos) for one in found} == {(topic, qos)}
        subscriber.expect_nothing()
        subscriber.disconnect()
    publisher.disconnect()


def test_queues_and_retained_messages_are_there_after_a_kill(nodes: ClusterNodes) -> None:
    """Clients of both shards have a session; a publisher of each shard stores for both."""
    (node,) = nodes.nodes
    names = [client_id("kept", shard) for shard in range(SHARDS)]
    for name in names:
        with RawClient(node.port) as client:
            client.connect(name, clean_start=False, properties=session_expiry())
            client.subscribe("kept/#", options=2)
            client.disconnect()
    for shard in range(SHARDS):
        with RawClient(node.port) as publisher:
            publisher.connect(client_id("pub", shard))
            for qos in (1, 2):
                publisher.publish(f"kept/{shard}/{qos}", b"x", qos, retain=True)
    topics = sorted(f"kept/{shard}/{qos}" for shard in range(SHARDS) for qos in (1, 2))
    node.kill()
    node.start()
    nodes.wait_until_ready()
    for name in names:
        with RawClient(node.port) as client:
            found = client.connect(name, clean_start=False, properties=session_expiry())
            assert found.session_present
            assert sorted(client.take().topic for _ in topics) == topics
            client.expect_nothing()
            client.disconnect()
    with RawClient(node.port) as client:
        client.connect(client_id("new", 0))
        client.subscribe("kept/#", options=2)
        retained = [client.take() for _ in topics]
        assert sorted(one.topic for one in retained) == topics and all(one.retain for one in retained)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_shared_subscription_has_members_on_all_shards(nodes: ClusterNodes, qos: int) -> None:
    """Each message goes to one member. A message that a member has not acknowledged when it leaves goes to one of another shard."""
    port = nodes.ports[0]
    members = [RawClient(port) for _ in range(2 * SHARDS)]
    for number, member in enumerate(members):
        member.connect(client_id(f"member{number}-", number % SHARDS))
        member.subscribe(f"$share/g{qos}/job/{qos}", options=qos)
    for shard in range(SHARDS):
        with RawClient(port) as publisher:
            publisher.connect(client_id("pub", shard))
            for number in range(20):
                publisher.publish(f"job/{qos}", b"%d-%d" % (shard, number), qos)
            publisher.disconnect()
    count = 20 * SHARDS // len(members)
    found = [member.take().payload for member in members[1:] for _ in range(count)]
    leaving = members.pop(0)
    taken = [leaving.expect(Publish).payload for _ in range(count)]
    leaving.close()
    if qos == 1:
        while len(found) < 20 * SHARDS:
            for member in members:
                found.extend(packet.payload for packet in member.ping() if isinstance(packet, Publish))
    else:
        found += taken  # at QoS 2 they may be with their client
    assert sorted(found) == sorted(b"%d-%d" % (shard, number) for shard in range(SHARDS) for number in range(20))
    for member in members:
        member.disconnect()


def test_a_message_without_subscribers_in_its_shard_may_have_some_in_others(nodes: ClusterNodes) -> None:
    with RawClient(nodes.ports[0]) as publisher:
        publisher.connect(client_id("pub", 0))
        assert publisher.publish("nobody", b"x", 1) == publisher.publish("nobody", b"x", 2) == 0


@pytest.mark.parametrize("shard", range(SHARDS))
def test_status_topics_tell_of_the_cluster(nodes: ClusterNodes, shard: int) -> None:
    with RawClient(nodes.ports[0]) as publisher, RawClient(nodes.ports[0]) as client:
        publisher.connect(client_id("pub", 1 - shard))
        client.connect(client_id("watch", shard))
        client.subscribe("$SYS/broker/cluster/#", options=0)
        for _ in range(20):
            publisher.publish("not/subscribed/here", b"x", 1)
        wanted = {
            "nodes": b"1", "shards": b"%d" % SHARDS, "shard": b"%d" % shard, "epoch": b"", "bus_lag": b"0", "links_missing": b"none"
        }  # fmt: skip
        found: dict[str, bytes] = {}
        until = time.monotonic() + PATIENCE
        while found != wanted:
            assert time.monotonic() < until, found
            client.subscribe("$SYS/broker/cluster/#", options=0)
            for packet in client.ping():
                if isinstance(packet, Publish):
                    found[packet.topic.removeprefix("$SYS/broker/cluster/")] = packet.payload
            if found.get("epoch", b"").isdigit():
                found["epoch"] = b""  # the offset of a takeover
