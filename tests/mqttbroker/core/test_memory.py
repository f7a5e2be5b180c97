"""The memory of all parts, and the stages of refusal near ``max_memory``."""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.chains import Scripted
from support.core import Core, CoreClient
from support.core_sessions import durable

from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Puback,
    Publish,
    Pubrec,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.core.access.policy import AnonymousPolicy, AuthenticationChain, Identity
from mqttbroker.core.routing.router import RECORDED_BYTES
from mqttbroker.core.terms.memory_stage import NO_CONNECTIONS, NO_STATE, NORMAL, SHEDDING
from mqttbroker.server.assembly import apply_limits
from mqttbroker.system.memory_limit import available_memory

MIB = 1 << 20


def set_used(core: Core, per_cent: float) -> int:
    """Have the process take this share of ``max_memory``; returns the stage."""
    core.broker.memory.sampled(int(core.broker.terms.max_memory * per_cent / 100))
    core.advance(0.25)
    return core.broker.memory_stage.stage


def held(core: Core, part: str) -> int:
    return next(found.held for found in core.broker.memory.parts() if found.name == part)


def suback_codes(client: CoreClient, topic_filter: str) -> list[int]:
    return client.subscribe(topic_filter, options=0).reason_codes


def kinds_of(client: CoreClient) -> list[tuple[str, int]]:
    return [(type(packet).__name__, packet.reason_code) for packet in client.arrived()]


def without_answers(core: Core) -> Scripted:
    """Have the broker ask an authenticator that answers nobody."""
    authenticator = Scripted("silent", None)
    core.policy = AuthenticationChain([authenticator], AnonymousPolicy(True))
    return authenticator


# --- the stages ---------------------------------------------------------------------------------------------------


def test_each_stage_begins_at_its_share_and_ends_below_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        assert core.broker.memory.reason() == ""
        shares = (79, 80, 76, 75, 74, 88, 84, 82, 95, 91, 90, 89, 50, 100, 10)
        stages = [set_used(core, share) for share in shares]
        assert stages == [0, 1, 1, 1, 0, 2, 2, 1, 3, 3, 3, 2, 0, 3, 0]
        lines = [record.getMessage() for record in caplog.records if "event=memory_stage" in record.getMessage()]
        assert len(lines) == 9  # one for each change, however many stages it passes
        assert "stage=shedding from=normal" in lines[-2] and "stage=normal from=shedding" in lines[-1]
        set_used(core, 90)
        assert core.broker.memory.reason() == "memory: 90 % of max_memory is used, stage no_state"


def test_there_is_no_stage_without_a_limit(tmp_path: Path) -> None:
    with Core(tmp_path, max_memory=None) as core:
        core.broker.memory.sampled(1 << 50)
        core.advance(1)
        assert core.broker.memory_stage.stage == NORMAL and core.broker.memory.reason() == ""


def test_what_is_counted_leads_to_a_stage_in_the_same_iteration(tmp_path: Path) -> None:
    """`Memory.check` is called with each flush, not only with each tick."""
    with Core(tmp_path, max_memory=64 * MIB) as core:
        publisher = core.connect("p")
        for number in range(6):
            publisher.publish(f"t/{number}", b"x" * 9 * MIB, 1, retain=True)
        core.broker.memory.check()
        assert core.broker.memory_stage.stage == NO_CONNECTIONS


def test_what_is_counted_since_the_last_sample_adds_to_the_memory_of_the_process(tmp_path: Path) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        memory = core.broker.memory
        publisher = core.connect("p")
        memory.sampled(790 * MIB)
        for number in range(2):
            publisher.publish(f"t/{number}", b"x" * 9 * MIB, 1, retain=True)
        memory.check()
        assert 808 * MIB < memory.used < 809 * MIB and memory.state.stage == NO_CONNECTIONS
        memory.sampled(791 * MIB)  # the messages are where freed memory was
        assert memory.used == 791 * MIB
        publisher.publish("t/0", b"", 1, retain=True)  # it is not known whether the process gives memory back
        memory.check()
        assert memory.used == 791 * MIB


