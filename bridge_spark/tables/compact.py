"""`mqttbroker compact`: merges the small files of the ingest job's tables while the job is not running."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.ingest_config import IngestConfig, load_config
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.output.batch_table import BatchTable, TableError
from bridge_spark.tables.output.table_format import open_dead_letters, open_table


def compact(config: IngestConfig) -> dict[str, int]:
    """Merge the small files of all tables; return how many of each were merged.  Raises `IngestError`."""
    merged: dict[str, int] = {}
    for table in config.tables:
        where = f"{config.where}: tables.{table.name}"
        with Checkpoint(table.checkpoint).lock(where):
            _compact(open_table(table.sink, table.output), where, merged)
            _compact(open_dead_letters(table.sink, table.dead_letters), where, merged)
        for aggregate in table.sink.aggregates:
            aggregate_where = f"{where}.aggregates.{aggregate.name}"
            with Checkpoint(aggregate.checkpoint).lock(aggregate_where):
                _compact(open_table(table.sink, aggregate.output), aggregate_where, merged)
    return merged


def main(argv: Sequence[str]) -> int:
    """`mqttbroker compact CONFIG`.

    Exit code 0 on success, 1 if a table cannot be merged, 2 for invalid settings.
    """
    parser = argparse.ArgumentParser(
        prog="mqttbroker compact",
        description="Merge the small files of the ingest job's tables, while it is not running.",
    )
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
    for place, files in merged.items():
        print(f"{place}: {files} small files merged")
    return 0


def _compact(table: BatchTable[Any], where: str, merged: dict[str, int]) -> None:
    try:
        if table.has_batches():
            table.prepare()
            merged[table.place] = table.compact()
    except (OSError, TableError) as error:
        raise IngestError(f"{where}: {error}") from None
    finally:
        table.clean()
