"""One streaming query of the ingest job: its checkpoint, its start and its end.

The rule kept here: a batch of messages is in the tables before Spark's
checkpoint says so, and a repeated batch changes nothing.  So the driver may be
killed between any two steps, and neither Spark nor a plain reader of the files
ever finds a row twice or misses one that the checkpoint has passed.  Spark's
own Parquet sink does not promise that to plain readers.

A batch that is in the tables is not read again, as retention may have taken it
since; only a query with state reads it, because its state is made of it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Optional

from bridge_spark.tables.batch_table import BatchTable, ForeignBatch
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.delta_table import DeltaBatchTable, DeltaMissing
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError, one_line, spark_path
from bridge_spark.tables.sink_config import SinkConfig
from bridge_spark.tables.table_columns import COLUMNS_FILE, ColumnChange, TableColumns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

STOP_WAIT_S = 60.0
START_WAIT_S = 20.0
RESTARTS = 5
"""One after the other, of a query whose Python worker took longer than the ten seconds that Spark gives it."""
_NO_WORKER = "Python worker failed to connect back"


def batch_table(sink: SinkConfig, directory: Path) -> BatchTable:
    """The table in ``directory``, of the format that the settings ask for."""
    kind = DeltaBatchTable if sink.table_format == "delta" else BatchTable
    return kind(directory, sink.merge_files)


class QueryJob(ABC):
    """A query over ``_stream()`` that hands each batch that is not ``_done`` to
    ``_fill``; both return the batch's mark.

    ``tables[0]`` is the one whose columns are watched; ``where`` begins each
    error's line; ``state`` is what the query's state in the checkpoint depends
    on, empty for a query that keeps none.
    """

    def __init__(
        self, name: str, where: str, checkpoint: Path, tables: Sequence[BatchTable], state: dict[str, Any]
    ) -> None:
        self.progress = TableProgress(name)
        self._where = where
        self._checkpoint = Checkpoint(checkpoint)
        self._tables = tables
        self._query: Optional[StreamingQuery] = None
        self._started = threading.Event()
        self._in_batch = threading.Lock()
        self._refused = False
        self._failure: Optional[str] = None
        self._interval: Optional[str] = None
        self._restarts = 0
        self._keeps_state = bool(state)
        self._lock = self._take_over()
        try:
            self._columns = TableColumns(checkpoint / COLUMNS_FILE, state)
        except ColumnChange as error:
            self._lock.close()
            raise IngestError(f"{where}: {error}") from None

    @abstractmethod
    def _stream(self) -> DataFrame:
        """The rows as the source gives them."""

    @abstractmethod
    def _done(self, batch: int, checkpoint: str) -> Optional[dict[str, Any]]:
        """The mark of a batch that is in the tables; ``checkpoint`` is the checkpoint's id."""

    @abstractmethod
    def _fill(self, messages: DataFrame, batch: int, checkpoint: str) -> dict[str, Any]:
        """Write a batch that is not done; its mark."""

    def start(self, interval: Optional[str]) -> None:
        """Start the query: every ``interval``, or once over what is there."""
        self._interval = interval
        self._failure = None
        self._settle()
        try:
            writer = self._stream().writeStream.queryName(self.progress.name).foreachBatch(self._write) \
                .option("checkpointLocation", spark_path(self._checkpoint.path))
            writer = writer.trigger(processingTime=interval) if interval else writer.trigger(availableNow=True)
            self._query = writer.start()
        except IngestError:
            raise
        except Exception as error:
            raise IngestError(f"{self._where}: {one_line(error)}") from None
        finally:
            self._started.set()

    def wait_until_it_reads(self) -> None:
        """Let the query start its Python workers before others start theirs:
        Spark gives up on workers that a busy machine starts too slowly."""
        until = time.monotonic() + START_WAIT_S
        while self.is_active() and time.monotonic() < until:
            assert self._query is not None
            if not str(self._query.status["message"]).startswith(("Initializing", "Getting offsets")):
                return
            time.sleep(0.02)

    def is_active(self) -> bool:
        """Whether the query runs; raises `IngestError` once it has failed.
        One that failed for want of a Python worker is started again."""
        error = self._query.exception() if self._query is not None and not self._query.isActive else None
        if error is not None and _NO_WORKER in (self._failure or one_line(error)) and self._restarts < RESTARTS:
            self._restarts += 1
            self.start(self._interval)
        self.check()
        return self._query is not None and self._query.isActive

    def check(self) -> None:
        """Raise `IngestError` if the query has failed."""
        if self._query is None or self._query.isActive or self._refused:
            return
        error = self._query.exception()
        if error is not None:
            raise IngestError(f"{self._where}: {self._failure or one_line(error)}")

    def stop(self) -> None:
        """Stop between two batches, or in one that takes too long."""
        if self._query is None or not self._query.isActive:
            return
        held = self._in_batch.acquire(timeout=STOP_WAIT_S)
        try:
            self._query.stop()
        finally:
            if held:
                self._in_batch.release()

    def close(self) -> None:
        """Stop, whatever state the session is in, and let another run have the table."""
        try:
            self.stop()
        except Exception as error:
            print(f"{self._where}: not stopped in good order: {one_line(error)}", file=sys.stderr)
        for table in self._tables:
            table.clean()
        self._lock.close()

    def update_progress(self) -> None:
        """Take over what Spark says of the batches since the last call."""
        if self._query is not None:
            self.progress.note([dict(json.loads(progress.json)) for progress in self._query.recentProgress])

    def _take_over(self) -> IO[bytes]:
        lock = self._checkpoint.lock(self._where)
        try:
            for table in self._tables:
                if table.has_batches() and self._checkpoint.is_new():
                    raise IngestError(f"{self._where}: {table.directory} holds batches but {self._checkpoint.path} is new: "
                                      f"give back the checkpoint they came from, or another output")
                table.prepare()
        except (DeltaMissing, OSError) as error:
            lock.close()
            raise IngestError(f"{self._where}: {error}") from None
        except IngestError:
            lock.close()
            raise
        return lock

    def _write(self, messages: DataFrame, batch: int) -> None:
        self._started.wait()
        # Whoever stops the query waits until this returns: to wait for them here would be for ever.
        if not self._in_batch.acquire(blocking=False):
            self._refused = True
            raise IngestError(f"{self._where}: the query is being stopped")
        try:
            checkpoint = self._checkpoint.id()
            mark = self._done(batch, checkpoint)
            if mark is None:
                self._checkpoint.sync_offsets(batch)
                mark = self._fill(messages, batch, checkpoint)
            elif self._keeps_state:
                messages.write.format("noop").mode("overwrite").save()
        except (ForeignBatch, ColumnChange, IngestError) as error:
            self._failure = str(error)
            raise
        except Exception as error:
            self._failure = one_line(error)
            raise
        finally:
            self._in_batch.release()
        self.progress.rows += mark.get("rows", 0)
        self.progress.bad += mark.get("bad", 0)
        self.progress.received(mark.get("newest"))
        self.progress.batches += 1
        self._restarts = 0

    def _settle(self) -> None:
        """Let Spark hold its last batch to be done if that is in the table: the
        driver was killed after it had published the batch."""
        batch = self._checkpoint.open_batch()
        if self._keeps_state or batch is None:
            return
        try:
            done = self._done(batch, self._checkpoint.id())
        except ForeignBatch as error:
            raise IngestError(f"{self._where}: {error}") from None
        if done is not None:
            self._checkpoint.commit(batch)
