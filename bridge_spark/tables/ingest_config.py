"""The configuration of `mqttbroker ingest`: a TOML file of tables, as in `conf/ingest.toml`.

Everything that can be checked without Spark is checked before the job starts.  Errors name the file, the key and the
reason in one line.  Relative directories are relative to the working directory.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge_spark.source.kafka_options import SERVERS
from bridge_spark.source.options import OptionError, parse_options
from bridge_spark.source.payload_options import PAYLOAD_KEYS, PayloadOptionError, in_keys, payload_options
from bridge_spark.source.topic_levels import PatternError, parse_pattern
from bridge_spark.tables.config_section import ConfigError, Section

FORMATS = ("json", "csv", "number", "sparkplug", "avro", "protobuf", "topics", "raw")
EXTRA_FIELDS = ("ignore", "map", "add")
TABLE_FORMATS = ("parquet", "delta", "iceberg")
MESSAGE_COLUMNS = (
    "topic",
    "payload",
    "qos",
    "retain",
    "partition",
    "offset",
    "timestamp",
    "client_id",
    "content_type",
    "response_topic",
    "correlation_data",
    "user_properties",
    "stream",
)
DEFAULT_COLUMNS = ["topic", "partition", "offset", "timestamp as received"]
MERGE_FILES = 200  # default of `compact_after`
EXPIRE_AFTER_S = 7 * 86400  # default of `expire_after`
EXPIRE_AFTER_MIN_S = 3600  # readers and other writers use files for that long
RETRY_OPTION = "fetch.numRetries"
RETRIES = 14  # default of `source.retries`: the waits double from 0.1 s up to 10 s, 70 s in all

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")
_IN_CATALOG = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
_DURATION = re.compile(r"(\d+) (second|minute|hour|day)s?")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_DEFAULT_SCHEMA = {
    "number": "value double not null",
    "sparkplug": "name string, alias long, timestamp timestamp, datatype string, long long, double double, "
    "boolean boolean, string string, seq long",
    "raw": "",
}
_QUOTED = r"`(?:[^`]|``)+`"  # a name with any characters, as in SQL
_ALIAS = rf"(?:\s+as\s+(\w+|{_QUOTED}))?"
_COLUMN = re.compile(rf"([a-z_]+){_ALIAS}", re.IGNORECASE)
_FIELD = re.compile(rf"((?:{_QUOTED}|[^`.]+?)(?:\.(?:{_QUOTED}|[^`.]+?))*){_ALIAS}", re.IGNORECASE)
_PART = re.compile(rf"{_QUOTED}|[^`.]+")
_SOURCE_KEYS = {
    "path": "path",
    "url": "url",
    "token": "token",
    "token_file": "tokenFile",
    "ca_file": "caFile",
    "bootstrap_servers": SERVERS,
    "cluster_id": "clusterId",
    "security_protocol": "kafka.security.protocol",
    "sasl_mechanism": "kafka.sasl.mechanism",
    "sasl_username": "kafka.sasl.username",
    "sasl_password": "kafka.sasl.password",
    "sasl_password_file": "kafka.sasl.passwordFile",
    "kafka_ca_file": "kafka.ssl.ca.location",
    "kafka_certificate_file": "kafka.ssl.certificate.location",
    "kafka_key_file": "kafka.ssl.key.location",
}


@dataclass(frozen=True)
class PayloadConfig:
    """How the payloads of a table are parsed, and which columns the table has.

    ``columns`` are message columns, as (column, name in the table); ``levels`` are topic levels; ``fields`` are paths
    into the payload with their names, None for all fields of the schema.  ``schema`` is DDL; a NOT NULL field is
    required.  The Spark source parses payloads, with the options ``source_options``.  ``several``: a message may have several
    rows, which the column `item` numbers.
    """

    format: str
    schema: str
    columns: tuple[tuple[str, str], ...]
    levels: tuple[str, ...]
    fields: tuple[tuple[tuple[str, ...], str], ...] | None
    extra_fields: str
    source_options: dict[str, str]
    several: bool


@dataclass(frozen=True)
class AggregateConfig:
    """One aggregate table: a row for each ``window`` (seconds) and group."""

    name: str
    window: int
    group_by: tuple[str, ...]
    values: tuple[str, ...]
    output: str
    checkpoint: Path


@dataclass(frozen=True)
class CatalogConfig:
    """An Iceberg catalog: its name in pyiceberg's configuration, and properties that override those found there."""

    name: str = "default"
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class SinkConfig:
    """How a table is written.

    ``event_time`` is a column of the table, None for the time of receipt; ``watermark`` is in seconds; ``merge_files``
    is the number of small files that are merged, None for never; versions of Delta and Iceberg tables are kept for
    ``expire_after`` seconds.  ``storage`` are deltalake's `storage_options`.
    """

    table_format: str
    merge_files: int | None
    expire_after: int
    storage: Mapping[str, str] = field(repr=False)
    catalog: CatalogConfig
    event_time: str | None
    watermark: int | None
    deduplicate_by: tuple[str, ...]
    aggregates: tuple[AggregateConfig, ...]


