"""Strategies of shared subscriptions: the chosen member, and that an available member is preferred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.null_connection import NullConnection

from mqttbroker.core.routing.groups import Group, HashTopic, LeastLoaded, Member, RandomMember, RoundRobin, Strategy
from sessions.context import SessionContext, SessionLimits
from sessions.delivery import Delivery
from sessions.journal import Journal
from sessions.message import Message
from sessions.session import Session, Subscription

CONTEXT = SessionContext(Journal(True), SessionLimits())

STRATEGIES: list[Callable[[], Strategy]] = [RoundRobin, lambda: RandomMember(Random(5).random), HashTopic, LeastLoaded]
every_strategy = pytest.mark.parametrize("make", STRATEGIES, ids=["round_robin", "random", "hash_topic", "least_loaded"])

AVAILABLE, STALLED, FULL, OFFLINE, LOST = range(5)
RANK = {AVAILABLE: 0, STALLED: 1, FULL: 1, OFFLINE: 2}


def group_of(*states: int) -> Group:
    """A group of members ``m0``, ``m1`` … in these states; a LOST one is offline and has no persistent session."""
    group = Group("g", "t")
    for number, state in enumerate(states):
        session = Session(CONTEXT, number + 1 if state in (OFFLINE, FULL) else 0, f"m{number}")
        if state not in (OFFLINE, LOST):
            session.attach(NullConnection(), 2)
            session.connection.ready = state != STALLED  # type: ignore[union-attr]
        if state == FULL:
            message = Message("t", b"", 1, False, b"", "p", 0, 0)
            session.deliveries.window.in_flight = {n: Delivery(session.deliveries, session.id, message, 1, False, b"") for n in (1, 2)}
        group.members.append(Member(Subscription(session, "$share/g/t", 1, 0)))
    return group


def chosen(strategy: Strategy, group: Group, topic: str = "t") -> int:
    """The number of the member that gets the message; -1 if none does."""
    member = strategy.choose(group, topic)
    return -1 if member is None else group.members.index(member)


@every_strategy
@settings(deadline=None)
@given(
    states=st.lists(st.integers(AVAILABLE, LOST), max_size=6),
    topics=st.lists(st.text(max_size=3), min_size=1, max_size=8),
)
def test_the_chosen_member_is_of_the_best_class(make: Callable[[], Strategy], states: list[int], topics: list[str]) -> None:
    strategy, group = make(), group_of(*states)
    first = min((RANK[state] for state in states if state != LOST), default=-1)
    for topic in topics:
        number = chosen(strategy, group, topic)
        assert (-1 if number < 0 else RANK[states[number]]) == first


@every_strategy
@pytest.mark.parametrize(
    "states", [(AVAILABLE,) * 4, (FULL, AVAILABLE, LOST, AVAILABLE, OFFLINE), (FULL, STALLED), (OFFLINE, LOST, OFFLINE)]
)
def test_every_member_of_the_best_class_is_chosen(make: Callable[[], Strategy], states: tuple[int, ...]) -> None:
    strategy, group = make(), group_of(*states)
    best = min(RANK[state] for state in states if state != LOST)
    equals = {number for number, state in enumerate(states) if RANK.get(state) == best}
    assert {chosen(strategy, group, f"topic/{n}") for n in range(100)} == equals


def test_round_robin_continues_after_the_last_chosen_member() -> None:
    strategy, group = RoundRobin(), group_of(AVAILABLE, FULL, AVAILABLE)
    assert [chosen(strategy, group) for _ in range(5)] == [0, 2, 0, 2, 0]


@pytest.mark.parametrize("make", [RoundRobin, LeastLoaded], ids=["round_robin", "least_loaded"])
def test_the_complete_group_owns_the_cursor_of_its_copies(make: Callable[[], Strategy]) -> None:
    strategy, group = make(), group_of(*[AVAILABLE] * 4)
    counts: Counter[int] = Counter()
    for number in range(9):  # a copy per topic, as the router makes them
        permitted = Group(group.name, group.topic_filter)
        permitted.original, permitted.members = group, group.members[1:]
        counts[chosen(strategy, permitted, f"t/{number}")] += 1
    assert counts == {0: 3, 1: 3, 2: 3}


def test_random_member_maps_the_number_to_a_member() -> None:
    numbers = iter([0.0, 0.999, 0.5, 0.34, 0.32])
    strategy, group = RandomMember(lambda: next(numbers)), group_of(AVAILABLE, FULL, AVAILABLE, AVAILABLE)
    assert [chosen(strategy, group) for _ in range(5)] == [0, 3, 2, 2, 0]


TOPICS = [f"site/{n}/temperature" for n in range(1000)]


def shares(group: Group) -> dict[str, str]:
    """The client id of the chosen member, by topic."""
    strategy = HashTopic()
    found = {}
    for topic in TOPICS:
        member = strategy.choose(group, topic)
        assert member is not None and strategy.choose(group, topic) is member
        found[topic] = member.session.client_id
    return found


def test_hash_topic_spreads_topics_evenly_over_similar_client_ids() -> None:
    counts = Counter(shares(group_of(*[AVAILABLE] * 8)).values())
    assert len(counts) == 8 and all(80 < count < 170 for count in counts.values()), counts


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(6)), st.integers(0, 5), st.sampled_from([FULL, STALLED, OFFLINE, LOST]))
def test_hash_topic_moves_only_the_topics_of_an_unavailable_member(order: list[int], leaver: int, state: int) -> None:
    group = group_of(*[AVAILABLE] * 6)
    before = shares(group)
    group.members = [group.members[number] for number in order]
    name = f"m{leaver}"
    left = group_of(*[state if number == leaver else AVAILABLE for number in range(6)])
    after = shares(left)
    assert shares(group) == before
    assert {topic for topic in TOPICS if before[topic] != after[topic]} == {t for t in TOPICS if before[t] == name}
    heirs = Counter(after[topic] for topic in TOPICS if before[topic] == name)
    assert len(heirs) == 5, "its topics go to all other members"


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 60))
def test_least_loaded_chooses_the_shortest_queue(loads: list[int], messages: int) -> None:
    strategy, group = LeastLoaded(), group_of(*[AVAILABLE] * len(loads))
    for member, load in zip(group.members, loads):
        member.session.deliveries.queue.message_count = load
    for _ in range(messages):
        member = strategy.choose(group, "t")  # type: ignore[assignment]
        assert member.session.deliveries.queued_messages == min(m.session.deliveries.queued_messages for m in group.members)
        member.session.deliveries.queue.message_count += 1


def test_least_loaded_alternates_between_equals() -> None:
    strategy, group = LeastLoaded(), group_of(AVAILABLE, AVAILABLE, FULL, AVAILABLE)
    assert sorted(chosen(strategy, group) for _ in range(9)) == [0, 0, 0, 1, 1, 1, 3, 3, 3]
