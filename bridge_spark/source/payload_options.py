"""The options of the Spark source for payloads and topic levels.  Without `payloadFormat`, payloads are not parsed.

| option | default | |
|---|---|---|
| payloadFormat | | `json`, `csv`, `number`, `sparkplug`, `avro`, `protobuf`: fills the columns `value`, `reason`; |
|  | | `topics`: the format depends on the topic, see `TOPICS_FILE` |
| payloadTimestamps | iso | JSON: `iso` strings, or numbers since the epoch in `s`, `ms` or `us`; Protobuf: numbers |
| payloadExplode | false | one row per object of a JSON array, or per line of CSV |
| payloadDelimiter | , | CSV, one character |
| payloadQuote | " | CSV, one character |
| payloadHeader | | comma-separated names of the CSV fields by position; default: the schema's |
| payloadSchemaFile | | Avro: the file of the schema, `*.avsc`; Protobuf: a descriptor file |
| payloadSchemaDirectory | | payloads with the schema registry's header: files `<id>.avsc`, or `<id>.desc` for Protobuf; |
|  | | `topics`: the directory of `TOPICS_FILE` |
| payloadMessage | | Protobuf: the name of the message type |
| topicPattern | | instead of `filter`: `sensors/{plant}/{machine}/#` fills the columns `plant` and `machine` |
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge_spark.source import avro_schemas, protobuf_schemas
from bridge_spark.source.avro_schemas import AvroSchemas
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.protobuf_schemas import ProtobufSchemas
from bridge_spark.source.schema_files import UnusableSchema
from topic_matcher.filters import is_valid_filter

PAYLOAD_OPTION_NAMES = (
    "payloadFormat",
    "payloadTimestamps",
    "payloadExplode",
    "payloadDelimiter",
    "payloadQuote",
    "payloadHeader",
    "payloadSchemaFile",
    "payloadSchemaDirectory",
    "payloadMessage",
    "topicPattern",
)
TOPICS = "topics"
TOPICS_FILE = "topics.toml"
"""A table per topic filter, with the keys `format`, those of `PAYLOAD_KEYS`, and for numbers `field`, the name of the
field that they fill.  The first filter that matches a topic counts.  Files are relative to the directory of this file.
"""
PAYLOAD_KEYS = {
    "timestamps": "payloadTimestamps",
    "explode": "payloadExplode",
    "delimiter": "payloadDelimiter",
    "quote": "payloadQuote",
    "header": "payloadHeader",
    "schema_file": "payloadSchemaFile",
    "schema_directory": "payloadSchemaDirectory",
    "message": "payloadMessage",
}
"""Keys of TOML files, and the options that they stand for."""
PAYLOAD_FORMATS = ("json", "csv", "number", "sparkplug", "avro", "protobuf", "topics")
_PACKAGES = {"avro": "fastavro", "protobuf": "protobuf"}
"""That formats with schemas need."""
TIMESTAMPS = ("iso", "s", "ms", "us")
_OF_FORMAT = {
    "payloadTimestamps": ("json", "protobuf"),
    "payloadExplode": ("json", "csv"),
    "payloadDelimiter": ("csv",),
    "payloadQuote": ("csv",),
    "payloadHeader": ("csv",),
    "payloadSchemaFile": ("avro", "protobuf"),
    "payloadSchemaDirectory": ("avro", "protobuf", TOPICS),
    "payloadMessage": ("protobuf",),
}


class PayloadOptionError(OptionError):
    """An unusable payload option."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class PayloadOptions:
    """Checked options; ``timestamps`` is None for ISO strings, ``header`` is None for the schema's names.

    ``schemas`` are those of Avro and Protobuf payloads.  ``field`` is the field that a number fills, if it is named.
    ``topics`` are the topic filters of the format `TOPICS` with their options, the first that matches counts;
    ``directory`` is that of their file.
    """

    format: str
    timestamps: str | None = None
    explode: bool = False
    delimiter: str = ","
    quote: str = '"'
    header: tuple[str, ...] | None = None
    schemas: AvroSchemas | ProtobufSchemas | None = None
    field: str | None = None
    topics: tuple[tuple[str, PayloadOptions], ...] = ()
    directory: str = ""

    @property
    def several(self) -> bool:
        """Whether a payload may have several rows."""
        return self.format == "sparkplug" or self.explode or any(options.several for _, options in self.topics)


def payload_options(given: Mapping[str, str]) -> PayloadOptions | None:
    """The options, or None without `payloadFormat`; raises `PayloadOptionError`."""
    kind = given.get("payloadFormat")
    if kind is not None and kind.lower() not in PAYLOAD_FORMATS:
        raise PayloadOptionError("payloadFormat", f"{kind!r} is none of {', '.join(PAYLOAD_FORMATS)}")
    for name, formats in _OF_FORMAT.items():
        if name in given and (kind is None or kind.lower() not in formats):
            *first, last = formats
            text = f"{', '.join(first)} and {last}" if first else last
            raise PayloadOptionError(name, f"is for 'payloadFormat' {text} only")
    if kind is None:
        return None
    if kind.lower() == TOPICS:
        return _by_topic(given)
    timestamps = given.get("payloadTimestamps", "iso").lower()
    if timestamps not in TIMESTAMPS:
        raise PayloadOptionError("payloadTimestamps", f"{timestamps!r} is none of {', '.join(TIMESTAMPS)}")
    explode = given.get("payloadExplode", "false").lower()
    if explode not in ("true", "false"):
        raise PayloadOptionError("payloadExplode", f"{explode!r} is neither true nor false")
    header = given.get("payloadHeader")
    return PayloadOptions(
        kind.lower(),
        None if timestamps == "iso" else timestamps,
        explode == "true",
        _character(given, "payloadDelimiter", ","),
        _character(given, "payloadQuote", '"'),
        None if header is None else tuple(name.strip() for name in header.split(",")),
        _schemas(given, kind.lower()) if kind.lower() in _PACKAGES else None,
    )


