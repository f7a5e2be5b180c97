"""Work for very many sessions or subscriptions is cut into parts; nothing is lost, repeated or reordered by that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient
from support.core_sessions import durable, numbers_of

from mqttbroker.codec.packets import (
    Disconnect,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
)
from mqttbroker.codec.packets import Subscription as Filter
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import SERVER_SHUTTING_DOWN
from mqttbroker.core.delivery.turns import TURN_WORK, LongWork
from mqttbroker.core.routing.route import LARGE_ROUTE
from mqttbroker.core.sessions.lifecycle import REMOVED_AT_ONCE
from sessions.session import NO_LOCAL, Session, Subscription

MANY = 4 * LARGE_ROUTE + 7


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    with Core(tmp_path) as opened:
        yield opened


def crowd(core: Core, count: int = MANY, persistent: bool = True, qos: int = 2) -> list[Session]:
    """Sessions of clients that are away, all subscribed to t/#."""
    broker = core.broker
    sessions = []
    for number in range(count):
        session = broker.registry.create(f"s{number}", persistent)
        session.expiry_interval = 0xFFFFFFFF
        session.disconnected_at = core.seconds
        broker.lifecycle.save(session, True)
        broker.subscriptions.load(Subscription(session, "t/#", qos, 0))
        sessions.append(session)
    core.settle()
    return sessions


def begin(core: Core) -> None:
    """From now on the broker does only what the test asks for; the route to the crowd is in the cache."""
    core.eager = False
    for topic in (b"t/1", b"t/will"):
        core.broker.router.route(topic)


def step(core: Core) -> None:
    assert core.broker.turns.step()


def payloads(packets: list[Any]) -> list[bytes]:
    return [packet.payload for packet in packets if isinstance(packet, Publish)]


# --- one message to very many sessions ----------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_to_many_sessions_is_stored_in_parts_and_in_one_commit(core: Core, qos: int) -> None:
    sessions = crowd(core)
    quick = core.connect("quick")
    quick.subscribe("b", options=0)
    publisher, other = core.connect("pub"), durable(core, "other")
    begin(core)
    publisher.send(Publish("t/1", b"1", qos, False, False, 7), Pingreq())
    step(core)
    assert 0 < sum(session.deliveries.queued_messages for session in sessions) < MANY
    assert core.take() is None  # a commit would store a part of the message
    other.send(Publish("b", b"quick"))
    assert payloads(quick.arrived()) == [b"quick"]
    assert not publisher.arrived() and publisher.connection.blocked
    while core.broker.turns.step():
        pass
    write_set = core.take()
    assert write_set is not None and len(write_set.entries) == MANY and len(write_set.messages) == 1
    assert not publisher.arrived()
    core.commit()
    core.settle()
    (answer,) = [packet for packet in publisher.arrived() if not isinstance(packet, Pingresp)]
    assert isinstance(answer, Puback if qos == 1 else Pubrec) and answer.reason_code == 0
    assert {session.deliveries.queued_messages for session in sessions} == {1}
    assert core.broker.journal.size == 0 and not publisher.connection.blocked


def test_messages_of_one_publisher_stay_in_order(core: Core) -> None:
    crowd(core)
    subscriber = core.connect("sub")
    subscriber.subscribe("t/#", "b", options=1)
    publisher = durable(core, "pub")
    begin(core)
    numbers = range(1, 5)
    publisher.send(*(Publish("b" if n == 3 else "t/1", b"%d" % n, 1, False, False, n) for n in numbers))
    publisher.close()
    step(core)
    again = durable(core, "pub")
    again.send(Publish("b", b"5", 0))
    assert numbers_of(subscriber.arrived()) in ([], [1])
    core.settle()
    found = numbers_of(subscriber.arrived())
    # What was not handled before the publisher closed its connection is lost with it; nothing overtakes the rest.
    assert found[-1] == 5 and found == sorted(found)
    again.send(*(Publish("b" if n % 2 else "t/1", b"%d" % n, 1, False, False, n) for n in range(6, 12)))
    core.settle()
    assert numbers_of(subscriber.arrived()) == list(range(6, 12))
    assert [answer.packet_id for answer in again.arrived() if isinstance(answer, Puback)] == list(range(6, 12))


