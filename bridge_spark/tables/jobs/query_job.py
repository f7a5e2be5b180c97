"""One streaming query of the ingest job: checkpoint, start, restart and stop.

A batch is published in the tables before Spark commits it in the checkpoint, and a repeated batch changes nothing.  So
the driver may be killed at any point, and readers of the files see every row once.  Spark's own Parquet sink does not
guarantee that to readers other than Spark.

A batch that was published already is not read again, as retention may have removed its messages.  Only a query with
state reads it, to rebuild its state.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError, one_line, spark_path
from bridge_spark.tables.output.batch_table import BatchTable, ForeignBatch, Marker, TableError
from bridge_spark.tables.recorded_columns import COLUMNS_FILE, ColumnChange, RecordedColumns

STOP_WAIT_S = 60.0
START_WAIT_S = 20.0
RESTARTS = 5  # consecutive restarts of a query whose Python workers took longer than Spark's limits of 10 and 15 seconds
_TOO_SLOW = ("Python worker failed to connect back", "CANNOT_OPEN_SOCKET")  # of the JVM, of Python


@dataclass(frozen=True)
class BatchContext:
    """A batch that is to be written, and the query it belongs to."""

    id: int
    checkpoint: Checkpoint
    columns: RecordedColumns
    query: StreamingQuery


class Pipeline(Protocol):
    """The work of a `QueryJob`: from the stream to the tables.

    ``state`` has the settings that the query's state in the checkpoint depends on; it is empty for a stateless query.
    """

    tables: Sequence[BatchTable[Any]]
    state: Mapping[str, Any]

    def stream(self, checkpoint: Checkpoint) -> DataFrame:
        """The streaming rows of the query."""

    def committed(self, batch: int, checkpoint: str) -> Marker | None:
        """The marker of a batch that was published; ``checkpoint`` is the checkpoint's id."""

    def write(self, messages: DataFrame, batch: BatchContext) -> Marker:
        """Write and publish a batch; return its marker."""


