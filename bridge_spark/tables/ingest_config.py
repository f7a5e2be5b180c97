"""What `mqttbroker ingest` is told: a TOML file of tables.

The rule kept here: every key is checked before anything starts, and a refusal
is one line that names the file, the key and the reason.  Relative directories
are relative to the working directory, as everywhere in the broker.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from bridge_spark.tables.config_section import ConfigError, Section
from bridge_spark.tables.table_config import TableConfig, check_directories, table_config

PATIENCE = "fetch.numRetries"
RETRIES = 9
"""How often a running query asks a broker that is away: with waits that double from 0.1 s, about 50 s."""
_SOURCE_OPTIONS = {"path": "path", "url": "url", "token": "token", "ca_file": "caFile"}


@dataclass(frozen=True)
class IngestConfig:
    """All tables of a run and the Spark session they share; ``master`` None
    means all local cores, each task tried four times.  ``metrics_port`` None
    serves no metrics."""

    tables: tuple[TableConfig, ...]
    where: str = "ingest"
    master: Optional[str] = None
    spark: dict[str, str] = field(default_factory=dict)
    metrics_host: str = "127.0.0.1"
    metrics_port: Optional[int] = None


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
    top = Section(where, "", document)
    source = Section(where, "source", top.table("source"))
    given = {option: source.text(key) for key, option in _SOURCE_OPTIONS.items() if key in source.values}
    retries = source.number("retries")
    if "url" in given:
        given[PATIENCE] = str(retries or RETRIES)
    elif retries is not None:
        raise source.error("retries", "is for 'url' only")
    source.finish()
    spark = Section(where, "spark", top.table("spark"))
    master = spark.text("master") if "master" in spark.values else None
    conf = Section(where, "spark.conf", spark.table("conf")).texts()
    spark.finish()
    metrics = Section(where, "metrics", top.table("metrics"))
    host, port = metrics.text("host", "127.0.0.1"), metrics.number("port")
    metrics.finish()
    tables = top.table("tables")
    top.finish()
    if not tables:
        raise ConfigError(where, "tables", "there is none: give at least one [tables.NAME]")
    parsed = tuple(table_config(where, name, values, given) for name, values in tables.items())
    check_directories(where, parsed)
    return IngestConfig(parsed, where, master, conf, host, port)
