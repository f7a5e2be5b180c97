"""A rolling upgrade: each of three nodes in turn is drained, stopped and started again, while clients of all nodes work."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chaos.clients import TOPICS, Broker, Client, Publisher, RetainedReader, Subscriber
from chaos.device import Address, Link
from chaos.record import MISSING_1, MISSING_2, PROTOCOL, TWICE, Record
from chaos.schedule import Load
from chaos.verdict import findings, judge_deliveries
from chaos_cluster.run import ROWS, SUBSCRIBED, end
from chaos_cluster.wills import WATCHED, WILLS, Mortal, complete, judge_wills
from support.cluster_nodes import TOKEN, ClusterNode, ClusterNodes, port_ranges, wait_until_ready
from support.command_line import run
from support.core import wait_until
from support.kafka import KafkaCluster
from support.paths import TESTS
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.cluster.formats import SPOKEN, Versions
from mqttbroker.cluster.shards import Shards
from mqttbroker.codec.packets import Connack, Disconnect, Packet, Publish, Will
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import SERVER_SHUTTING_DOWN, SERVER_UNAVAILABLE

NODES, SHARDS = 3, 3
RETRY = 0.02  # seconds between two attempts to connect
DELAYED = 3600  # seconds that a will is delayed, longer than the test
VERSION_3_UNAVAILABLE = 3
FAST = "fast"  # topic at QoS 0
CONFIG = {"http": {"token": TOKEN}, "allow_anonymous": True, "sys_interval": "0s"}

pytestmark = [pytest.mark.slow("restarts three nodes on Kafka under load"), pytest.mark.one_build]


class LoadBalancer(Broker):
    """The addresses of the nodes that take clients, in turn."""

    def __init__(self, addresses: list[Address]) -> None:
        super().__init__(addresses)
        self.addresses = addresses
        self.open = set(range(len(addresses)))
        self._next = 0
        self.up.set()

    def choose(self, home: int) -> int:
        """``home`` if it takes clients, else another node."""
        if home in self.open:
            return home
        self._next += 1
        return sorted(self.open)[self._next % len(self.open)]

    @property
    def address(self) -> Address:
        return self.addresses[self.choose(-1)]


class Stayer:
    """Keeps a client connected, from `run` on: at its ``home`` node, and at another one while that takes no clients."""

    def __init__(self, client: Client, home: int, balancer: LoadBalancer) -> None:
        self.client = client
        self.shard = Shards(SHARDS).of_text(client.name)
        self.node = home  # the last one that it was connected to
        self.losses = 0
        self.longest = 0.0  # seconds from a loss to the next CONNACK, or SUBACK of a client without a session
        self.reasons: list[int | None] = []  # of the DISCONNECT before each loss; None if there was none
        self.refusals: Counter[int] = Counter()  # CONNACKs by reason code
        self.served = False
        self._home = home
        self._balancer = balancer
        self._told: dict[Link, int] = {}
        handle = client.handle

        def watched(link: Link, packet: Packet) -> None:
            if isinstance(packet, Disconnect):
                self._told[link] = packet.reason_code
            elif isinstance(packet, Connack) and packet.reason_code:
                self.refusals[packet.reason_code] += 1
            handle(link, packet)

        client.handle = watched  # type: ignore[method-assign]

    async def run(self) -> None:
        lost_at = 0.0
        while True:
            node = self._balancer.choose(self._home)
            link = await self.client.connect(self._balancer.addresses[node])
            if link is None or not await self.client.arrived():
                await asyncio.sleep(RETRY)
                continue
            self.node = node
            self.served = True
            if lost_at:
                self.longest = max(self.longest, time.monotonic() - lost_at)
            await link.closed.wait()
            self.served = False
            lost_at = time.monotonic()
            self.losses += 1
            self.reasons.append(self._told.pop(link, None))


class Idle(Client):
    """Connects, and waits."""


class FastSender(Client):
    """Publishes at QoS 0."""

    sent = 0

    async def publish_all(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.up and self.link is not None:
                self.sent += 1
                self.link.send(Publish(FAST, b"%d" % self.sent, 0, False, False, 0))


class FastReceiver(Subscriber):
    def __init__(self, name: str, version: int, record: Record) -> None:
        super().__init__(name, version, record, 0, persistent=False, topic_filter=FAST)
        self.times: Counter[bytes] = Counter()

    def receive(self, link: Link, packet: Publish) -> None:
        assert packet.qos == 0
        self.times[packet.payload] += 1


class Upgrade:
    """The clients, and the three restarts."""

    def __init__(self, cluster: ClusterNodes, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.balancer = LoadBalancer(cluster.addresses)
        self.record = record = Record(ROWS)
        record.unavailable = frozenset((SERVER_UNAVAILABLE, SERVER_SHUTTING_DOWN, VERSION_3_UNAVAILABLE))
        self.publishers = [
            Publisher(f"publisher-{n}", 4 + n % 2, record, Load("rolling", f"publisher-{n}", len(TOPICS), 0.3)) for n in range(4)
        ]
        self.subscribers = [
            Subscriber("persistent-v4", 4, record, 2),
            Subscriber("persistent-v5", 5, record, 2),
            Subscriber("at-qos-1", 5, record, 1),
            *(Subscriber(f"member-{n}", 4 + n % 2, record, 2, "group") for n in range(3)),
        ]
        self.watcher = Subscriber("watcher", 5, record, 2, topic_filter=WATCHED)
        clean = [Subscriber(f"clean-v{version}", version, record, 2, persistent=False) for version in (4, 5)]
        self.fast = FastSender("fast-sender", 5, record, False)
        self.receivers = [FastReceiver(f"fast-{n}", 4 + n % 2, record) for n in range(3)]
        self.delayed = [Idle(f"delayed-{n}", 5, record) for n in range(NODES)]
        for one in self.delayed:
            message = record.send(one.name, f"will/{one.name}", 2, False, 40)
            properties = Properties()
            properties.will_delay_interval = DELAYED
            one.will = Will(message.topic, message.payload, message.qos, properties=properties)
        clients = [
            *self.publishers, *self.subscribers, self.watcher, *clean, self.fast, *self.receivers, *self.delayed,
            *(Idle(f"idle-{n}", 4 + n % 2, record, n % 3 == 0) for n in range(18)),
        ]  # fmt: skip
        self.stayers = [Stayer(client, n % NODES, self.balancer) for n, client in enumerate(clients)]
        self.mortals = [Mortal(f"mortal-{n}", 4 + n % 2, record, self.balancer.addresses[n], 1 + n % 2) for n in range(NODES)]
        self._owners: list[str | None] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            staying = [group.create_task(one.run()) for one in self.stayers]
            await self.until(lambda: all(one.served for one in self.stayers), "all clients are served")
            working = [group.create_task(publisher.publish_all()) for publisher in self.publishers]
            working += [group.create_task(self.fast.publish_all()), *(group.create_task(one.live()) for one in self.mortals)]
            await self.until(lambda: all(one.up for one in self.mortals), "clients with a will are served")
            for number, node in enumerate(self.cluster.nodes):
                await self.upgrade(number, node)
            await end(working)
            for mortal in self.mortals:
                await mortal.finish()
            await self.until(self.complete, "everything is delivered")
            await end(staying)
        reader = RetainedReader("reader", 5, self.record, "rolling", PATIENCE)
        await reader.check(self.balancer)
        for one in self.stayers:
            one.client.leave()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() < begin + 2 * PATIENCE, f"not {what}; {findings(self.record)}"
            await asyncio.sleep(0.02)

    def complete(self) -> bool:
        if any(publisher.outgoing for publisher in self.publishers) or any(one.incoming for one in self.subscribers):
            return False
        seen = self.record.seen
        single = [seen.get(one.name, set()) for one in self.subscribers if not one.group]
        together = set().union(*(seen.get(one.name, set()) for one in self.subscribers if one.group))
        expected = {number for number, message in self.record.sent.items() if message.topic.startswith(SUBSCRIBED[:-1])}
        return all(expected <= numbers for numbers in (*single, together)) and complete(self.mortals, seen.get(self.watcher.name, set()))

    # --- one node -------------------------------------------------------------------------------------------------

    async def upgrade(self, number: int, node: ClusterNode) -> None:
        name = f"node-{number + 1}"
        others = [other for other in self.cluster.nodes if other is not node]
        before = await self.status(node)
        own = [shard for shard, owner in enumerate(owners(before)) if owner == name]
        assert own and [one["draining"] for one in before["nodes"]] == [False] * NODES

        self.balancer.open.discard(number)
        losses = self.count()
        await self.command(node, "drain")
        drained = await self.status(others[0])
        assert_moved(before, drained, own)
        assert name not in owners(drained)
        assert [one["node"] for one in drained["nodes"] if one["draining"]] == [name]
        state, problems = await asyncio.to_thread(readiness, node)
        assert (state, problems) == (503, ["cluster: this node is draining"])
        await self.lost(losses, f"{name} is drained", lambda one: one.shard in own)

        losses, places = self.count(), [one.node for one in self.stayers]
        at_node = {one for one, place in zip(self.stayers, places) if place == number}
        assert at_node, "no client is connected to the node that stops"
        assert await asyncio.to_thread(node.terminate) == 0
        await self.lost(losses, f"{name} is stopped", lambda one: one in at_node)
        stopped = await self.status(others[0])
        assert owners(stopped) == owners(drained)
        assert [one["node"] for one in stopped["nodes"]] == [f"node-{n + 1}" for n in range(NODES) if n != number]

        losses = self.count()
        await asyncio.to_thread(node.start)
        await asyncio.to_thread(self.cluster.wait_until_ready, 2 * PATIENCE)
        started = await self.status(node)
        taken = [shard for shard, owner in enumerate(owners(started)) if owner == name]
        assert_moved(stopped, started, taken)
        assert Counter(owners(started)) == {f"node-{n + 1}": SHARDS // NODES for n in range(NODES)}
        assert owners(await self.status(others[1])) == owners(started)
        self.balancer.open.add(number)
        await self.lost(losses, f"{name} is started", lambda one: one.shard in taken)

    def count(self) -> list[int]:
        return [one.losses for one in self.stayers]

    async def lost(self, before: list[int], what: str, concerned: Callable[[Stayer], bool]) -> None:
        """Check that exactly the clients that are concerned have lost their connection, once, were told why and are served again."""
        expected = [count + concerned(one) for one, count in zip(self.stayers, before)]
        await self.until(
            lambda: all(one.served and one.losses >= count for one, count in zip(self.stayers, expected)), f"served after {what}"
        )
        for one in self.stayers:
            assert one.client.link is not None and await one.client.ping(), f"{one.client.name} is not served when {what}"
        for one, count, first in zip(self.stayers, expected, before):
            assert one.losses == count, f"{one.client.name} (shard {one.shard}) lost {one.losses - first} connections when {what}"
            told = [SERVER_SHUTTING_DOWN if one.client.version == 5 else None] * (count - first)
            assert one.reasons[first:] == told, f"{one.client.name} was told {one.reasons[first:]} when {what}"

    # --- the operator ---------------------------------------------------------------------------------------------

    async def command(self, node: ClusterNode, *arguments: str) -> str:
        done = await asyncio.to_thread(run, "cluster", *arguments, "--url", node.url, "--token", TOKEN, cwd=self.directory)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def status(self, node: ClusterNode) -> Any:
        return json.loads(await self.command(node, "status", "--json"))

    # --- the end --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        record = self.record
        judge_deliveries(
            record, SUBSCRIBED, [one.name for one in self.subscribers if not one.group],
            {"group": [one.name for one in self.subscribers if one.group]},
        )  # fmt: skip
        judge_wills(record, self.mortals, self.watcher.name)
        wills = {record.sent[number].publisher for number, _ in record.deliveries.get(self.watcher.name, [])}
        assert not wills & {one.name for one in self.delayed}, "a delayed will of a client that came back was published"
        for receiver in self.receivers:
            assert receiver.times and set(receiver.times.values()) == {1}, f"{receiver.name} was sent a QoS 0 message twice"
        assert not findings(record), findings(record)
        for row in (MISSING_1, MISSING_2, TWICE, PROTOCOL, WILLS):
            assert record.checked[row], f"nothing was checked: {row}"

    def summary(self) -> str:
        lost = sum(one.losses for one in self.stayers)
        slowest = max(self.stayers, key=lambda one: one.longest)
        refusals = sum((one.refusals for one in self.stayers), Counter())
        received = [f"{len(one.times)}" for one in self.receivers]
        return (
            f"rolling upgrade: {len(self.stayers)} clients lost {lost} connections in {NODES} restarts; served again after "
            f"{slowest.longest:.2f} s at most ({slowest.client.name}); refused meanwhile: {dict(refusals)}; "
            f"{len(self.record.acknowledged):,} messages acknowledged; of {self.fast.sent} at QoS 0 {', '.join(received)} came; "
            f"{sum(len(one.broken) for one in self.mortals)} wills"
        )


def owners(status: Any) -> list[str | None]:
    return [one["owner"] for one in status["shards"]]


def assert_moved(before: Any, after: Any, shards: list[int]) -> None:
    """Exactly these shards have another owner, and all shards have one."""
    assert None not in owners(after)
    moved = [shard for shard, (one, other) in enumerate(zip(owners(before), owners(after))) if one != other]
    assert moved == shards, f"shards {moved} have moved, not {shards}"


def readiness(node: ClusterNode) -> tuple[int, list[str]]:
    """The status and the reasons of /readyz."""
    try:
        with urllib.request.urlopen(node.url + "/readyz", timeout=PATIENCE) as answer:
            return answer.status, json.load(answer).get("reasons", [])
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["reasons"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterNodes]:
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), 1) as kafka:
        with ClusterNodes(kafka, NODES, SHARDS, CONFIG, replication=1, min_insync_replicas=1, session_timeout="10s") as nodes:
            for node in nodes.nodes:
                node.protected = True
            yield nodes


def node_of(cluster: ClusterNodes, speaks: Versions) -> ClusterNode:
    """A fourth node, whose program speaks these versions."""
    section = {
        "engine": "kafka", "id": cluster.id, "bootstrap_servers": cluster.kafka.bootstrap, "node": "node-4",
        "link_host": "127.0.0.1", "link_address": "127.0.0.1", "link_port": port_ranges(1, SHARDS + 1)[0], "shards": SHARDS,
        "fsync": False, "replication": 1, "min_insync_replicas": 1, "session_timeout": "10s",
    }  # fmt: skip
    paths = [str(TESTS / "support" / "other_version"), *filter(None, sys.path)]
    env = {"SPEAKS": f"{speaks.oldest}:{speaks.newest}", "PYTHONPATH": os.pathsep.join(paths)}
    return ClusterNode(config={**CONFIG, "cluster": section}, env=env)


def test_a_rolling_upgrade_costs_each_client_a_reconnect_and_nothing_else(cluster: ClusterNodes, tmp_path: Path) -> None:
    """A connection ends when the shard of its client moves, or when its node stops, and at no other time."""
    upgrade = Upgrade(cluster, tmp_path)
    asyncio.run(upgrade.run())
    print(upgrade.summary())
    upgrade.check()


def members(cluster: ClusterNodes) -> list[str]:
    return [one["node"] for one in cluster.nodes[0].cluster()["nodes"]]


def test_a_node_of_a_version_apart_ends_with_one_line_and_serves_nothing(cluster: ClusterNodes) -> None:
    before = cluster.nodes[0].cluster()
    version = SPOKEN.newest + 1
    with closing(node_of(cluster, Versions(version, version))) as node:
        node.launch()
        found = node.wait_for_log(r"(?m)^mqttbroker: cluster: this program .*$", 2 * PATIENCE)
        wait_until(lambda: not node.running)
        assert node.terminate() == 1
        assert "event=shard_served" not in node.log and "Traceback" not in node.log
    assert f"speaks version {version} of the links and logs, and node node-" in found[0]
    after = cluster.nodes[0].cluster()
    assert (members(cluster), owners(after)) == ([f"node-{n + 1}" for n in range(NODES)], owners(before))


def test_a_node_of_the_next_version_that_speaks_this_one_too_is_a_member(cluster: ClusterNodes, tmp_path: Path) -> None:
    """So that a cluster of both releases works while it is upgraded."""
    before = cluster.nodes[0].cluster()
    with closing(node_of(cluster, Versions(SPOKEN.newest, SPOKEN.newest + 1))) as node:
        node.start()
        wait_until_ready([*cluster.nodes, node], 2 * PATIENCE)
        done = run("cluster", "move", "0", "node-4", "--url", cluster.nodes[0].url, "--token", TOKEN, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: owners(cluster.nodes[0].cluster())[0] == "node-4")
        wait_until_ready([*cluster.nodes, node], 2 * PATIENCE)
        assert_moved(before, cluster.nodes[0].cluster(), [0])
        shards = Shards(SHARDS)
        for shard in range(SHARDS):
            name = next(f"client-{n}" for n in range(1000) if shards.of_text(f"client-{n}") == shard)
            with RawClient(node.port) as subscriber, RawClient(cluster.ports[0]) as publisher:
                assert subscriber.connect(name).reason_code == publisher.connect("publisher").reason_code == 0
                subscriber.subscribe("mixed/#")
                for qos in (0, 1, 2):
                    publisher.publish("mixed/t", b"%d" % qos, qos)
                assert {subscriber.take().payload for _ in range(3)} == {b"0", b"1", b"2"}
        assert node.terminate() == 0
    wait_until(lambda: "node-4" not in members(cluster))
    cluster.wait_until_ready()
