"""JSON fields that are not in the schema, as columns of their own.

No value is lost and no column changes its type.  A field becomes a column with the first batch that has a value for it.
Its type depends on the values in that batch:

| values in the first batch | column |
|---|---|
| numbers | double |
| true, false | boolean |
| others, or mixed | string: the text, or the JSON of the value |

The map column `_extra` keeps the other values:

- a value that is not of its column's type, or a number or text too large for it;
- a field whose name does not consist of ASCII letters, digits and '_', beginning with a letter;
- a field whose name differs from a column's only in case, or is one of `RESERVED_COLUMNS`;
- new fields after `MAX_ADDED` columns were added;
- fields of structs that the schema does not have, under the name of the struct (see `JsonParser`).

A field that is null adds no column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bridge_spark.tables.recorded_columns import RESERVED_COLUMNS

MAX_ADDED = 200  # columns; a publisher that uses values as field names must not make the table unreadable
MAX_TEXT = 10_000_000  # characters of a JSON text; Spark's parser fails at twice as many

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_COLUMNS = ("double", "boolean", "string")
_KINDS = {'"': "string", "{": "string", "[": "string", "t": "boolean", "f": "boolean", "n": "null"}


def new_fields(
    seen: Iterable[str], columns: Collection[str], added: Mapping[str, str], types: Mapping[str, str]
) -> dict[str, str]:
    """The columns to add, with their types, in the order of their names.

    ``seen`` is the result of `seen_fields`.  ``columns`` are the names of the table's columns and of the schema's fields, ``added`` the columns
    added before.  ``types`` has all columns that the table ever had: a column dropped from the schema may come back.
    """
    kinds: dict[str, set[str]] = {}
    for entry in seen:
        kinds.setdefault(entry[1:], set()).add(_KINDS.get(entry[0], "double"))
    used = {name.lower() for name in (*columns, *added, *RESERVED_COLUMNS)}
    spelled = {name.lower(): name for name in types}
    found: dict[str, str] = {}
    for name in sorted(kinds):
        given = kinds[name] - {"null"}
        if given and _NAME.fullmatch(name) and name.lower() not in used and len(added) + len(found) < MAX_ADDED \
                and spelled.get(name.lower(), name) == name:
            kind = types.get(name, given.pop() if len(given) == 1 else "string")
            if kind in _COLUMNS:
                found[name] = kind
                used.add(name.lower())
    return found


def seen_fields(extra: Column) -> Column:
    """An aggregate: each field of the maps ``extra`` that may become a column, prefixed with its value's first character;
    with repetitions."""
    usable = F.map_filter(extra, lambda key, _: key.rlike(f"^{_NAME.pattern}$"))
    return F.flatten(F.collect_set(F.transform(
        F.map_entries(usable), lambda entry: F.concat(F.substring(entry.value, 1, 1), entry.key))))


def with_columns(rows: DataFrame, extra: str, added: Mapping[str, str]) -> DataFrame:
    """``rows`` with the columns ``added``, then the map ``extra`` without the values in them."""
    columns = {name: _value(F.col(extra).getItem(name), kind) for name, kind in added.items()}
    left = F.map_filter(extra, lambda key, value: ~_has_column(key, value, added))
    others = ("`" + name.replace("`", "``") + "`" for name in rows.columns if name != extra)
    return rows.select(*others, *(column.alias(name) for name, column in columns.items()), left.alias(extra))


def _value(text: Column, kind: str) -> Column:
    if kind == "string":
        plain = F.get_json_object(F.concat(F.lit("["), text, F.lit("]")), "$[0]")
        return F.when(text.startswith('"'), F.when(_fits(text, kind), plain)).when(text != "null", text)
    return F.when(_fits(text, kind), text.try_cast(kind))


def _has_column(key: Column, text: Column, added: Mapping[str, str]) -> Column:
    """Whether the field becomes a column's value."""
    found = F.lit(False)
    for kind in _COLUMNS:
        names = [name for name in added if added[name] == kind]
        if names:
            found = found | (key.isin(names) & ((text == "null") | _fits(text, kind)))
    return found


def _fits(text: Column, kind: str) -> Column:
    """Whether the JSON text is a value of that column type."""
    if kind == "double":
        number = text.try_cast("double")
        exact = F.when(text.rlike("[.eE]"), F.lit(float("inf"))).otherwise(F.lit(float(2**53 + 1)))
        return text.rlike("^[-0-9]") & F.coalesce(F.abs(number) < exact, F.lit(False))
    if kind == "boolean":
        return text.isin("true", "false")
    return ~text.startswith('"') | (F.length(text) < MAX_TEXT)
