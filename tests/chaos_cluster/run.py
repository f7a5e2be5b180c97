"""``make chaos-cluster``: runs clients against a cluster whose nodes, Kafka brokers and links fail, and checks the record.

The seed decides the schedule of faults, connections and messages. Exit status 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from aiokafka.errors import KafkaError
from chaos.clients import SUBSCRIBED, TOPICS, Broker, Client, Publisher, RetainedReader, Subscriber
from chaos.device import Address, Device
from chaos.record import (
    MISSING_1,
    MISSING_2,
    ORDER,
    PROTOCOL,
    RETAINED,
    SESSION,
    TWICE,
    Record,
)
from chaos.schedule import CUT, LEAVE, TAKEOVER, Habits, Load
from chaos.verdict import findings, judge_deliveries, table
from support.cluster_nodes import ClusterNode, ClusterNodes
from support.kafka import PROMPT_FAILOVER, KafkaBroker, KafkaCluster, Place
from support.namespaces import Network, NetworkMissing

from chaos_cluster.log_proof import LOG_ROWS, LogProof
from chaos_cluster.outages import Outages
from chaos_cluster.wills import WATCHED, WILLS, WILLS_OF_LIVING, Mortal, complete, judge_wills
from mqttbroker import build_kind
from mqttbroker.cluster.shards import Shards
from topic_matcher.filters import matches

NODE = "node killed"
KAFKA = "Kafka broker killed"
BOTH = "node and Kafka broker killed"
STOP = "node stopped and continued"
CUT_OFF = "node without links to nodes and Kafka"
CUT_APART = "no link between two nodes"
KAFKA_CUT_OFF = "Kafka broker without links"
SLOW = "slow links of a node or Kafka broker"
CUTS = (CUT_OFF, CUT_APART, KAFKA_CUT_OFF)
ON_LINKS = (*CUTS, SLOW)  # faults that need a `Network`
ROWS = (MISSING_1, MISSING_2, TWICE, ORDER, RETAINED, SESSION, PROTOCOL, WILLS, WILLS_OF_LIVING, *LOG_ROWS)
UNSPECIFIED_ERROR = 0x80  # closes a connection that waits for a commit of unknown outcome for `append_timeout`
SERVER_UNAVAILABLE = 0x88
SERVER_SHUTTING_DOWN = 0x8B
RETURN_CODE_UNAVAILABLE = 3  # of MQTT 3.1.1
QUIET = 60.0  # seconds without a packet after which a run ends
IDLE = 0.2  # seconds without a packet after which the run checks whether everything is complete
RECOVERY_SECONDS = 90.0  # in which the cluster has to be ready again after a fault
RETAINED_SECONDS = 20.0  # in which retained messages have to arrive
PROBE_INTERVAL = 0.1  # seconds between two messages of a probe
MORTALS = 2  # clients with wills on each node
LOG_INTERVAL = 120.0  # seconds between two reads of the logs, whose records go when there is a snapshot behind them
FINAL_READS = 10  # attempts to read the logs at the end
CONFIG: dict[str, Any] = {
    # Small, so that queues are paged.
    "limits": {"max_queue_memory_messages": 50, "max_inflight": 100},
    "sys_interval": "0s",
}


class Story:
    """Writes the faults and findings of a run to ``story.log``, with times like those of the nodes' logs, which it keeps beside it.

    Without a directory it writes nothing.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    def tell(self, what: object, text: object) -> None:
        if self._directory is not None:
            with open(self._directory / "story.log", "a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z {what}: {text}\n")

    def keep(self, nodes: Sequence[ClusterNode]) -> None:
        """Write the logs of the nodes."""
        if self._directory is not None:
            for number, node in enumerate(nodes):
                (self._directory / f"{node_place(number)}.log").write_text(node.log, encoding="utf-8")


class Fault(NamedTuple):
    """A fault ``after`` seconds of service, which lasts ``hold`` seconds."""

    kind: str
    after: float
    hold: float
    node: int
    kafka: int
    of_kafka: bool  # slow links are those of a Kafka broker

    def other_node(self, nodes: int) -> int:
        """The node on the other side of a link that is cut."""
        return (self.node + 1 + self.kafka % (nodes - 1)) % nodes


def faults(seed: str, counts: dict[str, int], nodes: int, kafka_brokers: int) -> list[Fault]:
    """A schedule with so many faults of each kind."""
    random = Random(f"{seed}:faults")
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.shuffle(kinds)
    return [
        Fault(
            kind,
            random.expovariate(1 / 1.5),
            _hold(kind, random),
            random.randrange(nodes),
            random.randrange(kafka_brokers),
            random.random() < 0.5,
        )
        for kind in kinds
    ]


