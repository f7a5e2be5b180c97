"""The shards of a cluster as one node describes them."""

from __future__ import annotations

from mqttbroker.cluster.nodes.core_control import CHECKING, OWNER, STANDBY, TAKING_OVER, Status
from mqttbroker.cluster.nodes.membership import Directory
from mqttbroker.config.settings import Cluster
from mqttbroker.node.shards import MOVING, NodeShards


def test_shards_that_are_about_to_move_are_a_warning() -> None:
    shards = NodeShards(Cluster(node="a", shards=2), str, lambda: 1.0, lambda _: None, lambda _: None, lambda _: None)
    assert shards.warnings() == []
    shards.directory = Directory(1, {}, [("a", []), ("b", [])], moving=True)
    assert shards.warnings() == [MOVING]
    shards.directory = Directory(2, {}, [("a", []), ("b", [])])
    assert shards.warnings() == []


def test_a_node_says_why_it_is_not_ready() -> None:
    shards = NodeShards(Cluster(node="a", shards=2), str, lambda: 1.0, lambda _: None, lambda _: None, lambda _: None)
    assert shards.unready() == ["kafka: Kafka is not reached yet"]
    shards.kafka_problem = ""
    assert shards.unready() == ["cluster: this node is not a member yet"]
    shards.drain(True)
    assert shards.unready() == ["cluster: this node is draining"]
    assert shards.move(0, "b") == "this node is not in the cluster yet"


async def test_a_shard_is_served_once_for_each_takeover() -> None:
    served: list[int] = []
    shards = NodeShards(Cluster(node="a", shards=2), str, lambda: 1.0, lambda _: None, served.append, lambda _: None)
    core = shards.cores[1]
    core._told_own = True
    for state, epoch in ((STANDBY, -1), (TAKING_OVER, 7), (OWNER, 7), (CHECKING, 7), (OWNER, 7)):
        core.received(Status(state, epoch=epoch))
    assert served == [1]
    core.received(Status(STANDBY))
    core.received(Status(OWNER, epoch=9))
    assert served == [1, 1]
