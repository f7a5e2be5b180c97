"""Routes: a cached route always equals a fresh lookup of the subscriptions."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.core.routing.groups import RoundRobin
from mqttbroker.core.routing.route import StreamRule
from mqttbroker.core.routing.router import MAX_EVICTED, RECORDED_FILTERS, FilterChanges, Router
from sessions.context import SessionContext, SessionLimits
from sessions.journal import Journal
from sessions.session import NO_LOCAL, Session, Subscription
from topic_matcher.filters import matches

CONTEXT = SessionContext(Journal(True), SessionLimits())


def make(cache_size: int = 100, streams: list[StreamRule] | None = None) -> Router:
    return Router(cache_size, 1 << 30, 10, 50, streams or [], RoundRobin())


def session(name: str) -> Session:
    return Session(CONTEXT, 0, name)


def matching_filters(router: Router, topic: str) -> list[tuple[str, int]]:
    """The filters that match a topic, each with its number of subscriptions and groups."""
    search = router.search(topic, True)
    search.step(1 << 60)
    return [(value.topic_filter, count) for value, count in cast("list[tuple[Any, int]]", search.found)]


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
def test_routes_equal_a_plain_model(steps: list[tuple[str, str, str, int]], cache_size: int) -> None:
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
        for (client, name), subscription in model.items():
            if matches(name, topic):
                wanted[client] = max(wanted.get(client, 0), subscription.qos)
        assert {sessions.index(target.session): target.qos for target in route.targets} == wanted
        assert route.matched == bool(wanted)
        assert router.route(topic.encode()) is route
        assert len(router.cache) <= cache_size
    assert router.subscriptions == len(model)


def test_a_change_rebuilds_only_the_routes_that_its_filter_matches() -> None:
    router = make()
    routes = {topic: router.route(topic) for topic in (b"a/1", b"a/2", b"b/1")}
    router.subscribe(Subscription(session("s"), "a/1", 0, 0))
    assert [router.route(topic) is route for topic, route in routes.items()] == [False, True, True]
    router.subscribe(Subscription(session("s"), "a/+", 0, 0))
    assert [router.route(topic) is route for topic, route in routes.items()] == [False, False, True]


def test_overlapping_subscriptions_of_a_session_merge_into_one_target() -> None:
    router = make()
    client = session("s")
    router.subscribe(Subscription(client, "a", 0 | NO_LOCAL, 1))
    router.subscribe(Subscription(client, "#", 2, 200))
    router.subscribe(Subscription(client, "+", 1 | 8 | NO_LOCAL, 0))
    route = router.route(b"a")
    (target,) = route.targets
    assert (target.qos, target.retain_as_published, target.zero_copy) == (2, True, False)
    identifiers = {b"\x0b\x01", b"\x0b\xc8\x01"}
    assert target.subscription_ids in {a + b for a in identifiers for b in identifiers - {a}}
    (own,) = route.targets_for(client)
    assert own is not target and route.targets_for(session("other")) == [target]
    assert (own.qos, own.subscription_ids) == (2, b"\x0b\xc8\x01")


def test_no_local_on_all_subscriptions_excludes_own_messages() -> None:
    router = make()
    client = session("s")
    router.subscribe(Subscription(client, "a", NO_LOCAL, 0))
    route = router.route(b"a")
    assert len(route.targets) == 1 and route.targets_for(client) == []


@pytest.mark.parametrize(
    "topic, code",
    [
        (b"", 0x81),
        (b"a/+", 0x81),
        (b"#", 0x81),
        (b"a\0", 0x81),
        (b"\xff", 0x81),
        (b"a\n", 0x81),
        (b"x" * 51, 0x90),
        (b"/" * 10, 0x90),
    ],
)
def test_invalid_topic_names_are_refused(topic: bytes, code: int) -> None:
    router = make()
    with pytest.raises(MQTTError) as caught:
        router.route(topic)
    assert caught.value.reason_code == code and not router.cache


@pytest.mark.parametrize(
    "topic, reserved",
    [
        (b"$SYS", True),
        (b"$SYS/a", True),
        (b"$SYSTEM", False),
        (b"a/$SYS", False),
        (b"$share/g/a", True),
        (b"$share", False),
    ],
)
def test_reserved_topics(topic: bytes, reserved: bool) -> None:
    assert make().route(topic).reserved is reserved


def test_a_group_exists_while_it_has_members() -> None:
    router = make()
    one, two = session("1"), session("2")
    router.join("g", "a/#", Subscription(one, "$share/g/a/#", 1, 0))
    router.join("g", "a/#", Subscription(two, "$share/g/a/#", 1, 0))
    router.join("h", "a/#", Subscription(two, "$share/h/a/#", 1, 0))
    router.join("g", "a/#", Subscription(one, "$share/g/a/#", 2, 0))
    route = router.route(b"a/1")
    assert sorted((group.name, len(group.members)) for group in route.groups) == [("g", 2), ("h", 1)]
    assert not route.targets and route.matched and router.subscriptions == 2
    assert matching_filters(router, "a/1") == [("a/#", 2)] and matching_filters(router, "b") == []
    assert sorted(group.name for group in router.groups_of("a/#")) == ["g", "h"]
    for member in (one, two, two):
        router.leave("g", "a/#", member)
    router.leave("h", "a/#", two)
    assert not router.route(b"a/1").matched and not router.groups and router.subscriptions == 0
    assert router.groups_of("a/#") == [] and matching_filters(router, "a/1") == []


def test_a_stream_is_in_a_route_once() -> None:
    rules = [StreamRule("s", ["a/#", "a/1"], 4, "topic"), StreamRule("c", ["#"], 4, "client")]
    router = make(streams=rules)
    sinks = {sink.rule.name: sink.partition for sink in router.route(b"a/1").streams}
    assert sorted(sinks) == ["c", "s"] and sinks["c"] == -1 and 0 <= sinks["s"] < 4
    assert len(router.route(b"a/1").streams) == 2
    assert [sink.rule.name for sink in router.route(b"b").streams] == ["c"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("record record since since record_all".split()), FILTER, TOPIC, st.integers(0, 9)),
        max_size=20,
    )
)
def test_since_never_misses_a_change(steps: list[tuple[str, str, str, int]]) -> None:
    changes = FilterChanges(1)
    recorded: list[tuple[int, str]] = []
    number = 0
    for step, topic_filter, topic, revision in steps:
        if step == "since":
            later = [(count, name) for count, name in recorded if count > revision]
            affected = any(matches(name, topic) for _, name in later)
            assert changes.since(revision, topic) or not affected
            if len(later) <= 1 and all(name != "#" or topic[0] == "$" for _, name in later):
                assert changes.since(revision, topic) == affected
            continue
        number += 1
        if step == "record":
            changes.record(topic_filter, number)
            recorded.append((number, topic_filter))
        else:
            changes.record_all(number)
            recorded += [(number, "#"), (number, "$s/#")]


def test_many_wildcard_changes_keep_the_routes_that_they_do_not_match() -> None:
    router = make(cache_size=1000)
    routes = {topic: router.route(topic) for topic in (f"hot/{number}".encode() for number in range(500))}
    for number in range(3 * RECORDED_FILTERS):
        subscription = Subscription(session("s"), f"other/{number}/#", 0, 0)
        router.subscribe(subscription)
        router.unsubscribe(subscription)
        topic = f"hot/{number % 500}".encode()
        assert router.route(topic) is routes[topic]


def test_a_full_cache_evicts_a_few_of_its_oldest_routes() -> None:
    size = 32 * MAX_EVICTED
    router = make(cache_size=size)
    for number in range(size + 1):
        router.route(f"t/{number}".encode())
    assert len(router.cache) == size + 1 - MAX_EVICTED
    assert b"t/%d" % (MAX_EVICTED - 1) not in router.cache and b"t/%d" % MAX_EVICTED in router.cache


def test_changes_are_recorded_up_to_the_capacity() -> None:
    changes = FilterChanges(2)
    for number, topic_filter in enumerate(("a/#", "b/+", "c/#", "d/#", "e/#"), 1):
        changes.record(topic_filter, number)
    asked = [(1, "z"), (2, "z"), (2, "c/1"), (3, "c/1"), (3, "d/1"), (4, "e/1"), (5, "e/1")]
    assert [changes.since(revision, topic) for revision, topic in asked] == [
        True,
        False,
        True,
        False,
        True,
        True,
        False,
    ]
