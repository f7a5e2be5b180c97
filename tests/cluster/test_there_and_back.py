"""From a single broker to a cluster and back, with the commands import-store and export-store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.cluster_nodes import ClusterNodes
from support.clustered_broker import shared_kafka
from support.command_line import one_line, run
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.core.sessions.own_shard import shard_of

SHARDS = 2

pytestmark = [pytest.mark.one_build, pytest.mark.slow("starts nodes and three Kafka brokers")]


def client_id(name: str, shard: int) -> str:
    return next(f"{name}{number}" for number in range(99) if shard_of(f"{name}{number}", SHARDS) == shard)


SUBSCRIBERS = [client_id("sub", shard) for shard in range(SHARDS)]
WORKERS = [client_id("work", shard) for shard in range(SHARDS)]
PUBLISHER, RECEIVER = client_id("pub", 0), client_id("slow", 1)


def session(port: int, name: str) -> RawClient:
    client = RawClient(port)
    client.connect(name, clean_start=False, properties=session_expiry())
    return client


def publish(port: int, name: str, retained: str) -> None:
    """Messages of QoS 1 and 2 for all sessions, and two for the workers; a retained one."""
    with RawClient(port) as publisher:
        publisher.connect("plain-publisher")
        for qos in (1, 2):
            publisher.publish(f"queue/{qos}", name.encode(), qos)
            publisher.publish(f"jobs/{qos}", name.encode(), qos)
        publisher.publish(retained, name.encode(), 1, retain=True)
        publisher.disconnect()


def test_sessions_and_retained_messages_go_there_and_back(tmp_path: Path) -> None:
    config = {"allow_anonymous": True}
    with BrokerProcess(data_dir=tmp_path / "single", config=config) as single:
        for name in SUBSCRIBERS:
            with session(single.port, name) as client:
                client.subscribe("queue/#", options=2)
                client.disconnect()
        for name in WORKERS:
            with session(single.port, name) as client:
                client.subscribe("$share/group/jobs/#", options=2)
                client.disconnect()
        publish(single.port, "single", "kept/single")
        with session(single.port, PUBLISHER) as client:
            client.send(Publish("queue/exchange", b"once", 2, False, False, 7, None))
            assert client.expect(Pubrec).packet_id == 7
            client.close()
        single.terminate()
    cluster = ClusterNodes(shared_kafka(), 2, SHARDS, config)
    node_config = str(cluster.nodes[0].config)
    done = run("import-store", str(tmp_path / "single"), "--config", node_config, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    done = run("export-store", str(tmp_path / "unused"), "--config", node_config, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 sessions, 4 subscriptions, 8 queued messages, 1 retained messages" in done.stdout, "no node has run"
    with cluster:
        port = cluster.ports[0]
        with session(port, RECEIVER) as client:
            client.subscribe("slow", options=2)
            with RawClient(port) as publisher:
                publisher.connect("plain-publisher")
                publisher.publish("slow", b"x", 2)
                publisher.disconnect()
            received = client.expect(Publish).packet_id
            client.send(Pubrec(received))
            client.expect(Pubrel)
            client.close()  # without PUBCOMP
        publish(port, "cluster", "kept/cluster")
        running = run("export-store", str(tmp_path / "back"), "--config", node_config, cwd=tmp_path)
        assert running.returncode == 1
        assert f"2 nodes of {cluster.id} run" in one_line(running.stderr)
        for node in cluster.nodes:
            node.terminate()
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        refused = run("export-store", str(tmp_path / "full"), "--config", node_config, cwd=tmp_path)
        assert one_line(refused.stderr).endswith("full: is not an empty directory")
        done = run("export-store", str(tmp_path / "back"), "--config", node_config, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert {path.name for path in tmp_path.iterdir()} == {"single", "unused", "full", "back"}
    with closing(sqlite3.connect(tmp_path / "back" / "mqttbroker.db")) as connection:
        found = connection.execute("SELECT client_id, topic_filter FROM sessions LEFT JOIN subscriptions USING (session_id)")
        assert sorted(found) == sorted([
            *((name, "queue/#") for name in SUBSCRIBERS),
            *((name, "$share/group/jobs/#") for name in WORKERS),
            (PUBLISHER, None), (RECEIVER, "slow"),
        ])  # fmt: skip
    # 2 x 2 + 1 messages of each subscriber, with that of the exchange; 4 of the workers; the one without PUBCOMP.
    assert "-> " in done.stdout and "6 sessions, 5 subscriptions, 15 queued messages, 2 retained messages" in done.stdout
    with BrokerProcess(data_dir=tmp_path / "back", config=config) as back:
        with session(back.port, PUBLISHER) as client:
            client.send(Publish("queue/exchange", b"once", 2, False, True, 7, None))
            assert client.expect(Pubrec).packet_id == 7
            client.send(Pubrel(7))
            assert client.expect(Pubcomp).packet_id == 7
            client.disconnect()
        with session(back.port, RECEIVER) as client:
            assert client.expect(Pubrel).packet_id == received
            client.send(Pubcomp(received))
            client.expect_nothing()
            client.disconnect()
        expected = sorted([(f"queue/{qos}", one, qos) for qos in (1, 2) for one in (b"single", b"cluster")]
                          + [("queue/exchange", b"once", 2)])  # fmt: skip
        for name in SUBSCRIBERS:
            with session(back.port, name) as client:
                taken = [client.take() for _ in expected]
                assert sorted((one.topic, one.payload, one.qos) for one in taken) == expected
                client.expect_nothing()
                client.disconnect()
        shared = []
        workers = [session(back.port, name) for name in WORKERS]
        while len(shared) < 4:
            for client in workers:
                arrived = client.ping()
                client.inbox = arrived
                while any(isinstance(packet, Publish) for packet in client.inbox):
                    shared.append(client.take())
        assert sorted((one.topic, one.payload) for one in shared) == sorted(
            (f"jobs/{qos}", one) for qos in (1, 2) for one in (b"single", b"cluster")
        )
        for client in workers:
            client.disconnect()
        with RawClient(back.port) as client:
            client.connect("new")
            client.subscribe("kept/#", options=1)
            assert {(client.take().topic, True) for _ in range(2)} == {("kept/single", True), ("kept/cluster", True)}
            client.publish("queue/1", b"again", 1)  # the group and the sessions go on
            client.disconnect()
