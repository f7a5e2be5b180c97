"""JSON fields that are not in the schema, as columns of their own.

No value is lost and no column changes its type.  A field becomes a column with the first batch that has a value for it.
Its type depends on the values in that batch:

| values in the first batch | column |
|---|---|
| numbers | double |
| true, false | boolean |
| others, or mixed | string: the text, or the JSON of the value |

Names of columns do not differ in case only, as Spark's do not: `temp` and `Temp` fill one column, whose name is the
spelling of its first batch, the one with the first lower-case letter if there are several.  If a message has both, that of
the column's name is the column's value.

The map column `_extra` keeps the other values:

- a value that is not of its column's type, or a number or text too large for it;
- the value of a second spelling in the same message;
- a field whose name does not consist of ASCII letters, digits and '_', beginning with a letter;
- a field whose name differs only in case from a column of the schema, or from one of `RESERVED_COLUMNS`;
- new fields after `MAX_ADDED` columns, and new spellings after as many spellings, were added;
- fields of structs that the schema does not have, under the name of the struct (see `JsonParser`).

A field that is null adds no column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bridge_spark.tables.recorded_columns import RESERVED_COLUMNS, AddedColumns
from bridge_spark.tables.rows.column_names import quoted

MAX_ADDED = 200  # columns; a publisher that uses values as field names must not make the table unreadable
MAX_TEXT = 10_000_000  # characters of a JSON text; Spark's parser fails at twice as many

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_COLUMNS = ("double", "boolean", "string")
_KINDS = {'"': "string", "{": "string", "[": "string", "t": "boolean", "f": "boolean", "n": "null"}


def new_fields(seen: Iterable[str], columns: Collection[str], added: AddedColumns, types: Mapping[str, str]) -> AddedColumns:
    """The columns to add, in the order of their names, and the spellings of fields.

    ``seen`` is the result of `seen_fields`.  ``columns`` are the names of the table's columns and of the schema's fields, ``added`` the columns
    added before.  ``types`` has all columns that the table ever had: a column dropped from the schema may come back.
    """
    kinds: dict[str, set[str]] = {}
    for entry in seen:
        kinds.setdefault(entry[1:], set()).add(_KINDS.get(entry[0], "double"))
    reserved = {name.lower() for name in (*columns, *RESERVED_COLUMNS)}
    fields: dict[str, list[str]] = {}
    for name in sorted(kinds, key=str.swapcase):
        if kinds[name] != {"null"} and _NAME.fullmatch(name) and name.lower() not in reserved:
            fields.setdefault(name.lower(), []).append(name)
    of_added = {name.lower(): name for name in added.types}
    known = {name.lower(): name for name in types}
    found: dict[str, str] = {}
    spellings: dict[str, str] = {}
    for lower in sorted(fields):
        column = of_added.get(lower) or known.get(lower) or fields[lower][0]
        if column not in added.types:
            given = set().union(*(kinds[name] for name in fields[lower])) - {"null"}
            kind = types.get(column, given.pop() if len(given) == 1 else "string")
            if kind not in _COLUMNS or len(added.types) + len(found) >= MAX_ADDED:
                continue
            found[column] = kind
        for name in fields[lower]:
            if name != column and name not in added.spellings and len(added.spellings) + len(spellings) < MAX_ADDED:
                spellings[name] = column
    return AddedColumns(found, spellings)


def seen_fields(extra: Column) -> Column:
    """An aggregate: each field of the maps ``extra`` that may become a column, prefixed with its value's first character;
    with repetitions."""
    usable = F.map_filter(extra, lambda key, _: key.rlike(f"^{_NAME.pattern}$"))
    return F.flatten(F.collect_set(F.transform(F.map_entries(usable), lambda entry: F.concat(F.substring(entry.value, 1, 1), entry.key))))


def with_columns(rows: DataFrame, extra: str, added: AddedColumns) -> DataFrame:
    """``rows`` with the columns ``added``, then the map ``extra`` without the values in them."""
    spelled: dict[str, list[str]] = {name: [name] for name in added.types}
    for field, name in added.spellings.items():
        spelled[name].append(field)

    def values(name: str, fields: Sequence[str]) -> Column:
        found = [_value(F.col(extra).getItem(field), added.types[name]) for field in fields]
        return F.coalesce(*found)

    def second_spelling(key: Column) -> Column:
        """Whether the column has the value of another spelling of the field ``key``."""
        found = F.lit(False)
        for name, fields in spelled.items():
            for place in range(1, len(fields)):
                found = found | ((key == fields[place]) & values(name, fields[:place]).isNotNull())
        return found

    kinds = {**added.types, **{field: added.types[name] for field, name in added.spellings.items()}}
    left = F.map_filter(extra, lambda key, value: ~_has_column(key, value, kinds) | second_spelling(key))
    others = (quoted(name) for name in rows.columns if name != extra)
    return rows.select(*others, *(values(name, fields).alias(name) for name, fields in spelled.items()), left.alias(extra))


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