@pytest.mark.parametrize("version, code", [(5, 0x97), (4, 3)])
def test_new_connections_are_refused_first(tmp_path: Path, version: int, code: int) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        client = core.connect("here", version)
        assert set_used(core, 85) == NO_CONNECTIONS
        stranger = core.client(version)
        assert stranger.connect("stranger").reason_code == code and stranger.closed
        # A connected client goes on as before, and may replace its connection.
        assert suback_codes(client, "a/#") == [0]
        client.publish("a/1", b"x", 1, retain=True)
        again = core.connect("here", version)
        assert client.closed and not again.closed
        assert core.broker.memory_stage.refused_connections == 1
        assert set_used(core, 70) == NORMAL
        core.connect("stranger", version)


@pytest.mark.parametrize("version, code", [(5, 0x97), (4, 0x80)])
def test_new_state_is_refused_next(tmp_path: Path, version: int, code: int) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        client = core.connect("c", version, will=Will("w", b"long"))
        client.subscribe("a/#", options=1)
        publisher = core.connect("p")
        publisher.publish("a/1", b"four", 1, retain=True)
        client.arrived()
        assert set_used(core, 90) == NO_STATE
        suback = client.subscribe("a/#", "b/#", options=1)
        assert suback.reason_codes == [1, code]
        client.arrived()
        assert publisher.publish("a/2", b"x", 1, retain=True) == 0x97
        assert publisher.publish("a/1", b"longer", 1, retain=True) == 0x97
        assert publisher.publish("a/1", b"less", 1, retain=True) == 0
        assert publisher.publish("a/3", b"x", 1) == 0
        assert [packet.topic for packet in client.arrived()] == ["a/1", "a/3"]
        assert publisher.publish("a/1", b"", 1, retain=True) == 0  # frees memory
        refused = core.client(version)
        assert refused.connect("c", will=Will("w", b"longer")).reason_code == (0x97 if version == 5 else 3)
        core.connect("c", version, will=Will("w", b"less"))
        stage = core.broker.memory_stage
        assert (stage.refused_subscriptions, stage.refused_retained, stage.refused_wills) == (1, 2, 1)
        assert set_used(core, 74) == NORMAL
        assert publisher.publish("a/2", b"x", 1, retain=True) == 0x10


def test_shedding_drops_qos_0_only_for_clients_that_do_not_read(tmp_path: Path) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        publisher, reading, blocked = (core.connect(name) for name in ("p", "reading", "blocked"))
        for client in (reading, blocked):
            client.subscribe("t", options=0)
        blocked.connection.outbox.pause()
        publisher.publish("t", b"kept")
        assert set_used(core, 97) == SHEDDING
        publisher.publish("t", b"dropped for one")
        assert [packet.payload for packet in reading.arrived()] == [b"kept", b"dropped for one"]
        drops = core.control.status().drops
        assert (drops["memory"], drops["slow_subscriber"]) == (1, 0)
        set_used(core, 50)
        publisher.publish("t", b"after")
        assert [packet.payload for packet in blocked.arrived()] == [b"kept", b"after"]


def test_shedding_queues_for_persistent_sessions_on_disk_only(tmp_path: Path) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        publisher = core.connect("p")
        client = durable(core, "slow", window=1)
        client.subscribe("t", options=1)
        prompt = core.connect("prompt")
        prompt.subscribe("t", options=1)
        assert set_used(core, 97) == SHEDDING
        for number in range(20):
            assert publisher.publish("t", b"%d" % number, 1) == 0
            assert prompt.expect(Publish).payload == b"%d" % number
        assert held(core, "queues") == 0
        # Nothing that was acknowledged is lost.
        received = []
        while packets := [packet for packet in client.arrived() if isinstance(packet, Publish)]:
            received += [packet.payload for packet in packets]
            client.send(Puback(packets[-1].packet_id))
        assert received == [b"%d" % number for number in range(20)]


def test_shedding_pauses_publishers_to_clients_that_lag(tmp_path: Path) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        publisher = core.connect("p")
        client = durable(core, "slow", window=1)
        client.subscribe("t", options=1)
        set_used(core, 97)
        for _ in range(4):
            publisher.publish("t", b"x", 1)
        assert publisher.connection.paused_by is not None
        monitor = core.broker.context.backpressure_monitor
        monitor.check()
        monitor.check()
        assert publisher.connection.paused_by is None  # not for ever


