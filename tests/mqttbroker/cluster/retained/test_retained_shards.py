"""Retained messages of several shards, whose cores share a process and have their logs in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from support.core import CoreClient
from support.shard_cores import ShardCores

from mqttbroker.cluster.retained import pages as retained_pages
from mqttbroker.cluster.retained import shards as retained_shards
from mqttbroker.cluster.retained import view as retained_view
from mqttbroker.codec.packets import Puback, Publish, Pubrec, Suback, Subscribe, Subscription, Unsubscribe
from mqttbroker.codec.properties import Properties
from mqttbroker.core.packets.core_link import LinkHandler, LinkReceiver, open_link
from sessions.message import Message
from sessions.session import AWAITS_RETAINED, Session
from topic_matcher.filters import matches


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[ShardCores]:
    with ShardCores(tmp_path) as cores:
        yield cores


class NoCoreMessages(LinkReceiver):
    def core_message(self, topic: bytes, payload: bytes) -> None:
        raise AssertionError("a message of the core itself")

    def shared_message(self, key: str, message: Message) -> None:
        raise AssertionError("a message for a shared subscription")


def subscribe(client: CoreClient, topic_filter: str, qos: int = 0, retain_handling: int = 0) -> dict[str, bytes]:
    """The retained messages for a new subscription, by topic."""
    client.send(Subscribe(1, [Subscription(topic_filter, qos | retain_handling << 4)]))
    assert client.expect(Suback).reason_codes == [qos]
    return retained(client)


def retained(client: CoreClient) -> dict[str, bytes]:
    """The retained messages that have come; at QoS 1 they are acknowledged."""
    found = {}
    while True:
        packets = client.arrived()
        if not packets:
            return found
        for packet in packets:
            assert isinstance(packet, Publish) and packet.retain
            assert packet.topic not in found, "sent twice"
            found[packet.topic] = packet.payload
            if packet.qos:
                client.send(Puback(packet.packet_id))


def test_each_core_has_the_retained_messages_of_all(cores: ShardCores) -> None:
    topics = [cores.topic(shard) for shard in range(3)]
    for core in cores.cores:
        client = core.connect("p")
        client.send(*(Publish(topic, b"old", 0, True) for topic in topics))
        payload = b"new of %d" % core.shard
        for number, topic in enumerate(topics, 1):
            client.send(Publish(topic, payload, 1, True, packet_id=number))
            client.expect(Puback)
        assert [len(each.broker.retained) for each in cores.cores] == [1, 1, 1]
        for each in cores.cores:
            reader = each.connect("s")
            assert subscribe(reader, "t/#") == {topic: payload for topic in topics}
            for topic in topics:
                assert subscribe(reader, topic, 1) == {topic: payload}
            assert subscribe(reader, "$SYS/#") == {} and subscribe(reader, "other/+") == {}


def test_an_empty_payload_deletes(cores: ShardCores) -> None:
    topic = cores.topic(2)
    client = cores[0].connect("p")
    client.publish(topic, b"x", 1, retain=True)
    client.publish(topic, b"", 1, retain=True)
    assert len(cores[2].broker.retained) == 0
    for core in cores.cores:
        assert subscribe(core.connect("s"), "#") == {}


def test_the_acknowledgement_waits_until_the_topic_s_core_has_stored_the_message(cores: ShardCores) -> None:
    topic = cores.topic(1)
    client = cores[0].connect("p")
    cores.lose(1)
    client.send(Publish(topic, b"1", 1, True, packet_id=1), Publish(topic, b"2", 2, True, packet_id=2))
    client.send(Publish("plain", b"3", 1, packet_id=3))
    assert client.arrived() == [] and cores[0].messages.waiting == 2
    cores.bring_back(1)
    assert [type(packet) for packet in client.arrived()] == [Puback, Pubrec, Puback]
    assert cores[0].messages.waiting == 0
    assert subscribe(cores[2].connect("s"), topic) == {topic: b"2"}


def test_what_closed_connections_wait_for_is_forgotten(cores: ShardCores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained_shards, "PURGE_FROM", 3)
    topic = cores.topic(1)
    cores.lose(1)
    clients = []
    for number in range(1, 5):
        clients.append(cores[0].connect(f"p{number}"))
        clients[-1].send(Publish(topic, b"%d" % number, 1, True, packet_id=number))
        if number == 2:
            for client in clients:
                client.close()
    assert cores[0].messages.waiting == 2
    cores.bring_back(1)
    assert [[type(packet) for packet in client.arrived()] for client in clients[2:]] == [[Puback], [Puback]]


def test_topics_below_sys_stay_on_their_core(cores: ShardCores) -> None:
    """A bridge of another broker says there whether it is connected."""
    topic = "$SYS/broker/connection/far/state"
    for core in cores.cores:
        client = core.connect("p")
        client.publish(topic, b"%d" % core.shard, 1, retain=True)
        client.publish(topic, b"", 1, retain=True)
        client.publish(topic, b"%d" % core.shard, 1, retain=True)
    for core in cores.cores:
        assert subscribe(core.connect("s"), "$SYS/broker/connection/#") == {topic: b"%d" % core.shard}


def test_an_acknowledged_message_outlives_its_core_and_its_publisher_s(cores: ShardCores) -> None:
    topic = cores.topic(1)
    cores[0].connect("p").publish(topic, b"x", 1, retain=True)
    cores.kill(0)
    cores.kill(1)
    for core in cores.cores:
        assert subscribe(core.connect("s"), "t/+") == {topic: b"x"}


def test_a_killed_core_reads_on_where_it_was(cores: ShardCores) -> None:
    """An older message does not come back, and one that was published meanwhile is not lost."""
    topic, other = cores.topic(1), cores.topic(1, "u/")
    publisher = cores[0].connect("p")
    publisher.publish(topic, b"1", 1, retain=True)
    cores[1].connect("p").publish(topic, b"2", 1, retain=True)
    cores.lose(1)
    publisher.send(Publish(other, b"3", 1, True, packet_id=7))
    cores.away.clear()
    cores.kill(1)
    assert publisher.expect(Puback).packet_id == 7
    assert subscribe(cores[2].connect("s"), "#") == {topic: b"2", other: b"3"}


def test_a_core_that_is_away_is_asked_when_it_is_back(cores: ShardCores) -> None:
    topics = [cores.topic(shard) for shard in range(3)]
    for topic in topics:
        cores[0].connect("p").publish(topic, b"x", 1, retain=True)
    cores.lose(1)
    client = cores[0].connect("s")
    assert subscribe(client, "#", 1) == {topics[0]: b"x", topics[2]: b"x"}
    assert not cores[0].broker.replays.step(), "the replay uses no time while it waits"
    assert len(cores[0].broker.replays._active) == 1
    cores.bring_back(1)
    assert retained(client) == {topics[1]: b"x"}
    assert not cores[0].broker.replays._active


def test_a_core_that_is_killed_while_it_is_read_goes_on_behind_the_last_page(cores: ShardCores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained_view, "PAGE_BYTES", 100)
    topics = [topic for topic in (f"t/{number}" for number in range(60)) if cores.shards.of_text(topic) == 1]
    publisher = cores[1].connect("p")
    for topic in topics:
        publisher.publish(topic, b"x" * 30, 1, retain=True)
    slow = Properties()
    slow.receive_maximum = 2
    client = cores[0].connect("s", properties=slow)
    client.send(Subscribe(1, [Subscription("t/+", 1)]))
    client.expect(Suback)
    found = []
    for number in range(len(topics)):
        if number % 5 == 3:
            cores.kill(1)
        packet = client.expect(Publish)
        found.append(packet.topic)
        client.send(Puback(packet.packet_id))
    assert sorted(found) == sorted(topics) and client.arrived() == []


def test_pages_hold_every_match_once(cores: ShardCores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained_view, "PAGE_BYTES", 500)
    monkeypatch.setattr(retained_pages, "READ_AT_ONCE", 3)
    topics = ["a", "a/", "a/b", "a!/b", "a/b/c", "aa", "/a", "b/x/y", *(f"a/{n}/b" for n in range(60)), *(f"n{n}" for n in range(40))]
    publisher = cores[1].connect("p")
    publisher.send(*(Publish(topic, b"x" * 20, 0, True) for topic in topics))
    for topic_filter in ("#", "a/#", "+", "+/+", "a/+/b", "a/+", "/+", "b/x/#", "+/x/y", "a", "a/b/c/#"):
        for core in cores.cores:
            found = subscribe(core.connect("s"), topic_filter)
            assert set(found) == {topic for topic in topics if matches(topic_filter, topic)}, topic_filter


def test_a_message_that_is_replaced_while_a_page_is_on_its_way_is_not_sent(cores: ShardCores) -> None:
    topic, other = cores.topic(1), cores.topic(1, "u/")
    publisher = cores[0].connect("p")
    publisher.publish(topic, b"old", 1, retain=True)
    publisher.publish(other, b"other", 1, retain=True)
    client = cores[0].connect("s")
    cores[0].eager = False
    client.send(Subscribe(1, [Subscription("#", 1)]))
    cores[0].settle_alone()  # SUBACK is sent, and the page is asked for
    cores._pass_on()
    cores[1].settle_alone()
    publisher.send(Publish(topic, b"new", 1, True, packet_id=9))  # the page with the old message is on its way
    cores[0].settle_alone()
    cores[0].eager = True
    cores.settle()
    client.expect(Suback)
    got = [(packet.topic, packet.payload, packet.retain) for packet in client.arrived()]
    assert sorted(got) == sorted([(topic, b"new", False), (other, b"other", True)])


def ask_for_a_page(cores: ShardCores, topic: str) -> CoreClient:
    """A client of core 0 whose request for the retained message has gone to core 1."""
    client = cores[0].connect("s")
    cores[0].eager = False
    client.send(Subscribe(1, [Subscription(topic, 1)]))
    cores[0].settle_alone()
    assert cores.sent
    return client


def test_a_page_with_a_newer_message_at_qos_0_is_sent_as_its_publisher_s_core_may_not_have_known_the_filter(cores: ShardCores) -> None:
    """The logs deliver no message at QoS 0; the links do, from the moment at which the publisher's core knows the filter."""
    topic = cores.topic(1)
    publisher = cores[2].connect("p")
    publisher.publish(topic, b"old", 1, retain=True)
    client = ask_for_a_page(cores, topic)
    cores[2].eager = cores[1].eager = False
    publisher.send(Publish(topic, b"new", 0, True))
    cores[2].settle_alone()
    cores[1].read_logs()
    cores[1].settle_alone()
    cores._pass_on()  # the request, which is answered with the new message
    cores[0].read_logs()
    cores.settle()
    client.expect(Suback)
    assert retained(client) == {topic: b"new"}


