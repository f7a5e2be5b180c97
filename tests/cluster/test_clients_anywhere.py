"""Clients of any node: taken over by a connection to another node, and waiting for a core that is not there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.cluster_nodes import ClusterNodes
from support.kafka import KafkaCluster
from support.metric_samples import samples
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import Connack, Connect
from mqttbroker.codec.reason_codes import SERVER_UNAVAILABLE, SESSION_TAKEN_OVER
from mqttbroker.core.sessions.own_shard import OwnShard

SHARDS = 2
OF_SHARD = [OwnShard(shard, SHARDS).fitted("client") for shard in range(SHARDS)]
WAIT = 60.0

pytestmark = [pytest.mark.slow("two nodes on Kafka"), pytest.mark.one_build]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNodes]:
    config = {"allow_anonymous": True, "workers": 2}
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), 1) as kafka:
        with ClusterNodes(kafka, 2, SHARDS, config, replication=1, min_insync_replicas=1, session_timeout="3s") as cluster:
            yield cluster


def test_a_connection_to_another_node_takes_a_session_over(nodes: ClusterNodes) -> None:
    old = RawClient(nodes.ports[0])
    assert not old.connect(OF_SHARD[0], clean_start=False, properties=session_expiry()).session_present
    for number in range(1, 20):
        new = RawClient(nodes.ports[number % 2])
        assert new.connect(OF_SHARD[0], clean_start=False, properties=session_expiry()).session_present
        (disconnect,) = old.expect_closed()
        assert disconnect.reason_code == SESSION_TAKEN_OVER  # type: ignore[attr-defined]
        old.close()
        old = new
    old.ping()
    old.close()


def test_clients_without_a_client_id_get_one_of_the_node(nodes: ClusterNodes) -> None:
    for port in nodes.ports:
        with RawClient(port) as client:
            assigned = client.connect().properties.assigned_client_identifier
            assert assigned is not None
            client.subscribe("t")
            client.publish("t", b"x", 1)
            assert client.take().payload == b"x"


def test_clients_of_a_killed_core_come_back_by_any_node(nodes: ClusterNodes) -> None:
    clients = [RawClient(port) for port in nodes.ports]
    for number, client in enumerate(clients):
        name = OwnShard(0, SHARDS).fitted(f"back-{number}-")
        client.connect(name, clean_start=False, properties=session_expiry())
        client.subscribe("t")  # with SUBACK the session is stored
    os.kill(nodes.owner(0).cores()[0], signal.SIGKILL)
    for number, client in enumerate(clients):
        assert client.expect_closed() == []
        answer = Connack(False, SERVER_UNAVAILABLE)
        while answer.reason_code == SERVER_UNAVAILABLE:
            with RawClient(nodes.ports[number]) as again:
                again.send(Connect(OwnShard(0, SHARDS).fitted(f"back-{number}-"), 5, False))
                answer = again.expect(Connack, WAIT)
        assert answer.reason_code == 0 and answer.session_present
    metrics = samples(nodes.nodes[0].get("/metrics"))
    assert metrics["mqttbroker_worker_up/1"] == metrics["mqttbroker_worker_up/2"] == 1.0
