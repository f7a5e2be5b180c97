"""A store whose commit log is in Kafka: its rows equal a model's, and another node goes on where it was killed."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from support import kafka_writer
from support.kafka import KafkaCluster
from support.kafka_writer import CLUSTER, opened
from support.paths import ROOT
from support.patience import PATIENCE
from support.store_model import RandomCommits, check_reads, check_recovered
from support.store_writer import Writer

from mqttbroker.cluster.kafka import brokers as kafka_brokers
from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.shard.store import KafkaStore, ShardOnNode
from sessions.store.interface import StoreError
from sessions.write_set import WriteSet

pytestmark = [pytest.mark.one_build]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_brokers, "CONNECT_TIMEOUT", PATIENCE)


def create(kafka: KafkaCluster, topic: str) -> None:
    asyncio.run(kafka.create_topic(topic))


def next_commit(commits: RandomCommits) -> WriteSet:
    write_set = commits.next()
    write_set.stream_messages = {}
    return write_set


def lost(reason: str) -> None:
    raise AssertionError(reason)


def test_committed_write_sets_add_up_to_the_rows_of_a_model(kafka: KafkaCluster, tmp_path: Path) -> None:
    create(kafka, "store")
    commits = RandomCommits(1)
    for start, directory in enumerate(["first", "first", "other"]):
        store = opened(kafka.bootstrap, "store", tmp_path / directory, f"node-{start}", lost)
        check_recovered(store.recover(), commits.rows)
        writer = Writer(store)  # type: ignore[arg-type]
        for _ in range(30):
            assert writer.outcome(next_commit(commits)) is None
        check_reads(writer, commits.rows)
        store.stop()


def test_a_node_goes_on_where_another_one_was_killed(kafka: KafkaCluster, tmp_path: Path) -> None:
    """The tables of the second one are empty, those of the third are its own, at an older position."""
    create(kafka, "killed-store")
    number, chance = 0, Random(5)
    for start, directory in enumerate(["first", "second", "first", "second"]):
        process = subprocess.Popen(
            [
                sys.executable,
                kafka_writer.__file__,
                ",".join(kafka.bootstrap),
                "killed-store",
                str(tmp_path / directory),
                f"node-{start}",
                "7",
                str(number),
            ],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        )
        assert process.stdout is not None
        reported = number
        for _ in range(chance.randrange(5, 40)):
            reported = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        reported = max([reported, *map(int, process.stdout.read().split())])
        process.wait()
        number = recovered_number(kafka, tmp_path / directory, f"check-{start}", reported)


def recovered_number(kafka: KafkaCluster, directory: Path, name: str, reported: int) -> int:
    """The number of the last write set that a store recovers: the last reported one or the one behind it."""
    store = opened(kafka.bootstrap, "killed-store", directory, name, lost)
    recovered = store.recover()
    store.stop()
    commits = RandomCommits(7)
    commits.skip_to(reported)
    try:
        check_recovered(recovered, commits.rows)
    except AssertionError:
        next_commit(commits)
        check_recovered(recovered, commits.rows)
    return commits.number


def test_a_store_whose_shard_is_taken_over_answers_nothing_more(kafka: KafkaCluster, tmp_path: Path) -> None:
    create(kafka, "taken")
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    commits = RandomCommits(2)
    first = opened(kafka.bootstrap, "taken", tmp_path / "first", "node-1", reasons.put)
    first.recover()
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    first.start(lambda *answer: answers.put(answer), lambda *read: None)
    first.submit(next_commit(commits))
    assert answers.get(timeout=60)
    second = opened(kafka.bootstrap, "taken", tmp_path / "second", "node-2", lost)
    check_recovered(second.recover(), commits.rows)
    assert reasons.get(timeout=60) == "another node has taken the shard over"
    first.submit(RandomCommits(3).next())
    first.stop()
    assert answers.empty()
    writer = Writer(second)  # type: ignore[arg-type]
    assert writer.outcome(next_commit(commits)) is None
    second.stop()


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda place: place._replace(topic="absent"), "^absent: "),
        (lambda place: place._replace(cluster=b"another1"), f"a record of another cluster, {CLUSTER.hex()}"),
    ],
)
def test_a_log_that_cannot_be_used_is_named(kafka: KafkaCluster, tmp_path: Path, change: Callable[[object], object], reason: str) -> None:
    if "cluster" in reason:
        create(kafka, "foreign-store")
        store = opened(kafka.bootstrap, "foreign-store", tmp_path / "first", "node-1", lost)
        store.recover()
        store.stop()
    store = opened(kafka.bootstrap, "foreign-store", tmp_path / "second", "node-2", lost)
    place: ShardOnNode = change(store._where)  # type: ignore[assignment]
    log = KafkaLog({"bootstrap_servers": kafka.bootstrap}, place.topic, 5.0)
    other = KafkaStore(log, place, tmp_path / "other", lost)
    with pytest.raises(StoreError, match=reason):
        other.recover()