@dataclass(frozen=True)
class TableConfig:
    """One table; ``source`` are the options of the Spark source.

    ``output``, ``dead_letters`` and ``backfill`` are directories, URLs, or names in the catalog.
    """

    name: str
    source: dict[str, str]
    payload: PayloadConfig
    sink: SinkConfig
    output: str
    dead_letters: str
    checkpoint: Path
    backfill: str

    def places(self) -> Iterator[tuple[str, str]]:
        """All directories, URLs and names in the catalog of the table, each with its key."""
        for key in ("output", "dead_letters", "checkpoint", "backfill"):
            yield key, str(getattr(self, key))
        for aggregate in self.sink.aggregates:
            yield f"aggregates.{aggregate.name}.output", aggregate.output
            yield f"aggregates.{aggregate.name}.checkpoint", str(aggregate.checkpoint)


@dataclass(frozen=True)
class IngestConfig:
    """All tables of a run, and the Spark session they share.

    ``master`` None is all local cores, with four attempts per task; ``metrics_port`` None serves no metrics.
    """

    tables: tuple[TableConfig, ...]
    where: str = "ingest"
    master: str | None = None
    spark: dict[str, str] = field(default_factory=dict)
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None


def is_url(place: str) -> bool:
    """Whether a table's place is the URL of an object storage."""
    return _URL.fullmatch(place) is not None


@dataclass(frozen=True)
class _Storage:
    """The settings of storage and catalog that all tables share."""

    options: Mapping[str, str] = field(repr=False)
    catalog: CatalogConfig