class QueryJob:
    """Runs a pipeline as a streaming query.  ``where`` is the prefix of error texts."""

    def __init__(self, name: str, where: str, checkpoint: Path, pipeline: Pipeline) -> None:
        self.progress = TableProgress(name)
        self._where = where
        self._checkpoint = Checkpoint(checkpoint)
        self._pipeline = pipeline
        self._query: StreamingQuery | None = None
        self._started = threading.Event()
        self._in_batch = threading.Lock()
        self._refused = False  # a batch was refused because the query is being stopped
        self._failure: str | None = None
        self._interval: str | None = None
        self._restarts = 0
        self._lock = self._lock_checkpoint()
        try:
            self._columns = RecordedColumns(checkpoint / COLUMNS_FILE, dict(pipeline.state))
        except ColumnChange as error:
            self._lock.close()
            raise IngestError(f"{where}: {error}") from None

    def start(self, interval: str | None) -> None:
        """Start the query: a batch every ``interval``, or None for one run over everything available."""
        self._interval = interval
        self._failure = None
        self._started.clear()
        self._commit_published_batch()
        try:
            while True:
                try:
                    self._query = self._new_query(interval)
                    return
                except IngestError:
                    raise
                except (TableError, OSError) as error:
                    raise IngestError(f"{self._where}: {error}") from None
                except Exception as error:
                    if not _is_too_slow(one_line(error)) or self._restarts == RESTARTS:
                        raise IngestError(f"{self._where}: {_reason(one_line(error))}") from None
                    self._restarts += 1
        finally:
            self._started.set()

    def _new_query(self, interval: str | None) -> StreamingQuery:
        writer = (
            self._pipeline.stream(self._checkpoint)
            .writeStream.queryName(self.progress.name)
            .foreachBatch(self._write)
            .option("checkpointLocation", spark_path(self._checkpoint.path))
        )
        return (writer.trigger(processingTime=interval) if interval else writer.trigger(availableNow=True)).start()

    def wait_until_reading(self) -> None:
        """Wait until the query has started its Python workers, so that queries start theirs one after the other.

        Spark gives up on workers that start too slowly on a busy machine.
        """
        until = time.monotonic() + START_WAIT_S
        while self.is_active() and time.monotonic() < until:
            assert self._query is not None
            if not str(self._query.status["message"]).startswith(("Initializing", "Getting offsets")):
                return
            time.sleep(0.02)

    def is_active(self) -> bool:
        """Whether the query runs.  Raises `IngestError` if it has failed.

        A query that failed because a Python worker did not start in time is restarted.
        """
        error = self._query.exception() if self._query is not None and not self._query.isActive else None
        if error is not None and _is_too_slow(self._failure or one_line(error)) and self._restarts < RESTARTS:
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
            raise IngestError(f"{self._where}: {_reason(self._failure or one_line(error))}")

    def stop(self) -> None:
        """Stop between two batches, or after `STOP_WAIT_S` in the middle of one."""
        if self._query is None or not self._query.isActive:
            return
        held = self._in_batch.acquire(timeout=STOP_WAIT_S)
        try:
            self._query.stop()
        finally:
            if held:
                self._in_batch.release()

    def close(self) -> None:
        """Stop, even if the Spark session failed, and unlock the checkpoint."""
        try:
            self.stop()
        except Exception as error:
            print(f"{self._where}: the query could not be stopped: {one_line(error)}", file=sys.stderr)
        for table in self._pipeline.tables:
            table.clean()
        self._lock.close()

    def update_progress(self) -> None:
        """Add Spark's progress reports since the last call to `progress`."""
        if self._query is not None:
            self.progress.update([dict(json.loads(progress.json)) for progress in self._query.recentProgress])

    def _lock_checkpoint(self) -> IO[bytes]:
        """Lock the checkpoint and prepare the tables."""
        lock = self._checkpoint.lock(self._where)
        try:
            for table in self._pipeline.tables:
                if table.has_batches() and self._checkpoint.is_new():
                    raise IngestError(
                        f"{self._where}: {table.place} has batches but {self._checkpoint.path} is new: "
                        f"restore the checkpoint they came from, or give another output"
                    )
                table.prepare()
        except (TableError, OSError) as error:
            lock.close()
            raise IngestError(f"{self._where}: {error}") from None
        except IngestError:
            lock.close()
            raise
        return lock

    def _write(self, messages: DataFrame, batch: int) -> None:
        self._started.wait()
        # `stop` holds the lock and waits for this call to return, so waiting for the lock here would be a deadlock.
        if not self._in_batch.acquire(blocking=False):
            self._refused = True
            raise IngestError(f"{self._where}: the query is being stopped")
        try:
            marker = self._pipeline.committed(batch, self._checkpoint.id())
            if marker is None:
                assert self._query is not None
                self._checkpoint.sync_offsets(batch)
                marker = self._pipeline.write(messages, BatchContext(batch, self._checkpoint, self._columns, self._query))
            elif self._pipeline.state:
                messages.write.format("noop").mode("overwrite").save()
        except (ForeignBatch, TableError, ColumnChange, IngestError) as error:
            self._failure = str(error)
            raise
        except Exception as error:
            self._failure = one_line(error)
            raise
        finally:
            self._in_batch.release()
        self.progress.rows += marker.get("rows", 0)
        self.progress.bad += marker.get("bad", 0)
        self.progress.set_newest(marker.get("newest"))
        self.progress.batches += 1
        self._restarts = 0

    def _commit_published_batch(self) -> None:
        """Commit the last batch in the checkpoint if it is in the tables: the driver was killed in between."""
        batch = self._checkpoint.open_batch()
        if self._pipeline.state or batch is None:
            return
        try:
            published = self._pipeline.committed(batch, self._checkpoint.id())
        except (ForeignBatch, TableError) as error:
            raise IngestError(f"{self._where}: {error}") from None
        if published is not None:
            self._checkpoint.commit(batch)


def _is_too_slow(text: str) -> bool:
    """Whether a process did not start, or connect, within Spark's time limits."""
    return any(each in text for each in _TOO_SLOW)


def _reason(text: str) -> str:
    if not _is_too_slow(text):
        return text
    return (
        f"the machine is too busy: Spark's Python workers did not start in time, in {RESTARTS + 1} attempts; start fewer "
        f"tables at once, or give Spark fewer cores (spark.master), see docs/troubleshooting.md ({text})"
    )
