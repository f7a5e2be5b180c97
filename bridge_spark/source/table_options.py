"""Options of catalog tables: `CREATE TABLE t USING mqtt OPTIONS (...)`.

When a table is created, Spark passes the options twice, plain and with the prefix `option.`, among the properties of
the table.  When it is read, Spark passes a Python source no options, only the schema that the catalog has stored.  So
the source keeps the options in that schema, as metadata of a column, or as its comment if the schema is the option
`schema`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pyspark.sql.types import StructType

from bridge_spark.source.archive_options import ARCHIVE_SECRETS
from bridge_spark.source.kafka_options import PASSWORD, SERVERS
from bridge_spark.source.option_values import OptionError

_PREFIX = "option."
_KEY = "mqtt.options"
_COMMENT = "mqtt.options: "


class GivenOptions:
    """The options of a read: those of the query, and for a catalog table also those in the table's schema."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.table = _table_options(options) if _is_table(options) else None
        self._query: Mapping[str, str] = options if self.table is None else self.table

    def has(self, *names: str) -> bool:
        """Whether the query gives one of these options."""
        return not {key.lower() for key in self._query}.isdisjoint(names)

    def of_query(self) -> Mapping[str, str]:
        """The options of the query; those in a table's schema are not known before `for_schema`."""
        return self._query

    def for_schema(self, schema: StructType | None, required: str, missing: str) -> dict[str, str]:
        """All options, once Spark has given the schema. Raises `OptionError` with ``missing`` for the option
        ``required`` if the table keeps none."""
        kept = _options_of(schema) if schema is not None else {}
        if kept is None:
            raise OptionError(required, f"missing: {missing}")
        return kept | {key.lower(): value for key, value in self._query.items()}

    def keep_in(self, schema: StructType | str) -> StructType | str:
        """The schema, for a new table with its options."""
        return schema if self.table is None else _with_options(schema, self.table)


def _is_table(options: Mapping[str, str]) -> bool:
    """Whether these are the properties of a catalog table."""
    return any(key.lower().startswith(_PREFIX) for key in options) or "provider" in {key.lower() for key in options}


def _table_options(properties: Mapping[str, str]) -> dict[str, str]:
    """The options among a table's properties; raises `OptionError`."""
    lower = {key.lower(): value for key, value in properties.items()}
    options = {key.removeprefix(_PREFIX): value for key, value in lower.items() if key.startswith(_PREFIX)}
    if options.keys().isdisjoint(("path", "url", SERVERS)) and "location" in lower:
        options["path"] = lower["location"]
    if "token" in options:
        raise OptionError("token", "cannot be kept in a table, where anyone could read it: give 'tokenFile'")
    if PASSWORD in options:
        raise OptionError(PASSWORD, "cannot be kept in a table, where anyone could read it: give 'kafka.sasl.passwordFile'")
    for name in ARCHIVE_SECRETS:
        if name.lower() in options:
            raise OptionError(name, "cannot be kept in a table, where anyone could read it: give it in the environment")
    if options.get("path", "").startswith("file:"):
        options["path"] = unquote(options["path"])
    return options


def _with_options(schema: StructType | str, options: Mapping[str, str]) -> StructType | str:
    """The schema of a new table, with its options."""
    if isinstance(schema, str):
        comment = (_COMMENT + json.dumps(options)).replace("\\", "\\\\").replace("'", "\\'")
        return f"{schema} COMMENT '{comment}'"
    first, *others = schema.jsonValue()["fields"]
    fields = [{**first, "metadata": {**first["metadata"], _KEY: json.dumps(options)}}, *others]
    return StructType.fromJson({"type": "struct", "fields": fields})


def _options_of(schema: StructType) -> dict[str, str] | None:
    """The options that `_with_options` has put into a table's schema; None if there are none."""
    for field in schema.fields:
        metadata: Mapping[str, Any] = field.metadata or {}
        if _KEY in metadata:
            return dict(json.loads(metadata[_KEY]))
        comment = str(metadata.get("comment", ""))
        if comment.startswith(_COMMENT):
            return dict(json.loads(comment.removeprefix(_COMMENT)))
    return None
