"""A group while its members and the broker are killed: no message missing, each partition in order, repeats marked."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from contextlib import suppress
from random import Random

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Puback, Publish
from mqttbroker.codec.properties import Properties

PARTITIONS = 4
WINDOW = 20
CONFIG = {"streams": {"log": {"filters": ["log/#"], "partitions": PARTITIONS, "seal": False}}}


class Run:
    """What publisher and members see. ``epoch`` counts the kills of the broker."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self.broker = broker
        self.seed = seed
        self.lock = threading.Condition()
        self.epoch = 0
        self.stopping = False
        self.first: dict[int, list[int]] = defaultdict(list)  # by partition, the offsets in the order of their first delivery
        self.seen: set[tuple[int, int]] = set()
        self.repeats = 0
        self.faults: list[str] = []
        self.members_killed = 0
        self.published = 0

    def deliver(self, message: Publish, epoch: int) -> bool:
        """Record a delivery; false if the broker that sent it was killed before it was read."""
        found = dict(message.properties.user_properties)
        place = int(found["partition"]), int(found["offset"])
        with self.lock:
            if epoch != self.epoch:
                return False
            if place not in self.seen:
                self.seen.add(place)
                self.first[place[0]].append(place[1])
            else:
                self.repeats += 1
                if found.get("redelivered") != "1":
                    self.faults.append(f"{place} was delivered again without a mark")
            self.lock.notify_all()
        return True

    def member(self, number: int) -> None:
        chance = Random(f"{self.seed} {number}")
        while not self.stopping:
            with suppress(OSError):
                self._consume(chance)

    def _consume(self, chance: Random) -> None:
        with self.lock:
            epoch = self.epoch
            client = RawClient(self.broker.port)
        with client:
            properties = Properties()
            properties.receive_maximum = WINDOW
            client.connect(properties=properties)
            start = Properties()
            start.user_properties = [("stream-offset", "earliest")]
            client.subscribe("$share/g/$stream/log", options=1, properties=start)
            waiting: list[Publish] = []
            lifetime = chance.randrange(50, 400)
            while not self.stopping:
                try:
                    packet = client.receive(0.2 if waiting else 1.0)
                except TimeoutError:
                    packet = None
                if isinstance(packet, Publish):
                    if not self.deliver(packet, epoch):
                        return
                    waiting.append(packet)
                if packet is None or len(waiting) >= chance.randrange(1, WINDOW):
                    chance.shuffle(waiting)
                    count = chance.randrange(len(waiting) + 1) if packet is not None else len(waiting)
                    client.send(*(Puback(message.packet_id) for message in waiting[:count]))
                    del waiting[:count]
                lifetime -= 1
                if lifetime == 0:
                    with self.lock:
                        self.members_killed += 1
                    return  # the socket is closed, with messages that are not acknowledged

    def publish(self, count: int) -> None:
        while self.published < count:
            with suppress(OSError):
                with self.lock:
                    client = RawClient(self.broker.port)
                with client:
                    client.connect()
                    while self.published < count:
                        client.publish(f"log/{self.published % 32}", b"%d" % self.published, 1)
                        self.published += 1
        with self.lock:
            self.lock.notify_all()

    def kill_broker(self) -> None:
        with self.lock:
            self.epoch += 1
            self.broker.restart(kill=True)

    def ends(self) -> list[int]:
        return [each["high_watermark"] for each in json.loads(self.broker.get("/streams/log"))["partitions"]]


def run(messages: int, kills: int, seed: int) -> Run:
    with BrokerProcess(config=CONFIG) as broker:
        state = Run(broker, seed)
        threads = [threading.Thread(target=state.member, args=(number,), daemon=True) for number in range(3)]
        threads.append(threading.Thread(target=state.publish, args=(messages,), daemon=True))
        for thread in threads:
            thread.start()
        for number in range(1, kills + 1):
            with state.lock:
                wanted = messages * number // (kills + 1)
                assert state.lock.wait_for(lambda: len(state.seen) >= wanted, 120)
            state.kill_broker()
        threads[-1].join(120)
        ends = state.ends()
        with state.lock:
            state.lock.wait_for(lambda: len(state.seen) >= sum(ends), 120)
        state.stopping = True
        for thread in threads:
            thread.join(30)
        assert state.faults == []
        for partition, end in enumerate(ends):
            assert state.first[partition] == list(range(end)), f"partition {partition}"
        assert sum(ends) >= messages
        assert state.repeats <= (state.members_killed + 3 * kills) * WINDOW
        return state


def test_members_and_broker_are_killed_under_load() -> None:
    assert run(1200, 2, 1).members_killed > 0


@pytest.mark.slow("kills the broker 20 times for each of three seeds")
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_many_kills(seed: int) -> None:
    assert run(30_000, 20, seed).members_killed > 10
