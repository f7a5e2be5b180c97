"""The nodes of a cluster as a group of Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.kafka import KafkaCluster
from support.patience import PATIENCE

from mqttbroker.cluster.formats import Versions
from mqttbroker.cluster.nodes.membership import Directory, Membership, NodeInfo, Refused, make_directory, refusal

pytestmark = pytest.mark.one_build

SESSION = 1.0
SHARDS = 4


def info(node: str, start: float = 1.0, owned: dict[int, int] | None = None, **more: object) -> NodeInfo:
    return NodeInfo(node, start, "127.0.0.1", 18100, "1", owned=owned or {}, **more)  # type: ignore[arg-type]


# --- the directory -------------------------------------------------------------


def test_of_two_members_of_one_name_the_newer_is_refused() -> None:
    directory = make_directory(1, [info("a", 7.0), info("a", 3.0), info("b", 5.0)], SHARDS, 1)
    assert directory.refused == [7.0]
    assert directory.members["a"].start == 3.0


def test_a_node_that_speaks_no_version_of_the_others_is_refused() -> None:
    old = [info("a", 1.0, formats=Versions(2, 2)), info("b", 2.0, formats=Versions(2, 2))]
    both, newer = info("c", 3.0, formats=Versions(2, 3)), info("d", 4.0, formats=Versions(3, 3))
    directory = make_directory(1, [newer, both, *old], SHARDS, 1)
    assert list(directory.members) == ["a", "b", "c"] and directory.refused == [4.0]
    assert refusal(newer, directory.members) == (
        "this program (1) speaks version 3 of the links and logs, and node a (1) version 2:"
        " upgrade by way of a release that speaks both, or stop all nodes first"
    )
    upgraded = make_directory(2, [newer, both, info("a", 5.0, formats=Versions(2, 3))], SHARDS, 1)
    assert sorted(upgraded.members) == ["a", "c", "d"] and not upgraded.refused


def test_a_node_that_serves_shards_stays_whatever_its_clock_says() -> None:
    serving = info("a", 9.0, {0: 1}, formats=Versions(2, 2))
    assert list(make_directory(1, [info("b", 1.0, formats=Versions(3, 3)), serving], SHARDS, 1).members) == ["a"]
    assert make_directory(1, [info("a", 1.0), serving], SHARDS, 1).refused == [1.0]


def test_the_last_choice_of_an_operator_counts() -> None:
    nodes = [info("a", owned={0: 1, 1: 1}, pins={0: ("a", 5.0)}), info("b", owned={2: 1, 3: 1}, warm=[0], pins={0: ("b", 6.0)})]
    directory = make_directory(1, nodes, SHARDS, 1)
    assert directory.shards[0][0] == "b"
    assert directory.pins == {0: ("b", 6.0)}


def test_a_directory_says_whether_shards_are_still_to_move() -> None:
    owned = {shard: 1 for shard in range(SHARDS)}
    assert make_directory(1, [info("a", owned=owned), info("b")], SHARDS, 1).moving
    settled = [info("a", owned={0: 1, 1: 1}, follows=[2, 3]), info("b", owned={2: 1, 3: 1}, follows=[0, 1])]
    assert not make_directory(1, settled, SHARDS, 1).moving


def test_a_drained_node_is_left_for_one_where_a_core_failed_lately() -> None:
    nodes = [info("a", owned={0: 1, 1: 1}, draining=True), info("b", follows=[0, 1], warm=[0, 1], failed=[0])]
    directory = make_directory(1, nodes, 2, 1)
    assert [owner for owner, _ in directory.shards] == ["b", "b"]
    assert not directory.moving


# --- with a client that answers when it is told to -------------------------------


class Coordinator:
    """An aiokafka client with the answer to one request."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def send(self, *request: object, **options: object) -> object:
        self.asked.set()
        return await self.answer


@pytest.mark.parametrize("what", ["answer", "change"])
async def test_a_member_ends_also_if_something_happens_as_it_is_cancelled(what: str) -> None:
    membership = Membership({}, "group", 1.0, SHARDS, 1, lambda: info("a"), lambda directory: None)
    client = Coordinator()
    membership._client, membership._coordinator = client, 1  # type: ignore[assignment]
    task = asyncio.create_task(membership._stay())
    if what == "answer":
        await client.asked.wait()
        client.answer.set_result(SimpleNamespace(error_code=0))
    else:
        await asyncio.sleep(0)
        membership.changed()
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.cancelled()


