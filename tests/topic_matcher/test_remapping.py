"""Topics on both sides of a bridge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topic_matcher.filters import matches
from topic_matcher.remapping import (
    MAX_CACHED,
    TopicRule,
    echoed,
    incoming_map,
    outgoing_map,
    overlap,
    pattern_rule,
    prefix_rule,
)

LEVELS = st.sampled_from(["", "a", "b", "plant", "ü", "$x", "1"])
TOPICS = st.lists(LEVELS, min_size=1, max_size=5).map("/".join).filter(bool)
FILTER_LEVELS = st.sampled_from(["", "a", "b", "+", "$x"])


@st.composite
def filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(FILTER_LEVELS, min_size=1, max_size=4))
    return "/".join([*levels, *(["#"] if draw(st.booleans()) else [])]) or "#"


def there_and_back(rule: TopicRule, local: str, remote: str) -> None:
    assert outgoing_map([rule]).find(local.encode()).decode() == remote
    assert incoming_map([rule]).find(remote.encode()).decode() == local


@pytest.mark.parametrize(("topic_filter", "local_prefix", "remote_prefix", "local", "remote"), [
    ("#", "", "from/here/", "a/b", "from/here/a/b"),
    ("a/#", "", "", "a/b", "a/b"),
    ("#", "x/", "y/z/", "x", "y/z"),
    ("#", "x/", "y/", "x//", "y//"),
    ("+/t", "in/", "out/", "in/1/t", "out/1/t"),
    ("", "here", "there", "here", "there"),
    ("t", "$SYS/", "sys/", "$SYS/t", "sys/t"),
])  # fmt: skip
def test_prefixes(topic_filter: str, local_prefix: str, remote_prefix: str, local: str, remote: str) -> None:
    there_and_back(prefix_rule(topic_filter, "both", 1, local_prefix, remote_prefix), local, remote)


@pytest.mark.parametrize(("local_pattern", "remote_pattern", "local", "remote"), [
    ("plant/{line}/{machine}/#", "site/{machine}/{line}/#", "plant/1/m/t/x", "site/m/1/t/x"),
    ("plant/{line}/#", "{line}/#", "plant/7", "7"),
    ("a/#", "#", "a/b/c", "b/c"),
    ("{a}/x/{b}", "y/{b}/{a}", "1/x/2", "y/2/1"),
    ("{a}/{b}", "{b}/{a}", "/2", "2/"),
])  # fmt: skip
def test_patterns(local_pattern: str, remote_pattern: str, local: str, remote: str) -> None:
    there_and_back(pattern_rule(local_pattern, remote_pattern, "both", 1), local, remote)


def test_a_name_that_would_be_invalid_is_none() -> None:
    """`a/#` matches `a`, for which nothing is left on a side without a prefix."""
    assert outgoing_map([prefix_rule("#", "out", 0, "a/", "")]).find(b"a") == b""
    assert outgoing_map([pattern_rule("a/#", "#", "out", 0)]).find(b"a") == b""
    assert outgoing_map([prefix_rule("#", "out", 0, "", "x" * 64999 + "/")]).find(b"t" * 1000) == b""


@pytest.mark.parametrize("topic", [b"", b"a/+", b"\xff", b"other"])
def test_a_topic_that_is_invalid_or_has_no_rule_is_none(topic: bytes) -> None:
    assert outgoing_map([prefix_rule("a/#", "out", 0, "", "")]).find(topic) == b""


def test_the_first_rule_decides_and_directions_are_kept_apart() -> None:
    rules = [prefix_rule("a/b", "out", 0, "", "one/"), prefix_rule("a/#", "both", 0, "", "two/")]
    assert outgoing_map(rules).find(b"a/b") == b"one/a/b"
    assert outgoing_map(rules).find(b"a/c") == b"two/a/c"
    assert incoming_map(rules).find(b"one/a/b") == b""
    assert incoming_map(rules).find(b"two/a/b") == b"a/b"


def test_the_memory_of_topics_is_bounded() -> None:
    topics = outgoing_map([prefix_rule("#", "out", 0, "", "p/")])
    for number in range(500):
        topic = b"%d/" % number + b"t" * 5000
        assert topics.find(topic) == b"p/" + topic
        assert topics.cached <= MAX_CACHED
    assert topics.find(b"0/" + b"t" * 5000) == b"p/0/" + b"t" * 5000


@pytest.mark.parametrize(("local", "remote", "reason"), [
    ("a/{x}", "b/{y}", "same names"),
    ("a/#", "b", "same names"),
    ("a/{x}/{x}", "b/{x}/{x}", "twice"),
    ("a/+", "b/+", "level"),
    ("a/{x", "b/{x", "level"),
    ("#/a", "#/a", "invalid"),
    ("", "", "invalid"),
])  # fmt: skip
def test_patterns_that_cannot_be_converted_are_refused(local: str, remote: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        pattern_rule(local, remote, "both", 0)


@pytest.mark.parametrize("topic_filter", ["a/#/b", "a+", "$share/g/a", ""])
def test_prefixes_must_make_filters(topic_filter: str) -> None:
    with pytest.raises(ValueError, match="local topic filter is invalid"):
        prefix_rule(topic_filter, "out", 0, "", "x/")


@given(TOPICS, st.sampled_from(["", "p/", "p/q/"]), st.sampled_from(["", "r/", "$r/"]))
def test_what_goes_out_comes_back_under_its_name(topic: str, local: str, remote: str) -> None:
    rule = prefix_rule("#", "both", 0, local, remote)
    sent = outgoing_map([rule]).find((local + topic).encode())
    if sent and not (remote == "" and topic.startswith("$")):
        assert incoming_map([rule]).find(sent) == (local + topic).encode()


@given(filters(), filters(), TOPICS)
def test_filters_that_match_a_topic_overlap(one: str, other: str, topic: str) -> None:
    if matches(one, topic) and matches(other, topic):
        assert overlap(one, other) and overlap(other, one)


@pytest.mark.parametrize(("one", "other", "expected"), [
    ("a/#", "a", True), ("a/+", "a", False), ("a/b", "a/c", False), ("+/b", "a/+", True), ("#", "$x", False),
    ("$x/#", "+/a", False), ("a/+/c", "a/b/#", True), ("a/b/c", "a/b", False), ("#", "#", True),
])  # fmt: skip
def test_overlaps(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) == overlap(other, one) == expected


def test_messages_come_back_where_remote_filters_overlap() -> None:
    assert echoed([prefix_rule("a/#", "both", 0, "", "")]) == "a/#"
    assert echoed([prefix_rule("a/#", "out", 0, "", "x/"), prefix_rule("+/a/b", "in", 0, "", "")]) == "+/a/b"
    assert echoed([prefix_rule("a/#", "out", 0, "", "x/"), prefix_rule("a/#", "in", 0, "", "y/")]) is None