def test_publishers_to_many_sessions_take_turns(core: Core) -> None:
    sessions = crowd(core)
    publishers = [core.connect(f"pub{number}") for number in range(4)]
    begin(core)
    for publisher in publishers:
        publisher.send(*(Publish("t/1", b"x", 1, False, False, n) for n in (1, 2)))
    publishers[1].close()
    core.settle()
    assert {session.deliveries.queued_messages for session in sessions} <= {6, 7, 8}
    for publisher in (publishers[0], *publishers[2:]):
        assert [answer.packet_id for answer in publisher.arrived()] == [1, 2]


def test_sessions_that_end_meanwhile_get_nothing(core: Core) -> None:
    sessions = crowd(core)
    publisher = core.connect("pub")
    begin(core)
    publisher.send(Publish("t/1", b"x", 1, False, False, 1))
    step(core)
    for session in sessions[::2]:
        core.broker.lifecycle.end(session)
    core.settle()
    assert [answer.packet_id for answer in publisher.arrived()] == [1]
    assert core.broker.context.queued_messages == sum(session.deliveries.queued_messages for session in sessions[1::2])
    assert {session.deliveries.queued_messages for session in sessions[1::2]} == {1}


def test_a_message_that_was_delivered_in_part_is_not_there_after_a_crash(core: Core) -> None:
    crowd(core)
    publisher = durable(core, "pub")
    begin(core)
    publisher.send(Publish("t/1", b"x", 2, False, False, 1))
    step(core)
    core.kill()
    core.eager = True
    sessions = [core.broker.registry.get(f"s{number}") for number in range(MANY)]
    assert {session.deliveries.queued_messages for session in sessions if session is not None} == {0}
    for session in sessions:  # subscriptions of this test are not stored
        assert session is not None
        core.broker.subscriptions.load(Subscription(session, "t/#", 2, 0))
    publisher = durable(core, "pub")
    publisher.send(Publish("t/1", b"x", 2, False, True, 1))
    assert [type(packet) for packet in publisher.arrived()] == [Pubrec]
    publisher.send(Publish("t/1", b"x", 2, False, True, 1), Pubrel(1))
    assert {session.deliveries.queued_messages for session in sessions if session is not None} == {1}


def test_a_failed_commit_refuses_the_whole_message(core: Core) -> None:
    sessions = crowd(core)
    publisher = core.connect("pub")
    begin(core)
    publisher.send(Publish("t/1", b"x", 1, False, False, 1))
    while core.broker.turns.step():
        pass
    core.fail()
    (answer,) = publisher.arrived()
    assert isinstance(answer, Puback) and answer.reason_code == 0x97
    assert {session.deliveries.queued_messages for session in sessions} == {0}


def test_no_local_subscriptions_among_many_get_no_message_of_their_own_client(core: Core) -> None:
    crowd(core, persistent=False, qos=0)
    publisher, other = core.connect("pub"), core.connect("other")
    for client in (publisher, other):
        client.subscribe("t/#", options=NO_LOCAL)
    begin(core)
    publisher.send(Publish("t/1", b"x", 0))
    core.settle()
    assert payloads(publisher.arrived()) == [] and payloads(other.arrived()) == [b"x"]


def test_a_retained_message_to_many_is_there_for_a_client_that_subscribes_meanwhile(core: Core) -> None:
    crowd(core)
    publisher, late = core.connect("pub"), core.connect("late")
    begin(core)
    publisher.send(Publish("t/1", b"x", 1, True, False, 1))
    step(core)
    late.send(b"\x82\x09\x00\x05\x00\x00\x03t/1\x01")
    core.settle()
    assert payloads(late.arrived()) == [b"x"]


# --- messages of the broker ---------------------------------------------------------------------------------------


def test_wills_to_many_sessions_wait_for_each_other(core: Core) -> None:
    sessions = crowd(core)
    clients = [core.connect(f"w{n}", will=Will("t/will", b"%d" % n, 1, False, Properties())) for n in range(5)]
    last = core.connect("last", will=Will("elsewhere", b"", 1, False, Properties()))
    begin(core)
    for client in clients:
        client.close()
    messages = core.broker.messages
    assert messages.waiting == 4 and core.broker.context.will_bytes > 0
    last.close()
    assert messages.waiting == 5  # in order
    core.settle()
    assert messages.waiting == 0 and core.broker.context.will_bytes == 0
    assert {session.deliveries.queued_messages for session in sessions} == {5}