def _hold(kind: str, random: Random) -> float:
    if kind == STOP:
        return random.uniform(2.0, 5.0)  # an owner that is stopped for less keeps its shards
    if kind in ON_LINKS:
        return random.uniform(2.0, 8.0)
    return random.choice((0.0, 0.0, random.uniform(0.0, 4.0)))


def spread(cuts: int) -> dict[str, int]:
    """So many cuts, of all kinds in turn."""
    return {kind: (cuts + len(CUTS) - 1 - index) // len(CUTS) for index, kind in enumerate(CUTS)}


class Probe(Device):
    """A client of one shard on one node, that publishes again and again. ``acknowledged`` is called when it is answered."""

    def __init__(self, shard: int, shards: Shards, address: Address, record: Record, acknowledged: Callable[[], object]) -> None:
        number = 0
        while shards.of_text(name := f"probe-{address[0]}-{address[1]}-{number}") != shard:
            number += 1
        super().__init__(name, 5, record)
        self.address = address
        self._acknowledge = acknowledged
        self._settled = asyncio.Event()

    def settled(self) -> None:
        self._acknowledge()
        self._settled.set()

    async def run(self) -> None:
        while True:
            if not self.up and await self.connect(self.address) is None:
                await asyncio.sleep(PROBE_INTERVAL)
                continue
            self._settled.clear()
            self.publish(self.record.send(self.name, f"probe/{self.name}", 1, False, 40))
            while self.up and self.outgoing:
                link = self.link
                assert link is not None
                waits = [asyncio.ensure_future(event.wait()) for event in (self._settled, link.closed)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                if self._settled.is_set():
                    break
            await asyncio.sleep(PROBE_INTERVAL)


class Run:
    """One run on the nodes of ``cluster``, whose links are those of ``network`` if the ``schedule`` has faults on links."""

    def __init__(self, cluster: ClusterNodes, shards: int, seed: str, schedule: list[Fault], network: Network | None, story: Story) -> None:
        self.cluster = cluster
        self.story = story
        self.network = network
        self.seed = seed
        self.schedule = schedule
        self.record = record = Record(ROWS)
        record.unavailable = frozenset((SERVER_UNAVAILABLE, SERVER_SHUTTING_DOWN, RETURN_CODE_UNAVAILABLE))
        record.undecided = frozenset((UNSPECIFIED_ERROR,))
        record.on_fault = story.tell
        self.publishers = [Publisher(f"publisher-{n}", 4 + n % 2, record, Load(seed, f"publisher-{n}", len(TOPICS), 0.3)) for n in range(5)]
        self.subscribers = [
            Subscriber("there-v4", 4, record, 2),
            Subscriber("there-v5", 5, record, 2),
            Subscriber("at-qos-1", 5, record, 1),
            Subscriber("away-v4", 4, record, 2),
            Subscriber("away-v5", 5, record, 2),
            *(Subscriber(f"member-{n}", 4 + n % 2, record, 2, "group") for n in range(3)),
        ]
        self.watcher = Subscriber("watcher", 5, record, 2, topic_filter=WATCHED)
        self.persistent: list[Client] = [*self.publishers, *self.subscribers, self.watcher]
        self.readers = [RetainedReader(f"reader-v{version}", version, record, seed, RETAINED_SECONDS) for version in (4, 5)]
        addresses = cluster.addresses
        self.mortals = [
            Mortal(f"mortal-{n}", 4 + n % 2, record, addresses[n % len(addresses)], 1 + n // 2 % 2) for n in range(MORTALS * len(addresses))
        ]
        self.outages = Outages(shards, time.monotonic())
        self.probes = [
            Probe(shard, Shards(shards), address, record, partial(self._acknowledged, shard))
            for shard in range(shards)
            for address in addresses
        ]
        self.logs = LogProof(shards)
        self._logs_read = time.monotonic()
        self.broker = Broker(addresses)
        self._progress = asyncio.Event()
        record.progressed = self._progress.set

    async def run(self) -> None:
        """Run to the end and check the record."""
        self.broker.up.set()
        for subscriber in (*self.subscribers, self.watcher):
            while not (await subscriber.connect(self.broker.address) and await subscriber.arrived()):
                await asyncio.sleep(0.1)
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(client.follow(self.broker, self._habits(client))) for client in self.persistent]
            working = [group.create_task(publisher.publish_all()) for publisher in self.publishers]
            working += [group.create_task(reader.check_repeatedly(self.broker)) for reader in self.readers]
            working += [group.create_task(probe.run()) for probe in self.probes]
            living = [group.create_task(mortal.live()) for mortal in self.mortals]
            try:
                await self._inflict_all()
            except BaseException:  # a shard does not recover
                await end([*following, *working, *living])
                raise
            await end([*working, *living])
            for mortal in self.mortals:
                await mortal.finish()
            self.broker.finishing.set()
            await asyncio.gather(*following)
            connected = [group.create_task(client.stay_connected(self.broker)) for client in self.persistent]
            await self._wait_until_complete()
            await end(connected)
        for reader in self.readers:
            await reader.check(self.broker)
        for client in self.persistent:
            client.leave()
        for attempt in range(1, FINAL_READS + 1):
            try:
                await self._read_logs()
                break
            except KafkaError:
                if attempt == FINAL_READS:
                    raise
        self._check()

    def _acknowledged(self, shard: int) -> None:
        self.outages.acknowledged(shard, time.monotonic())

    async def _read_logs(self) -> None:
        await self.logs.read(self.cluster.kafka.bootstrap, f"{self.cluster.id}.log")
        self._logs_read = time.monotonic()

    def _habits(self, client: Client) -> Habits:
        away = 1.5 if client.name.startswith(("away", "member")) else 0.05
        return Habits(self.seed, client.name, 1.5, away)

    # --- faults ---------------------------------------------------------------------------------------------------

    async def _inflict_all(self) -> None:
        for fault in self.schedule:
            await self._inflict(fault)
            if time.monotonic() > self._logs_read + LOG_INTERVAL:
                with suppress(KafkaError):  # the next time
                    await self._read_logs()
        await self._wait_for_acknowledgements(time.monotonic())

    async def _inflict(self, fault: Fault) -> None:
        await asyncio.sleep(fault.after)
        begin = time.monotonic()
        self.outages.fault(fault.kind, begin)
        self.story.tell("fault", fault)
        node = self.cluster.nodes[fault.node]
        kafka = self.cluster.kafka.brokers[fault.kafka]
        if fault.kind == STOP:
            await asyncio.to_thread(node.stop_all)
            await asyncio.sleep(fault.hold)
            await asyncio.to_thread(node.continue_all)
        elif fault.kind in ON_LINKS:
            network = self.network
            assert network is not None
            await asyncio.to_thread(self._cut, fault, network)
            await asyncio.sleep(fault.hold)
            await asyncio.to_thread(network.heal)
        else:
            if fault.kind in (KAFKA, BOTH):
                await asyncio.to_thread(kafka.kill)
            if fault.kind in (NODE, BOTH):
                await asyncio.to_thread(node.kill)
            await asyncio.sleep(fault.hold)
            await asyncio.to_thread(self._restart, fault, node, kafka)
        self.record.counts[fault.kind] += 1
        await asyncio.to_thread(self.cluster.wait_until_ready, RECOVERY_SECONDS)
        await self._wait_for_acknowledgements(begin)

    async def _wait_for_acknowledgements(self, begin: float) -> None:
        """Wait until each shard has acknowledged something since ``begin``, a monotonic time."""
        while not self.outages.all_acknowledged_since(begin):
            assert time.monotonic() < begin + RECOVERY_SECONDS, "a shard acknowledges nothing"
            await asyncio.sleep(PROBE_INTERVAL)

    def _cut(self, fault: Fault, network: Network) -> None:
        node, kafka = node_place(fault.node), kafka_place(fault.kafka)
        if fault.kind == CUT_OFF:
            network.cut(node)
        elif fault.kind == CUT_APART:
            network.cut(node, [node_place(fault.other_node(len(self.cluster.nodes)))])
        elif fault.kind == KAFKA_CUT_OFF:
            network.cut(kafka)
        else:
            network.slow(kafka if fault.of_kafka else node)

    def _restart(self, fault: Fault, node: ClusterNode, kafka: KafkaBroker) -> None:
        if fault.kind in (KAFKA, BOTH):
            kafka.start()
            kafka.wait_until_listening()
        if fault.kind in (NODE, BOTH):
            node.start()

    # --- the end --------------------------------------------------------------------------------------------------

    async def _wait_until_complete(self) -> None:
        """Wait until everything is delivered and acknowledged, or no packet arrives for `QUIET` seconds."""
        quiet = 0.0
        while quiet < QUIET and not (self._complete() and quiet):
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), IDLE)
                quiet = 0.0
            except TimeoutError:
                quiet += IDLE

    def _complete(self) -> bool:
        if any(publisher.outgoing for publisher in self.publishers):
            return False
        if any(subscriber.incoming for subscriber in (*self.subscribers, self.watcher)):
            return False
        if not complete(self.mortals, self.record.seen.get(self.watcher.name, set())):
            return False
        expected = sum(matches(SUBSCRIBED, message.topic) for message in self.record.sent.values())
        together: set[int] = set()
        for subscriber in self.subscribers:
            seen = self.record.seen.get(subscriber.name, set())
            if subscriber.group:
                together |= seen
            elif len(seen) < expected:
                return False
        return len(together) == expected

    def _check(self) -> None:
        record = self.record
        for client in self.persistent:
            for message, received in client.outgoing.values():
                record.fault(PROTOCOL, f"{message}: no {'PUBCOMP' if received else 'acknowledgement'} came")
            for packet_id, number in client.incoming.items():
                record.fault(PROTOCOL, f"{client.name} got no PUBREL {packet_id} for {record.sent[number]}")
        single = [subscriber.name for subscriber in self.subscribers if not subscriber.group]
        members = [subscriber.name for subscriber in self.subscribers if subscriber.group]
        judge_deliveries(record, SUBSCRIBED, single, {"group": members})
        judge_wills(record, self.mortals, self.watcher.name)
        self.logs.judge(record, [message for mortal in self.mortals for message in mortal.broken])

    def summary(self, seconds: float) -> str:
        counts, record = self.record.counts, self.record
        retained = sum(message.retain for message in record.sent.values())
        wills = sum(len(mortal.broken) for mortal in self.mortals)
        lines = [
            f"chaos of a cluster: seed {self.seed}, {build_kind()} build, {seconds:.0f} s",
            f"  clients: {counts[CUT]} cut off, {counts[TAKEOVER]} taken over, {counts[LEAVE]} disconnected, "
            f"{wills} with a will lost their connection",
            f"  messages: {len(record.sent) - retained:,} and {retained:,} retained, "
            f"{len(record.acknowledged):,} acknowledged, {sum(map(len, record.deliveries.values())):,} deliveries",
            f"  {self.logs.summary()}",
        ]
        return "\n".join(lines) + f"\n\n{table(record)}\n\n{self.outages.table()}"


