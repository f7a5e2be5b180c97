"""How a table of the ingest job reads its messages: format, schema, columns.

The rule kept here: what is written in the file is checked as far as it can be
without Spark, by one line that names the key; the rest when the job starts.

Payloads are parsed in the source (`payload_reader`), unless options of Spark's
own parser are given: then Spark parses, by its own rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from bridge_spark.source.payload_options import PayloadOptionError, payload_options
from bridge_spark.source.topic_levels import PatternError, parse_pattern
from bridge_spark.tables.config_section import Section

FORMATS = ("json", "csv", "number", "sparkplug", "raw")
EXTRA_FIELDS = ("ignore", "map", "add")
MESSAGE_COLUMNS = (
    "topic", "payload", "qos", "retain", "partition", "offset", "timestamp", "client_id", "content_type",
    "response_topic", "correlation_data", "user_properties", "stream",
)
DEFAULT_COLUMNS = ["topic", "partition", "offset", "timestamp as received"]
_DEFAULT_SCHEMA = {
    "number": "value double not null",
    "sparkplug": "name string, alias long, timestamp timestamp, datatype string, long long, double double, "
                 "boolean boolean, string string, seq long",
    "raw": "",
}
_SPARK_PARSES = ("json", "csv")
_COLUMN = re.compile(r"([a-z_]+)(?:\s+as\s+(\w+))?", re.IGNORECASE)
_FIELD = re.compile(r"(.+?)(?:\s+as\s+(\w+))?", re.IGNORECASE)
_SOURCE_OPTIONS = {
    "timestamps": "payloadTimestamps",
    "explode": "payloadExplode",
    "delimiter": "payloadDelimiter",
    "quote": "payloadQuote",
    "header": "payloadHeader",
}


@dataclass(frozen=True)
class PayloadConfig:
    """What a payload is and which columns come of a message.

    ``columns`` are the message's columns that stand beside the parsed ones, as
    (column, name in the table); ``levels`` the topic's; ``fields`` the paths
    into the payload with their names, or None for all fields of the schema.
    ``schema`` is DDL; a field that is NOT NULL must be there.  ``options`` are
    those of Spark's own parser, ``source_options`` those of the source.
    """

    format: str
    schema: str
    options: dict[str, str]
    columns: tuple[tuple[str, str], ...]
    levels: tuple[str, ...]
    fields: Optional[tuple[tuple[tuple[str, ...], str], ...]]
    extra_fields: str
    source_options: dict[str, str]

    @property
    def parsed_by_source(self) -> bool:
        return self.format != "raw" and not self.options

    @property
    def several(self) -> bool:
        """Whether a message may be several rows: then `item` tells them apart."""
        return self.format == "sparkplug" or self.source_options.get("payloadExplode") == "true"


def payload_config(section: Section) -> PayloadConfig:
    """Take the keys about messages out of a table's section; raises `ConfigError`."""
    kind = section.text("format", "json")
    if kind not in FORMATS:
        raise section.error("format", f"{kind!r} is none of {', '.join(FORMATS)}")
    schema = section.text("schema", _DEFAULT_SCHEMA.get(kind))
    if kind == "raw" and schema:
        raise section.error("schema", "has no meaning with format \"raw\"")
    options = Section(section.where, f"{section.name}.options", section.table("options")).texts()
    if options and kind not in _SPARK_PARSES:
        raise section.error("options", f"are those of Spark's parsers for {' and '.join(_SPARK_PARSES)}")
    extra = section.text("extra_fields", "ignore")
    if extra not in EXTRA_FIELDS:
        raise section.error("extra_fields", f"{extra!r} is none of {', '.join(EXTRA_FIELDS)}")
    if extra != "ignore" and (kind != "json" or options):
        raise section.error("extra_fields", "is for format \"json\" without [options]")
    levels, topic = _topic(section)
    return PayloadConfig(
        format=kind,
        schema=schema,
        options=options,
        columns=_columns(section, kind),
        levels=levels,
        fields=_fields(section),
        extra_fields=extra,
        source_options={**topic, **_source_options(section, kind, bool(options))},
    )


def _topic(section: Section) -> tuple[tuple[str, ...], dict[str, str]]:
    if "topic" not in section.values:
        return (), {}
    if "filter" in section.values:
        raise section.error("topic", "is a filter itself: leave 'filter' out")
    text = section.text("topic")
    try:
        levels = parse_pattern(text).names
    except PatternError as error:
        raise section.error("topic", str(error)) from None
    return levels, {"topicPattern": text}


def _source_options(section: Section, kind: str, by_spark: bool) -> dict[str, str]:
    given = {
        "timestamps": section.text("timestamps") if "timestamps" in section.values else None,
        "explode": "true" if section.flag("explode", False) else None,
        "delimiter": section.text("delimiter") if "delimiter" in section.values else None,
        "quote": section.text("quote") if "quote" in section.values else None,
        "header": ",".join(section.list_of_texts("header", [])) or None,
    }
    options = {_SOURCE_OPTIONS[key]: value for key, value in given.items() if value is not None}
    if by_spark or kind == "raw":
        for key, value in given.items():
            if value is not None:
                raise section.error(key, "has no meaning with format \"raw\" or with [options] of Spark's parser")
        return {}
    options["payloadFormat"] = kind
    try:
        payload_options(options)
    except PayloadOptionError as error:
        key = next(key for key, name in _SOURCE_OPTIONS.items() if name == error.name)
        raise section.error(key, error.reason.replace("'payloadFormat'", "format")) from None
    return options


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


def _fields(section: Section) -> Optional[tuple[tuple[tuple[str, ...], str], ...]]:
    if "fields" not in section.values:
        return None
    fields = []
    for item in section.list_of_texts("fields", []):
        match = _FIELD.fullmatch(item.strip())
        path = tuple(match[1].split(".")) if match is not None else ()
        if match is None or not all(path):
            raise section.error("fields", f"{item!r} is not \"FIELD\" or \"FIELD.FIELD as NAME\"")
        fields.append((path, match[2] or path[-1]))
    if not fields:
        raise section.error("fields", "names none: leave it out for all of the schema")
    return tuple(fields)

