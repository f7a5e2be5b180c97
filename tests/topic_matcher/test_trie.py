"""The subscription trie against a dictionary searched with ``matches``."""

from __future__ import annotations

import random
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from topic_matcher.filters import is_valid_filter, matches
from topic_matcher.trie import SubscriptionTrie

LEVEL = st.sampled_from(["", "a", "b", "$x"])
FILTER_LEVEL = st.sampled_from(["", "a", "b", "$x", "+"])
TOPICS = st.lists(LEVEL, min_size=1, max_size=6).map("/".join).filter(bool)
FILTERS = st.builds(
    lambda levels, tail: "/".join(levels + tail),
    st.lists(FILTER_LEVEL, max_size=5),
    st.sampled_from([[], ["#"]]),
).filter(is_valid_filter)
SUBSCRIBERS = st.integers(1, 3)


class TrieAgainstDictionary(RuleBasedStateMachine):
    """After any sequence of inserts and removes the trie has the contents of the dictionary."""

    @initialize()
    def start(self) -> None:
        self.trie = SubscriptionTrie()
        self.plain: dict[tuple[str, int], int] = {}

    @rule(topic_filter=FILTERS, subscriber=SUBSCRIBERS, value=st.integers())
    def insert(self, topic_filter: str, subscriber: int, value: int) -> None:
        new = (topic_filter, subscriber) not in self.plain
        assert self.trie.insert(topic_filter, subscriber, value) is new
        self.plain[topic_filter, subscriber] = value

    @rule(topic_filter=FILTERS, subscriber=SUBSCRIBERS)
    def remove(self, topic_filter: str, subscriber: int) -> None:
        known = self.plain.pop((topic_filter, subscriber), None) is not None
        assert self.trie.remove(topic_filter, subscriber) is known

    @rule(data=st.data())
    def remove_known(self, data: st.DataObject) -> None:
        if self.plain:
            topic_filter, subscriber = data.draw(st.sampled_from(sorted(self.plain)))
            self.remove(topic_filter, subscriber)

    @rule(topic=TOPICS)
    def match(self, topic: str) -> None:
        expected = [value for (wanted, _), value in self.plain.items() if matches(wanted, topic)]
        assert sorted(self.trie.match(topic), key=int) == sorted(expected)  # type: ignore[call-overload]
        filters = [wanted for wanted, _ in self.plain if matches(wanted, topic)]
        search = self.trie.search(topic, True)
        search.step(1 << 60)
        counts = cast("list[tuple[object, int]]", search.found)
        assert sorted(count for _, count in counts) == sorted(map(filters.count, set(filters)))
        assert {value for value, _ in counts} <= set(expected)

    @invariant()
    def size(self) -> None:
        if hasattr(self, "plain"):
            assert len(self.trie) == len(self.plain)


TestTrieAgainstDictionary = TrieAgainstDictionary.TestCase
TestTrieAgainstDictionary.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.dictionaries(st.tuples(FILTERS, SUBSCRIBERS), st.integers(), max_size=40), TOPICS, st.randoms())
@settings(deadline=None)
def test_matches_do_not_depend_on_the_order_of_inserts(wanted: dict[tuple[str, int], int], topic: str, order: random.Random) -> None:
    trie = SubscriptionTrie()
    items = list(wanted.items())
    order.shuffle(items)
    for (topic_filter, subscriber), value in items:
        trie.insert(topic_filter, subscriber, value)
    expected = sorted(value for (topic_filter, _), value in items if matches(topic_filter, topic))
    assert sorted(trie.match(topic), key=int) == expected  # type: ignore[call-overload]


def test_a_subscriber_with_two_matching_filters_is_found_twice() -> None:
    trie = SubscriptionTrie()
    trie.insert("a/+", "s", 1)
    trie.insert("a/#", "s", 2)
    assert sorted(trie.match("a/b"), key=str) == [1, 2]


def test_insert_replaces_the_value() -> None:
    """[MQTT-3.8.4-3]"""
    trie = SubscriptionTrie()
    for topic_filter in ("a", "a/+", "a/#", "+", "+/b", "a/+/b", "#"):
        assert trie.insert(topic_filter, "s", 1)
        assert not trie.insert(topic_filter, "s", 2)
    assert trie.match("a") == [2] * 4
    assert len(trie) == 7


def test_filters_are_compared_character_by_character() -> None:
    """[MQTT-3.10.4-1] [MQTT-4.7.3-4]"""
    trie = SubscriptionTrie()
    trie.insert("ä/b", "s", 1)
    assert not trie.remove("a\u0308/b", "s")
    assert trie.match("a\u0308/b") == []
    assert not trie.remove("ä/b/", "s") and not trie.remove("ä", "s")
    assert trie.remove("ä/b", "s")


def test_equal_subscribers_are_the_same() -> None:
    trie = SubscriptionTrie()
    assert trie.insert("a/#", ("group", 1), 1)
    assert not trie.insert("a/#", ("group", 1), 2)
    assert trie.insert("a/#", ("group", 2), 3)
    assert sorted(trie.match("a"), key=str) == [2, 3]
    assert trie.remove("a/#", ("group", 1)) and trie.match("a") == [3]


def test_values_may_be_none() -> None:
    trie = SubscriptionTrie()
    trie.insert("a", "s", None)
    trie.insert("+", "s", None)
    assert trie.match("a") == [None, None]


def test_many_subscribers_of_one_filter() -> None:
    trie = SubscriptionTrie()
    for number in range(1000):
        trie.insert("room/+/light", number, number)
    assert sorted(trie.match("room/1/light"), key=str) == sorted(range(1000), key=str)
    for number in range(999):
        assert trie.remove("room/+/light", number)
    assert trie.match("room/1/light") == [999]


def test_filters_with_the_maximum_number_of_levels() -> None:
    trie = SubscriptionTrie()
    deep = "+/" * 32_767 + "#"
    assert trie.insert(deep, 1, 1) and trie.insert(deep, 2, 2)
    assert sorted(trie.match("/" * 65_535), key=str) == [1, 2]
    assert trie.match("/" * 32_765) == []
    assert trie.remove(deep, 1) and trie.remove(deep, 2)
    assert len(trie) == 0
