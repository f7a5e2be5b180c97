"""JSON fields that the schema does not have, as columns of their own.

The rule kept here: no value is lost and no column changes its type.  A field
becomes a column with the batch that first has a value for it, and the type is
made of what that batch has:

| values of the first batch | column |
|---|---|
| numbers | double |
| true, false | boolean |
| anything else, or of several kinds | string: a text, or the JSON of the value |

The map `EXTRA` keeps what has no column: a value that is not of its column's
type, or a number or text too large for it, a name that is not made of ASCII
letters, digits and '_' beginning with a letter, one that differs from a
column's name only in case or is one of `DIRECTORY_NAMES`, and all that is new
once there are `MAX_ADDED` columns. A field that is null adds no column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from bridge_spark.tables.table_columns import DIRECTORY_NAMES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAX_ADDED = 200
"""Columns; a sender that makes field names of its values shall not make a table nobody can read."""
MAX_TEXT = 10_000_000
"""Characters of a JSON text; Spark's parser gives up at twice as many."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_COLUMNS = ("double", "boolean", "string")
_KINDS = {'"': "string", "{": "string", "[": "string", "t": "boolean", "f": "boolean", "n": "null"}


def new_fields(
    seen: Iterable[str], columns: Collection[str], added: Mapping[str, str], types: Mapping[str, str]
) -> dict[str, str]:
    """The columns to add, with their types, in the order of their names.

    ``seen`` is what `seen_fields` has found, ``columns`` the names of the table's other columns, ``added`` those that
    were added before.  ``types`` are of all columns that the table ever had: one that the schema has no more comes back.
    """
    kinds: dict[str, set[str]] = {}
    for entry in seen:
        kinds.setdefault(entry[1:], set()).add(_KINDS.get(entry[0], "double"))
    taken = {name.lower() for name in (*columns, *added, *DIRECTORY_NAMES)}
    spelled = {name.lower(): name for name in types}
    found: dict[str, str] = {}
    for name in sorted(kinds):
        given = kinds[name] - {"null"}
        if given and _NAME.fullmatch(name) and name.lower() not in taken and len(added) + len(found) < MAX_ADDED \
                and spelled.get(name.lower(), name) == name:
            kind = types.get(name, given.pop() if len(given) == 1 else "string")
            if kind in _COLUMNS:
                found[name] = kind
                taken.add(name.lower())
    return found


def seen_fields(extra: Column) -> Column:
    """An aggregate: each field of the maps ``extra``, behind the first character of its value, once or more."""
    from pyspark.sql import functions as F

    return F.flatten(F.collect_set(F.transform(
        F.map_entries(extra), lambda entry: F.concat(F.substring(entry.value, 1, 1), entry.key))))


def with_columns(rows: DataFrame, extra: str, added: Mapping[str, str]) -> DataFrame:
    """``rows`` with the columns ``added``, and what went into them no longer in the map ``extra``, which comes last."""
    from pyspark.sql import functions as F

    columns = {name: _value(F.col(extra).getItem(name), kind) for name, kind in added.items()}
    left = F.map_filter(extra, lambda key, value: ~_taken(key, value, added))
    own = ("`" + name.replace("`", "``") + "`" for name in rows.columns if name != extra)
    return rows.select(*own,
                       *(column.alias(name) for name, column in columns.items()), left.alias(extra))


def _value(text: Column, kind: str) -> Column:
    from pyspark.sql import functions as F

    if kind == "string":
        plain = F.get_json_object(F.concat(F.lit("["), text, F.lit("]")), "$[0]")
        return F.when(text.startswith('"'), F.when(_fits(text, kind), plain)).when(text != "null", text)
    return F.when(_fits(text, kind), text.try_cast(kind))


def _taken(key: Column, text: Column, added: Mapping[str, str]) -> Column:
    from pyspark.sql import functions as F

    taken = F.lit(False)
    for kind in _COLUMNS:
        names = [name for name in added if added[name] == kind]
        if names:
            taken = taken | (key.isin(names) & ((text == "null") | _fits(text, kind)))
    return taken


def _fits(text: Column, kind: str) -> Column:
    """Whether the JSON text is a value of a column of that type."""
    from pyspark.sql import functions as F

    if kind == "double":
        number = text.try_cast("double")
        exact = F.when(text.rlike("[.eE]"), F.lit(float("inf"))).otherwise(F.lit(float(2**53 + 1)))
        return text.rlike("^[-0-9]") & F.coalesce(F.abs(number) < exact, F.lit(False))
    if kind == "boolean":
        return text.isin("true", "false")
    return ~text.startswith('"') | (F.length(text) < MAX_TEXT)