def _by_topic(given: Mapping[str, str]) -> PayloadOptions:
    name = "payloadSchemaDirectory"
    directory = given.get(name)
    if directory is None:
        raise PayloadOptionError(name, f"'payloadFormat' {TOPICS} needs the directory of the file {TOPICS_FILE}")
    path = os.path.join(directory, TOPICS_FILE)
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise PayloadOptionError(name, f"{path!r}: {error.strerror or 'cannot be read'}") from None
    except (ValueError, RecursionError) as error:
        raise PayloadOptionError(name, f"{path!r}: not TOML: {' '.join(str(error).split())[:200]}") from None
    if not document:
        raise PayloadOptionError(name, f'{path!r}: there is no table like ["sensors/#"], a topic filter')
    found = []
    for topic_filter, values in document.items():
        try:
            found.append((topic_filter, _of_topic(directory, topic_filter, values)))
        except ValueError as error:
            raise PayloadOptionError(name, f'{path!r}: ["{topic_filter}"]: {error}') from None
    return PayloadOptions(TOPICS, topics=tuple(found), directory=directory)


def _of_topic(directory: str, topic_filter: str, values: Any) -> PayloadOptions:
    """The options of one table of `TOPICS_FILE`; raises ValueError with the key and the reason."""
    if not is_valid_filter(topic_filter) or topic_filter.startswith("$share/"):
        raise ValueError("is not a topic filter")
    if not isinstance(values, dict) or not isinstance(values.get("format"), str):
        raise ValueError(f"needs a format: {', '.join(PAYLOAD_FORMATS[:-1])}")
    if values["format"].lower() == TOPICS:
        raise ValueError(f"format: {TOPICS!r} is none of {', '.join(PAYLOAD_FORMATS[:-1])}")
    options = {"payloadFormat": values["format"]}
    for key, value in values.items():
        if key == "explode" and isinstance(value, bool):
            options[PAYLOAD_KEYS[key]] = str(value).lower()
        elif key == "header" and isinstance(value, list) and all(isinstance(name, str) for name in value):
            options[PAYLOAD_KEYS[key]] = ",".join(value)
        elif key in ("schema_file", "schema_directory") and isinstance(value, str):
            options[PAYLOAD_KEYS[key]] = os.path.join(directory, value)
        elif key not in ("explode", "header", "format", "field") and key in PAYLOAD_KEYS and isinstance(value, str):
            options[PAYLOAD_KEYS[key]] = value
        elif key in PAYLOAD_KEYS:
            raise ValueError(f"{key}: {value!r} is of the wrong type")
        elif key not in ("format", "field"):
            raise ValueError(f"{key}: unknown key")
    field = values.get("field")
    if "field" in values and (options["payloadFormat"].lower() != "number" or not isinstance(field, str)):
        raise ValueError("field: is the name of the field that a payload of format number fills")
    try:
        found = payload_options(options)
    except PayloadOptionError as error:
        raise ValueError(in_keys(error)) from None
    assert found is not None
    return found if field is None else replace(found, field=field)


def in_keys(error: PayloadOptionError) -> str:
    """The message of an error with the names of TOML keys: ``key: reason``."""
    keys = {"payloadFormat": "format", **{option: key for key, option in PAYLOAD_KEYS.items()}}
    reason = error.reason
    for option, key in keys.items():
        reason = reason.replace(f"'{option}'", "format" if key == "format" else f"'{key}'")
    return f"{keys[error.name]}: {reason}"


def _schemas(given: Mapping[str, str], kind: str) -> AvroSchemas | ProtobufSchemas:
    file, directory = given.get("payloadSchemaFile"), given.get("payloadSchemaDirectory")
    if (file is None) == (directory is None):
        raise PayloadOptionError("payloadSchemaFile", f"'payloadFormat' {kind} needs either this or 'payloadSchemaDirectory'")
    message = given.get("payloadMessage")
    if kind == "protobuf" and message is None:
        raise PayloadOptionError("payloadMessage", "'payloadFormat' protobuf needs the name of a message type")
    name = "payloadSchemaDirectory" if file is None else "payloadSchemaFile"
    try:
        if message is not None:
            read = protobuf_schemas.read_directory if file is None else protobuf_schemas.read_file
            return read(given[name], message)
        return avro_schemas.read_directory(given[name]) if file is None else avro_schemas.read_file(file)
    except UnusableSchema as error:
        raise PayloadOptionError(name, str(error)) from None
    except ImportError:
        reason = f"{kind!r} needs the package {_PACKAGES[kind]}: pip install 'mqttbroker[{kind}]'"
        raise PayloadOptionError("payloadFormat", reason) from None


def _character(given: Mapping[str, str], name: str, default: str) -> str:
    value = given.get(name, default)
    if len(value) != 1 or not value.isascii() or value in "\r\n\0":
        raise PayloadOptionError(name, f"{value!r} is not one ASCII character")
    return value
