"""Options of catalog tables: `CREATE TABLE t USING mqtt OPTIONS (...)`.

When a table is created, Spark passes the options twice, plain and with the prefix `option.`, among the properties of
the table.  When it is read, Spark passes a Python source no options, only the schema that the catalog has stored.  So
the source keeps the options in that schema, as metadata of a column, or as its comment if the schema is the option
`schema`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Optional, Union
from urllib.parse import unquote

from pyspark.sql.types import StructType

from bridge_spark.source.option_values import OptionError

_PREFIX = "option."
_KEY = "mqtt.options"
_COMMENT = "mqtt.options: "


def is_table(options: Mapping[str, str]) -> bool:
    """Whether these are the properties of a catalog table."""
    return any(key.lower().startswith(_PREFIX) for key in options) or "provider" in {key.lower() for key in options}


def table_options(properties: Mapping[str, str]) -> dict[str, str]:
    """The options among a table's properties; raises `OptionError`."""
    lower = {key.lower(): value for key, value in properties.items()}
    options = {key.removeprefix(_PREFIX): value for key, value in lower.items() if key.startswith(_PREFIX)}
    if "path" not in options and "url" not in options and "location" in lower:
        options["path"] = lower["location"]
    if "token" in options:
        raise OptionError("token", "cannot be kept in a table, where anyone could read it: give 'tokenFile'")
    if options.get("path", "").startswith("file:"):
        options["path"] = unquote(options["path"])
    return options


def with_options(schema: Union[StructType, str], options: Mapping[str, str]) -> Union[StructType, str]:
    """The schema of a new table, with its options."""
    if isinstance(schema, str):
        comment = (_COMMENT + json.dumps(options)).replace("\\", "\\\\").replace("'", "\\'")
        return f"{schema} COMMENT '{comment}'"
    first, *others = schema.jsonValue()["fields"]
    fields = [{**first, "metadata": {**first["metadata"], _KEY: json.dumps(options)}}, *others]
    return StructType.fromJson({"type": "struct", "fields": fields})


def options_of(schema: StructType) -> Optional[dict[str, str]]:
    """The options that `with_options` has put into a table's schema; None if there are none."""
    for field in schema.fields:
        metadata: Mapping[str, Any] = field.metadata or {}
        if _KEY in metadata:
            return dict(json.loads(metadata[_KEY]))
        comment = str(metadata.get("comment", ""))
        if comment.startswith(_COMMENT):
            return dict(json.loads(comment.removeprefix(_COMMENT)))
    return None
