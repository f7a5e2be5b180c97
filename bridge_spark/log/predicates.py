"""Predicates on topic, partition, offset and timestamp, from the options `where` and `filter`.

A predicate is a range or a set of values of one column, so files and row groups can be skipped by their smallest and
largest values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

Value = TypeVar("Value", int, str)

COLUMNS = ("topic", "partition", "offset", "timestamp")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_CHARACTER = chr(0x10FFFF)


@dataclass(frozen=True)
class Bounds(Generic[Value]):
    """The values not below ``first``, below ``end``, and in ``among``; None is no limit.

    Strings are ordered by their UTF-8 bytes.
    """

    first: Value | None = None
    end: Value | None = None
    among: frozenset[Value] | None = None

    @property
    def unbounded(self) -> bool:
        return self.first is None and self.end is None and self.among is None

    @property
    def lowest(self) -> Value | None:
        """A lower limit of the values; None if unknown."""
        among = () if self.among is None else self.among
        return max((bound for bound in (self.first, min(among, default=None)) if bound is not None), default=None)

    def contains(self, value: Value) -> bool:
        return (
            (self.first is None or value >= self.first)
            and (self.end is None or value < self.end)
            and (self.among is None or value in self.among)
        )

    def may_match(self, smallest: Value | None, largest: Value | None) -> bool:
        """Whether a value from ``smallest`` to ``largest``, both inclusive, can be one of these; None is unknown."""
        if self.first is not None and largest is not None and largest < self.first:
            return False
        if self.end is not None and smallest is not None and smallest >= self.end:
            return False
        return self.among is None or any(
            (smallest is None or value >= smallest) and (largest is None or value <= largest) and self.contains(value)
            for value in self.among
        )

    def __and__(self, other: Bounds[Value]) -> Bounds[Value]:
        firsts = [bounds.first for bounds in (self, other) if bounds.first is not None]
        ends = [bounds.end for bounds in (self, other) if bounds.end is not None]
        sets = [bounds.among for bounds in (self, other) if bounds.among is not None]
        return Bounds(max(firsts, default=None), min(ends, default=None), frozenset.intersection(*sets) if sets else None)


@dataclass(frozen=True)
class Predicate:
    """The conjunction of bounds on the four columns.

    Timestamps are microseconds since the epoch.  Picklable.
    """

    topic: Bounds[str] = field(default_factory=Bounds)
    partition: Bounds[int] = field(default_factory=Bounds)
    offset: Bounds[int] = field(default_factory=Bounds)
    timestamp: Bounds[int] = field(default_factory=Bounds)

    @property
    def unbounded(self) -> bool:
        return not self.columns

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns with bounds."""
        return tuple(name for name in COLUMNS if not getattr(self, name).unbounded)

    def offsets(self, start: int, end: int) -> tuple[int, int]:
        """Narrow the offsets from ``start`` up to ``end``, exclusive, to those that may match; (end, end) for none."""
        low, high = start, end
        if self.offset.first is not None:
            low = max(low, self.offset.first)
        if self.offset.end is not None:
            high = min(high, self.offset.end)
        if self.offset.among is not None:
            inside = [offset for offset in self.offset.among if low <= offset < high]
            low, high = (min(inside), max(inside) + 1) if inside else (low, low)
        return (low, high) if low < high else (end, end)

    def may_match(
        self,
        offset: tuple[int | None, int | None] = (None, None),
        timestamp: tuple[int | None, int | None] = (None, None),
        topic: tuple[str | None, str | None] = (None, None),
    ) -> bool:
        """Whether a block of rows may have a matching one.

        Arguments are the smallest and largest value of each column, both inclusive; None is unknown.  The partition is
        not checked.
        """
        return self.offset.may_match(*offset) and self.timestamp.may_match(*timestamp) and self.topic.may_match(*topic)

    def narrowed(self, column: str, operator: str, value: Any) -> Predicate | None:
        """This predicate AND ``column operator value``; None if that cannot be expressed as bounds.

        Operators are ``=``, ``>``, ``>=``, ``<``, ``<=``, ``in``, ``prefix`` and ``not null``.
        """
        if column not in COLUMNS:
            return None
        bounds = _bounds(column, operator, value)
        return None if bounds is None else replace(self, **{column: getattr(self, column) & bounds})


def _bounds(column: str, operator: str, value: Any) -> Bounds[Any] | None:
    if operator == "not null":
        return Bounds()
    if operator == "in":
        values = [_value(column, each) for each in value if each is not None] if isinstance(value, Collection) else [None]
        return None if None in values else Bounds(among=frozenset(values))
    known = _value(column, value)
    if known is None:
        return None
    if operator == "=":
        return Bounds(among=frozenset((known,)))
    if operator == ">=":
        return Bounds(first=known)
    if operator == ">":
        return Bounds(first=_next(known))
    if operator == "<":
        return Bounds(end=known)
    if operator == "<=":
        return Bounds(end=_next(known))
    if operator == "prefix" and isinstance(known, str):
        return Bounds(first=known, end=_after_prefix(known))
    return None


def _value(column: str, value: Any) -> Any:
    """The value as in bounds; None if it is not of the column's type."""
    if column == "topic":
        return value if isinstance(value, str) else None
    if column == "timestamp":
        if not isinstance(value, datetime) or value.tzinfo is None:
            return None
        return (value - _EPOCH) // timedelta(microseconds=1)
    return value if type(value) is int else None


def _next(value: Any) -> Any:
    """The smallest larger value."""
    return value + "\0" if isinstance(value, str) else value + 1


def _after_prefix(prefix: str) -> str | None:
    """The smallest string larger than all with this prefix; None if there is none."""
    rest = prefix.rstrip(_LAST_CHARACTER)
    if not rest:
        return None
    last = ord(rest[-1]) + 1
    return rest[:-1] + chr(0xE000 if last == 0xD800 else last)