def test_the_first_page_has_what_was_published_before_it_was_asked_for(cores: ShardCores) -> None:
    """Also what was not in a log when the subscription came: a message at QoS 0 may have been published before its core knew the filter."""
    topic = cores.topic(1)
    publisher = cores[2].connect("p")
    publisher.publish(topic, b"old", 1, retain=True)
    client = cores[0].connect("s")
    for core in cores.cores:
        core.eager = False
    publisher.send(Publish(topic, b"new", 0, True))
    client.send(Subscribe(1, [Subscription(topic, 1)]))
    cores[0].settle_alone()
    cores._pass_on()
    cores[1].settle_alone()
    assert not cores.sent, "the answer waits until the core has read the message"
    cores.settle()
    client.expect(Suback)
    assert retained(client) == {topic: b"new"}


def test_what_a_core_keeps_itself_is_read_when_it_has_routed_what_was_published_before(cores: ShardCores) -> None:
    topic = cores.topic(0)
    publisher = cores[2].connect("p")
    publisher.publish(topic, b"old", 1, retain=True)
    client = cores[0].connect("s")
    for core in cores.cores:
        core.eager = False
    publisher.send(Publish(topic, b"new", 0, True))
    client.send(Subscribe(1, [Subscription(topic, 1)]))
    cores[0].settle_alone()
    client.expect(Suback)
    assert client.arrived() == []
    cores.settle()
    assert retained(client) == {topic: b"new"}


