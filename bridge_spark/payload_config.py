"""How a table of the ingest job reads its payloads: format, schema, columns.

The rule kept here: what is written in the file is checked as far as it can be
without Spark, by one line that names the key; the rest when the job starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bridge_spark.config_section import Section

FORMATS = ("json", "csv", "number", "raw")
MESSAGE_COLUMNS = (
    "topic", "payload", "qos", "retain", "partition", "offset", "timestamp", "client_id", "content_type",
    "response_topic", "correlation_data", "user_properties", "stream",
)
DEFAULT_COLUMNS = ["topic", "partition", "offset", "timestamp as received"]
_DEFAULT_SCHEMA = {"number": "value double not null", "raw": ""}
_COLUMN = re.compile(r"([a-z_]+)(?:\s+as\s+(\w+))?", re.IGNORECASE)


@dataclass(frozen=True)
class PayloadConfig:
    """What a payload is and which columns come of a message.

    ``columns`` are the message's columns that stand beside the parsed ones, as
    (column, name in the table).  ``schema`` is DDL; a field that is NOT NULL
    must be there.  ``options`` are those of Spark's own parser.
    """

    format: str
    schema: str
    options: dict[str, str]
    columns: tuple[tuple[str, str], ...]


def payload_config(section: Section) -> PayloadConfig:
    """Take the keys about payloads out of a table's section; raises `ConfigError`."""
    kind = section.text("format", "json")
    if kind not in FORMATS:
        raise section.error("format", f"{kind!r} is none of {', '.join(FORMATS)}")
    schema = section.text("schema", _DEFAULT_SCHEMA.get(kind))
    if kind == "raw" and schema:
        raise section.error("schema", "has no meaning with format \"raw\"")
    return PayloadConfig(
        format=kind,
        schema=schema,
        options=Section(section.where, f"{section.name}.options", section.table("options")).texts(),
        columns=_columns(section, kind),
    )


def _columns(section: Section, kind: str) -> tuple[tuple[str, str], ...]:
    default = ["topic", "payload", *DEFAULT_COLUMNS[1:]] if kind == "raw" else DEFAULT_COLUMNS
    columns: list[tuple[str, str]] = []
    for item in section.list_of_texts("columns", default):
        match = _COLUMN.fullmatch(item.strip())
        if match is None or match[1] not in MESSAGE_COLUMNS:
            raise section.error("columns", f"{item!r} is not \"COLUMN\" or \"COLUMN as NAME\" of "
                                           f"{', '.join(MESSAGE_COLUMNS)}")
        columns.append((match[1], match[2] or match[1]))
    if len({alias.lower() for _, alias in columns}) < len(columns):
        raise section.error("columns", "two columns have one name")
    return tuple(columns)
