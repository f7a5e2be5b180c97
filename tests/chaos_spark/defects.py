"""Defects for one of the three programs, which `make chaos-spark` must find.

    make chaos-spark CHAOS_SPARK_MODES=plain CHAOS_SPARK_ARGS="--defect NAME"        (`stateless`: of mode state)

A defect changes one thing, as a plausible programming error would.  `unreceived` needs the plain sources: functions of
compiled modules cannot be replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

BROKER, PUBLISHER, DRIVER = "broker", "publisher", "driver"


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Raises `TypeError` if the function does not take as many arguments as the one that it replaces."""
    wanted, found = (len(signature(one).parameters) for one in (getattr(owner, name), function))
    if wanted != found:
        raise TypeError(f"{owner.__name__}.{name} takes {wanted} arguments, and the defect {found}")
    setattr(owner, name, function)


class Appended(NamedTuple):
    """Rows that were written to the table at once."""

    path: Path
    count: int

    def rows(self) -> int:
        return self.count

    def discard(self) -> None:
        """They stay."""


def append() -> None:
    """All batches are written to one directory with Spark's `mode("append")`."""
    from bridge_spark.tables.ingest_session import spark_path
    from bridge_spark.tables.output.parquet_table import ParquetBatchTable

    def stage(table: ParquetBatchTable, rows: Any, batch: int) -> Appended:
        rows.write.parquet(spark_path(table.directory), mode="append")
        return Appended(table.directory, rows.count())

    def publish(table: ParquetBatchTable, batch: int, staged: Appended, marker: Any) -> None:
        """Nothing to do: the files are in place."""

    _replace(ParquetBatchTable, "stage", stage)
    _replace(ParquetBatchTable, "publish", publish)


def in_place() -> None:
    """A batch is written inside the table instead of the staging directory."""
    from bridge_spark.tables.output.parquet_table import ParquetBatchTable, StagedDirectory

    def new_directory(table: ParquetBatchTable, batch: int) -> StagedDirectory:
        return StagedDirectory(table.directory / f"writing-{batch}-{os.getpid()}")

    _replace(ParquetBatchTable, "new_directory", new_directory)


def unmarked() -> None:
    """A repeated batch is not recognised and gets another directory."""
    from bridge_spark.tables.output.parquet_table import ParquetBatchTable, StagedDirectory

    def committed(table: ParquetBatchTable, batch: int, checkpoint: str) -> None:
        """None of them is."""

    def publish(table: ParquetBatchTable, batch: int, staged: StagedDirectory, marker: Any) -> None:
        os.rename(staged.path, table.directory / f"batch={batch}-{os.getpid()}")

    _replace(ParquetBatchTable, "committed", committed)
    _replace(ParquetBatchTable, "publish", publish)


def committed_first() -> None:
    """The checkpoint commits a batch before its rows are in the table."""
    from bridge_spark.tables.jobs.query_job import QueryJob

    whole = QueryJob._write

    def write(job: QueryJob, messages: Any, batch: int) -> None:
        job._checkpoint.commit(batch)
        whole(job, messages, batch)
        (job._checkpoint.path / "commits" / str(batch)).unlink()

    _replace(QueryJob, "_write", write)


def stateless() -> None:
    """A query with state does not read again a batch that is in its table."""
    from pyspark.sql import DataFrameWriter

    def save(writer: Any, path: Any, format: Any, mode: Any, partition_by: Any, **options: Any) -> None:
        """Nothing is written."""

    _replace(DataFrameWriter, "save", save)


def dead_letters_last() -> None:
    """A batch is published before its dead letters are written."""
    from bridge_spark.tables.jobs.query_job import BatchContext
    from bridge_spark.tables.jobs.staged_files import stage_counted
    from bridge_spark.tables.jobs.table_pipeline import TablePipeline
    from bridge_spark.tables.rows.payloads import dead_letters

    def write(pipeline: TablePipeline, found: Any, batch: BatchContext) -> dict[str, Any]:
        staged, counts = pipeline._stage_rows(found, batch)
        marker = {"checkpoint": batch.checkpoint.id(), **counts}
        pipeline._good.publish(batch.id, staged, marker)
        staged_bad, _ = stage_counted(pipeline._bad, dead_letters(found), batch.id)
        pipeline._bad.publish(batch.id, staged_bad, marker)
        return marker

    _replace(TablePipeline, "write", write)


def forgetful() -> None:
    """The publisher forgets its incomplete handshakes."""
    from chaos_spark.outbox import Outbox

    whole = Outbox.__init__

    def empty(outbox: Outbox, path: Path) -> None:
        whole(outbox, path)
        for packet_id in list(outbox.outgoing):
            outbox.complete(packet_id)

    _replace(Outbox, "__init__", empty)


def new_packet_ids() -> None:
    """The publisher sends incomplete readings again under new packet ids."""
    from chaos_spark.outbox import Outbox

    whole = Outbox.__init__

    def again(outbox: Outbox, path: Path) -> None:
        whole(outbox, path)
        numbers = [number for number, _ in outbox.outgoing.values()]
        for packet_id in list(outbox.outgoing):
            outbox.complete(packet_id)
        for number in numbers:
            outbox.last = number - 1
            outbox.next_reading()

    _replace(Outbox, "__init__", again)


def hasty() -> None:
    """The broker acknowledges before the commit."""
    os.environ["MQTTBROKER_DURABILITY"] = "interval"


def unreceived() -> None:
    """The broker does not store received QoS 2 packet ids."""
    from sessions.store.tables import SqliteTables

    whole = SqliteTables.apply

    def apply(tables: SqliteTables, write_set: Any) -> None:
        write_set.received = []
        whole(tables, write_set)

    _replace(SqliteTables, "apply", apply)


DEFECTS: dict[str, tuple[str, Callable[[], None]]] = {
    "append": (DRIVER, append),
    "in-place": (DRIVER, in_place),
    "unmarked": (DRIVER, unmarked),
    "committed-first": (DRIVER, committed_first),
    "stateless": (DRIVER, stateless),
    "dead-letters-last": (DRIVER, dead_letters_last),
    "forgetful": (PUBLISHER, forgetful),
    "new-packet-ids": (PUBLISHER, new_packet_ids),
    "hasty": (BROKER, hasty),
    "unreceived": (BROKER, unreceived),
}


def main(arguments: list[str]) -> int:
    name, *rest = arguments
    victim, put = DEFECTS[name]
    put()
    if victim == PUBLISHER:
        from chaos_spark import publisher

        return publisher.main(rest)
    from mqttbroker.cli import main as cli

    return cli.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
