"""Spark's types as Arrow types: names, and the structs that stand for a type of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class UnusableType(ValueError):
    """A column's type that Spark cannot exchange with Python; the message is a sentence."""


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark exchanges for ``schema``.  Raises `UnusableType`."""
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    for field in schema.fields:
        parts = field.dataType.fields if isinstance(field.dataType, StructType) else [field]
        for part in parts:
            try:
                to_arrow_schema(StructType([part]), timezone="UTC")
            except PySparkTypeError:
                where = f"column {field.name!r}" if part is field else f"field {part.name!r} of {field.name!r}"
                raise UnusableType(f"{where} cannot be {part.dataType.simpleString()}, which no payload format is read to") from None
    return to_arrow_schema(schema, timezone="UTC")


def type_name(kind: pa.DataType) -> str:
    """The name of the Spark type that ``kind`` stands for."""
    from pyspark.errors import PySparkTypeError
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        return from_arrow_type(kind).simpleString()
    except PySparkTypeError:
        return str(kind)


def first_unread(kind: pa.DataType, where: str, is_read: Callable[[pa.DataType], bool]) -> tuple[str, pa.DataType] | None:
    """The path and type of the first type within ``kind`` that is not read; ``where`` is the path to ``kind``.

    ``is_read`` is asked about types that contain no other, and about maps.
    """
    types = pa.types
    if types.is_struct(kind) and not is_variant(kind) and not is_geospatial(kind):
        parts = [(f"{where}.{kind.field(number).name}", kind.field(number).type) for number in range(kind.num_fields)]
    elif types.is_list(kind):
        parts = [(f"{where}[]", kind.value_type)]
    elif types.is_map(kind) and is_read(kind):
        parts = [(f"{where}{{}}", kind.item_type)]
    else:
        return None if is_read(kind) else (where, kind)
    return next(filter(None, (first_unread(part, path, is_read) for path, part in parts)), None)


def is_variant(kind: pa.DataType) -> bool:
    """Whether a struct of `value` and `metadata` stands for Spark's variant."""
    return _is_tagged(kind, "metadata", b"variant")


def is_geospatial(kind: pa.DataType) -> bool:
    """Whether a struct of `srid` and `wkb` stands for Spark's geometry or geography."""
    return _is_tagged(kind, "wkb", b"geometry") or _is_tagged(kind, "wkb", b"geography")


def _is_tagged(kind: pa.DataType, name: str, key: bytes) -> bool:
    if not pa.types.is_struct(kind):
        return False
    place = kind.get_field_index(name)
    return place >= 0 and (kind.field(place).metadata or {}).get(key) == b"true"
