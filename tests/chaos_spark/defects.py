"""What `make chaos-spark` must find: defects put into one of the three programs, to show that a run can fail.

    make chaos-spark CHAOS_SPARK_MODES=plain CHAOS_SPARK_ARGS="--defect NAME"        (`stateless`: of mode state)

Rule: a defect is what somebody could write who does not know why the code is as it is, and nothing else is changed.
`unreceived` needs the sources as they are: compiled code is not to be replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BROKER, PUBLISHER, DRIVER = "broker", "publisher", "driver"


def append() -> None:
    """The files of all batches lie in one directory, where Spark's `mode("append")` puts them."""
    from pyspark.sql import DataFrameWriter

    from bridge_spark.tables.batch_table import BatchTable

    whole = DataFrameWriter.parquet

    def parquet(writer: DataFrameWriter, path: str) -> None:
        whole(writer, path, mode="append")

    def publish(table: BatchTable, batch: int, staged: Path, mark: dict[str, Any]) -> None:
        """The files are there already."""

    setattr(DataFrameWriter, "parquet", parquet)
    setattr(BatchTable, "stage", lambda table, batch: table.directory)
    setattr(BatchTable, "publish", publish)


def in_place() -> None:
    """A batch is written where readers look, instead of beside it."""
    from bridge_spark.tables.batch_table import BatchTable

    def stage(table: BatchTable, batch: int) -> Path:
        return table.directory / f"writing-{batch}-{os.getpid()}"

    setattr(BatchTable, "stage", stage)


def unmarked() -> None:
    """A batch that is repeated is not looked for: it gets a directory of its own."""
    from bridge_spark.tables.batch_table import BatchTable

    def publish(table: BatchTable, batch: int, staged: Path, mark: dict[str, Any]) -> None:
        os.rename(staged, table.directory / f"batch={batch}-{os.getpid()}")

    setattr(BatchTable, "done", lambda *_: None)
    setattr(BatchTable, "publish", publish)


def committed_first() -> None:
    """Spark's checkpoint says that a batch is done before its rows stand in the table."""
    from bridge_spark.tables.query_job import QueryJob

    whole = QueryJob._write

    def write(job: QueryJob, messages: Any, batch: int) -> None:
        job._checkpoint.commit(batch)
        whole(job, messages, batch)
        (job._checkpoint.path / "commits" / str(batch)).unlink()

    setattr(QueryJob, "_write", write)


def stateless() -> None:
    """A batch that is in a table with state is not read again."""
    from pyspark.sql import DataFrameWriter

    setattr(DataFrameWriter, "save", lambda *_: None)


def dead_letters_last() -> None:
    """A batch stands in the table, and so is done, before its dead letters are written."""
    from bridge_spark.tables.table_job import TableJob

    def fill(job: TableJob, found: Any, batch: int, checkpoint: str) -> dict[str, Any]:
        staged, counts = job._stage(found, batch)
        staged_bad = job._bad.stage(batch)
        mark = {"checkpoint": checkpoint, **counts}
        job._good.publish(batch, staged, mark)
        job._rows.dead_letters(found).write.parquet(staged_bad.as_uri())
        job._bad.publish(batch, staged_bad, mark)
        return mark

    setattr(TableJob, "_fill", fill)


def forgetful() -> None:
    """The publisher keeps its number, and forgets what is under way."""
    from chaos_spark.outbox import Outbox

    whole = Outbox.__init__

    def empty(outbox: Outbox, path: Path) -> None:
        whole(outbox, path)
        for packet_id in list(outbox.outgoing):
            outbox.complete(packet_id)

    setattr(Outbox, "__init__", empty)


def new_packet_ids() -> None:
    """The publisher sends what is under way again under other packet ids."""
    from chaos_spark.outbox import Outbox

    whole = Outbox.__init__

    def again(outbox: Outbox, path: Path) -> None:
        whole(outbox, path)
        numbers = [number for number, _ in outbox.outgoing.values()]
        for packet_id in list(outbox.outgoing):
            outbox.complete(packet_id)
        for number in numbers:
            outbox.last = number - 1
            outbox.take()

    setattr(Outbox, "__init__", again)


def hasty() -> None:
    """The broker acknowledges before the commit."""
    os.environ["MQTTBROKER_DURABILITY"] = "interval"


def unreceived() -> None:
    """The broker does not write down which packet ids of QoS 2 it has received."""
    from sessions.store.writer import Store

    whole = Store._apply

    def apply(store: Store, connection: Any, write_set: Any, ending: dict[int, int]) -> None:
        write_set.received = []
        whole(store, connection, write_set, ending)

    setattr(Store, "_apply", apply)


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