def test_status_messages_to_many_are_published_in_parts(core: Core) -> None:
    broker = core.broker
    for number in range(MANY):
        session = broker.registry.create(f"s{number}", False)
        broker.subscriptions.load(Subscription(session, "$SYS/#", 0, 0))
    last = core.connect("last")
    last.subscribe("$SYS/#", options=0)
    core.eager = False
    for number in range(5):
        broker.messages.publish_status(f"$SYS/{number}", b"%d" % number, True)
    assert broker.messages.waiting > 0 and not core.broker.journal.held
    core.settle()
    assert numbers_of(last.arrived()) == [0, 1, 2, 3, 4]
    assert len(broker.retained) == 5


# --- ends -----------------------------------------------------------------------------------------------------------


def test_the_subscriptions_of_an_ended_session_are_removed_in_parts(core: Core) -> None:
    broker = core.broker
    client = core.connect("sub")
    session = client.connection.session
    assert session is not None
    for number in range(40 * REMOVED_AT_ONCE):
        broker.subscriptions.load(Subscription(session, f"a/{number}/+", 1, 0))
    broker.subscriptions.load(Subscription(session, "$share/g/s", 1, 0))
    publisher = core.connect("pub")
    publisher.publish("a/1/x", b"")  # the route is cached
    client.arrived()
    core.eager = False
    client.close()
    assert broker.router.subscriptions == 40 * REMOVED_AT_ONCE + 1
    again = core.connect("sub")
    again.send(b"\x82\x0b\x00\x05\x00\x00\x05a/2/x\x01")
    for topic in ("a/1/x", "a/2/x", "a/3/x", "s"):
        publisher.send(Publish(topic, topic.encode(), 1, False, False, 9))
    core.settle()
    assert payloads(again.arrived()) == [b"a/2/x"]
    assert broker.router.subscriptions == 1 and not broker.router.groups and broker.lifecycle.waiting_removals == 0
    assert broker.context.memory_bytes == 0


def test_many_sessions_expire_in_parts(core: Core) -> None:
    sessions = crowd(core)
    for session in sessions:
        session.expiry_interval = 10
        core.broker.registry.schedule_end(session)
    core.eager = False
    core.advance(11)
    assert 0 < core.broker.lifecycle.expired < MANY
    core.settle()
    assert core.broker.lifecycle.expired == MANY and len(core.broker.registry) == 0
    assert core.broker.router.subscriptions == 0


def test_many_wills_that_are_due_are_published_in_parts(core: Core) -> None:
    subscriber = core.connect("sub")
    subscriber.subscribe("w/#", options=0)
    properties, delay = Properties(), Properties()
    properties.session_expiry_interval = 0xFFFFFFFF
    delay.will_delay_interval = 5
    for number in range(300):
        will = Will(f"w/{number}", b"%d" % number, 0, False, delay)
        core.connect(f"c{number}", properties=properties, will=will).close()
    core.eager = False
    core.advance(6)
    core.settle()
    assert sorted(numbers_of(subscriber.arrived())) == list(range(300))


def test_many_connections_time_out_in_parts(core: Core) -> None:
    waiting = [core.client() for _ in range(3 * TURN_WORK)]
    late: list[CoreClient] = [core.connect(f"c{number}", keep_alive=10) for number in range(20)]
    core.eager = False
    core.advance(16)
    assert 0 < sum(client.closed for client in waiting + late) < len(waiting)
    core.settle()
    assert all(client.closed for client in waiting + late)
    assert all(isinstance(client.arrived()[-1], Disconnect) for client in late)


def test_all_clients_are_disconnected_in_parts_when_the_broker_stops(core: Core) -> None:
    clients = [core.connect(f"c{number}", version=4 + number % 2) for number in range(200)]
    begin(core)
    shut_down = core.broker.clients.shut_down()
    left = []
    while not shut_down.done:
        assert shut_down.step(TURN_WORK) > 0
        left.append(len(core.broker.clients.connections))
        if len(left) == 1:
            late = core.client()  # its CONNECT is to come
    assert len(left) >= 4 and left == sorted(set(left), reverse=True) and max(left) > 100
    assert late.closed and late.arrived() == []
    for client in clients:
        assert client.closed
        reasons = [packet.reason_code for packet in client.arrived() if isinstance(packet, Disconnect)]
        assert reasons == ([SERVER_SHUTTING_DOWN] if client.version == 5 else [])


