"""Tells which schemas of payloads can fill the columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from bridge_spark.source.schema_files import UnusableSchema


class FilledFields(Protocol):
    """The fields of the columns that a schema has, and those that it has not."""

    present: set[str]
    absent: set[str]


S = TypeVar("S")
F = TypeVar("F", bound=FilledFields)


def use_one(schema: S, use: Callable[[S], F]) -> F:
    """``use(schema)``.  Raises `UnusableSchema` if it does, or if a field is absent."""
    found = use(schema)
    for name in sorted(found.absent):
        raise UnusableSchema(f"there is no field {name!r}")
    return found


def use_some(schemas: Mapping[int, S], use: Callable[[S], F]) -> tuple[dict[int, F], dict[int, str]]:
    """``use`` of the schemas of a registry by their ids, and the reasons for those where it raises `UnusableSchema`.

    Raises `UnusableSchema` if no schema can be used, or if each of those lacks the same field.
    """
    usable: dict[int, F] = {}
    unusable: dict[int, str] = {}
    for number, schema in schemas.items():
        try:
            usable[number] = use(schema)
        except UnusableSchema as error:
            unusable[number] = f"cannot be used: {error}"
    if not usable:
        number, reason = next(iter(unusable.items()))
        raise UnusableSchema(f"schema {number} {reason}")
    present: set[str] = set().union(*(found.present for found in usable.values()))
    absent: set[str] = set().union(*(found.absent for found in usable.values()))
    for name in sorted(absent - present):
        raise UnusableSchema(f"no usable schema has a field {name!r}")
    return usable, unusable