def test_a_reload_applies_in_the_stage_in_force(tmp_path: Path) -> None:
    with Core(tmp_path, max_memory=1000 * MIB) as core:
        assert set_used(core, 97) == SHEDDING
        limits = replace(core.settings.limits, max_total_outbox_bytes=12345)
        apply_limits(core.broker, replace(core.settings, limits=limits))
        assert core.broker.outbound.max_blocked == 0
        set_used(core, 10)
        assert core.broker.outbound.max_blocked == 12345
        limits = replace(limits, max_memory=10_000 * MIB)
        set_used(core, 97)
        apply_limits(core.broker, replace(core.settings, limits=limits))
        assert core.broker.memory_stage.stage == NORMAL


# --- the parts ----------------------------------------------------------------------------------------------------


def test_the_sum_is_that_of_all_parts(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_queue_memory_bytes=1 << 30) as core:
        publisher = core.connect("p", will=Will("w", b"x" * 100))
        slow = durable(core, "slow", window=1)
        slow.subscribe("+/1", "$share/g/+/1", options=2)
        for number in range(10):
            publisher.publish("t/1", b"x" * 100, 1, retain=True)
            publisher.publish(f"t/{number}/x", b"x" * 100, 1, retain=True)
        broken = core.connect("broken")
        broken.send(Publish("t", b"x" * 9000, 0).encode(5)[:8000])
        parts = core.broker.memory.parts()
        assert sum(part.held for part in parts) == core.broker.memory.held
        empty = {part.name for part in parts if part.held == 0}
        assert empty == {"outboxes", "connects", "aliases", "decisions", "pending_writes", "unapplied", "stream_chunks"}


def test_subscriptions_are_bounded_together(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_subscription_bytes=3000) as core:
        clients = [core.connect(f"c{number}") for number in range(3)]
        codes = [suback_codes(client, f"a/{number}") for number in range(3) for client in clients]
        accepted = codes.count([0])
        assert 3 < accepted < 9 and codes.count([0x97]) == 9 - accepted
        assert 2500 < held(core, "subscriptions") <= 3000
        assert core.control.status().limits_reached == {"max_total_subscription_bytes": 9 - accepted}
        assert suback_codes(clients[0], "a/0") == [0]  # it exists
        clients[0].unsubscribe("a/0")
        assert suback_codes(clients[1], "b") == [0]
        for client in clients:
            client.close()
        assert held(core, "subscriptions") == 0


def test_sessions_are_bounded_together(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_session_bytes=10_000) as core:
        for number in range(2):
            durable(core, "x" * 4000 + str(number)).close()
        durable(core, "z" * 4000).close()  # the last one may exceed the limit
        refused = core.client(5)
        assert refused.connect("short").reason_code == 0x97 and refused.closed
        durable(core, "x" * 4000 + "1").disconnect()  # a known one may return
        core.kill()
        assert held(core, "sessions") > 9000
        for session in list(core.broker.registry.sessions.values()):
            core.broker.lifecycle.end(session)
        assert held(core, "sessions") == 0


def test_packet_ids_of_qos_2_count_as_sessions(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_session_bytes=8000, receive_maximum=100) as core:
        clients = [core.connect(f"c{number}") for number in range(2)]
        refused: list[int] = []
        for client in clients:
            client.send(*(Publish("t", b"x", 2, False, False, packet_id) for packet_id in range(1, 91)))
            codes = [client.wait_for(Pubrec).reason_code for _ in range(90)]
            refused.append(codes.count(0x97))
            assert codes[:16] == [0x10] * 16  # each client may have a few
        assert refused[0] > 0 and refused[1] > 50
        assert held(core, "sessions") < 8000 + 20 * 80
        for client in clients:
            client.close()
        assert held(core, "sessions") == 0


def test_messages_in_flight_are_bounded_together(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_in_flight_bytes=5000) as core:
        publisher = core.connect("p")
        clients = [durable(core, f"c{number}") for number in range(3)]
        for client in clients:
            client.subscribe("t", options=1)
        for number in range(10):
            publisher.publish("t", b"%d" % number + b"x" * 999, 1)
        assert 4000 < held(core, "in_flight") < 5000 + 2 * 1500
        sent = [[packet for packet in client.arrived() if isinstance(packet, Publish)] for client in clients]
        assert all(sent)  # each client has one at least
        for client, packets in zip(clients, sent):
            while len(packets) < 10:
                client.send(Puback(packets[-1].packet_id))
                packets += [packet for packet in client.arrived() if isinstance(packet, Publish)]
            assert [packet.payload[:1] for packet in packets] == [b"%d" % number for number in range(10)]
        for client in clients:
            client.close()
        assert held(core, "in_flight") == 0


