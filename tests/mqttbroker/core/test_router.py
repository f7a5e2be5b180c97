"""Routes: the cache says at any moment what the subscriptions say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.groups import Strategy
from mqttbroker.core.router import CHANGES, EVICTED, Changes, Router, StreamRule
from sessions.context import SessionContext, SessionLimits
from sessions.journal import Journal
from sessions.session import NO_LOCAL, Session, Subscription
from topic_matcher.filters import matches

CONTEXT = SessionContext(Journal(True), SessionLimits(10, 10, 1000, 10, 1000))


def make(cache_size: int = 100, streams: list[StreamRule] | None = None) -> Router:
    return Router(cache_size, 10, 50, streams or [], Strategy())


def session(name: str) -> Session:
    return Session(CONTEXT, 0, name)


LEVEL = st.sampled_from(["a", "b", "$s", ""])
TOPIC = st.lists(LEVEL, min_size=1, max_size=3).map("/".join).filter(bool)
FILTER = st.lists(st.sampled_from(["a", "b", "+", ""]), min_size=1, max_size=3).map("/".join).filter(bool) | st.sampled_from(
    ["#", "a/#", "+/b/#", "$s/#", "/#"]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("subscribe unsubscribe route".split()), FILTER, TOPIC, st.integers(0, 2)), max_size=40),
    st.integers(1, 20),
)
def test_routes_against_a_plain_model(steps: list[tuple[str, str, str, int]], cache_size: int) -> None:
    router = make(cache_size)
    sessions = [session(name) for name in "xyz"]
    model: dict[tuple[int, str], Subscription] = {}
    for index, (step, topic_filter, topic, number) in enumerate(steps):
        if step == "subscribe":
            subscription = Subscription(sessions[number], topic_filter, index % 3, index + 1)
            router.subscribe(subscription)
            model[(number, topic_filter)] = subscription
        elif step == "unsubscribe":
            known = model.pop((number, topic_filter), None)
            if known is not None:
                router.unsubscribe(known)
        route = router.route(topic.encode())
        wanted = {}
        for (who, name), subscription in model.items():
            if matches(name, topic):
                wanted[who] = max(wanted.get(who, 0), subscription.qos)
        assert {sessions.index(target.session): target.qos for target in route.targets} == wanted
        assert route.matched == bool(wanted)
        assert router.route(topic.encode()) is route
        assert len(router.cache) <= cache_size
    assert router.subscriptions == len(model)


def test_only_the_topics_that_a_filter_matches_leave_the_cache() -> None:
    router = make()
    routes = {topic: router.route(topic) for topic in (b"a/1", b"a/2", b"b/1")}
    router.subscribe(Subscription(session("s"), "a/1", 0, 0))
    assert [router.route(topic) is route for topic, route in routes.items()] == [False, True, True]
    router.subscribe(Subscription(session("s"), "a/+", 0, 0))
    assert [router.route(topic) is route for topic, route in routes.items()] == [False, False, True]


def test_overlapping_subscriptions_of_a_session_are_one_target() -> None:
    router = make()
    client = session("s")
    router.subscribe(Subscription(client, "a", 0 | NO_LOCAL, 1))
    router.subscribe(Subscription(client, "#", 2, 200))
    router.subscribe(Subscription(client, "+", 1 | 8 | NO_LOCAL, 0))
    (target,) = router.route(b"a").targets
    assert (target.qos, target.retain_as_published, target.plain) == (2, True, False)
    identifiers = {b"\x0b\x01", b"\x0b\xc8\x01"}
    assert target.subscription_ids in {a + b for a in identifiers for b in identifiers - {a}}
    assert target.own is not None and target.own is not target
    assert (target.own.qos, target.own.subscription_ids) == (2, b"\x0b\xc8\x01")


def test_no_local_alone_leaves_nothing_of_ones_own() -> None:
    router = make()
    router.subscribe(Subscription(session("s"), "a", NO_LOCAL, 0))
    (target,) = router.route(b"a").targets
    assert target.own is None


@pytest.mark.parametrize(
    "topic, code",
    [(b"", 0x81), (b"a/+", 0x81), (b"#", 0x81), (b"a\0", 0x81), (b"\xff", 0x81), (b"a\n", 0x81), (b"x" * 51, 0x90), (b"/" * 10, 0x90)],
)
def test_names_that_are_none(topic: bytes, code: int) -> None:
    router = make()
    with pytest.raises(MQTTError) as caught:
        router.route(topic)
    assert caught.value.reason_code == code and not router.cache


@pytest.mark.parametrize("topic, reserved", [(b"$SYS", True), (b"$SYS/a", True), (b"$SYSTEM", False), (b"a/$SYS", False), (b"$share/g/a", True), (b"$share", False)])
def test_sys_is_reserved(topic: bytes, reserved: bool) -> None:
    assert make().route(topic).reserved is reserved


def test_groups_come_and_go_with_their_members() -> None:
    router = make()
    one, two = session("1"), session("2")
    router.join("g", "a/#", Subscription(one, "$share/g/a/#", 1, 0))
    router.join("g", "a/#", Subscription(two, "$share/g/a/#", 1, 0))
    router.join("h", "a/#", Subscription(two, "$share/h/a/#", 1, 0))
    router.join("g", "a/#", Subscription(one, "$share/g/a/#", 2, 0))
    route = router.route(b"a/1")
    assert sorted((group.name, len(group.members)) for group in route.groups) == [("g", 2), ("h", 1)]
    assert not route.targets and route.matched and router.subscriptions == 2
    for member in (one, two, two):
        router.leave("g", "a/#", member)
    router.leave("h", "a/#", two)
    assert not router.route(b"a/1").matched and not router.groups and router.subscriptions == 0


def test_streams_are_part_of_a_route_once() -> None:
    rules = [StreamRule("s", ["a/#", "a/1"], 4, "topic"), StreamRule("c", ["#"], 4, "client")]
    router = make(streams=rules)
    sinks = {sink.rule.name: sink.partition for sink in router.route(b"a/1").streams}
    assert sorted(sinks) == ["c", "s"] and sinks["c"] == -1 and 0 <= sinks["s"] < 4
    assert len(router.route(b"a/1").streams) == 2
    assert [sink.rule.name for sink in router.route(b"b").streams] == ["c"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("note note ask ask forget".split()), FILTER, TOPIC, st.integers(0, 9)), max_size=20))
def test_no_change_since_is_never_said_in_error(steps: list[tuple[str, str, str, int]]) -> None:
    changes = Changes(1)
    noted: list[tuple[int, str]] = []
    number = 0
    for step, topic_filter, topic, seen in steps:
        if step == "ask":
            later = [(count, name) for count, name in noted if count > seen]
            concerned = any(matches(name, topic) for _, name in later)
            assert changes.since(seen, topic) or not concerned
            if len(later) <= 1 and all(name != "#" or topic[0] == "$" for _, name in later):
                assert changes.since(seen, topic) == concerned
            continue
        number += 1
        if step == "note":
            changes.note(topic_filter, number)
            noted.append((number, topic_filter))
        else:
            changes.forget(number)
            noted += [(number, "#"), (number, "$s/#")]


def test_a_storm_of_wildcards_leaves_the_routes_that_it_does_not_concern() -> None:
    router = make(cache_size=1000)
    routes = {topic: router.route(topic) for topic in (f"hot/{number}".encode() for number in range(500))}
    for number in range(3 * CHANGES):
        subscription = Subscription(session("s"), f"other/{number}/#", 0, 0)
        router.subscribe(subscription)
        router.unsubscribe(subscription)
        topic = f"hot/{number % 500}".encode()
        assert router.route(topic) is routes[topic]


def test_a_full_cache_loses_its_oldest_routes_and_few_at_once() -> None:
    size = 32 * EVICTED
    router = make(cache_size=size)
    for number in range(size + 1):
        router.route(f"t/{number}".encode())
    assert len(router.cache) == size + 1 - EVICTED
    assert b"t/%d" % (EVICTED - 1) not in router.cache and b"t/%d" % EVICTED in router.cache


def test_changes_are_known_for_as_many_filters_as_there_is_room() -> None:
    changes = Changes(2)
    for number, topic_filter in enumerate(("a/#", "b/+", "c/#", "d/#", "e/#"), 1):
        changes.note(topic_filter, number)
    asked = [(1, "z"), (2, "z"), (2, "c/1"), (3, "c/1"), (3, "d/1"), (4, "e/1"), (5, "e/1")]
    assert [changes.since(seen, topic) for seen, topic in asked] == [True, False, True, False, True, True, False]
