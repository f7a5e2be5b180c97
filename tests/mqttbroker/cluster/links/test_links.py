"""Three cores with links to each other: messages at QoS 0, and shared subscriptions, across them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.core import wait_until
from support.linked_cores import LinkedClient, LinkedCores
from support.patience import PATIENCE
from support.properties import properties_of

from mqttbroker.cluster.bus.bus import DROPS_LOGGED, LocalReceiver
from mqttbroker.cluster.links import links
from mqttbroker.cluster.links import peer as link_peer
from mqttbroker.cluster.links.links import HELD, Announced, LocalFilters
from mqttbroker.cluster.links.messages import ADD, REMOVE
from mqttbroker.cluster.links.server import Hello
from mqttbroker.cluster.log.body import published_of
from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.packets import Publish
from mqttbroker.config.settings import Limits
from mqttbroker.core.sessions.own_shard import OwnShard
from mqttbroker.net.link_address import LinkAddress
from sessions.message import Message
from sessions.session import NO_LOCAL, RETAIN_AS_PUBLISHED
from sessions.write_set import TO_ALL, TO_MEMBER

PERSISTENT = properties_of(session_expiry_interval=1000)


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[LinkedCores]:
    with LinkedCores(tmp_path) as cores:
        yield cores


def drain(cores: LinkedCores, *clients: LinkedClient) -> list[list[Publish]]:
    """The packets that the clients were sent and acknowledge, when nothing is on its way any more."""
    taken: list[list[Publish]] = [[] for _ in clients]
    count = -1
    while count != sum(map(len, taken)):
        count = sum(map(len, taken))
        cores.settle()
        for client, messages in zip(clients, taken):
            client.inbox = client.ping()
            while any(isinstance(packet, Publish) for packet in client.inbox):
                messages.append(client.take())
    return taken


def payloads(messages: list[Publish]) -> list[bytes]:
    return [message.payload for message in messages]


# --- QoS 0 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("received", [4, 5])
@pytest.mark.parametrize("published", [4, 5])
def test_versions_differ_across_a_link(cores: LinkedCores, published: int, received: int) -> None:
    subscriber = cores.client(2, "s", version=received)
    subscriber.subscribe("t", options=0)
    publisher = cores.client(0, "p", version=published)
    sizes = (0, 1, 100, 20_000, 200_000)
    for size in sizes:
        publisher.publish("t", b"x" * size)
    [messages] = drain(cores, subscriber)
    assert [len(one.payload) for one in messages] == list(sizes)
    assert {(one.topic, one.retain, one.dup) for one in messages} == {("t", False, False)}


@pytest.mark.parametrize("version", [4, 5])
def test_a_message_at_qos_0_reaches_each_subscriber_on_all_cores_once(cores: LinkedCores, version: int) -> None:
    clients = [cores.client(shard, f"c{shard}") for shard in range(3)]
    for client in clients:
        client.subscribe("a/+", "a/#", "a/b")
    publisher = cores.client(1, "p", version=version)
    for number in range(5):
        publisher.publish("a/b", b"%d" % number)
    publisher.publish("x", b"no subscriber")
    for messages in drain(cores, *clients):
        assert payloads(messages) == [b"0", b"1", b"2", b"3", b"4"]
        assert {(one.qos, one.retain, one.topic) for one in messages} == {(0, False, "a/b")}


def test_messages_at_qos_1_and_2_come_from_the_log_and_not_over_the_link(cores: LinkedCores) -> None:
    subscriber = cores.client(2, "s")
    subscriber.subscribe("t")
    publisher = cores.client(0, "p")
    for number in range(6):
        assert publisher.publish("t", b"%d" % number, qos=number % 3) == 0
    [messages] = drain(cores, subscriber)
    assert Counter((one.payload, one.qos) for one in messages) == Counter((b"%d" % n, n % 3) for n in range(6))


def test_properties_and_remaining_expiry_cross_a_link(cores: LinkedCores) -> None:
    subscriber = cores.client(2, "s")
    subscriber.subscribe("t", properties=properties_of(subscription_identifiers=[7]))
    cores.client(0, "p").publish(
        "t", b"x", properties=properties_of(message_expiry_interval=60, user_properties=[("k", "v")], content_type="c")
    )
    [[message]] = drain(cores, subscriber)
    found = message.properties
    assert found.message_expiry_interval in (59, 60)
    assert found.user_properties == [("k", "v")] and found.content_type == "c"
    assert found.subscription_identifiers == [7]


def test_the_retain_flag_crosses_a_link_for_retain_as_published_only(cores: LinkedCores) -> None:
    published, cleared = cores.client(2, "rap"), cores.client(2, "plain")
    published.subscribe("t", options=RETAIN_AS_PUBLISHED)
    cleared.subscribe("t", options=0)
    cores.client(0, "p").publish("t", b"x", retain=True)
    kept, plain = drain(cores, published, cleared)
    assert [(one.payload, one.retain) for one in kept] == [(b"x", True)]
    assert [(one.payload, one.retain) for one in plain] == [(b"x", False)]


def test_no_local_holds_with_links(cores: LinkedCores) -> None:
    own, other = cores.client(0, "own"), cores.client(1, "other")
    own.subscribe("t", options=NO_LOCAL)
    other.subscribe("t", options=NO_LOCAL)
    own.publish("t", b"mine")
    other.publish("t", b"theirs")
    mine, theirs = drain(cores, own, other)
    assert payloads(mine) == [b"theirs"] and payloads(theirs) == [b"mine"]


def test_sys_topics_stay_on_their_core(cores: LinkedCores) -> None:
    subscriber = cores.client(2, "s")
    subscriber.subscribe("$SYS/#", "#", "$share/g/$SYS/#")
    cores.settle()
    peer = cores.cores[0].links._peers[2]
    assert cores.look(lambda: dict(peer._filters)).keys() == {"#"}
    assert not cores.look(lambda: dict(peer._groups))


def test_a_message_is_never_passed_on_to_a_third_core(cores: LinkedCores) -> None:
    for shard in range(3):
        cores.client(shard, f"c{shard}").subscribe("#")
    counts = [cores.look(lambda core=core: core.broker.outbound.counters.publish_sent) for core in cores.cores.values()]  # type: ignore[misc]
    publisher = cores.client(0, "p")
    for _ in range(10):
        publisher.publish("loop", b"x", retain=False)
    publisher.ping()
    cores.settle()
    after = [cores.look(lambda core=core: core.broker.outbound.counters.publish_sent) for core in cores.cores.values()]  # type: ignore[misc]
    # Core 0 sends each message to its client and over two links, the others to their client only.
    assert [new - old for old, new in zip(counts, after)] == [30, 10, 10]


def test_unsubscribed_filters_are_withdrawn_when_the_last_session_leaves(cores: LinkedCores) -> None:
    one, two = cores.client(2, "one"), cores.client(2, "two")
    one.subscribe("t")
    two.subscribe("t")
    peer = cores.cores[0].links._peers[2]
    one.unsubscribe("t")
    cores.settle()
    assert cores.look(lambda: peer.filters) == 1
    two.disconnect()
    cores.settle()
    assert cores.look(lambda: peer.filters) == 0


def test_a_link_that_comes_back_has_all_filters(cores: LinkedCores) -> None:
    subscriber, publisher = cores.client(2, "s"), cores.client(0, "p")
    subscriber.subscribe("t", "gone")
    cores.cut_link(2, 0)
    subscriber.unsubscribe("gone")
    subscriber.subscribe("new")
    publisher.publish("t", b"lost")
    publisher.ping()
    away = cores.cores[0].broker.outbound.counters.away
    assert away.slow_subscriber == 1
    cores.cut.clear()
    cores.synchronize()
    assert cores.look(lambda: set(cores.cores[0].links._peers[2]._filters)) == {"t", "new"}
    publisher.publish("t", b"1")
    publisher.publish("new", b"2")
    [messages] = drain(cores, subscriber)
    assert payloads(messages) == [b"1", b"2"]


def test_a_silent_core_does_not_hold_subscribes_for_ever(tmp_path: Path) -> None:
    with LinkedCores(tmp_path, timeout=0.2) as cores:
        client = cores.client(2, "s")
        # The core reads no more from its link.
        cores.look(lambda: cores.cores[0].links._links[2]._wire.transport.pause_reading())
        assert client.subscribe("t").reason_codes == [2]


# --- cores that do not answer, or send too much -----------------------------------------------------------------------


def waiting_bytes(cores: LinkedCores, own: int, other: int) -> int:
    """Bytes of one core that wait for another one."""
    wire = cores.cores[own].links._links[other]._wire
    return int(cores.look(lambda: wire.connection.outbox.backlog + wire.transport.get_write_buffer_size()))


def test_what_waits_for_a_core_that_does_not_read_is_bounded(tmp_path: Path) -> None:
    """Messages beyond the limit are dropped and counted, and other cores get everything."""
    buffer, size = 1 << 20, 10_000
    with LinkedCores(tmp_path, buffer=buffer) as cores:
        stopped, other = cores.client(0, "stopped"), cores.client(1, "other")
        for client in (stopped, other):
            client.subscribe("t")
        cores.settle()
        cores.look(lambda: cores.cores[0].links._links[2]._wire.transport.pause_reading())
        publisher = cores.client(2, "p")
        received = 0
        for _ in range(40):
            for _ in range(20):
                publisher.publish("t", bytes(size))
            publisher.ping()
            assert waiting_bytes(cores, 2, 0) <= buffer + 2 * size
            received += len(drain(cores, other)[0])
        assert received == 800
        drops = cores.cores[2].broker.outbound.counters.drops_of("cores").slow_subscriber
        assert drops > 0
        # A single message is never too long for what waits.
        cores.look(lambda: cores.cores[0].links._links[2]._wire.transport.resume_reading())
        assert len(drain(cores, stopped)[0]) == 800 - drops
        publisher.publish("t", bytes(2 * buffer))
        assert [len(one.payload) for one in drain(cores, stopped)[0]] == [2 * buffer]


def test_the_link_to_a_core_that_says_nothing_is_closed_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "LOST_AFTER", 0.6)
    with LinkedCores(tmp_path, timeout=0.5) as cores:
        subscriber, publisher = cores.client(0, "s"), cores.client(2, "p")
        subscriber.subscribe("t")
        cores.settle()
        silent = cores.cores[0].links._links[2]
        cores.look(lambda: silent._wire.transport.pause_reading())
        wait_until(lambda: cores.cores[0].links._links.get(2) not in (None, silent) and cores.cores[2].links._links.get(0) is not None)
        cores.synchronize()
        publisher.publish("t", b"again")
        assert payloads(drain(cores, subscriber)[0]) == [b"again"]
    assert any("event=link_silent shard=" in one for one in caplog.messages)  # either side may be the first to close it


def test_links_of_cores_that_have_nothing_to_say_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LOST_AFTER", 2.4)
    with LinkedCores(tmp_path, timeout=2.0) as cores:
        before = {shard: dict(core.links._links) for shard, core in cores.cores.items()}
        connection = cores.cores[0].links._links[2]._wire.connection
        begun = connection.last_received
        wait_until(lambda: connection.last_received > begun + 3 * links.LOST_AFTER)
        assert {shard: dict(core.links._links) for shard, core in cores.cores.items()} == before


def test_a_packet_that_is_longer_than_those_of_clients_ends_the_link(tmp_path: Path) -> None:
    """Before it is there. It would have up to 256 MiB."""
    with LinkedCores(tmp_path, limits=Limits(max_packet_size=100_000)) as cores:
        link = cores.cores[2].links._links[0]
        longest = 100_000 + links.LINK_ROOM
        cores.look(lambda: link._wire.transport.write(b"\x30" + encode_varint(longest) + bytes(1000)))
        wait_until(lambda: link.lost.is_set())
        cores.synchronize()
        # A core that has such a message does not send it.
        assert not cores.look(lambda: cores.cores[2].links.send(0, "$core/x", bytes(longest)))
        assert cores.cores[2].broker.outbound.counters.drops_of("cores").too_large == 1
        cores.look(lambda: cores.cores[2].links.take_packets(200_000))
        cores.look(lambda: cores.cores[0].links.take_packets(200_000))
        assert cores.cores[2].links._links[0]._wire.endpoint.policy.terms.max_packet_size == 200_000 + links.LINK_ROOM


def test_an_update_has_not_all_members_of_a_very_large_group(cores: LinkedCores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_peer, "MAX_MEMBERS", 2)
    members = [cores.client(0, f"m{number}") for number in range(5)]
    for member in members:
        member.subscribe("$share/g/t")
    cores.settle()
    (_, states) = cores.look(lambda: cores.cores[2].links._peers[0]._groups["g/t"])
    assert len(states) == 2
    publisher = cores.client(2, "p")
    for number in range(10):
        publisher.publish("t", b"%d" % number)
    assert sorted(one.payload for taken in drain(cores, *members) for one in taken) == [b"%d" % n for n in range(10)]


def test_a_core_says_when_what_was_retained_on_it_is_in_its_log(cores: LinkedCores, monkeypatch: pytest.MonkeyPatch) -> None:
    other = cores.cores[1]
    submit, held = other.store.submit, []
    monkeypatch.setattr(other.store, "submit", held.append)
    done = threading.Event()
    cores.look(lambda: cores.cores[0].links.after_retained(done.set))
    assert done.wait(PATIENCE) and not held
    monkeypatch.setattr(other.port, "all_in_log", lambda: False)
    done.clear()
    cores.look(lambda: cores.cores[0].links.after_retained(done.set))
    wait_until(lambda: held)
    assert not done.is_set()
    cores.look(lambda: submit(held[0]))
    assert done.wait(PATIENCE)


def test_an_announced_filter_is_forgotten_if_nobody_subscribes() -> None:
    changes: list[tuple[int, str]] = []
    filters = LocalFilters(lambda change: changes.append((change.kind, change.text)))
    announced = Announced(filters)
    announced.add(["a", "b"], 0.0)
    announced.add(["a"], 1.0)
    filters.add("a")
    announced.subscribed("a")
    announced.expire(HELD + 0.5)
    assert set(filters) == {"a"} and "a" in announced
    filters.remove("a")
    announced.expire(HELD + 1.5)
    assert not len(filters) and "a" not in announced
    assert changes == [(ADD, "a"), (ADD, "b"), (REMOVE, "b"), (REMOVE, "a")]


# --- shared subscriptions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_round_robin_over_members_of_three_cores(cores: LinkedCores, qos: int) -> None:
    members = [cores.client(shard, f"m{shard}{n}") for shard, count in enumerate((1, 2, 3)) for n in range(count)]
    for member in members:
        member.subscribe("$share/g/t/#")
    cores.settle()
    publisher = cores.client(1, "p")
    for number in range(60):
        publisher.publish("t/x", b"%d" % number, qos=qos)
    taken = drain(cores, *members)
    assert sorted(int(one.payload) for messages in taken for one in messages) == list(range(60))
    assert [len(messages) for messages in taken] == [10] * 6
    assert {one.qos for messages in taken for one in messages} == {qos}


@pytest.mark.parametrize("strategy", ["round_robin", "random", "hash_topic", "least_loaded"])
def test_every_strategy_hands_each_message_to_one_member(tmp_path: Path, strategy: str) -> None:
    with LinkedCores(tmp_path, shared_subscription_strategy=strategy) as cores:
        members = [cores.client(shard, f"m{shard}") for shard in range(3)]
        for member in members:
            member.subscribe("$share/g/+")
        publishers = [cores.client(shard, f"p{shard}") for shard in range(3)]
        cores.settle()
        for publisher in publishers:
            for number in range(40):
                publisher.publish(f"t{number}", b"%d" % number, qos=number % 3)
        taken = drain(cores, *members)
        assert sorted(one.topic for messages in taken for one in messages) == sorted(f"t{n}" for n in range(40) for _ in range(3))
        assert all(messages for messages in taken)
        if strategy == "hash_topic":  # wherever it is published, a topic has one member
            topics = [{one.topic for one in messages} for messages in taken]
            assert sum(map(len, topics)) == 40


@pytest.mark.parametrize("qos", [1, 2])
def test_unacknowledged_messages_of_a_member_that_leaves_go_to_another_core(cores: LinkedCores, qos: int) -> None:
    leaving = cores.client(2, "leaving", properties=properties_of(receive_maximum=1))
    leaving.subscribe("$share/g/t")
    publisher = cores.client(0, "p")
    for number in range(5):
        publisher.publish("t", b"%d" % number, qos=qos)
    cores.settle()
    staying = cores.client(1, "staying")
    staying.subscribe("$share/g/t")
    cores.settle()
    sent = [packet for packet in leaving.ping() if isinstance(packet, Publish)]
    assert payloads(sent) == [b"0"]
    leaving.close()
    [messages] = drain(cores, staying)
    # A QoS 2 message that was sent may be with its client [MQTT-4.8.2-5].
    expected = [b"0", b"1", b"2", b"3", b"4"] if qos == 1 else [b"1", b"2", b"3", b"4"]
    assert payloads(messages) == expected


def test_messages_wait_for_the_persistent_member_of_a_core_that_is_away(cores: LinkedCores) -> None:
    member = cores.client(2, "m", properties=PERSISTENT)
    member.subscribe("$share/g/t")
    cores.settle()
    cores.kill(2)
    # This core has never had a link to the other: it knows the group from its rows.
    cores.kill(0)
    cores.restart(0)
    publisher = cores.client(0, "p")
    for number in range(4):
        assert publisher.publish("t", b"%d" % number, qos=2) == 0
    cores.settle()
    cores.restart(2)
    member = cores.client(2, "m", clean_start=False, properties=PERSISTENT)
    [messages] = drain(cores, member)
    assert payloads(messages) == [b"0", b"1", b"2", b"3"]


def test_messages_chosen_for_members_that_died_with_their_core_go_to_others(cores: LinkedCores) -> None:
    cores.client(2, "dying").subscribe("$share/g/t")
    staying = cores.client(1, "staying")
    staying.subscribe("$share/g/t")
    cores.settle()
    publisher = cores.client(0, "p")
    core = cores.cores[2]
    cores.look(lambda: core.bus.stop_at(cores.ends(2)))  # the log is read no further
    for number in range(10):
        assert publisher.publish("t", b"%d" % number, qos=1) == 0
    cores.kill(2)
    cores.restart(2)
    [messages] = drain(cores, staying)
    assert sorted(payloads(messages)) == [b"%d" % number for number in range(10)]


def test_a_cut_link_loses_no_shared_message_at_qos_1(cores: LinkedCores) -> None:
    member = cores.client(2, "m")
    member.subscribe("$share/g/t")
    cores.settle()
    cores.cut_link(2, 0)
    publisher = cores.client(0, "p")
    for number in range(5):
        assert publisher.publish("t", b"%d" % number, qos=1) == 0
    [messages] = drain(cores, member)
    assert payloads(messages) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_group_that_nobody_is_in_any_more_gets_nothing(cores: LinkedCores) -> None:
    member = cores.client(2, "m", properties=PERSISTENT)
    member.subscribe("$share/g/t")
    member.unsubscribe("$share/g/t")
    cores.settle()
    for shard in (0, 1):
        core = cores.cores[shard]
        assert not cores.look(lambda core=core: dict(core.broker.router.groups))  # type: ignore[misc]
        session = core.broker.registry.get("$core/2")
        assert session is not None and not session.subscriptions
    cores.client(0, "p").publish("t", b"x", qos=1)
    destinations = [section.destination for body in cores.logs[0] for section in published_of(body).sections]
    assert TO_ALL in destinations and TO_MEMBER not in destinations


def test_messages_for_a_group_without_members_are_counted_and_a_hundred_logged_in_a_second(
    cores: LinkedCores, caplog: pytest.LogCaptureFixture
) -> None:
    def drop() -> int:
        broker = cores.cores[1].broker
        receiver = LocalReceiver(broker, 1, 3)
        broker.outbound.clock.monotonic = 7.0
        for _ in range(3 * DROPS_LOGGED):
            receiver.shared("g/t", Message("t", b"x", 1, False, b"", "p", 0, 0))
        lines = len(caplog.messages)
        broker.outbound.clock.monotonic = 8.0
        receiver.shared("g/t", Message("t", b"x", 1, False, b"", "p", 0, 0))
        assert len(caplog.messages) == lines + 1
        return sum("event=shared_message_dropped" in line for line in caplog.messages)

    assert cores.look(drop) == DROPS_LOGGED + 1
    assert cores.look(lambda: cores.cores[1].broker.outbound.counters.away.no_member) == 3 * DROPS_LOGGED + 1


def test_a_member_that_is_away_gets_messages_only_if_no_other_is_there(cores: LinkedCores) -> None:
    away = cores.client(2, "away", properties=PERSISTENT)
    away.subscribe("$share/g/t")
    away.disconnect()
    there = cores.client(1, "there")
    there.subscribe("$share/g/t")
    cores.settle()
    cores.look(lambda: cores.cores[2].links._look_at_members())
    cores.settle()
    publisher = cores.client(0, "p")
    for number in range(6):
        publisher.publish("t", b"%d" % number, qos=1)
    [messages] = drain(cores, there)
    assert len(messages) == 6
    there.disconnect()
    cores.settle()
    publisher.publish("t", b"last", qos=1)
    cores.settle()
    away = cores.client(2, "away", clean_start=False, properties=PERSISTENT)
    [messages] = drain(cores, away)
    assert payloads(messages) == [b"last"]


def test_ordinary_and_shared_subscriptions_of_one_client_both_get_a_message(cores: LinkedCores) -> None:
    client = cores.client(2, "c")
    client.subscribe("$share/g/t", "t")
    cores.settle()
    publisher = cores.client(0, "p")
    publisher.publish("t", b"zero")
    publisher.publish("t", b"one", qos=1)
    [messages] = drain(cores, client)
    assert Counter(payloads(messages)) == {b"zero": 2, b"one": 2}


class ClosedTransport:
    """Refuses writes as a closed transport of uvloop does."""

    def write(self, data: bytes) -> None:
        raise RuntimeError("the handler is closed")


def test_nothing_is_written_to_a_link_that_is_closed(cores: LinkedCores) -> None:
    def send_after_close() -> None:
        core = cores.cores[0]
        peer, link = core.links._peers[2], core.links._links[2]
        link.abort()
        link._wire.transport = ClosedTransport()
        assert peer.send(b"$core/x", b"y"), "the core does not know yet that the link is lost"
        core.scheduler.flush()
        assert not core.defects

    cores.look(send_after_close)
    cores.synchronize()


def test_links_are_no_clients(cores: LinkedCores) -> None:
    clients = cores.cores[0].broker.clients
    assert cores.look(lambda: (list(clients.connections), clients.connected)) == ([], 0)
    cores.cut_link(1, 0)
    assert cores.look(lambda: clients.connected) == 0


def test_no_client_has_the_client_id_that_stands_for_a_core(cores: LinkedCores) -> None:
    cores.cores[0].broker.connect_handler.own_shard = OwnShard(0, 3)
    client = cores.open(0)
    assert client.connect("$core/1").reason_code == 0x85


def test_a_link_is_opened_after_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    linked = LinkedCores(tmp_path, 2)
    connect = linked.connect
    failed: list[int] = []

    async def fail_once(address: LinkAddress, hello: Hello, protocol: object) -> object:
        if not failed:
            failed.append(address.port)
            raise RuntimeError("the handler is closed")
        return await connect(address, hello, protocol)

    monkeypatch.setattr(linked, "connect", fail_once)
    with linked:
        assert failed == [0] and not linked.look(lambda: linked.cores[1].links.missing)
    assert "event=defect in=link shard=0" in caplog.messages
