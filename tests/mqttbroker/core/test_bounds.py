"""Limits of one queue and of all queues, in messages and bytes, their policies, and message expiry."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.core import Core, CoreClient, wait_until
from support.core_sessions import away, drain, durable, publish
from support.properties import message_expiry, session_expiry

from mqttbroker.codec.packets import Connack, Connect, Puback, Publish, Will
from sessions.session import Session


def stored(core: Core) -> list[tuple[int, int]]:
    """The numbers of entries and messages on disk, as one row."""
    wait_until(lambda: core.store.progress().commits_behind == 0)
    connection = sqlite3.connect(core.directory / "core.db")
    try:
        query = "SELECT (SELECT count(*) FROM queue), (SELECT count(*) FROM messages)"
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def memory_of(session: Session) -> int:
    """Bytes of messages that a session holds in memory."""
    return session.deliveries.queue.memory_bytes + (0 if session.deliveries.paging is None else session.deliveries.paging.arrived_bytes)


def check_totals(core: Core) -> None:
    """The totals of the context are the sums over all sessions."""
    sessions = core.broker.registry.by_id.values()
    context = core.broker.context
    assert context.queued_messages == sum(session.deliveries.queued_messages for session in sessions)
    assert context.queued_bytes == sum(session.deliveries.queue.byte_count for session in sessions)
    everybody = core.broker.registry.sessions.values()
    assert context.memory_bytes == sum(memory_of(session) for session in everybody)


def payloads(client: CoreClient) -> list[bytes]:
    return [packet.payload for packet in client.arrived() if isinstance(packet, Publish)]


# --- one session's queue ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy, kept, cause",
    [("drop_newest", range(5), "queue_full"), ("drop_oldest", range(3, 8), "queue_full_oldest")],
)
@pytest.mark.parametrize("where", ["offline", "online", "transient"])
def test_a_full_queue_drops_by_its_policy(tmp_path: Path, policy: str, kept: range, cause: str, where: str) -> None:
    with Core(tmp_path, max_queued_messages=5, queue_full=policy) as core:
        if where == "offline":
            session = away(core, qos=1)
        else:
            client = durable(core, "sub") if where == "online" else core.connect("sub")
            client.subscribe("t/#", options=1)
            assert client.connection.session is not None
            session = client.connection.session
            client.connection.ready = False  # the socket is blocked
        publish(core, range(8))
        drops = core.control.status().drops
        assert {name for name, count in drops.items() if count} == {cause} and drops[cause] == 3
        assert session.deliveries.queued_messages == 5
        check_totals(core)
        if where == "offline":
            assert stored(core) == [(5, 5)]
            client = durable(core, "sub")
        else:
            client.connection.resume_sending()
        assert drain(client) == list(kept)
        assert session.deliveries.queued_messages == 0
        check_totals(core)


def test_drop_oldest_makes_room_in_bytes(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_bytes=2048, queue_full="drop_oldest") as core:
        session = away(core, qos=1)
        publisher = core.connect("pub")
        for letter, size in ((b"a", 900), (b"b", 900), (b"c", 100), (b"d", 1500), (b"e", 4000)):
            assert publisher.publish("t/1", letter * size, 1) == 0
        # "e" is larger than the limit of the queue, so nothing is dropped for it.
        assert [payload[:1] for payload in payloads(durable(core, "sub"))] == [b"c", b"d"]
        drops = core.control.status().drops
        assert (drops["queue_full"], drops["queue_full_oldest"], session.deliveries.queue.byte_count) == (1, 2, 3 + 100 + 3 + 1500)


def test_drop_oldest_queries_a_long_queue_in_parts(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=3000, queue_full="drop_oldest") as core:
        session = away(core, qos=1)
        publish(core, range(7500))
        assert session.deliveries.queued_messages == 3000
        assert core.control.status().drops["queue_full_oldest"] == 4500
        check_totals(core)
        assert drain(durable(core, "sub")) == list(range(4500, 7500))
        assert stored(core) == [(0, 0)]


def test_drop_oldest_keeps_messages_that_were_sent(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=3, queue_full="drop_oldest") as core:
        client = durable(core, "sub")
        client.subscribe("t/#", options=1)
        publish(core, range(3))
        assert [packet.payload for packet in client.arrived()] == [b"0", b"1", b"2"]
        client.close()
        publish(core, range(3, 6))
        assert core.control.status().drops["queue_full"] + core.control.status().drops["queue_full_oldest"] == 3
        again = durable(core, "sub")
        assert [(packet.dup, packet.payload) for packet in again.arrived()] == [(True, b"%d" % n) for n in range(3)]


def test_a_message_dropped_from_one_queue_stays_in_others(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=2, queue_full="drop_oldest") as core:
        away(core, qos=1)
        reader = durable(core, "reader")
        reader.subscribe("t/#", options=1)
        for number in range(4):
            publish(core, range(number, number + 1))
            assert drain(reader) == [number]
        assert stored(core) == [(2, 2)]
        assert drain(durable(core, "sub")) == [2, 3]
        assert stored(core) == [(0, 0)]


def test_drop_oldest_drops_nothing_while_the_first_page_is_read(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=3, queue_full="drop_oldest") as core:
        away(core, qos=1)
        publish(core, range(3))
        publisher = core.connect("pub")
        core.eager = False
        client = core.client()
        client.send(Connect("sub", 5, False, properties=session_expiry()))
        publisher.send(Publish("t/1", b"3", 1, False, False, 1))
        core.settle()
        core.eager = True
        assert client.expect(Connack).session_present
        assert drain(client) == [0, 1, 2]
        check_totals(core)
        assert stored(core) == [(0, 0)]


# --- refusal ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_for_a_full_queue_is_refused(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path, max_queued_messages=2, queue_full="refuse") as core:
        away(core)
        reader = core.connect("reader")
        reader.subscribe("t/#", options=2)
        publisher = core.connect("pub")
        assert [publisher.publish("t/1", b"%d" % n, qos) for n in range(4)] == [0, 0, 0x97, 0x97]
        assert publisher.publish("t/1", b"9", 0) == 0
        # A refused message was delivered to nobody, and may be published again.
        assert drain(reader) == [0, 1, 9]
        assert core.control.status().drops["refused"] == 2
        assert drain(durable(core, "sub")) == [0, 1]
        assert publisher.publish("t/1", b"2", qos) == 0


def test_a_refused_publisher_of_version_3_1_1_is_disconnected(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=1, queue_full="refuse") as core:
        away(core)
        publisher = core.connect("pub", 4)
        publisher.send(*(Publish("t/1", b"%d" % n, 1, False, False, n) for n in (1, 2, 3)))
        assert publisher.arrived() == [] and publisher.closed
        assert drain(durable(core, "sub")) == [1]


def test_messages_for_a_slow_transient_subscriber_are_refused(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=3, queue_full="refuse") as core:
        reader = core.connect("reader")
        reader.subscribe("t/#", options=1)
        publisher = core.connect("pub")
        assert [publisher.publish("t/1", b"", 1) for _ in range(5)] == [0, 0, 0, 0x97, 0x97]


def test_a_message_is_refused_only_if_no_group_member_has_room(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=2, queue_full="refuse") as core:
        away(core, qos=1, topic_filter="$share/g/t/#")
        member = core.connect("member")
        member.subscribe("$share/g/t/#", options=1)
        publisher = core.connect("pub")
        for number in range(4):
            assert publisher.publish("t/1", b"%d" % number, 1) == 0
            assert drain(member) == [number]
        member.disconnect()
        assert [publisher.publish("t/1", b"9", 1) for _ in range(3)] == [0, 0, 0x97]


# --- all sessions together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_total_queued_messages": 7}, {"max_total_queued_bytes": 7 * (3 + 200) + 100}])
@pytest.mark.parametrize("policy", ["drop_newest", "drop_oldest", "refuse"])
def test_the_total_of_all_queues_is_limited(tmp_path: Path, limit: dict[str, int], policy: str) -> None:
    with Core(tmp_path, queue_full=policy, **limit) as core:
        for name in ("one", "two"):
            client = durable(core, name)
            client.subscribe("t/#", options=1)
            client.disconnect()
        online = durable(core, "online")
        online.subscribe("u", "t/1", options=1)
        publisher = core.connect("pub")
        text = b"%0200d"
        for number in range(3):
            assert publisher.publish("t/1", text % number, 1) == 0 and drain(online) == [number]
        assert publisher.publish("t/1", text % 3, 1) == 0x97
        # Messages that are sent at once are still accepted.
        assert publisher.publish("u", b"4", 1) == 0 and drain(online) == [4]
        check_totals(core)
        core.kill()
        assert core.broker.context.queued_messages == 6
        assert core.connect("pub").publish("t/1", text % 5, 1) == 0x97
        assert drain(durable(core, "one")) == [0, 1, 2]
        assert core.connect("pub").publish("t/2", text % 6, 1) == 0
        durable(core, "two", clean_start=True)
        check_totals(core)


def test_a_will_that_finds_no_room_is_dropped_and_counted(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_queued_messages=1) as core:
        away(core, qos=1)
        will = Publish("t/will", b"1", 1)
        for name in ("a", "b"):
            client = core.client()
            client.connect(name, will=_will(will))
            client.close()
        assert core.broker.context.queued_messages == 1 and core.control.status().drops["total_full"] == 1


def _will(message: Publish) -> Will:
    return Will(message.topic, message.payload, message.qos, False)


def test_the_total_in_memory_is_limited(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_queue_memory_bytes=2048) as core:
        readers = [core.connect("transient"), durable(core, "kept")]
        for client in readers:
            client.subscribe("t/#", options=1)
            client.connection.ready = False
        publisher = core.connect("pub")
        for number in range(20):
            assert publisher.publish("t/1", b"%0200d" % number, 1) == 0
            assert core.broker.context.memory_bytes <= 2048
        dropped = core.control.status().drops["memory_full"]
        assert 10 <= dropped < 20
        check_totals(core)
        for client in readers:
            client.connection.resume_sending()
        core.settle()
        assert len(drain(readers[0])) == 20 - dropped
        # A durable session has the rest on disk.
        assert drain(readers[1]) == list(range(20))
        check_totals(core)
        assert core.broker.context.memory_bytes == 0


# --- message expiry -----------------------------------------------------------------------------------------------


def test_messages_of_a_disconnected_client_expire_on_disk(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        session = away(core, qos=1)
        publisher = core.connect("pub")
        for number in range(2500):
            publisher.publish("t/1", b"%d" % number, 1, properties=message_expiry(60 if number % 5 else 600))
        publisher.publish("t/1", b"2500", 1)
        core.advance(59)
        assert stored(core) == [(2501, 2501)]
        core.advance(2)
        assert stored(core) == [(501, 501)] and session.deliveries.queued_messages == 501
        check_totals(core)
        core.kill()
        core.advance(600)
        assert stored(core) == [(1, 1)]
        assert core.control.status().drops["expired"] == 500
        check_totals(core)
        assert drain(durable(core, "sub")) == [2500]


def test_a_queue_that_dropped_its_oldest_expires(tmp_path: Path) -> None:
    with Core(tmp_path, max_queued_messages=3, queue_full="drop_oldest") as core:
        away(core, qos=1)
        publisher = core.connect("pub")
        for number in range(5):
            publisher.publish("t/1", b"%d" % number, 1, properties=message_expiry(60))
        core.advance(61)
        core.advance(61)
        assert stored(core) == [(0, 0)]
        drops = core.control.status().drops
        assert (drops["queue_full_oldest"], drops["expired"]) == (2, 3)
        check_totals(core)


def test_a_connected_session_skips_expired_messages_itself(tmp_path: Path) -> None:
    with Core(tmp_path, max_queue_memory_messages=2) as core:
        away(core, qos=1)
        publisher = core.connect("pub")
        for number in range(10):
            publisher.publish("t/1", b"%d" % number, 1, properties=message_expiry(10))
        client = durable(core, "sub", window=1)
        session = client.connection.session
        assert session is not None
        assert [packet.payload for packet in client.arrived()] == [b"0"]
        core.advance(11)
        assert session.deliveries.queued_messages == 10
        client.close()
        # Its client was connected when they expired. Now they are deleted, except for the one that was sent.
        core.advance(61)
        assert session.deliveries.queued_messages == 1 and stored(core) == [(1, 1)]
        check_totals(core)
        assert [packet.payload for packet in durable(core, "sub").arrived()] == [b"0"]


def test_a_session_that_disconnects_during_the_search_has_skipped_them(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = durable(core, "sub", window=1)
        client.subscribe("t/#", options=1)
        publisher = core.connect("pub")
        for number in range(5):
            publisher.publish("t/1", b"%d" % number, 1, properties=message_expiry(10))
        core.eager = False
        core.advance(11)
        core.take()
        # The acknowledgement makes the session skip the expired messages itself.
        (sent,) = client.arrived()
        client.send(Puback(sent.packet_id))
        client.close()
        core.settle()
        assert core.control.status().drops["expired"] == 4
        check_totals(core)
        assert core.broker.context.queued_messages == 0 and stored(core) == [(0, 0)]


def test_a_message_of_two_sessions_is_deleted_with_the_second_entry(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        away(core, qos=1)
        other = durable(core, "other", window=1)
        other.subscribe("t/#", options=1)
        publisher = core.connect("pub")
        for number in range(3):
            publisher.publish("t/1", b"%d" % number, 1, properties=message_expiry(10))
        core.advance(11)
        assert stored(core) == [(3, 3)]
        assert drain(other) == [0]
        assert stored(core) == [(0, 0)]


def test_retained_messages_expire_without_a_subscriber(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        publisher = core.connect("pub")
        for number in range(1500):
            properties = message_expiry(10 if number % 2 else 1000)
            publisher.publish(f"r/{number}", b"x", 1, retain=True, properties=properties)
        for _ in range(4):
            core.advance(10)
        assert len(core.broker.retained) == 750
        core.kill()
        assert len(core.broker.retained) == 750


# --- random event sequences ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(["drop_newest", "drop_oldest", "refuse"]),
    steps=st.lists(st.sampled_from(["publish", "publish", "expiring", "come", "go", "slow", "wait", "fail", "kill"]), max_size=40),
)
def test_totals_are_right_after_random_events(tmp_path: Path, policy: str, steps: list[str]) -> None:
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with Core(
        tmp_path,
        queue_full=policy,
        max_queued_messages=5,
        max_total_queued_messages=8,
        max_queue_memory_messages=2,
        max_total_queue_memory_bytes=1024,
    ) as core:
        for name in ("one", "two"):
            client = durable(core, name)
            client.subscribe("t/#", options=1)
        publisher = core.connect("pub")
        for number, step in enumerate(steps):
            if step in ("publish", "expiring"):
                properties = message_expiry(5) if step == "expiring" else None
                publisher.publish("t/1", b"%0200d" % number, 1, properties=properties)
            elif step == "come":
                drain(durable(core, "one"))
            elif step == "slow":
                durable(core, "two", window=1).arrived()
            elif step == "go":
                for client in core.clients:
                    if client is not publisher and not client.closed:
                        client.close()
            elif step == "wait":
                core.advance(6)
            elif step == "fail":
                core.eager = False
                publisher.send(Publish("t/1", b"f", 1, False, False, 60000))
                core.fail()
                core.eager = True
                core.settle()
                publisher.arrived()
            elif step == "kill":
                core.kill()
                publisher = core.connect("pub")
            check_totals(core)
        for name in ("one", "two"):
            drain(durable(core, name))
        check_totals(core)
        assert core.broker.context.queued_messages == 0 and stored(core) == [(0, 0)]
