"""Checks the columns of a user's schema against those of a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyspark.sql.types import DataType, StructField

from bridge_spark.source.storage import StreamError


def check_column(field: StructField, known: Mapping[str, DataType], names: Iterable[str]) -> None:
    """Raise `StreamError` unless ``field`` is one of ``known`` with its type; the error lists ``names``."""
    kind = known.get(field.name)
    if kind is None:
        raise StreamError(f"mqtt source: there is no column {field.name!r}; the columns are {', '.join(names)}")
    if field.dataType != kind:
        raise StreamError(
            f"mqtt source: column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}: convert it after reading"
        )
