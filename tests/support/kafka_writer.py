"""A store on Kafka, and a process that commits the write sets of a seed from a number on, and prints each number once committed.

python kafka_writer.py BOOTSTRAP TOPIC DIRECTORY NODE SEED NUMBER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from mqttbroker.cluster.kafka import brokers as kafka_brokers
from mqttbroker.cluster.kafka.log import KafkaLog
from mqttbroker.cluster.log.records import Takeover
from mqttbroker.cluster.shard.store import KafkaStore, ShardOnNode, Timing
from support.patience import PATIENCE
from support.store_model import RandomCommits
from support.store_writer import Writer

CLUSTER = b"testtest"


def opened(bootstrap: list[str], topic: str, directory: Path, node: str, on_lost: Callable[[str], None]) -> KafkaStore:
    place = ShardOnNode(topic, 0, CLUSTER, node.encode().ljust(8, b"-")[-8:], Takeover(node, "", ""))
    timing = Timing(4.0, 1.0, 1.0, 0.1)
    log = KafkaLog({"bootstrap_servers": bootstrap}, topic, timing.append_timeout)
    return KafkaStore(log, place, directory, on_lost, timing)


def be_patient() -> None:
    """Let Kafka brokers of a busy machine take their time for a connection."""
    kafka_brokers.CONNECT_TIMEOUT = PATIENCE  # type: ignore[misc]


def main(bootstrap: str, topic: str, directory: str, node: str, seed: str, number: str) -> None:
    be_patient()
    commits = RandomCommits(int(seed))
    commits.skip_to(int(number))
    store = opened(bootstrap.split(","), topic, Path(directory), node, sys.exit)
    store.recover()
    writer = Writer(store)  # type: ignore[arg-type]
    while True:
        write_set = commits.next()
        write_set.stream_messages = {}
        assert writer.outcome(write_set) is None
        print(commits.number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
