"""How a table of the ingest job is written: format, watermark, aggregates.

The rule kept here: what needs a watermark is refused without one, and times
are checked here, since Spark would tell of them when the job runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from bridge_spark.tables.batch_table import MERGE_FILES
from bridge_spark.tables.config_section import Section

TABLE_FORMATS = ("parquet", "delta")
_DURATION = re.compile(r"(\d+) (second|minute|hour|day)s?")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class AggregateConfig:
    """One table of aggregates: a row for each ``window`` (seconds) and group."""

    name: str
    window: int
    group_by: tuple[str, ...]
    values: tuple[str, ...]
    output: Path
    checkpoint: Path


@dataclass(frozen=True)
class SinkConfig:
    """``event_time`` names a column of the table, None means the receipt;
    ``watermark`` is in seconds; ``merge_files`` None merges nothing."""

    table_format: str
    merge_files: Optional[int]
    event_time: Optional[str]
    watermark: Optional[int]
    deduplicate_by: tuple[str, ...]
    aggregates: tuple[AggregateConfig, ...]

    def directories(self) -> Iterator[tuple[str, Path]]:
        """Each directory with its key below the table's."""
        for aggregate in self.aggregates:
            yield f"aggregates.{aggregate.name}.output", aggregate.output
            yield f"aggregates.{aggregate.name}.checkpoint", aggregate.checkpoint


def sink_config(section: Section, output: Path) -> SinkConfig:
    """Take the keys about writing out of a table's section; raises `ConfigError`."""
    table_format = section.text("table_format", "parquet")
    if table_format not in TABLE_FORMATS:
        raise section.error("table_format", f"{table_format!r} is none of {', '.join(TABLE_FORMATS)}")
    compacts = section.flag("compact", True)
    watermark = duration(section, "watermark") if "watermark" in section.values else None
    keys = tuple(section.list_of_texts("deduplicate_by", []))
    aggregates = tuple(_aggregate(section, name, values, output)
                       for name, values in section.table("aggregates").items())
    for key, given in (("deduplicate_by", keys), ("aggregates", aggregates)):
        if given and watermark is None:
            raise section.error(key, "needs a 'watermark': how late a message may come, like \"10 minutes\"")
    return SinkConfig(
        table_format=table_format,
        merge_files=(section.number("compact_after") or MERGE_FILES) if compacts else None,
        event_time=section.text("event_time") if "event_time" in section.values else None,
        watermark=watermark,
        deduplicate_by=keys,
        aggregates=aggregates,
    )


def duration(section: Section, key: str) -> int:
    """A time like "10 minutes", in seconds; raises `ConfigError`."""
    text = section.text(key)
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise section.error(key, f"{text!r} is not a time like \"30 seconds\", \"10 minutes\", \"1 hour\"")
    return int(match[1]) * _SECONDS[match[2]]


def _aggregate(table: Section, name: str, values: Any, output: Path) -> AggregateConfig:
    section = Section(table.where, f"{table.name}.aggregates.{name}", values)
    if not _NAME.fullmatch(name):
        raise table.error(f"aggregates.{name}", "a name is made of letters, digits, '_' and '-'")
    place = section.text("output", f"{output}.{name}")
    aggregate = AggregateConfig(
        name=name,
        window=duration(section, "window"),
        group_by=tuple(section.list_of_texts("group_by", ["topic"])),
        values=tuple(section.list_of_texts("values", ["value"])),
        output=Path(place).absolute(),
        checkpoint=Path(section.text("checkpoint", f"{place}.checkpoint")).absolute(),
    )
    section.finish()
    return aggregate
