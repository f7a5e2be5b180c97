"""Readers that join a stream under load at random moments: nothing is missing, twice or out of order behind the first
message, while segments are rolled, sealed and removed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from support.broker_process import BrokerProcess
from support.patience import PATIENCE
from support.raw_client import RawClient

from mqttbroker.codec.packets import Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties

KEYS = 6
MOST_IN_FLIGHT = 500  # of the publisher, whose Receive Maximum is 1000
QOS = [0, 0, 1, 1, 1, 2]  # of each key's messages
PARTITIONS = 2
CONFIG = {
    "streams": {
        "load": {
            "filters": ["load/#"],
            "partitions": PARTITIONS,
            "segment_bytes": "64KiB",
            "segment_age": "1s",
            "retention_bytes": "512KiB",
        }
    }
}


AHEAD = 40  # numbers of each topic that the load is before the one for which a reader waits


class Load:
    """Publishes numbered messages of several topics; ``sent`` has the last number of each topic.

    It stops while all have a number above ``until``, so that a slow reader has no more to read than a fast one.
    """

    def __init__(self, port: int) -> None:
        self.sent = [0] * KEYS
        self.until = 1 << 60
        self.first_at = time.time()
        self.error: Exception | None = None
        self._in_flight = 0
        self._port = port
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with RawClient(self._port) as client:
                client.connect()
                while not self._stopped.wait(0.01):
                    if min(self.sent) > self.until:
                        continue
                    packets = []
                    for key in range(KEYS):
                        for _ in range(5):
                            self.sent[key] += 1
                            payload = b"%d " % self.sent[key] + random.randbytes(120)
                            packets.append(
                                Publish(f"load/{key}", payload, QOS[key], False, False, client.next_packet_id() if QOS[key] else 0)
                            )
                    client.send(*packets)
                    self._in_flight += sum(packet.qos > 0 for packet in packets)
                    self._take(client, client.ping())
                    while self._in_flight > MOST_IN_FLIGHT:
                        self._take(client, [client.receive()])
        except Exception as error:
            self.error = error

    def _take(self, client: RawClient, packets: list[Packet]) -> None:
        for packet in packets:
            if isinstance(packet, Pubrec):
                client.send(Pubrel(packet.packet_id))
            elif isinstance(packet, (Puback, Pubcomp)):
                self._in_flight -= 1

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        assert self.error is None, self.error


class Joining:
    """One subscription that begins at a random moment of the past or now. ``ends`` are the last known offsets."""

    def __init__(self, rng: random.Random, number: int, broker: BrokerProcess, load: Load, ends: list[int]) -> None:
        self.broker = broker
        self.load = load
        self.client_id = f"join{number}"
        self.replays = rng.random() < 0.3
        self.version = rng.choice([4, 5]) if self.replays else 5
        self.connections = rng.randint(2, 4) if rng.random() < 0.3 else 1
        self.qos = rng.choice([0, 1, 2])
        self.keys = [rng.randrange(KEYS)] if rng.random() < 0.3 else list(range(KEYS))
        if self.connections > 1:  # what is lost with a connection at QoS 0 is not sent again
            self.qos = rng.choice([1, 2])
            self.keys = [rng.choice([key for key in range(KEYS) if QOS[key]])]
        self.start = self._random_start(rng, ends)
        part = "" if len(self.keys) > 1 else f"/load/{self.keys[0]}"
        self.filter = f"$replay/{self.start}/$stream/load{part}" if self.replays else f"$stream/load{part}"
        self.more = [rng.randint(5, 60) for _ in range(self.connections)]
        self.ends = ends
        self.last: dict[int, int] = {}
        self.offsets: dict[str, int] = {}

    def _random_start(self, rng: random.Random, ends: list[int]) -> str:
        now = time.time()
        moment = rng.uniform(self.load.first_at, now)
        if self.replays:
            written = datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "Z")
            return rng.choice(
                ["earliest", "latest", f"{moment:.0f}", f"{moment * 1e3:.0f}", f"{moment * 1e6:.0f}", written,
                 f"{max(1, int(now - moment))}s", "1h"]
            )  # fmt: skip
        kind = rng.choice(["earliest", "latest", "time", "offset"])
        if kind == "time":
            return f"{moment * 1e6:.0f}"
        if kind == "offset":
            return "offset:" + ",".join(f"{n}={rng.randint(0, end)}" for n, end in enumerate(ends))
        return kind

    def read(self) -> None:
        """Read until every topic is live, with breaks if there are several connections."""
        for connection, more in enumerate(self.more):
            with RawClient(self.broker.port, self.version) as client:
                self._connect(client, self.connections == 1, connection > 0)
                if connection == 0:
                    properties = Properties()
                    if self.version == 5 and not self.replays:
                        properties.user_properties = [("stream-offset", self.start)]
                    suback = client.subscribe(self.filter, options=self.qos, properties=properties)
                    assert suback.reason_codes == [self.qos], f"{self.filter}: {suback.reason_codes}"
                until = {key: self.load.sent[key] + more for key in self.keys}
                most = max(until.values()) + AHEAD
                taken = 0
                while any(self.last.get(key, 0) < until[key] for key in self.keys):
                    self.load.until = most + taken // (4 * len(self.keys))  # a long way through old messages is one under load
                    self._check(client.take())
                    taken += 1
        if self.connections > 1:
            with RawClient(self.broker.port, self.version) as client:
                self._connect(client, True, False)

    def _connect(self, client: RawClient, clean: bool, present: bool) -> None:
        properties = Properties()
        if self.version == 5 and not clean:
            properties.session_expiry_interval = 600
        connack = client.connect(self.client_id, clean_start=clean, properties=properties)
        assert connack.session_present == present

    def _check(self, message: Publish) -> None:
        key, number = int(message.topic.rpartition("/")[2]), int(message.payload.split()[0])
        before = self.last.get(key, number - 1)
        if message.dup and number <= before:
            return  # its acknowledgement was lost with the connection
        if number > before + 1:
            print(f"{self.filter} at {self.start}: {message.topic} {number} after {before}")
            expired = self.broker.wait_for_log(rf"event=stream_offset_expired client={self.client_id} .* continues_at=(\d+)")
            self.broker.wait_for_log(rf"event=retention_removed .* last_offset={int(expired[1]) - 1}\b")
        else:
            assert number == before + 1, f"{self.filter} at {self.start}: {message.topic} {number} after {before}"
        self.last[key] = number
        if self.version < 5:
            return
        place = dict(message.properties.user_properties)
        partition, offset = place["partition"], int(place["offset"])
        # A message at QoS 2 waits for a commit, so others may overtake it.
        order = f"{partition} at QoS {message.qos}"
        assert offset > self.offsets.get(order, -1), f"{self.start}: offset {offset} after {self.offsets[order]}"
        self.offsets[order] = offset
        self.ends[int(partition)] = max(self.ends[int(partition)], offset)


@contextmanager
def loaded_broker() -> Iterator[tuple[BrokerProcess, Load]]:
    with BrokerProcess(config=CONFIG) as broker, Load(broker.port) as load:
        yield broker, load


def run_joins(joins: int, seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    ends = [0] * PARTITIONS
    with loaded_broker() as (broker, load):
        broker.wait_for_log("event=retention_removed", 2 * PATIENCE)
        for number in range(joins):
            Joining(rng, number, broker, load, ends).read()


def test_joins_at_random_moments() -> None:
    run_joins(15, random.randrange(1 << 32))


@pytest.mark.slow("a thousand joins take minutes")
@pytest.mark.timeout(3600)
def test_a_thousand_joins() -> None:
    run_joins(1000, random.randrange(1 << 32))
