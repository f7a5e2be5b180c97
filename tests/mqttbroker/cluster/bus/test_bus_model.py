"""Random publishes, subscriptions and takeovers in a cluster of three cores, whose logs are in memory.

An acknowledged message reaches each session that had the subscription before; QoS 2 exactly once; in order; nothing that is older than
a subscription.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from support.core import CoreClient
from support.shard_core import Logs, ShardCore

from mqttbroker.cluster.shards import Shards
from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Subscription,
)
from mqttbroker.codec.properties import Properties

SHARDS = 3
TOPICS = ("a/1", "a/2", "b/1")
FILTERS = ("a/#", "a/1", "+/1", "#")
FOR_EVER = 0xFFFFFFFF
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow(reason="more of the same")) for seed in range(3, 100))]


@dataclass
class Sent:
    """A message of a publisher: ``number`` is its payload."""

    number: int
    topic: str
    qos: int
    packet_id: int
    sent_at: int
    acknowledged_at: int | None = None
    repeated: bool = False  # sent again at QoS 1: the second one is a new message to the broker, behind what follows the first


@dataclass
class Client:
    """A client with a persistent session, which keeps its side of the protocol over connections."""

    client_id: str
    shard: int
    connection: CoreClient | None = None
    packet_id: int = 0
    # as a publisher
    in_flight: list[Sent] = field(default_factory=list)
    # as a subscriber
    subscribing: dict[int, str] = field(default_factory=dict)  # packet id -> filter
    asked: dict[str, int] = field(default_factory=dict)  # filter -> when it was subscribed first, answered or not
    subscribed: dict[str, int] = field(default_factory=dict)  # filter -> when SUBACK came
    received: set[int] = field(default_factory=set)  # QoS 2 packet ids
    got: list[tuple[int, int]] = field(default_factory=list)  # number and QoS of each message that was accepted

    def next_packet_id(self) -> int:
        self.packet_id += 1
        return self.packet_id


def client_on(shard: int, kind: str) -> Client:
    shards = Shards(SHARDS)
    client_id = next(name for name in (f"{kind}{number}" for number in range(1000)) if shards.of_text(name) == shard)
    return Client(client_id, shard)


class Model:
    """Three cores, with a publisher and a subscriber each."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = Random(seed)
        self.logs = Logs(SHARDS)
        self.cores = [ShardCore(directory, self.logs, shard) for shard in range(SHARDS)]
        self.publishers = [client_on(shard, "p") for shard in range(SHARDS)]
        self.subscribers = [client_on(shard, "s") for shard in range(SHARDS)]
        self.time = 0
        self.messages: list[tuple[Client, Sent]] = []

    def run(self, steps: int) -> None:
        chance = self.chance
        self.begin([chance.choice(FILTERS) for _ in range(SHARDS)])
        works = [work for work, weight in self.weights.items() for _ in range(weight)]
        for _ in range(steps):
            chance.choice(works)(self, chance.randrange(SHARDS))
        self.drain()
        self.check()

    def close(self) -> None:
        for core in self.cores:
            core.close()

    def now(self) -> int:
        self.time += 1
        return self.time

    # -- clients ----------------------------------------------------------------

    def connect(self, client: Client) -> None:
        core = self.cores[client.shard]
        properties = Properties()
        properties.session_expiry_interval = FOR_EVER
        connection = core.client()
        connection.send(Connect(client.client_id, 5, clean_start=False, properties=properties))
        core.settle()
        answer = connection.expect(Connack)
        assert answer.reason_code == 0
        client.connection = connection
        client.subscribing.clear()
        for sent in client.in_flight:
            if sent.acknowledged_at is not None and sent.qos == 2:
                connection.send(Pubrel(sent.packet_id))
            else:
                sent.repeated = sent.qos == 1
                connection.send(self.publish_packet(sent, dup=True))

    def publish_packet(self, sent: Sent, dup: bool) -> Publish:
        return Publish(sent.topic, b"%d" % sent.number, sent.qos, False, dup, sent.packet_id)

    def serve(self, client: Client, answers: bool = True) -> None:
        """Handle what was sent to a client."""
        connection = client.connection
        if connection is None:
            return
        for packet in connection.arrived():
            if isinstance(packet, Disconnect):  # the log refused the record that its SUBACK waited for
                self.lose(client)
                return
            answer = self.handle(client, packet)
            if answer is not None and answers:
                connection.send(answer)

    def handle(self, client: Client, packet: Packet) -> Packet | None:
        if isinstance(packet, Publish):
            if packet.qos < 2:
                client.got.append((int(packet.payload), packet.qos))
                return Puback(packet.packet_id)
            if packet.packet_id not in client.received:
                client.received.add(packet.packet_id)
                client.got.append((int(packet.payload), 2))
            return Pubrec(packet.packet_id)
        if isinstance(packet, Pubrel):
            client.received.discard(packet.packet_id)
            return Pubcomp(packet.packet_id)
        if isinstance(packet, Suback):
            client.subscribed[client.subscribing.pop(packet.packet_id)] = self.now()
            return None
        sent = next(one for one in client.in_flight if one.packet_id == packet.packet_id)  # type: ignore[attr-defined]
        if isinstance(packet, Pubcomp):
            client.in_flight.remove(sent)
            return None
        assert isinstance(packet, (Puback, Pubrec)) and packet.reason_code < 0x80
        if sent.acknowledged_at is None:
            sent.acknowledged_at = self.now()
        if isinstance(packet, Pubrec):
            return Pubrel(packet.packet_id)
        client.in_flight.remove(sent)
        return None

    def ready(self, client: Client) -> bool:
        return self.cores[client.shard].caught_up

    # -- steps ------------------------------------------------------------------

    def begin(self, filters: list[str]) -> None:
        for shard, topic_filter in enumerate(filters):
            self.cores[shard].read_all()
            self.subscribe(shard, topic_filter, 2, True)
            assert self.subscribers[shard].subscribed

    def publish(self, shard: int) -> None:
        qos = self.chance.randint(1, 2)
        client = self.publishers[shard]
        if not self.ready(client):
            return
        if client.connection is None:
            self.connect(client)
        assert client.connection is not None
        for topic in self.chance.choices(TOPICS, k=self.chance.randint(1, 4)):
            sent = Sent(len(self.messages), topic, qos, client.next_packet_id(), self.now())
            self.messages.append((client, sent))
            client.in_flight.append(sent)
            client.connection.send(self.publish_packet(sent, dup=False))

    def subscribe(self, shard: int, topic_filter: str, qos: int, finish: bool) -> None:
        client = self.subscribers[shard]
        if topic_filter in client.subscribed or not self.ready(client):
            return
        if client.connection is None:
            self.connect(client)
        assert client.connection is not None
        if client.subscribing:  # the broker reads no other packet meanwhile
            return
        packet_id = client.next_packet_id()
        client.subscribing[packet_id] = topic_filter
        client.asked.setdefault(topic_filter, self.now())
        client.connection.send(Subscribe(packet_id, [Subscription(topic_filter, qos)]))
        if finish:
            self.cores[shard].read_all()
            self.serve(client)

    def commit(self, shard: int) -> None:
        self.cores[shard].work()
        self.cores[shard].commit()

    def read(self, shard: int) -> None:
        core = self.cores[shard]
        core.read((shard + self.chance.randint(1, SHARDS - 1)) % SHARDS, self.chance.randint(1, 3))
        core.work()
        if self.chance.random() < 0.5:
            core.commit()

    def route_a_part(self, shard: int) -> None:
        core = self.cores[shard]
        for log in core.feeds:
            core.read(log)
        core.bus.step(self.chance.randint(1, 20))
        if self.chance.random() < 0.5:
            core.commit()

    def answer_ends(self, shard: int) -> None:
        self.cores[shard].answer_ends()

    def serve_client(self, shard: int) -> None:
        client = self.chance.choice((self.publishers, self.subscribers))[shard]
        answers = self.chance.random() < 0.8
        self.serve(client, answers)
        if not answers:
            self.lose(client)

    def disconnect(self, shard: int) -> None:
        self.lose(self.chance.choice((self.publishers, self.subscribers))[shard])

    def lose(self, client: Client) -> None:
        if client.connection is not None:
            client.connection.close()
            client.connection = None
            client.subscribing.clear()

    def read_everything(self, shard: int) -> None:
        self.cores[shard].read_all()

    def kill(self, shard: int) -> None:
        for client in (self.publishers[shard], self.subscribers[shard]):
            client.connection = None
            client.subscribing.clear()
        self.cores[shard].kill()
        if self.chance.random() < 0.7:
            self.cores[shard].read_all()

    def fail(self, shard: int) -> None:
        """The log refuses a record; no publisher has an answer yet, so its connection is lost before it reads one."""
        core = self.cores[shard]
        if core.broker.journal.has_pending and not core.broker.journal.held and core.broker.journal.writer_idle:
            self.lose(self.publishers[shard])
            core.fail()

    def subscribe_more(self, shard: int) -> None:
        self.subscribe(shard, self.chance.choice(FILTERS), self.chance.randint(1, 2), self.chance.random() < 0.5)

    def connect_subscriber(self, shard: int) -> None:
        client = self.subscribers[shard]
        if client.connection is None and self.ready(client):
            self.connect(client)

    weights = {
        publish: 6,
        commit: 6,
        read: 10,
        route_a_part: 8,
        serve_client: 8,
        connect_subscriber: 4,
        answer_ends: 3,
        read_everything: 3,
        subscribe_more: 2,
        disconnect: 2,
        kill: 2,
        fail: 1,
    }

    # -- the end ----------------------------------------------------------------

    def drain(self) -> None:
        for _ in range(60):
            for core in self.cores:
                core.read_all()
            for client in (*self.publishers, *self.subscribers):
                if client.connection is None and self.ready(client):
                    self.connect(client)
                self.serve(client)
        for client in (*self.publishers, *self.subscribers):
            assert not client.in_flight and not client.subscribing, client
        for core in self.cores:
            assert core.bus.done and all(each.connection is not None for each in (*self.publishers, *self.subscribers))

    def check(self) -> None:
        for subscriber in self.subscribers:
            times: dict[int, int] = defaultdict(int)
            order: dict[tuple[str, str, int], list[int]] = defaultdict(list)
            for number, qos in subscriber.got:
                times[number] += 1
                publisher, sent = self.messages[number]
                key = (publisher.client_id, sent.topic, qos)
                if times[number] == 1 and not sent.repeated:
                    order[key].append(number)
                assert qos == 1 or times[number] == 1, f"{subscriber.client_id} got {number} twice at QoS 2"
                asked = min(when for name, when in subscriber.asked.items() if matches(name, sent.topic))
                assert sent.acknowledged_at is None or sent.acknowledged_at > asked, f"{number} is older"
            for key, numbers in order.items():
                assert numbers == sorted(numbers), f"{subscriber.client_id} got {key} as {numbers}"
            for _, sent in self.messages:
                assert sent.acknowledged_at is not None
                wanted = any(done < sent.sent_at and matches(name, sent.topic) for name, done in subscriber.subscribed.items())
                assert not wanted or times[sent.number], f"{subscriber.client_id} did not get {sent.number}"


def matches(topic_filter: str, topic: str) -> bool:
    return (
        topic_filter == "#"
        or topic_filter == topic
        or (topic.startswith("a/") if topic_filter == "a/#" else topic_filter == "+/1" and topic.endswith("/1"))
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, seed: int) -> None:
    model = Model(tmp_path, seed)
    try:
        model.run(200)
    finally:
        model.close()
