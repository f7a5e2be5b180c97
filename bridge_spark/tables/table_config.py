"""One table of the ingest job: which messages, how they are read, where rows go.

The rule kept here: no two tables, and no two directories of one, can write
over each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_spark.source.options import OptionError, parse_options
from bridge_spark.tables.config_section import ConfigError, Section
from bridge_spark.tables.payload_config import PayloadConfig, payload_config
from bridge_spark.tables.sink_config import SinkConfig, sink_config

_TABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class TableConfig:
    """One table: ``source`` are the options of the data source."""

    name: str
    source: dict[str, str]
    payload: PayloadConfig
    sink: SinkConfig
    output: Path
    dead_letters: Path
    checkpoint: Path
    backfill: Path


def table_config(where: str, name: str, values: Any, source: dict[str, str]) -> TableConfig:
    """Check `[tables.<name>]`; ``source`` are the options that all tables share; raises `ConfigError`."""
    section = Section(where, f"tables.{name}", values)
    if not _TABLE_NAME.fullmatch(name):
        raise ConfigError(where, f"tables.{name}", "a table's name is made of letters, digits, '_' and '-'")
    payload = payload_config(section)
    output = Path(section.text("output"))
    options = _source_options(section, source, f"ingest-{name}")
    table = TableConfig(
        name=name,
        source=options,
        payload=payload,
        sink=sink_config(section, output),
        output=output.absolute(),
        dead_letters=Path(section.text("dead_letters", str(output) + ".rejected")).absolute(),
        checkpoint=Path(section.text("checkpoint", str(output) + ".checkpoint")).absolute(),
        backfill=Path(section.text("backfill", str(output) + ".backfill")).absolute(),
    )
    section.finish()
    return table


def check_directories(where: str, tables: Sequence[TableConfig]) -> None:
    """Refuse tables whose directories lie in each other; raises `ConfigError`."""
    used: dict[Path, str] = {}
    for table in tables:
        own = [(key, Path(getattr(table, key))) for key in ("output", "dead_letters", "checkpoint", "backfill")]
        for key, directory in (*own, *table.sink.directories()):
            name = f"tables.{table.name}.{key}"
            for other, owner in used.items():
                if directory == other or directory in other.parents or other in directory.parents:
                    raise ConfigError(where, name, f"{directory} lies with {owner}: give each its own directory")
            used[directory] = name


def _source_options(section: Section, source: dict[str, str], consumer: str) -> dict[str, str]:
    options = dict(source, stream=section.text("stream"), startingOffsets=section.text("starting_offsets", "earliest"),
                   consumer=section.text("consumer", consumer))
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
        raise ConfigError(section.where, section.name, str(error).removeprefix("mqtt source: ")) from None
    return options
