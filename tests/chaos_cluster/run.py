"""``make chaos-cluster``: runs clients against a cluster whose nodes and Kafka brokers fail, and checks the record.

The seed decides the schedule of faults, connections and messages. Exit status 1 if there is any finding.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from chaos.clients import SUBSCRIBED, TOPICS, Broker, Client, Publisher, RetainedReader, Subscriber
from chaos.device import Device
from chaos.record import PROTOCOL, Record
from chaos.schedule import CUT, LEAVE, TAKEOVER, Habits, Load
from chaos.verdict import findings, judge_deliveries, table
from support.cluster_nodes import ClusterNode, ClusterNodes
from support.kafka import KafkaBroker, KafkaCluster

from mqttbroker import build_kind
from mqttbroker.cluster.shards import Shards
from topic_matcher.filters import matches

NODE, KAFKA, BOTH, STOP = "node", "kafka", "both", "stop"
SERVER_UNAVAILABLE = 0x88
SERVER_SHUTTING_DOWN = 0x8B
RETURN_CODE_UNAVAILABLE = 3  # of MQTT 3.1.1
QUIET = 60.0  # seconds without a packet after which a run ends
IDLE = 0.2  # seconds without a packet after which the run checks whether everything is complete
RECOVERY_SECONDS = 90.0  # in which the cluster has to be ready again after a fault
RETAINED_SECONDS = 20.0  # in which retained messages have to arrive
PROBE_INTERVAL = 0.05  # seconds between two messages of a probe
CONFIG: dict[str, Any] = {
    # Small, so that queues are paged.
    "limits": {"max_queue_memory_messages": 50, "max_inflight": 100},
    "sys_interval": "0s",
}


class Fault(NamedTuple):
    """A fault ``after`` seconds of service, which lasts ``hold`` seconds."""

    kind: str
    after: float
    hold: float
    node: int
    kafka: int


def faults(seed: str, counts: dict[str, int], nodes: int, kafka_brokers: int) -> list[Fault]:
    """A schedule with so many faults of each kind."""
    random = Random(f"{seed}:faults")
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    random.shuffle(kinds)
    return [
        Fault(
            kind,
            random.expovariate(1 / 1.5),
            # An owner that is stopped for less than this keeps its shards.
            random.uniform(2.0, 5.0) if kind == STOP else random.choice((0.0, 0.0, random.uniform(0.0, 4.0))),
            random.randrange(nodes),
            random.randrange(kafka_brokers),
        )
        for kind in kinds
    ]


class Probe(Device):
    """A client of one shard that publishes again and again, and measures how long no acknowledgement comes."""

    def __init__(self, shard: int, shards: Shards, record: Record) -> None:
        number = 0
        while shards.of_text(f"probe-{shard}-{number}") != shard:
            number += 1
        super().__init__(f"probe-{shard}-{number}", 5, record)
        self.longest = 0.0  # seconds since the last `begin`
        self.acknowledged_at = time.monotonic()
        self._settled = asyncio.Event()

    def begin(self) -> None:
        self.longest = 0.0

    def settled(self) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self.acknowledged_at)
        self.acknowledged_at = now
        self._settled.set()

    async def run(self, broker: Broker) -> None:
        while True:
            if not self.up and await self.connect(broker.port) is None:
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
    """One run on the nodes of ``cluster``."""

    def __init__(self, cluster: ClusterNodes, shards: int, seed: str, schedule: list[Fault]) -> None:
        self.cluster = cluster
        self.seed = seed
        self.schedule = schedule
        self.record = record = Record()
        record.unavailable = frozenset((SERVER_UNAVAILABLE, SERVER_SHUTTING_DOWN, RETURN_CODE_UNAVAILABLE))
        self.publishers = [
            Publisher(f"publisher-{n}", 4 + n % 2, record, Load(seed, f"publisher-{n}", len(TOPICS), 0.3))
            for n in range(5)
        ]
        self.subscribers = [
            Subscriber("there-v4", 4, record, 2),
            Subscriber("there-v5", 5, record, 2),
            Subscriber("at-qos-1", 5, record, 1),
            Subscriber("away-v4", 4, record, 2),
            Subscriber("away-v5", 5, record, 2),
            *(Subscriber(f"member-{n}", 4 + n % 2, record, 2, "group") for n in range(3)),
        ]
        self.persistent: list[Client] = [*self.publishers, *self.subscribers]
        self.readers = [
            RetainedReader(f"reader-v{version}", version, record, seed, RETAINED_SECONDS) for version in (4, 5)
        ]
        self.probes = [Probe(shard, Shards(shards), record) for shard in range(shards)]
        self.outages: dict[str, list[float]] = {kind: [] for kind in (NODE, KAFKA, BOTH, STOP)}
        self.broker = Broker(cluster.ports)
        self._progress = asyncio.Event()
        record.progressed = self._progress.set

    async def run(self) -> None:
        """Run to the end and check the record."""
        self.broker.up.set()
        for subscriber in self.subscribers:
            while not (await subscriber.connect(self.broker.port) and await subscriber.arrived()):
                await asyncio.sleep(0.1)
        async with asyncio.TaskGroup() as group:
            following = [
                group.create_task(client.follow(self.broker, self._habits(client))) for client in self.persistent
            ]
            working = [group.create_task(publisher.publish_all()) for publisher in self.publishers]
            working += [group.create_task(reader.check_repeatedly(self.broker)) for reader in self.readers]
            working += [group.create_task(probe.run(self.broker)) for probe in self.probes]
            for fault in self.schedule:
                await self._inflict(fault)
            for task in working:
                task.cancel()
            self.broker.finishing.set()
            await asyncio.gather(*following)
            connected = [group.create_task(client.stay_connected(self.broker)) for client in self.persistent]
            await self._wait_until_complete()
            for task in connected:
                task.cancel()
        for reader in self.readers:
            await reader.check(self.broker)
        self._check()

    def _habits(self, client: Client) -> Habits:
        away = 1.5 if client.name.startswith(("away", "member")) else 0.05
        return Habits(self.seed, client.name, 1.5, away)

    # --- faults ---------------------------------------------------------------------------------------------------

    async def _inflict(self, fault: Fault) -> None:
        await asyncio.sleep(fault.after)
        for probe in self.probes:
            probe.begin()
        begin = time.monotonic()
        node = self.cluster.nodes[fault.node]
        kafka = self.cluster.kafka.brokers[fault.kafka]
        if fault.kind == STOP:
            await asyncio.to_thread(node.stop_all)
            await asyncio.sleep(fault.hold)
            await asyncio.to_thread(node.continue_all)
        else:
            if fault.kind in (KAFKA, BOTH):
                await asyncio.to_thread(kafka.kill)
            if fault.kind in (NODE, BOTH):
                await asyncio.to_thread(node.kill)
            await asyncio.sleep(fault.hold)
            await asyncio.to_thread(self._restart, fault, node, kafka)
        self.record.counts[fault.kind] += 1
        await asyncio.to_thread(self.cluster.wait_until_ready, RECOVERY_SECONDS)
        # Until each shard has acknowledged something again.
        for probe in self.probes:
            while probe.acknowledged_at < begin:
                assert time.monotonic() < begin + RECOVERY_SECONDS, f"{probe.name} gets no acknowledgement"
                await asyncio.sleep(PROBE_INTERVAL)
        self.outages[fault.kind].append(max(probe.longest for probe in self.probes))

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
        if any(subscriber.incoming for subscriber in self.subscribers):
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
            client.leave()
            for message, received in client.outgoing.values():
                record.fault(PROTOCOL, f"{message}: no {'PUBCOMP' if received else 'acknowledgement'} came")
            for packet_id, number in client.incoming.items():
                record.fault(PROTOCOL, f"{client.name} got no PUBREL {packet_id} for {record.sent[number]}")
        single = [subscriber.name for subscriber in self.subscribers if not subscriber.group]
        members = [subscriber.name for subscriber in self.subscribers if subscriber.group]
        judge_deliveries(record, SUBSCRIBED, single, {"group": members})

    def summary(self, seconds: float) -> str:
        counts, record = self.record.counts, self.record
        retained = sum(message.retain for message in record.sent.values())
        lines = [f"chaos of a cluster: seed {self.seed}, {build_kind()} build, {seconds:.0f} s"]
        for kind, text in (
            (NODE, "kills of nodes"), (KAFKA, "kills of Kafka brokers"), (BOTH, "kills of one of each"),
            (STOP, "nodes stopped and continued"),
        ):
            found = sorted(self.outages[kind])
            if found:
                lines.append(
                    f"  {counts[kind]} {text}: a shard without an acknowledgement for {found[len(found) // 2]:.1f} s "
                    f"(median), {found[-1]:.1f} s (longest)"
                )
        lines.append(f"  clients: {counts[CUT]} cut off, {counts[TAKEOVER]} taken over, {counts[LEAVE]} disconnected")
        lines.append(
            f"  messages: {len(record.sent) - retained:,} and {retained:,} retained, "
            f"{len(record.acknowledged):,} acknowledged, {sum(map(len, record.deliveries.values())):,} deliveries"
        )
        return "\n".join(lines) + f"\n\n{table(record)}"


def chaos(seed: str, counts: dict[str, int], nodes: int = 3, shards: int = 3) -> tuple[Record, str]:
    """Run; return the checked record and its summary."""
    with tempfile.TemporaryDirectory(prefix="chaos-cluster-") as place, KafkaCluster(Path(place)) as kafka:
        with ClusterNodes(kafka, nodes, shards, CONFIG) as cluster:
            begin = time.monotonic()
            run = Run(cluster, shards, seed, faults(seed, counts, nodes, len(kafka.brokers)))
            asyncio.run(run.run())
            return run.record, run.summary(time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make chaos-cluster", description="Kill and stop parts of a cluster under load, and check what it kept."
    )
    parser.add_argument("--nodes", type=int, default=50, help="kills of a node")
    parser.add_argument("--kafka", type=int, default=50, help="kills of a Kafka broker")
    parser.add_argument("--both", type=int, default=20, help="kills of a node and a Kafka broker at once")
    parser.add_argument("--stops", type=int, default=200, help="nodes that are stopped, and continued")
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    counts = Counter({NODE: options.nodes, KAFKA: options.kafka, BOTH: options.both, STOP: options.stops})
    record, summary = chaos(options.seed, dict(counts))
    found = findings(record)
    print(summary)
    print(f"\n{found}" if found else "\nchaos of a cluster: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
