"""The topic tree against a dictionary searched with ``matches``."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from topic_matcher.filters import is_valid_filter, matches
from topic_matcher.topic_tree import Level, Stored, TopicTree

LEVEL = st.sampled_from(["", "a", "b", "c", "$x"])
TOPICS = st.lists(LEVEL, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = st.builds(
    lambda levels, tail: "/".join(levels + tail),
    st.lists(st.sampled_from(["", "a", "b", "$x", "+"]), max_size=4),
    st.sampled_from([[], ["#"]]),
).filter(is_valid_filter)
CHANGES = st.lists(st.tuples(st.sampled_from(["set", "set", "pop"]), TOPICS), max_size=25)


def pairs(found: list[Stored]) -> list[tuple[str, object]]:
    return [(stored.topic, stored.value) for stored in found]


def change(tree: TopicTree, plain: dict[str, int], changes: list[tuple[str, str]]) -> set[str]:
    """Apply changes to both; returns the topics that were removed, even if added again."""
    absent = set()
    for number, (what, topic) in enumerate(changes):
        if what == "set":
            tree.set(topic, number)
            plain[topic] = number
        else:
            assert tree.pop(topic) == plain.pop(topic, None)
            absent.add(topic)
        assert len(tree) == len(plain)
    return absent


@given(CHANGES, st.lists(FILTERS, min_size=1, max_size=5), TOPICS)
@settings(deadline=None)
def test_tree_equals_dictionary(changes: list[tuple[str, str]], filters: list[str], absent: str) -> None:
    tree = TopicTree()
    plain: dict[str, int] = {}
    change(tree, plain, changes)
    for topic in [*plain, absent]:
        assert tree.get(topic) == plain.get(topic)
    for topic_filter in filters:
        found = pairs(tree.match(topic_filter))
        assert dict(found) == {topic: value for topic, value in plain.items() if matches(topic_filter, topic)}
        assert len(found) == len(dict(found))
    for topic in list(plain):
        assert tree.pop(topic) == plain.pop(topic)
    assert len(tree) == 0 and tree.match("#") == [] and tree.match("$x/#") == []


@given(
    CHANGES,
    FILTERS,
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), CHANGES), max_size=20),
)
@settings(deadline=None, max_examples=300)
def test_scan_while_the_tree_changes(
    before: list[tuple[str, str]], topic_filter: str, turns: list[tuple[int, int, list[tuple[str, str]]]]
) -> None:
    tree = TopicTree()
    plain: dict[str, int] = {}
    change(tree, plain, before)
    steady = set(plain)
    scan = tree.scan(topic_filter)
    seen: Counter[str] = Counter()
    for limit, visits, changes in turns:
        found = scan.read_within(limit, visits)
        assert len(found) <= limit
        for topic, value in pairs(found):
            assert matches(topic_filter, topic) and plain[topic] == value
            seen[topic] += 1
        if scan.done:
            break
        steady -= change(tree, plain, changes)
    while rest := scan.read(2):
        seen.update(stored.topic for stored in rest)
    assert scan.done
    for topic in steady:
        assert seen[topic] == (1 if matches(topic_filter, topic) else 0)


def test_a_scan_reads_no_more_than_the_limit() -> None:
    tree = TopicTree()
    for number in range(250):
        tree.set(f"a/{number}/b", number)
    scan = tree.scan("a/+/b")
    sizes = []
    while found := scan.read(100):
        sizes.append(len(found))
    assert sizes == [100, 100, 50]
    assert scan.read(100) == []


def test_a_scan_visits_no_more_than_the_limit() -> None:
    tree = TopicTree()
    for number in range(5000):
        tree.set(f"a/{number}/b", number)
    tree.set("a/last/rare", "found")
    scan = tree.scan("a/+/rare")
    assert scan.read_within(10, 1000) == [] and not scan.done
    assert pairs(scan.read(10)) == [("a/last/rare", "found")]
    assert scan.read(10) == [] and scan.done


def test_a_scan_continues_when_its_next_topic_is_removed() -> None:
    tree = TopicTree()
    for topic in "abcdef":
        tree.set(topic, topic)
    scan = tree.scan("#")
    assert pairs(scan.read(1)) == [("a", "a")]
    for topic in "bcd":
        tree.pop(topic)
    tree.set("b", "again")
    assert [stored.topic for stored in scan.read(9)] == ["e", "f", "b"]


def test_a_scan_continues_when_its_next_topic_gets_children() -> None:
    tree = TopicTree()
    tree.set("a", 1)
    tree.set("b/c/d", 2)
    scan = tree.scan("#")
    assert pairs(scan.read(1)) == [("a", 1)]
    tree.set("a/x", 3)
    tree.set("b/c/e", 4)
    assert sorted(pairs(scan.read(9))) == [("b/c/d", 2), ("b/c/e", 4)]


def test_topics_with_the_maximum_number_of_levels() -> None:
    tree = TopicTree()
    deep = "/" * 65_534
    tree.set(deep, 1)
    tree.set(deep + "x", 2)
    assert len(tree.match("/#")) == 2
    assert tree.get(deep) == 1 and tree.get(deep + "x") == 2 and tree.get(deep[1:]) is None
    assert tree.pop(deep) == 1 and tree.pop(deep + "x") == 2
    assert len(tree) == 0


def test_leading_wildcards_do_not_match_dollar_topics() -> None:
    """[MQTT-4.7.2-1]"""
    tree = TopicTree()
    tree.set("$SYS/a", 1)
    tree.set("x/$SYS", 2)
    assert pairs(tree.match("#")) == [("x/$SYS", 2)] and tree.match("+/a") == []
    assert pairs(tree.match("$SYS/#")) == [("$SYS/a", 1)] and pairs(tree.match("x/+")) == [("x/$SYS", 2)]


def expected_levels(plain: dict[str, int], prefix: str | None) -> dict[str, tuple[object, bool]]:
    """Each level after a prefix, with the value of the topic that it ends and whether topics continue."""
    start = "" if prefix is None else f"{prefix}/"
    names = {topic[len(start) :].split("/")[0] for topic in plain if topic.startswith(start)}
    return {name: (plain.get(start + name), any(topic.startswith(f"{start}{name}/") for topic in plain)) for name in names}


def levels_of(found: list[Level]) -> dict[str, tuple[object, bool]]:
    assert len({level.name for level in found}) == len(found)
    return {level.name: (level.own and level.own.value, level.below) for level in found}


@given(CHANGES, st.one_of(st.none(), TOPICS, st.just("")), st.integers(1, 3))
def test_levels_are_those_of_all_topics(changes: list[tuple[str, str]], prefix: str | None, visits: int) -> None:
    tree = TopicTree()
    plain: dict[str, int] = {}
    change(tree, plain, changes)
    scan = tree.levels(prefix)
    found: list[Level] = []
    while not scan.done:
        found += scan.read(visits)
    assert levels_of(found) == expected_levels(plain, prefix)


@given(CHANGES, CHANGES, st.one_of(st.none(), TOPICS))
def test_levels_that_stay_are_found_once_while_the_tree_changes(
    changes: list[tuple[str, str]], later: list[tuple[str, str]], prefix: str | None
) -> None:
    tree = TopicTree()
    plain: dict[str, int] = {}
    change(tree, plain, changes)
    scan = tree.levels(prefix)
    found = scan.read(1)
    before = dict(plain)
    absent = change(tree, plain, later)
    while not scan.done:
        found += scan.read(1)
    stayed = {topic: value for topic, value in before.items() if topic not in absent}
    names = Counter(level.name for level in found)
    assert all(names[name] == 1 for name in expected_levels(stayed, prefix))
