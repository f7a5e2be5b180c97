"""A work queue while its consumers and the broker are killed: each message ends once, by a PUBACK or as a dead letter."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from contextlib import suppress
from random import Random
from typing import NamedTuple

import pytest
from support.broker_process import BrokerProcess
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

WINDOW = 10
MAX_DELIVERIES = 3
LEASE = 8.0  # seconds
POISON = 29  # one of so many messages is refused by every consumer
REFUSED = 0x83
Place = tuple[int, int]  # partition and offset


def config(lease: float) -> dict[str, object]:
    return {
        "streams": {
            "jobs": {"filters": ["jobs/#"], "partitions": 2, "seal": False},
            "marks": {"filters": ["marks"], "partitions": 1, "seal": False},
            "dead": {"filters": ["no/such/topic"], "partitions": 1, "seal": False},
        },
        "queues": {"jobs": {"lease": f"{lease:.0f}s", "max_deliveries": MAX_DELIVERIES, "dead_letter": "dead"}},
    }


class Held(NamedTuple):
    """A message that a consumer has."""

    message: Publish
    place: Place
    since: float


class Run:
    """A publisher and consumers, and the messages that they sent and got. ``epoch`` counts the kills of the broker."""

    def __init__(self, broker: BrokerProcess, seed: int, leases_end: bool) -> None:
        self.broker = broker
        self.seed = seed
        self.leases_end = leases_end
        self.lock = threading.Condition()
        self.epoch = 0
        self.stopping = False
        self.published = 0
        self.faults: list[str] = []
        self.seen: set[Place] = set()
        self.acknowledged: set[Place] = set()
        self.settled: set[Place] = set()  # acknowledged, and committed for certain
        self.holders: dict[Place, tuple[int, float]] = {}  # the consumer that has a message, and since when
        self.deliveries: dict[Place, int] = defaultdict(int)
        self.returned = {"refused": 0, "closed": 0, "lease": 0}

    def deliver(self, message: Publish, consumer: int, epoch: int) -> Place | None:
        """Record a delivery; None if the broker that sent it was killed before it was read."""
        found = dict(message.properties.user_properties)
        place = int(found["partition"]), int(found["offset"])
        with self.lock:
            if epoch != self.epoch:
                return None
            holder, since = self.holders.get(place, (consumer, 0.0))
            if holder != consumer and time.monotonic() - since < LEASE / 2:
                self.faults.append(f"{place} was delivered to {consumer} while {holder} had it")
            if place in self.settled:
                self.faults.append(f"{place} was delivered after the commit of its acknowledgement")
            if place in self.seen and found.get("redelivered") != "1":
                self.faults.append(f"{place} was delivered again without a mark")
            self.seen.add(place)
            self.holders[place] = consumer, time.monotonic()
            self.deliveries[place] += 1
            self.lock.notify_all()
        return place

    def give_up(self, held: list[Held], reason: str) -> None:
        with self.lock:
            for each in held:
                self.holders.pop(each.place, None)
            self.returned[reason] += len(held)

    def consumer(self, number: int) -> None:
        chance = Random(f"{self.seed} {number}")
        while not self.stopping:
            held: list[Held] = []
            with suppress(OSError):
                self._consume(chance, number, held)
            self.give_up(held, "closed")

    def _consume(self, chance: Random, number: int, held: list[Held]) -> None:
        with self.lock:
            epoch = self.epoch
            client = RawClient(self.broker.port)
        with client:
            properties = Properties()
            properties.receive_maximum = WINDOW
            client.connect(properties=properties)
            client.subscribe("$queue/jobs", options=1)
            forgotten: list[Held] = []  # neither acknowledged nor refused: their leases end
            lifetime = chance.randrange(40, 400)
            try:
                while not self.stopping and lifetime and len(forgotten) < WINDOW // 2:
                    lifetime -= 1
                    try:
                        packet = client.receive(0.2)
                    except TimeoutError:
                        packet = None
                    if isinstance(packet, Publish):
                        place = self.deliver(packet, number, epoch)
                        if place is None:
                            return
                        held.append(Held(packet, place, time.monotonic()))
                    if packet is None or len(held) >= chance.randrange(1, WINDOW):
                        self._end_some(client, chance, held, forgotten, epoch)
            finally:
                self.give_up(forgotten, "lease")
                # Before the socket is closed, with messages that are not acknowledged.
                self.give_up(held, "closed")
                held.clear()

    def _end_some(self, client: RawClient, chance: Random, held: list[Held], forgotten: list[Held], epoch: int) -> None:
        """Acknowledge and refuse messages, and wait for the commit."""
        chance.shuffle(held)
        count = chance.randrange(1, len(held) + 1) if held else 0
        done: list[Place] = []
        packets: list[Puback] = []
        for message, place, since in held[:count]:
            if self.leases_end and time.monotonic() - since > 1.0:  # perhaps its lease ends before the acknowledgement arrives
                forgotten.append(Held(message, place, since))
            elif int(message.payload) % POISON == 0 or chance.random() < 0.05:
                self.give_up([Held(message, place, since)], "refused")
                packets.append(Puback(message.packet_id, REFUSED))
            elif self.leases_end and len(forgotten) < 2 and chance.random() < 0.02:
                forgotten.append(Held(message, place, since))
            else:
                packets.append(Puback(message.packet_id))
                done.append(place)
        del held[:count]
        with self.lock:
            self.acknowledged.update(done)
        client.send(*packets)
        # It is in the same commit or in a later one, and its own acknowledgement follows that.
        assert client.publish("marks", b"", 1) in (0, 16)
        with self.lock:
            if epoch == self.epoch:
                self.settled.update(done)
            for place in done:
                self.holders.pop(place, None)

    def publish(self, count: int) -> None:
        while self.published < count:
            with suppress(OSError):
                with self.lock:
                    client = RawClient(self.broker.port)
                with client:
                    client.connect()
                    while self.published < count:
                        client.publish(f"jobs/{self.published % 32}", b"%d" % (self.published + 1), 1)
                        self.published += 1

    def kill_broker(self) -> None:
        with self.lock:
            self.epoch += 1
            self.holders.clear()
            self.broker.restart(kill=True)

    def read(self, stream: str) -> list[Publish]:
        """All messages of a stream."""
        with RawClient(self.broker.port) as client:
            client.connect()
            start = Properties()
            start.user_properties = [("stream-offset", "earliest")]
            client.subscribe(f"$stream/{stream}", options=0, properties=start)
            partitions = json.loads(self.broker.get(f"/streams/{stream}"))["partitions"]
            return [client.expect(Publish) for _ in range(sum(each["high_watermark"] for each in partitions))]

    def depth(self) -> float:
        return samples(self.broker.get("/metrics"))["mqttbroker_queue_depth/jobs"]


def place_of(message: Publish) -> Place:
    found = dict(message.properties.user_properties)
    return int(found["partition"]), int(found["offset"])


def run(messages: int, kills: int, seed: int, leases_end: bool) -> Run:
    with BrokerProcess(config=config(LEASE if leases_end else 3600)) as broker:
        state = Run(broker, seed, leases_end)
        threads = [threading.Thread(target=state.consumer, args=(number,), daemon=True) for number in range(3)]
        publisher = threading.Thread(target=state.publish, args=(messages,), daemon=True)
        for thread in [*threads, publisher]:
            thread.start()
        for number in range(1, kills + 1):
            with state.lock:
                wanted = messages * number // (kills + 1)
                assert state.lock.wait_for(lambda: len(state.seen) >= wanted, 120), state.faults
            state.kill_broker()
        publisher.join(120)
        deadline = time.monotonic() + 120
        while state.depth() > 0:
            assert time.monotonic() < deadline, "messages are left in the queue"
            time.sleep(0.1)
        state.stopping = True
        for thread in threads:
            thread.join(30)
        assert state.faults == []
        dead: dict[Place, Publish] = {}
        for message in state.read("dead"):
            found = dict(message.properties.user_properties)
            partition, offset = found["dead-letter-offset"].split(":")
            place = int(partition), int(offset)
            assert place not in dead, f"{place} is a dead letter twice"
            assert int(found["delivery-count"]) == MAX_DELIVERIES and found["dead-letter-reason"]
            dead[place] = message
        stored = {place_of(message): message for message in state.read("jobs")}
        assert len(stored) >= messages
        assert not state.settled & dead.keys()
        assert state.acknowledged | dead.keys() == stored.keys()
        poison = {place for place, message in stored.items() if int(message.payload) % POISON == 0}
        assert poison <= dead.keys()
        assert all(count <= MAX_DELIVERIES + kills for count in state.deliveries.values())
        return state


def test_consumers_and_broker_are_killed_under_load() -> None:
    state = run(400, 2, 1, False)
    assert state.returned["refused"] and state.returned["closed"]


@pytest.mark.slow("kills the broker 20 times for each of three random seeds")
@pytest.mark.parametrize("number", range(3))
def test_many_kills(number: int) -> None:
    seed = Random().randrange(1 << 32)
    print(f"seed {seed}")
    state = run(10_000, 20, seed, True)
    assert min(state.returned.values()) > 0