def test_a_message_at_qos_0_that_came_over_a_link_is_not_followed_by_an_older_one(cores: ShardCores) -> None:
    topic = cores.topic(1)
    cores[2].connect("p").publish(topic, b"old", 1, retain=True)
    client = ask_for_a_page(cores, topic)
    link = cores[0].client()
    link.protocol.use_publish_handler(LinkHandler(cores[0].broker, link.connection, NoCoreMessages()))
    open_link(link.connection, Session(cores[0].broker.context, 0, "core 2"))
    link.send(Publish(topic, b"new", 0, True))
    cores[0].eager = True
    cores.settle()
    client.expect(Suback)
    assert [(packet.payload, packet.retain) for packet in client.arrived()] == [(b"new", False)]


def test_a_page_has_what_the_asking_core_has_routed_before(cores: ShardCores) -> None:
    """The core that keeps a message may have read less of its publisher's log than the one that asks."""
    topic = cores.topic(1)
    publisher = cores[0].connect("p")
    publisher.publish(topic, b"old", 1, retain=True)
    cores[0].eager = False
    publisher.send(Publish(topic, b"new", 1, True, packet_id=9))
    cores[0].settle_alone()  # committed, and read by the core of shard 2 only
    cores[2].read_logs()
    cores[2].settle_alone()
    cores[2].eager = False
    client = cores[2].client()
    client.connack = client.connect("s")
    client.send(Subscribe(1, [Subscription(topic, 0)]))
    cores[2].settle_alone()
    cores._pass_on()
    cores[1].settle_alone()
    assert not cores.sent, "the answer waits until the core has read the message"
    cores[2].eager = True
    cores.settle()
    client.expect(Suback)
    assert retained(client) == {topic: b"new"}


