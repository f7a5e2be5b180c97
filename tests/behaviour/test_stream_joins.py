"""Readers that join a stream under load at random moments: nothing is missing, twice or out of order behind the first
message, while segments are rolled, sealed and removed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Publish
from mqttbroker.codec.properties import Properties

KEYS = 6
PARTITIONS = 2
CONFIG = {
    "streams": {
        "load": {
            "filters": ["load/#"],
            "partitions": PARTITIONS,
            "segment_bytes": "64KiB",
            "segment_age": "1s",
            "retention_bytes": "2MiB",
        }
    }
}


class Load:
    """Publishes numbered messages of several topics until it is stopped; ``sent`` has the last number of each topic."""

    def __init__(self, port: int) -> None:
        self.sent = [0] * KEYS
        self.first_at = time.time()
        self.error: Exception | None = None
        self._port = port
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with RawClient(self._port) as client:
                client.connect()
                while not self._stopped.wait(0.01):
                    packets = []
                    for key in range(KEYS):
                        for _ in range(5):
                            self.sent[key] += 1
                            packets.append(Publish(f"load/{key}", b"%d " % self.sent[key] + random.randbytes(120), 0))
                    client.send(*packets)
                    client.ping()
        except Exception as error:
            self.error = error

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        assert self.error is None, self.error


def random_start(rng: random.Random, load: Load, ends: list[int]) -> str:
    kind = rng.choice(["earliest", "latest", "time", "offset"])
    if kind == "time":
        return str(int(rng.uniform(load.first_at, time.time()) * 1_000_000))
    if kind == "offset":
        return "offset:" + ",".join(f"{n}={rng.randint(0, end)}" for n, end in enumerate(ends))
    return kind


def join(rng: random.Random, port: int, load: Load, ends: list[int]) -> int:
    """Read from a random start until every topic is live; returns the number of messages. Updates ``ends``."""
    keys = [rng.randrange(KEYS)] if rng.random() < 0.3 else list(range(KEYS))
    topic_filter = "$stream/load" if len(keys) > 1 else f"$stream/load/load/{keys[0]}"
    start = random_start(rng, load, ends)
    qos = rng.choice([0, 0, 1, 2])
    properties = Properties()
    properties.user_properties = [("stream-offset", start)]
    last: dict[int, int] = {}
    offsets: dict[str, int] = {}
    count = 0
    with RawClient(port) as client:
        client.connect()
        assert client.subscribe(topic_filter, options=qos, properties=properties).reason_codes == [qos]
        until = {key: load.sent[key] + rng.randint(5, 60) for key in keys}
        while any(last.get(key, 0) < until[key] for key in keys):
            message = client.take(20)
            count += 1
            key, number = int(message.topic.rpartition("/")[2]), int(message.payload.split()[0])
            assert number == last.get(key, number - 1) + 1, f"{start}: {message.topic} {number} after {last.get(key)}"
            last[key] = number
            place = dict(message.properties.user_properties)
            partition, offset = place["partition"], int(place["offset"])
            assert offset > offsets.get(partition, -1), f"{start}: offset {offset} after {offsets[partition]}"
            offsets[partition] = offset
            ends[int(partition)] = max(ends[int(partition)], offset)
    return count


@contextmanager
def loaded_broker() -> Iterator[tuple[BrokerProcess, Load]]:
    with BrokerProcess(config=CONFIG) as broker, Load(broker.port) as load:
        yield broker, load


def run_joins(joins: int, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    ends = [0] * PARTITIONS
    with loaded_broker() as (broker, load):
        if seconds:  # until segments were sealed and removed
            broker.wait_for_log("event=retention_removed", 60)
        for _ in range(joins):
            join(rng, broker.port, load, ends)
        assert "event=retention_removed" in broker.log or not seconds


def test_joins_at_random_moments() -> None:
    run_joins(15, 0, random.randrange(1 << 32))


@pytest.mark.slow("a thousand joins take minutes")
def test_a_thousand_joins() -> None:
    run_joins(1000, 60, random.randrange(1 << 32))
