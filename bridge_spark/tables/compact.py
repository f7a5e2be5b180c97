"""`mqttbroker compact`: the small files of the ingest job's tables, merged.

The rule kept here: the job is not running meanwhile; it merges by itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge_spark.tables.batch_table import BatchTable
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.delta_table import DeltaMissing
from bridge_spark.tables.ingest_config import IngestConfig, load_config
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.query_job import batch_table


def compact(config: IngestConfig) -> dict[Path, int]:
    """How many small files of each table went into others; raises `IngestError`."""
    merged: dict[Path, int] = {}
    for table in config.tables:
        where = f"{config.where}: tables.{table.name}"
        with Checkpoint(table.checkpoint).lock(where):
            _compact(batch_table(table.sink, table.output), where, merged)
            _compact(BatchTable(table.dead_letters), where, merged)
        for aggregate in table.sink.aggregates:
            own = f"{where}.aggregates.{aggregate.name}"
            with Checkpoint(aggregate.checkpoint).lock(own):
                _compact(batch_table(table.sink, aggregate.output), own, merged)
    return merged


def main(argv: Sequence[str]) -> int:
    """`mqttbroker compact CONFIG`: 0 when all is merged, 1 when a table could
    not be, 2 for settings that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="mqttbroker compact", description="Merge the small files of the ingest job's tables, while it is not running.")
    parser.add_argument("config", type=Path, help="TOML file of tables, see conf/ingest.toml")
    arguments = parser.parse_args(argv)
    try:
        merged = compact(load_config(arguments.config))
    except ConfigError as error:
        print(f"mqttbroker compact: {error}", file=sys.stderr)
        return 2
    except IngestError as error:
        print(f"mqttbroker compact: {error}", file=sys.stderr)
        return 1
    for directory, files in merged.items():
        print(f"{directory}: {files} small files merged")
    return 0


def _compact(table: BatchTable, where: str, merged: dict[Path, int]) -> None:
    if not table.directory.is_dir():
        return
    try:
        table.prepare()
        merged[table.directory] = table.compact()
    except (OSError, DeltaMissing) as error:
        raise IngestError(f"{where}: {error}") from None
    finally:
        table.clean()