def test_unanswered_requests_are_repeated(cores: ShardCores) -> None:
    topic = cores.topic(1)
    cores[0].connect("p").publish(topic, b"x", 1, retain=True)
    client = cores[0].connect("s")
    cores[0].eager = False
    client.send(Subscribe(1, [Subscription(topic, 0)]))
    cores[0].settle_alone()
    assert len(cores.sent) == 1
    cores.sent.clear()
    cores[0].eager = True
    cores.advance(2.0)
    client.expect(Suback)
    assert retained(client) == {}
    cores.advance(2.0)
    assert retained(client) == {topic: b"x"}


def test_slow_subscribers_share_the_memory_of_a_message(cores: ShardCores) -> None:
    topic = cores.topic(1)
    cores[0].connect("p").publish(topic, b"x" * 1000, 1, retain=True)
    clients = [cores[0].connect("s"), cores[0].connect("t")]
    view = cores[0].messages.view
    for client in clients:
        cores[0].eager = False
        client.send(Subscribe(1, [Subscription(topic, 0)]))
        cores[0].settle_alone()
        client.expect(Suback)
        client.connection.outbox.pause()
        cores[0].eager = True
        cores.settle()
        assert 1000 < view.held_bytes < 1100
    clients[0].close()
    assert view.held_bytes > 1000
    clients[1].connection.outbox.resume()
    cores.settle()
    assert retained(clients[1]) == {topic: b"x" * 1000} and view.held_bytes == 0