async def end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks until they end: `asyncio.wait_for` of Python 3.11 forgets a cancellation when its future is done."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=IDLE)


def node_place(number: int) -> str:
    return f"node-{number + 1}"


def kafka_place(number: int) -> str:
    return f"kafka-{number + 1}"


def chaos(
    seed: str, counts: dict[str, int], nodes: int = 3, shards: int = 3, kafka_brokers: int = 3, keep: Path | None = None
) -> tuple[Record, str]:
    """Run; print what was found, before everything ends; return the checked record and its summary. The `Story` is kept in ``keep``.

    If there are faults on links, each node and each Kafka broker has a network namespace of its own. Where namespaces are not
    permitted, the run says so, and leaves these faults out.
    """
    with ExitStack() as stack:
        names = [*map(node_place, range(nodes)), *map(kafka_place, range(kafka_brokers))]
        network: Network | None = None
        if any(counts.get(kind) for kind in ON_LINKS):
            try:
                network = stack.enter_context(Network(names))
            except NetworkMissing as missing:
                print(f"chaos of a cluster: no links are cut or slow: {missing}", flush=True)
                counts = {kind: count for kind, count in counts.items() if kind not in ON_LINKS}
        places = [Place(network.address(name), network.command(name)) for name in names] if network is not None else []
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-cluster-")))
        story = Story(keep)
        kafka = stack.enter_context(KafkaCluster(directory, kafka_brokers, places[nodes:], settings=PROMPT_FAILOVER))
        cluster = stack.enter_context(ClusterNodes(kafka, nodes, shards, CONFIG, places=places[:nodes]))
        begin = time.monotonic()
        stack.callback(story.keep, cluster.nodes)
        run = Run(cluster, shards, seed, faults(seed, counts, nodes, kafka_brokers), network, story)
        asyncio.run(run.run())
        summary = run.summary(time.monotonic() - begin)
        print(f"{summary}\n\n{findings(run.record) or 'chaos of a cluster: nothing found'}", flush=True)
        return run.record, summary


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make chaos-cluster",
        description="Kill, stop and cut off parts of a cluster under load, and check what it kept.",
    )
    parser.add_argument("--nodes", type=int, default=50, help="kills of a node")
    parser.add_argument("--kafka", type=int, default=50, help="kills of a Kafka broker")
    parser.add_argument("--both", type=int, default=20, help="kills of a node and a Kafka broker at once")
    parser.add_argument("--stops", type=int, default=200, help="nodes that are stopped, and continued")
    parser.add_argument(
        "--cuts",
        type=int,
        default=50,
        help="cuts, in turn of all links of a node but those of clients, of one link between nodes, of a Kafka broker",
    )
    parser.add_argument("--slow", type=int, default=50, help="times that a node or a Kafka broker sends with a delay")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="a new directory for the logs of the run, its nodes and Kafka brokers")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir()
    counts = {
        NODE: options.nodes,
        KAFKA: options.kafka,
        BOTH: options.both,
        STOP: options.stops,
        **spread(options.cuts),
        SLOW: options.slow,
    }
    # So that all processes and namespaces are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    record, _ = chaos(options.seed, counts, keep=options.keep and options.keep.absolute())
    return 1 if findings(record) else 0


if __name__ == "__main__":
    raise SystemExit(main())