def test_a_replaced_retained_message_counts(tmp_path: Path) -> None:
    with Core(tmp_path, max_retained_bytes=10_000) as core:
        client = core.connect("c")
        for number in range(5):
            assert client.publish(f"t/{number}", b"x", 1, retain=True) == 0x10
        codes = [client.publish(f"t/{number}", b"x" * 4000, 1, retain=True) for number in range(5)]
        assert codes.count(0x97) == 3 and core.broker.retained.size < 10_000


def test_wills_do_not_exceed_the_retained_messages(tmp_path: Path) -> None:
    with Core(tmp_path, max_retained_bytes=10_000) as core:
        watcher = core.connect("watcher")
        watcher.subscribe("t/+", options=0)
        for number in range(5):
            core.connect(f"c{number}", will=Will(f"t/{number}", b"x" * 4000, 0, True)).close()
        assert len(watcher.arrived()) == 5  # all are published
        assert len(core.broker.retained) == 2
        assert core.control.status().drops["retained_full"] == 3


def test_rows_of_a_failing_disk_are_counted(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = durable(core, "c")
        core.eager = False
        for number in range(3):
            topic_filter = f"{number}" + "x" * 10_000
            client.send(Subscribe(number + 1, [Subscription(topic_filter, 0)]), Unsubscribe(number + 4, [topic_filter]))
            core.fail()
            assert client.closed
            client = durable(core, "c")
        assert held(core, "pending_writes") > 30_000
        assert core.broker.journal.size < 15_000  # the others do not stop clients from being read
        core.settle()
        assert held(core, "pending_writes") == 0


def test_the_default_is_a_share_of_the_memory_there_is(tmp_path: Path) -> None:
    available = available_memory()
    assert available is not None
    with Core(tmp_path) as core:
        assert core.broker.terms.max_memory == available * 60 // 100


def test_connects_that_wait_are_bounded_together(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_connect_bytes=20_000) as core:
        requests = without_answers(core).asked
        fields = {"username": "u", "password": b"x" * 8000}
        waiting = [core.client() for _ in range(2)]
        for number, client in enumerate(waiting):
            client.send(Connect(f"c{number}", **fields))
        assert 16_000 < held(core, "connects") < 17_000
        refused = core.client()
        assert refused.connect("c2", **fields).reason_code == 0x97
        short = core.client()  # always has room
        short.send(Connect("short", username="u", password=b"x"))
        assert not short.closed
        waiting[0].close()
        assert 8000 < held(core, "connects") < 9000
        requests[1].accept(Identity(None))
        assert waiting[1].expect(Connack).reason_code == 0 and held(core, "connects") == 0


def test_empty_user_properties_count_with_the_memory_that_they_take(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        without_answers(core)
        properties = Properties()
        properties.user_properties += [("", "")] * 1000
        core.client().send(Connect("c", properties=properties))
        assert held(core, "connects") > 100_000


def test_topic_aliases_are_bounded_together(tmp_path: Path) -> None:
    def aliased(topic: str, alias: int) -> bytes:
        properties = Properties()
        properties.topic_alias = alias
        return Publish(topic, b"x", properties=properties).encode(5)

    with Core(tmp_path, max_total_alias_bytes=50_000) as core:
        greedy, modest = core.connect("greedy"), core.connect("modest")
        for alias in (1, 2, 3):
            greedy.send(aliased("t/" + "x" * 15_000 + str(alias), alias))
        assert 45_000 < held(core, "aliases") < 50_000
        greedy.send(aliased("t/" + "x" * 15_000 + "1", 1), aliased("", 2), aliased("short", 3))  # the last one replaces
        assert 30_000 < held(core, "aliases") < 32_000
        greedy.send(aliased("t/" + "x" * 15_000, 3))
        for alias in range(1, 10):
            modest.send(aliased(f"modest/{alias}", alias))  # always has room
        assert not greedy.closed and not modest.closed
        greedy.send(aliased("t/" + "x" * 15_000, 4))
        assert kinds_of(greedy) == [("Disconnect", 0x97)]
        modest.send(aliased("", 9))
        greedy.close()
        assert 0 < held(core, "aliases") < 2000 and not modest.closed
        assert core.control.status().limits_reached["max_total_alias_bytes"] == 1


def test_no_alias_is_sent_for_which_there_is_no_room(tmp_path: Path) -> None:
    properties = Properties()
    properties.topic_alias_maximum = 10
    with Core(tmp_path, max_total_alias_bytes=50_000) as core:
        client, publisher = core.connect("c", properties=properties), core.connect("p")
        client.subscribe("#", options=0)
        topics = ["t/" + "x" * 15_000 + str(number) for number in range(6)]
        for topic in topics + topics:
            publisher.publish(topic, b"x")
        received = client.arrived()
        assert [packet.properties.topic_alias for packet in received] == [1, 2, 3, 4, -1, -1] + [1, 2, 3, -1, -1, -1]
        assert [packet.topic for packet in received[6:]] == ["", "", ""] + topics[3:]
        assert 45_000 < held(core, "aliases") <= 50_000
        client.close()
        assert held(core, "aliases") == 0


def test_a_client_that_does_not_read_its_answers_is_not_read(tmp_path: Path) -> None:
    with Core(tmp_path, max_total_outbox_bytes=200_000) as core:
        client, other = core.connect("c"), core.connect("other")
        client.connection.outbox.pause()
        other.connection.outbox.pause(200_001)
        assert not client.connection.blocked
        client.send(b"\xc0\x00" * 3000)
        assert client.connection.blocked and held(core, "outboxes") > 200_000 + 3000 * 40
        other.connection.outbox.resume()
        assert not client.connection.blocked  # up to max_outbox_bytes


def test_changed_filters_are_recorded_within_a_bound(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c")
        client.publish("t/1", b"x", 1)
        for number in range(300):
            topic_filter = f"{number}/" + "x" * 60_000 + "/#"
            client.subscribe(topic_filter, options=0)
            client.unsubscribe(topic_filter)
        recorded = [len(trie) for trie in (core.broker.router._changes._older, core.broker.router._changes._newer)]
        assert 0 < sum(recorded) < 2 * (RECORDED_BYTES // 120_000 + 1)
        client.subscribe("t/#", options=1)
        assert client.publish("t/1", b"x", 1) == 0  # the cached route is not out of date


def test_a_will_for_the_session_that_ends_is_not_counted_for_ever(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c", will=Will("will", b"x", 1))
        client.subscribe("will", options=1)
        client.close()
        assert held(core, "queues") == held(core, "sessions") == 0


def test_clients_that_come_and_go_with_new_topics_take_no_more_memory_once_the_route_cache_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topics = 100
    caplog.set_level(logging.ERROR, "mqttbroker")  # pytest keeps what is logged
    with Core(tmp_path, durability="off", route_cache_size=topics) as core:
        number = 0

        def churn(connects: int) -> int:
            """Returns the objects that Python has then."""
            nonlocal number
            for _ in range(connects):
                name = number * 7 % 20
                client = core.connect(f"c{name}", 4, clean_start=name % 10 >= 3)
                client.send(Subscribe(1, [Subscription(f"a/{name}/#", 1)]), Publish(f"a/{name}/x{number}", b"x", 0))
                client.close()
                core.clients.clear()
                core.broker.outbound.flush_queue.clear()  # there is no socket
                number += 1
                if number % 10 == 0:
                    core.advance(1)
            gc.collect()  # the test's own clients
            return sys.getallocatedblocks()

        churn(10 * topics)
        parts = {part.name: part.held for part in core.broker.memory.parts()}
        full = churn(10 * topics)
        assert len(core.broker.router.cache) <= topics
        last = churn(20 * topics)
        after = {part.name: part.held for part in core.broker.memory.parts()}
        assert after["route_cache"] < 1.2 * parts["route_cache"] < 200_000
        del parts["route_cache"], after["route_cache"]
        assert after == parts
        assert last < full + 5 * topics, "an object or more of every fourth client stays"