def test_retain_handling(cores: ShardCores) -> None:
    topic = cores.topic(1)
    cores[0].connect("p").publish(topic, b"x", 1, retain=True)
    client = cores[0].connect("s")
    assert subscribe(client, topic, retain_handling=2) == {}
    assert subscribe(client, topic, retain_handling=1) == {}, "the subscription is not new"
    assert subscribe(client, topic, retain_handling=0) == {topic: b"x"}
    client.send(Unsubscribe(2, [topic]))
    client.arrived()
    assert subscribe(client, topic, retain_handling=1) == {topic: b"x"}


def test_expiry_is_counted_down_and_expired_messages_are_gone(cores: ShardCores) -> None:
    topic = cores.topic(1)
    lasting = Properties()
    lasting.message_expiry_interval = 10
    client = cores[0].connect("p")
    client.send(Publish(topic, b"x", 1, True, packet_id=1, properties=lasting))
    client.expect(Puback)
    cores.advance(4.0)
    reader = cores[2].connect("s")
    reader.send(Subscribe(1, [Subscription(topic, 0)]))
    reader.expect(Suback)
    assert reader.expect(Publish).properties.message_expiry_interval == 6
    cores.advance(7.0)
    assert subscribe(cores[2].connect("t"), topic) == {}
    assert subscribe(cores[2].connect("t"), "#") == {}
    assert len(cores[1].broker.retained) == 0


def test_limits_are_those_of_the_core_that_keeps_the_message(tmp_path: Path) -> None:
    with ShardCores(tmp_path, max_retained_messages=1) as cores:
        client = cores[0].connect("p")
        first, second = cores.topic(1), cores.topic(1, "u/")
        client.publish(first, b"x", 1, retain=True)
        client.publish(second, b"x", 1, retain=True)
        client.publish(first, b"y", 1, retain=True)
        assert subscribe(cores[2].connect("s"), "#") == {first: b"y"}
        assert cores[1].broker.outbound.counters.away.retained_full == 1


class Watcher:
    """A subscriber, and the last message of each topic that it got."""

    def __init__(self, cores: ShardCores, number: int, shard: int, topic_filter: str) -> None:
        self.shard = shard
        self.seen: dict[str, int] = {}
        self.client = cores[shard].connect(f"w{number}")
        self.client.send(Subscribe(1, [Subscription(topic_filter, 1)]))
        self.filter = topic_filter

    def read(self) -> None:
        for packet in self.client.arrived():
            if isinstance(packet, Publish):
                version = int(packet.payload)
                assert version >= self.seen.get(packet.topic, 0), f"{packet.topic}: {version} after a newer one"
                self.seen[packet.topic] = version
                self.client.send(Puback(packet.packet_id))


