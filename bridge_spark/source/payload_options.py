"""The options of the Spark source for payloads and topic levels.  Without `payloadFormat`, payloads are not parsed.

| option | default | |
|---|---|---|
| payloadFormat | | `json`, `csv`, `number`, `sparkplug`, `avro` or `protobuf`: fills the columns `value` and `reason` |
| payloadTimestamps | iso | JSON timestamps: `iso` strings, or numbers since the epoch in `s`, `ms` or `us`; Protobuf: numbers |
| payloadExplode | false | one row per object of a JSON array, or per line of CSV |
| payloadDelimiter | , | CSV, one character |
| payloadQuote | " | CSV, one character |
| payloadHeader | | comma-separated names of the CSV fields by position; default: the schema's |
| payloadSchemaFile | | Avro: the file of the schema, `*.avsc`; Protobuf: a descriptor file |
| payloadSchemaDirectory | | payloads with the schema registry's header: files `<id>.avsc`, or `<id>.desc` for Protobuf |
| payloadMessage | | Protobuf: the name of the message type |
| topicPattern | | instead of `filter`: `sensors/{plant}/{machine}/#` fills the columns `plant` and `machine` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional, Union

from bridge_spark.source import avro_schemas, protobuf_schemas
from bridge_spark.source.avro_schemas import AvroSchemas
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.protobuf_schemas import ProtobufSchemas
from bridge_spark.source.schema_files import UnusableSchema

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
PAYLOAD_FORMATS = ("json", "csv", "number", "sparkplug", "avro", "protobuf")
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
    "payloadSchemaDirectory": ("avro", "protobuf"),
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

    ``schemas`` are those of Avro and Protobuf payloads.
    """

    format: str
    timestamps: Optional[str] = None
    explode: bool = False
    delimiter: str = ","
    quote: str = '"'
    header: Optional[tuple[str, ...]] = None
    schemas: Union[AvroSchemas, ProtobufSchemas, None] = None


def payload_options(given: Mapping[str, str]) -> Optional[PayloadOptions]:
    """The options, or None without `payloadFormat`; raises `PayloadOptionError`."""
    kind = given.get("payloadFormat")
    if kind is not None and kind.lower() not in PAYLOAD_FORMATS:
        raise PayloadOptionError("payloadFormat", f"{kind!r} is none of {', '.join(PAYLOAD_FORMATS)}")
    for name, formats in _OF_FORMAT.items():
        if name in given and (kind is None or kind.lower() not in formats):
            raise PayloadOptionError(name, f"is for 'payloadFormat' {' and '.join(formats)} only")
    if kind is None:
        return None
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


def _schemas(given: Mapping[str, str], kind: str) -> Union[AvroSchemas, ProtobufSchemas]:
    file, directory = given.get("payloadSchemaFile"), given.get("payloadSchemaDirectory")
    if (file is None) == (directory is None):
        raise PayloadOptionError(
            "payloadSchemaFile", f"'payloadFormat' {kind} needs either this or 'payloadSchemaDirectory'")
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
        raise PayloadOptionError(
            "payloadFormat", f"{kind!r} needs the package {_PACKAGES[kind]}: pip install 'mqttbroker[{kind}]'") from None


def _character(given: Mapping[str, str], name: str, default: str) -> str:
    value = given.get(name, default)
    if len(value) != 1 or not value.isascii() or value in "\r\n\0":
        raise PayloadOptionError(name, f"{value!r} is not one ASCII character")
    return value
