"""Predicates as bounds agree with the predicates row by row, and skip no block with a matching row."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_spark.log.predicates import Bounds, Predicate

pytestmark = pytest.mark.one_build

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MEANING: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "in": lambda value, among: value in among,
    "prefix": lambda value, prefix: value.startswith(prefix),
    "not null": lambda value, nothing: True,
}
TOPIC = st.text("ab/\ud7ff\ue000\U0010ffff", max_size=4)
NUMBER = st.integers(-3, 12)
COMPARISON = st.sampled_from(["=", ">", ">=", "<", "<="])


def of(column: str, value: Any) -> Any:
    return EPOCH + timedelta(microseconds=value) if column == "timestamp" else value


PREDICATE = st.one_of(
    st.tuples(st.just("topic"), COMPARISON, TOPIC),
    st.tuples(st.just("topic"), st.just("prefix"), TOPIC),
    st.tuples(st.just("topic"), st.just("in"), st.lists(TOPIC, max_size=3)),
    st.tuples(st.sampled_from(["partition", "offset", "timestamp"]), COMPARISON, NUMBER),
    st.tuples(st.sampled_from(["partition", "offset", "timestamp"]), st.just("in"), st.lists(NUMBER, max_size=3)),
    st.tuples(st.sampled_from(["topic", "offset"]), st.just("not null"), st.none()),
)
ROW = st.fixed_dictionaries({"topic": TOPIC, "partition": NUMBER, "offset": NUMBER, "timestamp": NUMBER})


def predicate_of(predicates: list[tuple[str, str, Any]]) -> Predicate:
    predicate = Predicate()
    for column, sign, value in predicates:
        given_value = [of(column, each) for each in value] if sign == "in" else of(column, value)
        narrowed = predicate.narrowed(column, sign, given_value)
        assert narrowed is not None
        predicate = narrowed
    return predicate


@given(st.lists(PREDICATE, max_size=4), st.lists(ROW, min_size=1, max_size=6))
def test_bounds_agree_with_the_predicates(predicates: list[tuple[str, str, Any]], rows: list[dict[str, Any]]) -> None:
    predicate = pickle.loads(pickle.dumps(predicate_of(predicates)))
    meant = [row for row in rows if all(MEANING[sign](row[column], value) for column, sign, value in predicates)]
    assert meant == [row for row in rows if all(getattr(predicate, name).contains(row[name]) for name in row)]
    span = {name: (min(row[name] for row in rows), max(row[name] for row in rows)) for name in rows[0]}
    low, high = predicate.offsets(span["offset"][0], span["offset"][1] + 1)
    assert all(low <= row["offset"] < high for row in meant)
    if meant:
        assert predicate.may_match(span["offset"], span["timestamp"], span["topic"])
        assert predicate.may_match(topic=(span["topic"][0], None), offset=(None, span["offset"][1]))
        assert predicate.partition.may_match(*span["partition"])


REFUSED = [
    ("payload", "=", b"x"),
    ("qos", "=", 1),
    ("topic", "=", 1),
    ("topic", "=", None),
    ("offset", "=", "1"),
    ("offset", "=", True),
    ("offset", "<", 1.5),
    ("timestamp", ">", 5),
    ("timestamp", ">", datetime(2026, 1, 1)),
    ("offset", "prefix", 1),
    ("topic", "suffix", "x"),
    ("topic", "in", ("a", 1)),
]


@pytest.mark.parametrize(("column", "sign", "value"), REFUSED)
def test_conditions_that_bounds_cannot_express_give_none(column: str, sign: str, value: Any) -> None:
    assert Predicate().narrowed(column, sign, value) is None


def test_blocks_without_a_matching_row() -> None:
    predicate = predicate_of([("topic", "prefix", "plant/"), ("offset", ">=", 100), ("timestamp", "<", 1000)])
    assert predicate.columns == ("topic", "offset", "timestamp") and not predicate.unbounded
    assert predicate.may_match((90, 100), (999, 2000), ("a", "plant/x"))
    assert not predicate.may_match(offset=(0, 99))
    assert not predicate.may_match(timestamp=(1000, 2000))
    assert not predicate.may_match(topic=("plant0", "z")) and not predicate.may_match(topic=("a", "plant"))
    among = predicate_of([("offset", "in", [5, 50, 70]), ("offset", "<", 60)])
    assert among.offsets(0, 100) == (5, 51) and among.offsets(6, 40) == (40, 40)
    assert not among.may_match(offset=(51, 100))
    assert Predicate().unbounded and Bounds[int]().unbounded and Predicate().offsets(3, 9) == (3, 9)