@pytest.mark.parametrize("seed", range(3))
def test_every_subscriber_ends_with_the_last_message_of_each_topic(cores: ShardCores, seed: int) -> None:
    """In any order of commits, reads, pages and kills no message falls between retained and live ones."""
    random = Random(seed)
    topics = [cores.topic(shard, prefix) for shard in range(3) for prefix in ("a/", "b/", "c/")]
    publishers = {topic: random.randrange(3) for topic in topics}  # each topic has one, so its order is known
    versions = dict.fromkeys(topics, 0)
    watchers: list[Watcher] = []
    for core in cores.cores:
        core.eager = False
    clients = [core.connect("publisher") for core in cores.cores]
    steps = [*["publish"] * 6, *["commit"] * 6, *["read"] * 6, *["pass"] * 6, *["step"] * 6, "subscribe", "subscribe", "kill", "tick"]
    for number in range(600):
        step = random.choice(steps)
        shard = random.randrange(3)
        core = cores[shard]
        if step == "publish":
            topic = random.choice(topics)
            versions[topic] += 1
            packet = Publish(topic, b"%d" % versions[topic], 1, True, packet_id=number + 1)
            clients[publishers[topic]].send(packet)
        elif step == "commit":
            core.commit()
        elif step == "read":
            core.read_logs(random.randint(1, 3))
        elif step == "pass" and cores.sent:
            cores.pass_one()
        elif step == "step":
            core.broker.turns.step()
            core.broker.replays.step()
        elif step == "subscribe" and len(watchers) < 20:
            watchers.append(Watcher(cores, number, shard, random.choice(["#", "a/+", "+/#", *topics])))
        elif step == "tick":
            core.advance(random.choice([0.5, 3.5]))
        elif step == "kill" and random.random() < 0.3:
            watchers = [watcher for watcher in watchers if watcher.shard != shard]
            core.kill()
            core.eager = False
            clients[shard] = core.connect("publisher")
            for other in cores.cores:
                other.messages.link_down(shard)
                other.messages.link_up()
            cores.sent = deque(one for one in cores.sent if shard not in one[:2])
        for watcher in watchers:
            watcher.read()
    for core in cores.cores:
        core.eager = True
    for _ in range(3):
        cores.advance(4.0)
    for watcher in watchers:
        watcher.read()
    final = {}
    for core in cores.cores:
        final.update({topic: int(message.payload) for topic in topics if (message := core.broker.retained.get(topic))})
    assert all(final[topic] <= versions[topic] for topic in final)
    for watcher in watchers:
        expected = {topic: version for topic, version in final.items() if matches(watcher.filter, topic)}
        assert watcher.seen == expected, watcher.filter
    assert all(not core.broker.replays._active and not core.messages.view._requests for core in cores.cores)


def test_a_core_answers_a_bounded_number_of_requests_of_another_one(cores: ShardCores, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none for a page of any size."""
    monkeypatch.setattr(retained_pages, "MAX_ASKED", 5)
    asked = retained_pages.PageRequest(1, "#", "", 1 << 40, {1: 1 << 40})
    for _ in range(10):
        for shard in (1, 2):
            cores[0].messages.handle(shard, "$core/retained/request", retained_pages.encode(asked))
    answers = cores[0].messages._pages._answers
    assert [answer.shard for answer in answers].count(1) == [answer.shard for answer in answers].count(2) == 5
    assert {answer.request.size for answer in answers} == {retained_pages.LARGEST_PAGE}
    cores.advance(2 * retained_pages.ANSWER_WITHIN)
    cores.settle()
    assert not cores[0].messages._pages._answers


def test_the_next_core_of_a_shard_continues_a_replay(tmp_path: Path) -> None:
    properties = Properties()
    properties.session_expiry_interval = 3600
    with ShardCores(tmp_path, max_inflight=5, max_queued_messages=10) as cores:
        topics = {cores.topic(shard, f"k/{number}/") for number in range(20) for shard in range(3)}
        cores[1].connect("p").send(*(Publish(topic, b"x", 1, True, False, 1 + n) for n, topic in enumerate(topics)))
        cores.settle()
        client = cores[0].connect("c", clean_start=False, properties=properties)
        client.send(Subscribe(1, [Subscription("k/#", 1)]))
        while not (packets := client.arrived()):
            cores[0].commit()
        assert isinstance(packets[0], Suback)
        found = {packet.topic for packet in packets[1:]}
        assert len(found) < len(topics)
        cores.kill(0)
        client = cores[0].connect("c", clean_start=False, properties=properties)
        assert client.connack.session_present
        while len(found) < len(topics):
            cores.settle()
            packets = client.arrived()
            assert packets
            found |= {packet.topic for packet in packets}
            client.send(*(Puback(packet.packet_id) for packet in packets))
        assert found == topics
        cores.settle()
        assert not cores[0].broker.registry.sessions["c"].subscriptions["k/#"].options & AWAITS_RETAINED