def load_config(path: Path) -> IngestConfig:
    """Read and check a configuration file.  Raises `ConfigError`."""
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(str(path), "file", error.strerror or str(error)) from None
    except ValueError as error:  # also of bytes that are not UTF-8, or of a number with too many digits
        raise ConfigError(str(path), "file", f"not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(str(path), "file", "not TOML: lists or tables are nested too deeply") from None
    return parse_config(document, str(path))


def parse_config(document: Mapping[str, Any], where: str = "ingest") -> IngestConfig:
    """Check a configuration with the structure of the file.  Raises `ConfigError`."""
    top = Section(where, "", document)
    source = Section(where, "source", top.table("source"))
    given = {option: source.text(key) for key, option in _SOURCE_KEYS.items() if key in source.values}
    retries = source.number("retries")
    if "url" in given or SERVERS in given:
        given[RETRY_OPTION] = str(retries or RETRIES)
    elif retries is not None:
        raise source.error("retries", "is for 'url' and 'bootstrap_servers' only")
    source.finish()
    spark = Section(where, "spark", top.table("spark"))
    master = spark.text("master") if "master" in spark.values else None
    conf = Section(where, "spark.conf", spark.table("conf")).texts()
    spark.finish()
    metrics = Section(where, "metrics", top.table("metrics"))
    host, port = metrics.text("host", "127.0.0.1"), metrics.number("port")
    metrics.finish()
    shared = _Storage(Section(where, "storage", top.table("storage")).secrets(), _catalog(where, top))
    tables = top.table("tables")
    top.finish()
    if not tables:
        raise ConfigError(where, "tables", "there is none: give at least one [tables.NAME]")
    parsed = tuple(_table(where, name, values, given, shared) for name, values in tables.items())
    _check_places(where, parsed)
    return IngestConfig(parsed, where, master, conf, host, port)


# -- a table ------------------------------------------------------------------


def _catalog(where: str, top: Section) -> CatalogConfig:
    section = Section(where, "catalog", top.table("catalog"))
    name = section.text("name", "default")
    return CatalogConfig(name, section.secrets())


def _table(where: str, name: str, values: Any, source: dict[str, str], shared: _Storage) -> TableConfig:
    """Check `[tables.<name>]`; ``source`` are the options that all tables share."""
    section = Section(where, f"tables.{name}", values)
    if not _NAME.fullmatch(name):
        raise ConfigError(where, f"tables.{name}", "a table's name consists of letters, digits, '_' and '-'")
    payload = _payload(section)
    options = _source_options(section, source, f"ingest-{name}")
    table_format = section.text("table_format", "parquet")
    if table_format not in TABLE_FORMATS:
        raise section.error("table_format", f"{table_format!r} is none of {', '.join(TABLE_FORMATS)}")
    place = _TableLocation(section, table_format)
    output = place.read("output")
    checkpoint = place.checkpoint(output)
    table = TableConfig(
        name=name,
        source=options,
        payload=payload,
        sink=_sink(section, place, output, checkpoint, shared),
        output=output,
        dead_letters=place.read("dead_letters", place.beside(output, "rejected")),
        checkpoint=checkpoint,
        backfill=place.read("backfill", place.beside(output, "backfill")),
    )
    section.finish()
    return table


class _TableLocation:
    """Reads the places of the tables of one format: directories, URLs, or names in the catalog."""

    def __init__(self, section: Section, table_format: str) -> None:
        self._section = section
        self.table_format = table_format

    def read(self, key: str, default: str | None = None, section: Section | None = None) -> str:
        section = section or self._section
        text = section.text(key, default)
        if self.table_format == "iceberg":
            if _IN_CATALOG.fullmatch(text) is None:
                raise section.error(
                    key,
                    f"{text!r} is not the name of a table in the catalog, like sensors.readings: "
                    f"directory or URL come from 'warehouse' in [catalog]",
                )
            return text
        if not is_url(text):
            return str(Path(text).absolute())
        if ":" in urlsplit(text).netloc.rpartition("@")[0]:
            raise section.error(key, "must not have credentials: give them in [storage]")
        if self.table_format == "parquet":
            raise section.error(
                key,
                f"{text!r} is a URL: Parquet tables are published by renaming directories, which "
                f'object storage does not have; use table_format = "delta" or "iceberg"',
            )
        return text.rstrip("/")

    def checkpoint(self, output: str, default: str | None = None, section: Section | None = None) -> Path:
        section = section or self._section
        if default is None and self.table_format != "iceberg" and not is_url(output):
            default = output + ".checkpoint"
        if default is None and "checkpoint" not in section.values:
            raise section.error(
                "checkpoint",
                "is missing: give a directory on the driver's disk, as the table is in "
                + ("a catalog" if self.table_format == "iceberg" else "object storage"),
            )
        text = section.text("checkpoint", default)
        if is_url(text):
            raise section.error("checkpoint", f"{text!r} is a URL: give a directory on the driver's disk")
        return Path(text).absolute()

    def beside(self, output: str, name: str) -> str:
        """The default place of a table that belongs to the one at ``output``."""
        return f"{output}{'_' if self.table_format == 'iceberg' else '.'}{name}"


def _check_places(where: str, tables: Sequence[TableConfig]) -> None:
    """Refuse a place that is, contains or lies in another one."""
    used: dict[Path, str] = {}
    for table in tables:
        for key, text in table.places():
            place, name = Path(text), f"tables.{table.name}.{key}"
            for other, owner in used.items():
                if place == other or place in other.parents or other in place.parents:
                    raise ConfigError(where, name, f"{text} overlaps with {owner}: give each its own directory")
            used[place] = name


def _source_options(section: Section, source: dict[str, str], consumer: str) -> dict[str, str]:
    options = dict(
        source,
        stream=section.text("stream"),
        startingOffsets=section.text("starting_offsets", "earliest"),
        consumer=section.text("consumer", consumer),
    )
    if "filter" in section.values:
        options["filter"] = section.text("filter")
    limit = section.number("max_offsets_per_trigger")
    if limit is not None:
        options["maxOffsetsPerTrigger"] = str(limit)
    if "accept_incarnation" in section.values:
        options["acceptIncarnation"] = section.text("accept_incarnation")
    if not section.flag("fail_on_data_loss", True):
        options["failOnDataLoss"] = "false"
    try:
        parse_options(options)
    except OptionError as error:
        raise ConfigError(section.where, section.name, str(error).removeprefix("mqtt source: ")) from None
    return options


# -- its messages -------------------------------------------------------------


def _payload(section: Section) -> PayloadConfig:
    """Read the keys about messages from a table's section."""
    kind = section.text("format", "json")
    if kind not in FORMATS:
        raise section.error("format", f"{kind!r} is none of {', '.join(FORMATS)}")
    schema = section.text("schema", _DEFAULT_SCHEMA.get(kind))
    if kind == "raw" and schema:
        raise section.error("schema", 'has no meaning with format "raw"')
    if section.table("options"):
        raise section.error(
            "options",
            "Spark's own parser is not used any more: leave [options] out, and write 'timestamps', 'delimiter', 'quote' or 'header' "
            'instead; for other options write a table with format = "raw", and parse that in a query of your own',
        )
    extra = section.text("extra_fields", "ignore")
    if extra not in EXTRA_FIELDS:
        raise section.error("extra_fields", f"{extra!r} is none of {', '.join(EXTRA_FIELDS)}")
    if extra != "ignore" and kind != "json":
        raise section.error("extra_fields", 'is for format "json"')
    levels, topic = _topic(section)
    source_options, several = _payload_options(section, kind)
    return PayloadConfig(
        format=kind,
        schema=schema,
        columns=_columns(section, kind),
        levels=levels,
        fields=_fields(section),
        extra_fields=extra,
        source_options={**topic, **source_options},
        several=several,
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


def _payload_options(section: Section, kind: str) -> tuple[dict[str, str], bool]:
    """The options of the source, and whether a message may have several rows."""
    given = {
        "timestamps": section.text("timestamps") if "timestamps" in section.values else None,
        "explode": "true" if section.flag("explode", False) else None,
        "delimiter": section.text("delimiter") if "delimiter" in section.values else None,
        "quote": section.text("quote") if "quote" in section.values else None,
        "header": ",".join(section.list_of_texts("header", [])) or None,
        "schema_file": _place(section, "schema_file"),
        "schema_directory": _place(section, "schema_directory"),
        "message": section.text("message") if "message" in section.values else None,
    }
    options = {PAYLOAD_KEYS[key]: value for key, value in given.items() if value is not None}
    if kind == "raw":
        for key, value in given.items():
            if value is not None:
                raise section.error(key, 'has no meaning with format "raw"')
        return {}, False
    options["payloadFormat"] = kind
    try:
        parsed = payload_options(options)
    except PayloadOptionError as error:
        key, _, reason = in_keys(error).partition(": ")
        raise section.error(key, reason) from None
    return options, parsed is not None and parsed.several


def _place(section: Section, key: str) -> str | None:
    return str(Path(section.text(key)).absolute()) if key in section.values else None


def _columns(section: Section, kind: str) -> tuple[tuple[str, str], ...]:
    default = ["topic", "payload", *DEFAULT_COLUMNS[1:]] if kind == "raw" else DEFAULT_COLUMNS
    columns: list[tuple[str, str]] = []
    for item in section.list_of_texts("columns", default):
        match = _COLUMN.fullmatch(item.strip())
        if match is None or match[1] not in MESSAGE_COLUMNS:
            raise section.error("columns", f'{item!r} is not "COLUMN" or "COLUMN as NAME" of {", ".join(MESSAGE_COLUMNS)}')
        columns.append((match[1], _unquoted(match[2] or match[1])))
    if len({alias.lower() for _, alias in columns}) < len(columns):
        raise section.error("columns", "two columns have the same name")
    return tuple(columns)


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def _fields(section: Section) -> tuple[tuple[tuple[str, ...], str], ...] | None:
    if "fields" not in section.values:
        return None
    fields = []
    for item in section.list_of_texts("fields", []):
        match = _FIELD.fullmatch(item.strip())
        if match is None:
            raise section.error(
                "fields", f'{item!r} is not "FIELD" or "FIELD.FIELD as NAME"; a name with a dot is in backticks: "`A.B` as NAME"'
            )
        path = tuple(_unquoted(part) for part in _PART.findall(match[1]))
        fields.append((path, path[-1] if match[2] is None else _unquoted(match[2])))
    if not fields:
        raise section.error("fields", "is empty: leave it out for all fields of the schema")
    return tuple(fields)


# -- its files ----------------------------------------------------------------


def _sink(section: Section, place: _TableLocation, output: str, checkpoint: Path, shared: _Storage) -> SinkConfig:
    """Read the keys about writing from a table's section."""
    compacts = section.flag("compact", True)
    expire_after = EXPIRE_AFTER_S
    if "expire_after" in section.values:
        if place.table_format == "parquet":
            raise section.error("expire_after", 'is for table_format "delta" and "iceberg": Parquet has no versions')
        expire_after = _duration(section, "expire_after")
        if expire_after < EXPIRE_AFTER_MIN_S:
            raise section.error("expire_after", "is less than 1 hour: readers and other writers may need the files")
    watermark = _duration(section, "watermark") if "watermark" in section.values else None
    keys = tuple(section.list_of_texts("deduplicate_by", []))
    aggregates = tuple(_aggregate(section, name, values, place, output, checkpoint) for name, values in section.table("aggregates").items())
    for key, given in (("deduplicate_by", keys), ("aggregates", aggregates)):
        if given and watermark is None:
            raise section.error(key, "needs a 'watermark': how late a message may come, like \"10 minutes\"")
    storage = Section(section.where, f"{section.name}.storage", section.table("storage"))
    return SinkConfig(
        table_format=place.table_format,
        merge_files=(section.number("compact_after") or MERGE_FILES) if compacts else None,
        expire_after=expire_after,
        storage={**shared.options, **storage.secrets()},
        catalog=shared.catalog,
        event_time=section.text("event_time") if "event_time" in section.values else None,
        watermark=watermark,
        deduplicate_by=keys,
        aggregates=aggregates,
    )


def _duration(section: Section, key: str) -> int:
    """A time like "10 minutes", in seconds."""
    text = section.text(key)
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise section.error(key, f'{text!r} is not a time like "30 seconds", "10 minutes", "1 hour"')
    return int(match[1]) * _SECONDS[match[2]]


def _aggregate(table: Section, name: str, values: Any, places: _TableLocation, output: str, checkpoint: Path) -> AggregateConfig:
    section = Section(table.where, f"{table.name}.aggregates.{name}", values)
    if not _NAME.fullmatch(name):
        raise table.error(f"aggregates.{name}", "a name consists of letters, digits, '_' and '-'")
    place = places.read("output", places.beside(output, name), section)
    in_directory = places.table_format != "iceberg" and not is_url(place)
    aggregate = AggregateConfig(
        name=name,
        window=_duration(section, "window"),
        group_by=tuple(section.list_of_texts("group_by", ["topic"])),
        values=tuple(section.list_of_texts("values", ["value"])),
        output=place,
        checkpoint=places.checkpoint(place, None if in_directory else f"{checkpoint}.{name}", section),
    )
    section.finish()
    return aggregate
