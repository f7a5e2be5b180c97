"""Work that one packet can cause is cut into parts: builds of long routes, and SUBSCRIBE and UNSUBSCRIBE packets."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core import Core, CoreClient
from support.core_sessions import durable

from mqttbroker.codec.packets import (
    Disconnect,
    Pingreq,
    Puback,
    Publish,
    Pubrec,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
)
from mqttbroker.codec.properties import Properties
from mqttbroker.core.routing.groups import RoundRobin
from mqttbroker.core.routing.route import Route
from mqttbroker.core.routing.router import MAX_BUILDS, Router
from sessions import session as session_module
from sessions.context import SessionContext, SessionLimits
from sessions.journal import Journal
from sessions.session import NO_LOCAL, Session
from topic_matcher.trie import SubscriptionTrie

LEVELS = 12
TOPIC = "/".join(["a"] * LEVELS)
OVERLAPPING = ["/".join(levels) for levels in product("a+", repeat=LEVELS)]  # all of them match TOPIC
CONTEXT = SessionContext(Journal(True), SessionLimits())


def overlap(core: Core, client: CoreClient, options: int = 0, identifiers: bool = False) -> None:
    """Subscribe to all overlapping filters."""
    for start in range(0, len(OVERLAPPING), 1000):
        properties = Properties()
        if identifiers:
            properties.subscription_identifiers.append(start + 1)
        part = [Subscription(name, options) for name in OVERLAPPING[start : start + 1000]]
        client.send(Subscribe(1, part, properties))
        assert set(client.expect(Suback).reason_codes) == {options & 3}


# --- the search ---------------------------------------------------------------------------------------------------


LEVEL = st.sampled_from(["a", "b", "+"])
FILTER = st.lists(LEVEL, min_size=1, max_size=5).map("/".join) | st.sampled_from(["#", "a/#", "+/b/#", "+/+/#"])


@given(st.lists(FILTER, max_size=40), st.lists(st.sampled_from("ab"), min_size=1, max_size=5), st.integers(1, 9))
def test_a_search_in_steps_finds_what_a_whole_one_finds(filters: list[str], levels: list[str], budget: int) -> None:
    trie = SubscriptionTrie()
    for number, name in enumerate(filters):
        trie.insert(name, number % 7, number)
    topic = "/".join(levels)
    search = trie.search(topic)
    steps = 0
    while not search.done:
        assert search.step(budget) <= budget + 12  # at most one node too many
        steps += 1
        assert steps < 1000
    assert sorted(map(repr, search.found)) == sorted(map(repr, trie.match(topic)))


# --- routes in parts ----------------------------------------------------------------------------------------------


def router_with(options: int = 0) -> tuple[Router, Session]:
    router = Router(100, 1 << 30, 20, 100, [], RoundRobin())
    subscriber = Session(CONTEXT, 0, "s")
    for number, name in enumerate(OVERLAPPING):
        no_local = NO_LOCAL if number % 3 == 0 else 0
        router.subscribe(session_module.Subscription(subscriber, name, options | no_local, number + 1))
    return router, subscriber


def built(router: Router, publisher: object, between: Any = None) -> tuple[Route, int]:
    """The route of TOPIC, and the number of parts; ``between`` is called once, after the first part."""
    parts = 0
    route: Route | None = None
    while route is None:
        router.work = 0
        route = router.route_in_parts(TOPIC.encode(), publisher)
        assert router.work < 2100
        parts += 1
        if parts == 1 and between is not None:
            between()
    return route, parts


def test_a_route_in_parts_equals_a_whole_one() -> None:
    router, subscriber = router_with(1)
    route, parts = built(router, "p")
    assert parts > 3
    whole = router_with(1)[0].route(TOPIC.encode())
    assert router.route(TOPIC.encode()) is route  # it is cached
    for found in (route, whole):
        (target,) = found.targets
        assert (target.qos, target.no_local, target.zero_copy) == (1, True, False)
        assert len(target.subscription_ids) > 2 * len(OVERLAPPING)
        (own,) = found.targets_for(target.session)
        assert len(own.subscription_ids) > len(OVERLAPPING) and not own.zero_copy
    assert sorted(route.targets[0].subscription_ids) == sorted(whole.targets[0].subscription_ids)


def test_a_route_is_not_cached_if_a_matching_subscription_changed_meanwhile() -> None:
    for topic_filter in ("#", TOPIC, OVERLAPPING[5]):
        router, subscriber = router_with()
        other = Session(CONTEXT, 0, "other")
        new = session_module.Subscription(other, topic_filter, 0, 0)
        route, _ = built(router, "p", lambda: router.subscribe(new))
        assert route.revision == -1 and TOPIC.encode() not in router.cache
        assert {target.session for target in router.route(TOPIC.encode()).targets} == {subscriber, other}
    router, _ = router_with()
    route, _ = built(router, "p", lambda: router.subscribe(session_module.Subscription(other, "b/#", 0, 0)))
    assert router.cache[TOPIC.encode()] is route


def test_a_session_that_ends_meanwhile_is_no_target() -> None:
    router, subscriber = router_with()

    def end() -> None:
        for name in OVERLAPPING:
            router.unsubscribe(session_module.Subscription(subscriber, name, 0, 0))
        subscriber.end()

    route, _ = built(router, "p", end)
    assert not route.matched


def test_unfinished_builds_are_few_and_end_with_their_publishers() -> None:
    router, _ = router_with()
    for number in range(3 * MAX_BUILDS):
        router.work = 0
        assert router.route_in_parts(TOPIC.encode(), number) is None
    assert len(router._builds) == MAX_BUILDS
    for _ in range(10):
        router.tick(100)
    assert not router._builds
    assert built(router, "late")[1] > 3


# --- publishers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_publisher_waits_for_its_route_and_others_do_not(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("sub")
        overlap(core, subscriber, 2)
        subscriber.subscribe("b", options=0)
        publisher, other = core.connect("pub"), core.connect("other")
        core.eager = False
        numbers = range(1, 4)
        publisher.send(*(Publish(TOPIC, b"%d" % n, qos, False, False, n if qos else 0) for n in numbers), Pingreq())
        assert publisher.connection.halted and publisher.connection.blocked
        assert not subscriber.arrived() and not publisher.arrived()
        other.send(Publish("b", b"quick", 0))
        assert [packet.payload for packet in subscriber.arrived()] == [b"quick"]
        core.settle()
        assert [packet.payload for packet in subscriber.arrived()] == [b"1", b"2", b"3"]
        assert core.broker.outbound.counters.publish_received == 4
        answers = [type(packet) for packet in publisher.arrived()]
        assert answers[:-1] == [{1: Puback, 2: Pubrec}[qos]] * 3 if qos else len(answers) == 1
        assert not publisher.connection.blocked


def test_a_long_message_waits_for_its_route(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("sub")
        overlap(core, subscriber, 1)
        publisher = core.connect("pub")
        core.eager = False
        payload = bytes(range(256)) * 4000
        packet = Publish(TOPIC, payload, 1, False, False, 7).encode(5) + Publish("b", b"", 1, False, False, 8).encode(5)
        for start in range(0, len(packet), 100_000):
            publisher.send(packet[start : start + 100_000])
        assert publisher.connection.halted and not subscriber.arrived()
        core.settle()
        (message,) = subscriber.arrived()
        assert message.payload == payload
        assert [answer.packet_id for answer in publisher.arrived()] == [7, 8]


def test_data_that_arrives_while_a_publisher_waits_is_kept(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("sub")
        overlap(core, subscriber)
        publisher = core.connect("pub")
        core.eager = False
        stream = b"".join(Publish(TOPIC, b"%d" % n, 0).encode(5) for n in range(5)) + b"\xc0\0"
        for position in range(len(stream)):
            publisher.send(stream[position : position + 1])
        core.settle()
        assert [packet.payload for packet in subscriber.arrived()] == [b"0", b"1", b"2", b"3", b"4"]
        assert len(publisher.arrived()) == 1


def test_a_publisher_that_sets_an_alias_waits_for_its_route(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("sub")
        overlap(core, subscriber, 0, identifiers=True)
        publisher = core.connect("pub")
        properties = Properties()
        properties.topic_alias = 3
        publisher.send(Publish(TOPIC, b"1", 0, properties=properties), Publish("", b"2", 0, properties=properties))
        messages = subscriber.arrived()
        assert [message.payload for message in messages] == [b"1", b"2"]
        assert len(messages[0].properties.subscription_identifiers) == len(OVERLAPPING)


def test_a_message_of_a_publisher_that_is_gone_is_dropped_with_it(tmp_path: Path) -> None:
    """The broker closed the connection of a publisher that waits: as of other unread packets, nothing is left."""
    with Core(tmp_path) as core:
        subscriber = core.connect("sub")
        overlap(core, subscriber)
        publisher = core.connect("pub")
        core.eager = False
        publisher.send(Publish(TOPIC, b"1", 0))
        core.connect("pub")
        core.settle()
        assert not [packet for packet in subscriber.arrived() if isinstance(packet, Publish)]


def test_many_new_topics_are_routed_in_parts(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("sub")
        subscriber.subscribe("t/#", options=0)
        publisher = core.connect("pub")
        core.eager = False
        publisher.send(*(Publish(f"t/{number}", b"", 0) for number in range(2000)))
        assert publisher.connection.halted and 0 < len(subscriber.arrived()) < 2000
        core.settle()
        assert len(subscriber.arrived()) > 1000
        # Topics with a cached route cost no work.
        publisher.send(*(Publish(f"t/{number}", b"", 0) for number in range(2000)))
        assert not publisher.connection.halted


# --- SUBSCRIBE and UNSUBSCRIBE ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("make", [
    lambda filters: Subscribe(1, [Subscription(name, 0) for name in filters]),
    lambda filters: Unsubscribe(1, filters),
], ids=["subscribe", "unsubscribe"])  # fmt: skip
def test_filters_per_packet_are_limited(tmp_path: Path, version: int, make: Any) -> None:
    with Core(tmp_path, max_filters_per_packet=10) as core:
        client = core.connect("sub", version)
        for names in ([str(number) for number in range(10)], ["x" * 1000] * 10):
            client.send(make(names))
            (answer,) = client.arrived()
            assert isinstance(answer, (Suback, Unsuback))
        client.send(make([str(number) for number in range(11)]))
        packets = client.arrived()
        assert client.closed
        assert [packet.reason_code for packet in packets if isinstance(packet, Disconnect)] == [0x97] * (version == 5)


def test_subscriptions_are_handled_in_parts(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = durable(core, "sub")
        core.eager = False
        packets = [Subscribe(number, [Subscription(f"{number}/{index}", 1) for index in range(100)]) for number in range(1, 21)]
        client.send(*packets, Pingreq())
        session = client.connection.session
        assert session is not None and client.connection.halted and 0 < len(session.subscriptions) < 2000
        core.settle()
        assert len(session.subscriptions) == 2000 and len(client.arrived()) == 21