# --- with Kafka ------------------------------------------------------------------


class Node:
    """A member that owns what it is told to own."""

    def __init__(self, kafka: KafkaCluster, group: str, name: str, start: float) -> None:
        self.name = name
        self.start = start
        self.draining = False
        self.directory: Directory | None = None
        self.changed = asyncio.Event()
        self.membership = Membership({"bootstrap_servers": kafka.bootstrap}, group, SESSION, SHARDS, 1, self.describe, self.assigned)
        self.task = asyncio.create_task(self.membership.run())

    @property
    def owned(self) -> list[int]:
        return [] if self.directory is None else [
            shard for shard, (owner, _) in enumerate(self.directory.shards) if owner == self.name
        ]  # fmt: skip

    def describe(self) -> NodeInfo:
        follows = [] if self.directory is None else [
            shard for shard, (_, standbys) in enumerate(self.directory.shards) if self.name in standbys
        ]  # fmt: skip
        return info(self.name, self.start, {shard: 1 for shard in self.owned}, follows=follows, warm=follows, draining=self.draining)

    def assigned(self, directory: Directory) -> None:
        self.directory = directory
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def kill(self) -> None:
        """End without a word to Kafka."""
        self.task.cancel()
        await asyncio.wait([self.task])
        self.membership.joined = False
        await self.membership.leave()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.membership.leave()


@pytest.mark.slow("needs Kafka")
async def test_shards_of_nodes_that_join_die_drain_and_leave(kafka: KafkaCluster) -> None:
    first = Node(kafka, "members", "a", 1.0)
    await first.until(lambda: len(first.owned) == SHARDS)
    second = Node(kafka, "members", "b", 2.0)
    await first.until(lambda: len(first.owned) == 2)
    await second.until(lambda: len(second.owned) == 2)
    await second.kill()
    await first.until(lambda: len(first.owned) == SHARDS)
    third = Node(kafka, "members", "c", 3.0)
    await third.until(lambda: len(third.owned) == 2)
    first.draining = True
    first.membership.changed()
    await third.until(lambda: len(third.owned) == SHARDS)
    await first.close()
    await third.until(lambda: third.directory is not None and list(third.directory.members) == ["c"])
    await third.close()


@pytest.mark.slow("needs Kafka")
async def test_a_second_node_of_a_name_ends_with_one_line(kafka: KafkaCluster) -> None:
    first = Node(kafka, "namesakes", "a", 1.0)
    await first.until(lambda: len(first.owned) == SHARDS)
    second = Node(kafka, "namesakes", "a", 2.0)
    with pytest.raises(Refused, match="^another node of the name a is in the cluster, at 127.0.0.1:18100$"):
        async with asyncio.timeout(30):
            await second.task
    assert second.directory is None
    await second.close()
    assert len(first.owned) == SHARDS
    await first.close()


@pytest.mark.slow("needs Kafka")
async def test_nodes_stay_members_when_the_kafka_broker_that_coordinates_them_dies(kafka: KafkaCluster) -> None:
    first, second = Node(kafka, "coordinated", "a", 1.0), Node(kafka, "coordinated", "b", 2.0)
    try:
        await first.until(lambda: len(first.owned) == 2)
        await second.until(lambda: len(second.owned) == 2)
        for partition in range(3):
            await kafka.in_sync("__consumer_offsets", partition, 3)
        coordinator = first.membership._coordinator
        assert coordinator is not None
        broker = kafka.broker(coordinator)
        broker.kill()
        try:
            # A third node is told of both, by another Kafka broker.
            third = Node(kafka, "coordinated", "c", 3.0)
            async with asyncio.timeout(90):
                while third.directory is None or len(third.directory.members) < 3:
                    await asyncio.sleep(0.1)
            assert sorted(third.directory.members) == ["a", "b", "c"]
            assert first.membership._coordinator not in (None, coordinator)
            assert not first.task.done() and not second.task.done()
            await third.close()
        finally:
            broker.start()
            broker.wait_until_listening()
    finally:
        await first.close()
        await second.close()
