"""A shard's log on three Kafka brokers: who owns it, what it acknowledges, and what faults leave in it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from support import shard_owner
from support.kafka import KafkaCluster
from support.shard_owner import ShardOwner, valid_bodies

from mqttbroker.cluster.kafka.log import KafkaLog, LogFailure
from mqttbroker.cluster.log.records import HEADER_BYTES
from mqttbroker.cluster.shard import log as shard_log
from mqttbroker.cluster.shard.log import Outcome
from mqttbroker.cluster.shard.ownership import State

pytestmark = [pytest.mark.one_build, pytest.mark.slow("kills and stops Kafka brokers")]

WAIT_S = 90.0
LONGEST_PAUSE_S = 8.0  # until these Kafka brokers have elected another controller, and fenced the broker; and the log is read
LONG_APPEND_S = 20.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    for _ in range(int(WAIT_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited in vain for {what}")


async def whole_log(kafka: KafkaCluster, topic: str) -> list[tuple[int, bytes]]:
    """All records of partition 0, as another client of Kafka reads them."""
    place = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        consumer.assign([place])
        end = (await consumer.end_offsets([place]))[place]
        found: list[tuple[int, bytes]] = []
        while not found or found[-1][0] < end - 1:
            found += [(one.offset, one.value) for one in (await consumer.getmany(timeout_ms=1000)).get(place, [])]
        return found
    finally:
        await consumer.stop()


@asynccontextmanager
async def owner(
    kafka: KafkaCluster,
    topic: str,
    name: str,
    own: bool = True,
    lease: float = shard_owner.LEASE,
    append_timeout: float = shard_owner.APPEND_TIMEOUT,
) -> AsyncIterator[ShardOwner]:
    """A node in this process; it says nothing."""
    node = ShardOwner(kafka.bootstrap, topic, name, lambda line: None, lease, append_timeout)
    await node.start()
    node.own = own
    try:
        yield node
    finally:
        await node.stop()


class OwnerProcess:
    """A node in a process of its own, which can be killed, stopped and continued."""

    def __init__(self, kafka: KafkaCluster, topic: str, name: str, directory: Path) -> None:
        self.name = name
        self.output = directory / f"{name}.out"
        with open(self.output, "ab") as output, open(directory / f"{name}.err", "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, shard_owner.__file__, ",".join(kafka.bootstrap), topic, name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
            )

    def command(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def said(self, what: str) -> list[bytes]:
        """The bodies of which the node said this, in order."""
        lines = self.output.read_text().splitlines()
        return [f"{self.name} {line.split()[1]}".encode() for line in lines if line.startswith(f"{what} ")]

    @property
    def committed(self) -> int:
        return len(self.said("committed"))

    async def commits(self, more: int = 20) -> None:
        """Wait until it has committed so many more."""
        before = self.committed
        await until(lambda: self.committed >= before + more, f"{more} commits of {self.name}")

    @property
    def lefts(self) -> int:
        return self.output.read_text().splitlines().count("left")

    async def leaves(self, before: int) -> None:
        """Wait until it has left the shard again."""
        await until(lambda: self.lefts > before, f"{self.name} to leave")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def check(nodes: list[OwnerProcess], log: list[tuple[int, bytes]]) -> None:
    """Nothing acknowledged is missing, doubled, void or out of order; nothing refused is there."""
    assert [offset for offset, _ in log] == list(range(len(log)))
    found = valid_bodies(log)
    assert len(found) == len(set(found))
    places = {body: place for place, body in enumerate(found)}
    for node in nodes:
        acknowledged = node.said("committed")
        assert acknowledged and not [body for body in acknowledged if body not in places]
        assert [places[body] for body in acknowledged] == sorted(places[body] for body in acknowledged)
        assert not [body for body in node.said("refused") if body in places]


async def test_an_owner_commits_and_a_follower_reads_what_it_commits(kafka: KafkaCluster) -> None:
    await kafka.create_topic("one-owner")
    async with owner(kafka, "one-owner", "a") as first, owner(kafka, "one-owner", "b", own=False) as second:
        for _ in range(5):
            assert await first.commit() is Outcome.COMMITTED
        await until(lambda: len(second.bodies) == 5, "the follower")
        assert second.bodies == first.bodies == [b"a %d" % number for number in range(1, 6)]
        assert second.ownership.state is State.FOLLOWER
        assert second.ownership.view.owner == first.ownership.node


async def test_a_shard_moves_by_a_release(kafka: KafkaCluster) -> None:
    await kafka.create_topic("moved")
    async with owner(kafka, "moved", "a") as first, owner(kafka, "moved", "b", own=False) as second:
        assert await first.commit() is Outcome.COMMITTED
        first.own, second.own = False, True
        assert await second.commit() is Outcome.COMMITTED
        await until(lambda: first.ownership.state is State.FOLLOWER, "the first owner")
        await until(lambda: first.bodies == second.bodies == [b"a 1", b"b 1"], "the records")
        assert first.log is not None and first.log.void == 0


async def test_an_owner_that_starts_again_goes_on_behind_its_records(kafka: KafkaCluster) -> None:
    await kafka.create_topic("again")
    async with owner(kafka, "again", "a") as first:
        assert await first.commit() is Outcome.COMMITTED
    async with owner(kafka, "again", "a2") as second:
        assert await second.commit() is Outcome.COMMITTED
        assert second.bodies == [b"a 1", b"a2 1"]


async def test_too_few_replicas_refuse_a_commit_and_the_next_one_succeeds(kafka: KafkaCluster) -> None:
    await kafka.create_topic("replicas", **{"min.insync.replicas": "3"})
    async with owner(kafka, "replicas", "a") as node:
        assert await node.commit() is Outcome.COMMITTED
        dead = kafka.broker(await kafka.leader("replicas", 0) % 3 + 1)
        dead.kill()
        await kafka.in_sync("replicas", 0, 2)
        assert await node.commit() is Outcome.REFUSED
        assert await node.commit() is Outcome.REFUSED
        dead.start()
        await kafka.in_sync("replicas", 0, 3)
        assert await node.commit() is Outcome.COMMITTED
    assert valid_bodies(await whole_log(kafka, "replicas")) == [b"a 1", b"a 4"]


async def test_a_commit_whose_outcome_is_not_known_is_settled_when_the_replicas_are_back(kafka: KafkaCluster) -> None:
    await kafka.create_topic("unknown", **{"min.insync.replicas": "3"})
    async with owner(kafka, "unknown", "a") as node:
        assert await node.commit() is Outcome.COMMITTED
        others = [one for one in kafka.brokers if one.number != await kafka.leader("unknown", 0)]
        # The leader has the record, and waits for a replica that does not fetch.
        others[0].send_signal(signal.SIGSTOP)
        undecided = asyncio.create_task(node.commit())
        await node.until(State.CHECKING)
        assert not undecided.done()
        others[0].send_signal(signal.SIGCONT)
        outcome = await undecided
        assert await node.commit() is Outcome.COMMITTED
        assert outcome is not Outcome.DROPPED
        expected = [b"a 1", b"a 2", b"a 3"] if outcome is Outcome.COMMITTED else [b"a 1", b"a 3"]
        assert node.bodies == expected
    assert valid_bodies(await whole_log(kafka, "unknown")) == expected


async def test_a_deposed_owner_that_has_read_nothing_of_it_acknowledges_nothing(
    kafka: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_log, "ENDS_INTERVAL", 1e9)
    await kafka.create_topic("deposed")
    async with owner(kafka, "deposed", "a", lease=1e9) as first, owner(kafka, "deposed", "b", own=False) as second:
        assert await first.commit() is Outcome.COMMITTED
        assert first.reader is not None
        await first.reader.stop()
        second.own, second.patience = True, 0.0
        assert await second.commit() is Outcome.COMMITTED
        assert first.ownership.state is State.OWNER
        void = asyncio.create_task(first.commit())
        await first.until(State.CHECKING)
        assert not void.done()
        first.own = False
        first.listen()
        assert await void is Outcome.DROPPED
        assert await second.commit() is Outcome.COMMITTED
        await until(lambda: first.bodies == second.bodies == [b"a 1", b"b 1", b"b 2"], "the valid records")
        assert second.log is not None and second.log.void == 1
    log = await whole_log(kafka, "deposed")
    assert b"a 2" in [record[HEADER_BYTES:] for _, record in log]
    assert valid_bodies(log) == [b"a 1", b"b 1", b"b 2"]


async def test_a_topic_that_is_not_there_is_named(kafka: KafkaCluster) -> None:
    with pytest.raises(LogFailure, match="^absent: "):
        await KafkaLog({"bootstrap_servers": kafka.bootstrap}, "absent", 0.5).start()


async def test_a_record_of_another_program_is_void(kafka: KafkaCluster) -> None:
    await kafka.create_topic("foreign")
    raw = KafkaLog({"bootstrap_servers": kafka.bootstrap}, "foreign", 4.0)
    await raw.start()
    assert (await raw.append(0, b"{}")).offset == 0
    await raw.stop()
    async with owner(kafka, "foreign", "a") as node:
        assert await node.commit() is Outcome.COMMITTED
        assert node.log is not None and node.log.void == 1


@pytest.mark.parametrize("leads", [True, False])
async def test_a_broker_that_answers_nothing_stops_acknowledgements_until_kafka_leaves_it(kafka: KafkaCluster, leads: bool) -> None:
    """A stopped process is to all others what an isolated one is: its connections stay open, and nothing comes."""
    topic = f"isolated-{leads}"
    await kafka.create_topic(topic)
    async with owner(kafka, topic, "a", append_timeout=LONG_APPEND_S) as node:
        for _ in range(20):
            assert await node.commit() is Outcome.COMMITTED
        stopped = await kafka.leader(topic, 0)
        if not leads:
            stopped = stopped % 3 + 1
        loop = asyncio.get_running_loop()
        began = last = loop.time()
        longest = 0.0
        kafka.broker(stopped).send_signal(signal.SIGSTOP)
        try:
            while loop.time() < began + 15.0:
                await node.commit()
                now = loop.time()
                longest, last = max(longest, now - last), now
        finally:
            kafka.broker(stopped).send_signal(signal.SIGCONT)
        print(f"acknowledgements paused for {longest:.2f} s")
        assert longest < LONGEST_PAUSE_S
        await kafka.in_sync(topic, 0, 3)
        assert await node.commit() is Outcome.COMMITTED
    found = valid_bodies(await whole_log(kafka, topic))
    assert len(found) == len(set(found))


ROUNDS = [2, pytest.param(20, marks=[pytest.mark.slow(reason="more of the same"), pytest.mark.timeout(1200)])]


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_an_owner_that_was_stopped_and_taken_over_acknowledges_nothing_void(kafka: KafkaCluster, tmp_path: Path, rounds: int) -> None:
    topic = f"stopped-{rounds}"
    await kafka.create_topic(topic)
    nodes = [OwnerProcess(kafka, topic, name, tmp_path) for name in ("a", "b")]
    try:
        serving, other = nodes
        serving.command("own")
        await serving.commits()
        for _ in range(rounds):
            lefts = serving.lefts
            serving.process.send_signal(signal.SIGSTOP)
            other.command("own")
            await other.commits()
            serving.process.send_signal(signal.SIGCONT)
            serving.command("leave")
            await serving.leaves(lefts)
            await other.commits()
            serving, other = other, serving
    finally:
        for node in nodes:
            node.end()
    check(nodes, await whole_log(kafka, topic))


@pytest.mark.parametrize("rounds", ROUNDS)
async def test_the_leader_of_a_log_is_killed_under_load(kafka: KafkaCluster, tmp_path: Path, rounds: int) -> None:
    topic = f"killed-{rounds}"
    await kafka.create_topic(topic)
    node = OwnerProcess(kafka, topic, "a", tmp_path)
    try:
        node.command("own")
        await node.commits()
        for _ in range(rounds):
            leader = await kafka.leader(topic, 0)
            kafka.broker(leader).kill()
            await kafka.leader(topic, 0, other_than=leader)
            await node.commits()
            kafka.broker(leader).start()
            kafka.broker(leader).wait_until_listening()
            await node.commits()
    finally:
        node.end()
    check([node], await whole_log(kafka, topic))


@pytest.mark.slow(reason="kills five Kafka brokers")
@pytest.mark.timeout(1200)
async def test_the_owner_and_the_leader_of_its_log_are_killed_at_once(kafka: KafkaCluster, tmp_path: Path) -> None:
    await kafka.create_topic("both")
    nodes = [OwnerProcess(kafka, "both", "n0", tmp_path)]
    try:
        nodes[0].command("own")
        await nodes[0].commits()
        for number in range(1, 6):
            nodes.append(OwnerProcess(kafka, "both", f"n{number}", tmp_path))
            leader = await kafka.leader("both", 0)
            nodes[-2].end()
            kafka.broker(leader).kill()
            nodes[-1].command("own")
            await nodes[-1].commits()
            kafka.broker(leader).start()
            kafka.broker(leader).wait_until_listening()
            await nodes[-1].commits()
    finally:
        for node in nodes:
            node.end()
    check(nodes, await whole_log(kafka, "both"))
