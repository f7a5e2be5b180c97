"""Defects for one of the three programs, which `make chaos-spark` must find.

    make chaos-spark CHAOS_SPARK_MODES=plain CHAOS_SPARK_ARGS="--defect NAME"        (`stateless`: of mode state)

A defect changes one thing, as a plausible programming error would.  `unreceived` needs the plain sources: functions of
compiled modules cannot be replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BROKER, PUBLISHER, DRIVER = "broker", "publisher", "driver"


def append() -> None:
    """All batches are written to one directory with Spark's `mode("append")`."""
    from pyspark.sql import DataFrameWriter

    from bridge_spark.tables.output.parquet_table import ParquetBatchTable

    whole = DataFrameWriter.parquet

    def parquet(writer: DataFrameWriter, path: str) -> None:
        whole(writer, path, mode="append")

    def publish(table: ParquetBatchTable, batch: int, staged: Path, mark: dict[str, Any]) -> None:
        """Nothing to do: the files are in place."""

    setattr(DataFrameWriter, "parquet", parquet)
    setattr(ParquetBatchTable, "stage", lambda table, batch: table.directory)
    setattr(ParquetBatchTable, "publish", publish)


def in_place() -> None:
    """A batch is written inside the table instead of the staging directory."""
    from bridge_spark.tables.output.parquet_table import ParquetBatchTable

    def stage(table: ParquetBatchTable, batch: int) -> Path:
        return table.directory / f"writing-{batch}-{os.getpid()}"

    setattr(ParquetBatchTable, "stage", stage)


def unmarked() -> None:
    """A repeated batch is not recognised and gets another directory."""
    from bridge_spark.tables.output.parquet_table import ParquetBatchTable

    def publish(table: ParquetBatchTable, batch: int, staged: Path, mark: dict[str, Any]) -> None:
        os.rename(staged, table.directory / f"batch={batch}-{os.getpid()}")

    setattr(ParquetBatchTable, "committed", lambda *_: None)
    setattr(ParquetBatchTable, "publish", publish)


def committed_first() -> None:
    """The checkpoint commits a batch before its rows are in the table."""
    from bridge_spark.tables.jobs.query_job import QueryJob

    whole = QueryJob._write

    def write(job: QueryJob, messages: Any, batch: int) -> None:
        job._checkpoint.commit(batch)
        whole(job, messages, batch)
        (job._checkpoint.path / "commits" / str(batch)).unlink()

    setattr(QueryJob, "_write", write)


def stateless() -> None:
    """A query with state does not read again a batch that is in its table."""
    from pyspark.sql import DataFrameWriter

    setattr(DataFrameWriter, "save", lambda *_: None)


def dead_letters_last() -> None:
    """A batch is published before its dead letters are written."""
    from bridge_spark.tables.jobs.query_job import BatchContext
    from bridge_spark.tables.jobs.table_pipeline import TablePipeline
    from bridge_spark.tables.rows.payloads import dead_letters

    def write(pipeline: TablePipeline, found: Any, batch: BatchContext) -> dict[str, Any]:
        staged, counts = pipeline._stage_rows(found, batch)
        staged_bad = pipeline._bad.stage(batch.id)
        marker = {"checkpoint": batch.checkpoint.id(), **counts}
        pipeline._good.publish(batch.id, staged, marker)
        dead_letters(found).write.parquet(staged_bad.as_uri())
        pipeline._bad.publish(batch.id, staged_bad, marker)
        return marker

    setattr(TablePipeline, "write", write)


def forgetful() -> None:
    """The publisher forgets its incomplete handshakes."""
    from chaos_spark.outbox import Outbox

    whole = Outbox.__init__

    def empty(outbox: Outbox, path: Path) -> None:
        whole(outbox, path)
        for packet_id in list(outbox.outgoing):
            outbox.complete(packet_id)

    setattr(Outbox, "__init__", empty)


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

    setattr(Outbox, "__init__", again)


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

    setattr(SqliteTables, "apply", apply)


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
