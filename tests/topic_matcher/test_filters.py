"""Topic names and filters: the cases of vectors/filters.json, and properties of all filters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import VECTORS

from topic_matcher.filters import has_wildcard, is_valid_filter, is_valid_topic, matches, parse_shared

VECTORS: dict[str, Any] = json.loads((VECTORS / "filters.json").read_text(encoding="utf-8"))

LEVEL = st.sampled_from(["", "a", "b", "ab", "$x", "ü"])
TOPICS = st.lists(LEVEL, min_size=1, max_size=5).map("/".join).filter(bool)


@pytest.mark.parametrize(("topic_filter", "topic", "expected"), VECTORS["matches"])
def test_matches(topic_filter: str, topic: str, expected: bool) -> None:
    assert is_valid_filter(topic_filter) and is_valid_topic(topic)
    assert matches(topic_filter, topic) is expected


@pytest.mark.parametrize(("topic_filter", "expected"), VECTORS["filters"])
def test_filter_validity(topic_filter: str, expected: bool) -> None:
    assert is_valid_filter(topic_filter) is expected


@pytest.mark.parametrize("topic", ["a", "/", "a//b", "$SYS/x", " ", "💡", "a" * 65_535, "\ufeff", "$share/g/a"])
def test_valid_topic(topic: str) -> None:
    assert is_valid_topic(topic)


@pytest.mark.parametrize("topic", ["", "a\0", "a/+", "#", "a+b", "a" * 65_536, "ü" * 32_768])
def test_invalid_topic(topic: str) -> None:
    assert not is_valid_topic(topic)


def test_length_is_counted_in_bytes() -> None:
    """[MQTT-4.7.3-3]"""
    assert is_valid_filter("💡" * 16_383 + "/+")
    assert not is_valid_filter("💡" * 16_384)
    assert is_valid_filter("/" * 65_535)


def test_shared() -> None:
    assert parse_shared("$share/group/a/+/#") == ("group", "a/+/#")
    assert parse_shared("$share/g//") == ("g", "/")
    assert parse_shared("share/g/a") is None
    assert parse_shared("$share") is None
    for broken in ("$share/", "$share/g", "$share//a", "$share/g/", "$share/+/a", "$share/g#/a", "$share/g/a/#/b"):
        with pytest.raises(ValueError):
            parse_shared(broken)


def test_has_wildcard() -> None:
    assert has_wildcard("a/+") and has_wildcard("#") and not has_wildcard("a/b")


@given(TOPICS)
def test_a_topic_is_a_filter_that_matches_itself(topic: str) -> None:
    assert is_valid_topic(topic) and is_valid_filter(topic) and matches(topic, topic)


@given(TOPICS, st.data())
def test_levels_may_be_replaced_by_wildcards(topic: str, data: st.DataObject) -> None:
    levels = topic.split("/")
    kept = data.draw(st.integers(0, len(levels)))
    wanted = [data.draw(st.sampled_from([level, "+"])) for level in levels[:kept]] + ["#"]
    topic_filter = "/".join(wanted)
    assert is_valid_filter(topic_filter)
    assert matches(topic_filter, topic) == (not topic.startswith("$") or wanted[0] not in "+#" or wanted[0] == "")


@given(st.text(st.sampled_from("a/+#$\0"), max_size=8))
def test_validity_against_the_definition(text: str) -> None:
    levels = text.split("/")
    valid = text != "" and "\0" not in text
    for index, level in enumerate(levels):
        if "#" in level and (level != "#" or index != len(levels) - 1):
            valid = False
        if "+" in level and level != "+":
            valid = False
    assert is_valid_filter(text) is valid
    assert is_valid_topic(text) is (valid and not has_wildcard(text))
