"""Which node owns and follows each shard."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqttbroker.cluster.nodes.assignment import Member, ShardNodes, assign

pytestmark = pytest.mark.one_build


def settle(shards: int, names: list[str], places: list[ShardNodes], standbys: int = 1, draining: str = "") -> list[ShardNodes]:
    """The places after all nodes have done what they were told and follow their shards to the end, again and again."""
    for _ in range(20):
        members = [
            Member(
                name,
                {shard: 1 for shard, place in enumerate(places) if place.owner == name},
                frozenset(shard for shard, place in enumerate(places) if name in place.standbys),
                frozenset(shard for shard, place in enumerate(places) if name in place.standbys),
                name == draining,
            )
            for name in names
        ]
        again = assign(shards, members, standbys)
        if again == places:
            return places
        places = again
    raise AssertionError("it never ends")


def fresh(shards: int, names: list[str], standbys: int = 1) -> list[ShardNodes]:
    return settle(shards, names, assign(shards, [Member(name) for name in names], standbys), standbys)


def loads(places: list[ShardNodes], names: list[str]) -> list[int]:
    return [sum(place.owner == name for place in places) for name in names]


counts = st.integers(1, 24)
nodes = st.integers(1, 6).map(lambda count: [f"node-{number}" for number in range(count)])


@given(counts, nodes, st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_each_shard_has_an_owner_and_standbys_on_other_nodes(shards: int, names: list[str], standbys: int) -> None:
    places = fresh(shards, names, standbys)
    assert max(loads(places, names)) - min(loads(places, names)) <= 1
    for place in places:
        assert len(place.standbys) == len(set(place.standbys)) == min(standbys, len(names) - 1)
        assert place.owner not in place.standbys


@given(counts, nodes)
@settings(max_examples=60, deadline=None)
def test_a_node_that_joins_takes_its_share_and_moves_nothing_else(shards: int, names: list[str]) -> None:
    before = fresh(shards, names)
    now = assign(shards, [
        *(Member(name, {shard: 1 for shard, place in enumerate(before) if place.owner == name}) for name in names),
        Member("new"),
    ])  # fmt: skip
    assert [place.owner for place in now] == [place.owner for place in before], "nobody follows yet"
    after = settle(shards, [*names, "new"], before)
    assert all(new.owner in (old.owner, "new") for old, new in zip(before, after))
    assert max(loads(after, [*names, "new"])) - min(loads(after, [*names, "new"])) <= 1


@given(counts, nodes, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_shards_of_a_dead_node_go_to_nodes_that_follow_them(shards: int, names: list[str], number: int) -> None:
    dead = names[number % len(names)]
    left = [name for name in names if name != dead]
    before = fresh(shards, names)
    after = assign(shards, [
        Member(
            name,
            {shard: 1 for shard, place in enumerate(before) if place.owner == name},
            frozenset(shard for shard, place in enumerate(before) if name in place.standbys),
            frozenset(shard for shard, place in enumerate(before) if name in place.standbys),
        )
        for name in left
    ])  # fmt: skip
    for old, new in zip(before, after):
        if old.owner == dead:
            assert new.owner in (old.standbys if left else [None])
        else:
            assert new.owner == old.owner


@given(counts, nodes, st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_draining_node_keeps_a_shard_until_another_follows_it(shards: int, names: list[str], number: int) -> None:
    draining = names[number % len(names)]
    before = fresh(shards, names, standbys=0)
    members = [
        Member(name, {shard: 1 for shard, place in enumerate(before) if place.owner == name}, draining=name == draining) for name in names
    ]
    first = assign(shards, members, standbys=0)
    assert [place.owner for place in first] == [place.owner for place in before]
    last = settle(shards, names, first, 0, draining)
    if len(names) > 1:
        assert all(place.owner != draining for place in last)
    assert all(draining not in place.standbys for place in last)


@given(counts, nodes, st.randoms())
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_members_does_not_matter(shards: int, names: list[str], random: object) -> None:
    members = [Member(name, {shard: shard for shard in range(shards) if shard % (index + 2) == 0}) for index, name in enumerate(names)]
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(shards, members) == assign(shards, shuffled)


def test_of_two_nodes_that_believe_to_own_a_shard_the_last_takeover_counts() -> None:
    members = [Member("a", {0: 5}), Member("b", {0: 9})]
    assert assign(1, members)[0].owner == "b"


def test_a_shard_goes_back_to_a_node_where_its_core_failed_only_if_its_owner_drains_or_died() -> None:
    owner = Member("a", {0: 1, 1: 1})
    failed = Member("b", {}, frozenset({0, 1}), frozenset({0, 1}), failed=frozenset({0, 1}))
    assert [place.owner for place in assign(2, [owner, failed])] == ["a", "a"]
    assert [place.owner for place in assign(2, [owner._replace(draining=True), failed])] == ["b", "b"]
    assert [place.owner for place in assign(2, [failed])] == ["b", "b"]
    other = Member("c", {}, frozenset({0, 1}), frozenset({0, 1}))
    assert [place.owner for place in assign(2, [failed, other])] == ["c", "c"]


def test_an_operators_choice_moves_a_shard_once_the_node_follows_it() -> None:
    owned = {0: 1, 1: 1}
    assert assign(2, [Member("a", owned), Member("b", {})], pins={0: "b", 1: "a"})[0] == ShardNodes("a", ["b"])
    warm = Member("b", {}, frozenset({0}), frozenset({0}))
    assert assign(2, [Member("a", owned), warm], pins={0: "b", 1: "a"})[0].owner == "b"


def test_without_members_there_is_no_owner() -> None:
    assert assign(2, []) == [ShardNodes(None, []), ShardNodes(None, [])]
