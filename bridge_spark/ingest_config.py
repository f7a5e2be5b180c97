"""What `mqttbroker ingest` is told: a TOML file of tables.

The rule kept here: every key is checked before anything starts, and a refusal
is one line that names the file, the key and the reason.  Relative directories
are relative to the working directory, as everywhere in the broker.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from bridge_spark.options import OptionError, parse_options

FORMATS = ("json", "csv", "number", "raw")
MESSAGE_COLUMNS = (
    "topic", "payload", "qos", "retain", "partition", "offset", "timestamp", "client_id", "content_type",
    "response_topic", "correlation_data", "user_properties", "stream",
)
DEFAULT_COLUMNS = ["topic", "partition", "offset", "timestamp as received"]
_DEFAULT_SCHEMA = {"number": "value double not null", "raw": ""}
_COLUMN = re.compile(r"([a-z_]+)(?:\s+as\s+(\w+))?", re.IGNORECASE)
_TABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class ConfigError(ValueError):
    """A setting that cannot be used: ``where`` is the file, ``key`` the dotted key."""

    def __init__(self, where: str, key: str, reason: str) -> None:
        super().__init__(f"{where}: {key}: {reason}")


@dataclass(frozen=True)
class TableConfig:
    """One table: which messages, how they are parsed, where the rows go.

    ``columns`` are the message's columns that stand beside the parsed ones, as
    (column, name in the table).  ``schema`` is DDL; a field that is NOT NULL
    must be there.
    """

    name: str
    source: dict[str, str]
    format: str
    schema: str
    parse_options: dict[str, str]
    columns: tuple[tuple[str, str], ...]
    output: Path
    dead_letters: Path
    checkpoint: Path


@dataclass(frozen=True)
class IngestConfig:
    """All tables of a run and the Spark session they share; ``master`` None
    means all local cores, each task tried four times."""

    tables: tuple[TableConfig, ...]
    where: str = "ingest"
    master: Optional[str] = None
    spark: dict[str, str] = field(default_factory=dict)


def load_config(path: Path) -> IngestConfig:
    """Read and check a configuration file; raises `ConfigError`."""
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(str(path), "file", error.strerror or str(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), "file", f"not TOML: {error}") from None
    return parse_config(document, str(path))


def parse_config(document: Mapping[str, Any], where: str = "ingest") -> IngestConfig:
    """Check a configuration, laid out as in the file; raises `ConfigError`."""
    top = _Section(where, "", document)
    source = _Section(where, "source", top.table("source"))
    given = {key: source.text(key) for key in ("path", "url", "token") if key in source.values}
    source.finish()
    spark = _Section(where, "spark", top.table("spark"))
    master = spark.text("master") if "master" in spark.values else None
    conf = _Section(where, "spark.conf", spark.table("conf")).texts()
    spark.finish()
    tables = top.table("tables")
    top.finish()
    if not tables:
        raise ConfigError(where, "tables", "there is none: give at least one [tables.NAME]")
    parsed = tuple(_table(where, name, values, given) for name, values in tables.items())
    _check_directories(where, parsed)
    return IngestConfig(parsed, where, master, conf)


class _Section:
    """One table of the file, read key by key."""

    def __init__(self, where: str, name: str, values: Any) -> None:
        self.where = where
        self._name = name
        if not isinstance(values, Mapping):
            raise ConfigError(where, name, "is not a table")
        self.values = dict(values)

    def error(self, key: str, reason: str) -> ConfigError:
        return ConfigError(self.where, f"{self._name}.{key}".lstrip("."), reason)

    def table(self, key: str) -> Mapping[str, Any]:
        values = self.values.pop(key, {})
        if not isinstance(values, Mapping):
            raise self.error(key, "is not a table")
        return values

    def text(self, key: str, default: Optional[str] = None) -> str:
        value = self.values.pop(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, str):
            raise self.error(key, f"{value!r} is not a text")
        return value

    def number(self, key: str) -> Optional[int]:
        value = self.values.pop(key, None)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(key, f"{value!r} is not a positive whole number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.pop(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is neither true nor false")
        return value

    def list_of_texts(self, key: str, default: list[str]) -> list[str]:
        value = self.values.pop(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "is not a list of texts")
        return value

    def texts(self) -> dict[str, str]:
        return {key: str(value).lower() if isinstance(value, bool) else str(value)
                for key, value in self.values.items()}

    def finish(self) -> None:
        for key in self.values:
            raise self.error(key, "unknown key")


def _table(where: str, name: str, values: Any, source: dict[str, str]) -> TableConfig:
    section = _Section(where, f"tables.{name}", values)
    if not _TABLE_NAME.fullmatch(name):
        raise ConfigError(where, f"tables.{name}", "a table's name is made of letters, digits, '_' and '-'")
    kind = section.text("format", "json")
    if kind not in FORMATS:
        raise section.error("format", f"{kind!r} is none of {', '.join(FORMATS)}")
    schema = section.text("schema", _DEFAULT_SCHEMA.get(kind))
    if kind == "raw" and schema:
        raise section.error("schema", "has no meaning with format \"raw\"")
    output = Path(section.text("output"))
    options = _source_options(section, source)
    table = TableConfig(
        name=name,
        source=options,
        format=kind,
        schema=schema,
        parse_options=_Section(where, f"tables.{name}.options", section.table("options")).texts(),
        columns=_columns(section, kind),
        output=output.absolute(),
        dead_letters=Path(section.text("dead_letters", str(output) + ".rejected")).absolute(),
        checkpoint=Path(section.text("checkpoint", str(output) + ".checkpoint")).absolute(),
    )
    section.finish()
    return table


def _source_options(section: _Section, source: dict[str, str]) -> dict[str, str]:
    options = dict(source, stream=section.text("stream"), startingOffsets=section.text("starting_offsets", "earliest"))
    if "filter" in section.values:
        options["filter"] = section.text("filter")
    limit = section.number("max_offsets_per_trigger")
    if limit is not None:
        options["maxOffsetsPerTrigger"] = str(limit)
    if not section.flag("fail_on_data_loss", True):
        options["failOnDataLoss"] = "false"
    try:
        parse_options(options)
    except OptionError as error:
        raise ConfigError(section.where, f"{section._name}", str(error).removeprefix("mqtt source: ")) from None
    return options


def _columns(section: _Section, kind: str) -> tuple[tuple[str, str], ...]:
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


def _check_directories(where: str, tables: tuple[TableConfig, ...]) -> None:
    used: dict[Path, str] = {}
    for table in tables:
        for key in ("output", "dead_letters", "checkpoint"):
            directory = Path(getattr(table, key))
            name = f"tables.{table.name}.{key}"
            for other, owner in used.items():
                if directory == other or directory in other.parents or other in directory.parents:
                    raise ConfigError(where, name, f"{directory} lies with {owner}: give each its own directory")
            used[directory] = name
