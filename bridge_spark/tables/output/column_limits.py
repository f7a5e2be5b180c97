"""What the formats of tables cannot hold, checked before a job starts.

| table format | types | names |
|---|---|---|
| parquet | no calendar interval, void | any |
| delta | no variant, geometry, geography, interval, time, void | without space and , ; { } ( ) newline tab = |
| iceberg | as delta | any |

Delta allows such names with column mapping, but deltalake cannot add a column to a table with column mapping.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

NAMES = {"parquet": "Parquet", "delta": "Delta", "iceberg": "Iceberg"}
_NEITHER = ("variant", "geometry", "geography", "interval", "time", "void")
_REFUSED = {"parquet": ("interval", "void"), "delta": _NEITHER, "iceberg": _NEITHER}
"""The names of types without parameters; "interval" alone is Spark's calendar interval."""
_DELTA_CHARACTERS = " ,;{}()\n\t="


def refusal(table_format: str, schema: StructType) -> str | None:
    """Why a table of the format cannot have the columns, a sentence without its end; None if it can."""
    for path, kind in _within(schema, ""):
        if _is_refused(kind, table_format):
            return f"column {path!r} is {kind.simpleString()}, which {NAMES[table_format]} tables cannot hold"
        if table_format == "delta" and isinstance(kind, StructType):
            for name in kind.names:
                if any(character in _DELTA_CHARACTERS for character in name):
                    place = "column" if kind is schema else f"in column {path!r} field"
                    return f"{place} {name!r} has one of the characters {_DELTA_CHARACTERS!r}, which Delta tables cannot hold"
    return None


def _is_refused(kind: DataType, table_format: str) -> bool:
    name = kind.simpleString().partition("(")[0]
    return (name if table_format == "parquet" else name.partition(" ")[0]) in _REFUSED[table_format]


def _within(kind: DataType, path: str) -> Iterator[tuple[str, DataType]]:
    """``kind`` and the types in it, each with its path."""
    yield path, kind
    if isinstance(kind, StructType):
        for field in kind.fields:
            yield from _within(field.dataType, f"{path}.{field.name}" if path else field.name)
    elif isinstance(kind, ArrayType):
        yield from _within(kind.elementType, f"{path}[]")
    elif isinstance(kind, MapType):
        yield from _within(kind.keyType, f"{path}{{}}")
        yield from _within(kind.valueType, f"{path}{{}}")