# --- packets with many filters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 5])
def test_packets_with_many_filters_are_handled_in_parts_and_answered_in_order(core: Core, version: int) -> None:
    names = [f"a/{number}/+" for number in range(5000)]
    publisher = core.connect("pub")
    publisher.publish("a/7/retained", b"kept", 1, retain=True)
    client = core.connect("sub", version)
    other = core.connect("other")
    core.eager = False
    client.send(Subscribe(1, [Filter(name, 1) for name in names]), Unsubscribe(2, [*names[1::2], "none"]), Pingreq())
    session = client.connection.session
    assert session is not None and not session.subscriptions and client.connection.blocked
    step(core)
    assert 0 < len(session.subscriptions) < len(names)
    other.send(Pingreq())
    assert [type(packet) for packet in other.arrived()] == [Pingresp]
    core.settle()
    suback, *retained, unsuback, pingresp = client.arrived()
    assert suback.packet_id == 1 and suback.reason_codes == [1] * len(names)
    assert payloads(retained) == [] or payloads(retained) == [b"kept"]  # a/7/+ may have been unsubscribed before
    assert unsuback.packet_id == 2 and isinstance(pingresp, Pingresp)
    assert version < 5 or unsuback.reason_codes == [0] * 2500 + [0x11]
    assert list(session.subscriptions) == names[::2] and core.broker.router.subscriptions == 2500


def test_a_client_that_is_gone_is_not_subscribed_further(core: Core) -> None:
    client, other = durable(core, "sub"), core.connect("other")
    core.eager = False
    client.send(Subscribe(1, [Filter(f"a/{number}", 1) for number in range(5000)]))
    step(core)
    client.close()
    core.settle()
    session = core.broker.registry.get("sub")
    assert session is not None and 0 < len(session.subscriptions) < 5000
    assert core.broker.router.subscriptions == len(session.subscriptions)
    again = durable(core, "sub")
    core.settle()
    again.send(Subscribe(1, [Filter(f"a/{number}", 1) for number in range(5000)]))
    core.settle()
    assert len(session.subscriptions) == 5000 and not other.closed


# --- shared subscriptions -----------------------------------------------------------------------------------------


def test_the_queue_of_a_member_that_leaves_is_passed_on_in_parts_and_in_order(core: Core) -> None:
    leaver, publisher = core.connect("leaver"), core.connect("pub")
    leaver.subscribe("$share/g/t", options=1)
    for low in range(1, 3001, 500):
        publisher.send(*(Publish("t", b"%d" % number, 1, False, False, 1) for number in range(low, low + 500)))
    left = leaver.connection.session
    assert left is not None and left.deliveries.queued_messages == 3000
    member = core.connect("member")
    member.subscribe("$share/g/t", options=0)
    core.eager = False
    leaver.close()
    step(core)
    begun = numbers_of(member.arrived())
    assert 0 < len(begun) < 3000 and core.broker.context.memory_bytes > 0
    core.settle()
    assert begun + numbers_of(member.arrived()) == list(range(1, 3001))
    assert core.broker.context.memory_bytes == 0 and core.broker.context.memory_entries == 0


def test_wills_of_many_clients_that_disconnect_at_once_are_published_in_parts(core: Core) -> None:
    sessions = crowd(core, 1000, persistent=False, qos=0)
    subscriber = core.connect("sub")
    subscriber.subscribe("t/#", options=0)
    clients = [core.connect(f"w{n}", will=Will("t/will", b"%d" % n, 0, False, Properties())) for n in range(40)]
    begin(core)
    for client in clients:
        client.close()
    assert 20 < core.broker.messages.waiting < 40 and len(sessions) == 1000
    core.settle()
    assert numbers_of(subscriber.arrived()) == list(range(40))
    assert core.broker.messages.waiting == 0 and core.broker.context.will_bytes == 0


class Countdown(LongWork):
    """Work of so many parts."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        return self.parts == 0

    def step(self, budget: int) -> int:
        self.parts -= 1
        return 1


def test_work_that_is_done_already_does_not_keep_other_work_waiting(core: Core) -> None:
    turns = core.broker.turns
    work = Countdown(3)
    turns.add(Countdown(0))
    turns.add(work)
    turns.step()
    assert work.done
