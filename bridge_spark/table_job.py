"""The streaming query of one table of the ingest job.

The rule kept here: a batch of messages is in the table before Spark's
checkpoint says so, and a repeated batch changes nothing.  So the driver may be
killed between any two steps, and neither Spark nor a plain reader of the files
ever finds a row twice or misses one that the checkpoint has passed.  Spark's
own Parquet sink does not promise that to plain readers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import threading
from typing import IO, TYPE_CHECKING, Any, Optional

from bridge_spark.batch_table import BatchTable, ForeignBatch
from bridge_spark.ingest_progress import TableProgress
from bridge_spark.ingest_session import IngestError, one_line
from bridge_spark.table_config import TableConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

STOP_WAIT_S = 60.0


class TableJob:
    """The streaming query of one table, and the table it fills."""

    def __init__(self, table: TableConfig, spark: SparkSession, where: str) -> None:
        from bridge_spark.payloads import SchemaError, table_schema

        self.progress = TableProgress(table.name)
        self._config = table
        self._where = f"{where}: tables.{table.name}"
        self._spark = spark
        self._good = BatchTable(table.output)
        self._bad = BatchTable(table.dead_letters)
        self._query: Optional[StreamingQuery] = None
        self._in_batch = threading.Lock()
        self._failure: Optional[str] = None
        try:
            self._schema: StructType = table_schema(table.payload)
        except SchemaError as error:
            raise IngestError(f"{self._where}.schema: {error}") from None
        self._made_by = hashlib.sha256(
            repr((table.source.get("filter"), table.payload, self._schema.json())).encode()
        ).hexdigest()[:16]
        self._lock = self._take_over()

    def start(self, interval: Optional[str]) -> None:
        """Start the query: every ``interval``, or once over what is there."""
        from bridge_spark.payloads import source_schema

        try:
            messages = self._spark.readStream.format("mqtt") \
                .schema(source_schema(self._config.payload, self._schema)) \
                .options(**self._config.source, **self._config.payload.source_options).load()
            writer = messages.writeStream.queryName(self._config.name).foreachBatch(self._write) \
                .option("checkpointLocation", self._config.checkpoint.as_uri())
            writer = writer.trigger(processingTime=interval) if interval else writer.trigger(availableNow=True)
            self._query = writer.start()
        except Exception as error:
            raise IngestError(f"{self._where}: {one_line(error)}") from None

    def is_active(self) -> bool:
        """Whether the query runs; raises `IngestError` once it has failed."""
        self.check()
        return self._query is not None and self._query.isActive

    def check(self) -> None:
        """Raise `IngestError` if the query has failed."""
        if self._query is None or self._query.isActive:
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
        self._good.clean()
        self._bad.clean()
        self._lock.close()

    def update_lag(self) -> None:
        last = self._query.lastProgress if self._query is not None else None
        if last is None:
            return
        source = last["sources"][0]
        done, there = _offsets(source["endOffset"]), _offsets(source["latestOffset"])
        if done and there:
            self.progress.lag = sum(max(0, offset - done.get(partition, 0)) for partition, offset in there.items())

    def _take_over(self) -> IO[bytes]:
        checkpoint = self._config.checkpoint
        checkpoint.mkdir(parents=True, exist_ok=True)
        lock = open(checkpoint / "ingest.lock", "ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise IngestError(f"{self._where}: another ingest is running with {checkpoint}") from None
        for table in (self._good, self._bad):
            if table.has_batches() and not (checkpoint / "metadata").exists():
                lock.close()
                raise IngestError(f"{self._where}: {table.directory} holds batches but {checkpoint} is new: "
                                  f"give back the checkpoint they came from, or another output")
            table.prepare()
        return lock

    def _write(self, messages: DataFrame, batch: int) -> None:
        with self._in_batch:
            try:
                self._write_batch(messages, batch)
            except ForeignBatch as error:
                self._failure = str(error)
                raise

    def _write_batch(self, messages: DataFrame, batch: int) -> None:
        identity = {"checkpoint": self._checkpoint_id(), "settings": self._made_by}
        done = self._good.mark(batch)
        for table in (self._good, self._bad):
            mark = table.mark(batch)
            if mark is not None and mark["checkpoint"] != identity["checkpoint"]:
                raise ForeignBatch(f"batch {batch} in {table.directory} was made by another checkpoint")
        if done is None or done["settings"] != self._made_by:
            done = self._fill(messages, batch, identity)
        self.progress.rows += done["rows"]
        self.progress.bad += done["bad"]
        self.progress.batches += 1

    def _fill(self, messages: DataFrame, batch: int, identity: dict[str, str]) -> dict[str, Any]:
        """Dead letters first: a batch that is in the table is done."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F

        from bridge_spark.payloads import REASON, dead_letters, good_rows, parsed

        counts = Observation()
        found = parsed(messages, self._config.payload, self._schema).observe(
            counts, F.count(F.lit(1)).alias("all"), F.count(F.col(REASON)).alias("bad"))
        staged = self._good.stage(batch)
        good_rows(found, self._config.payload, self._schema).write.parquet(staged.as_uri())
        bad = int(counts.get["bad"])
        mark = {**identity, "rows": int(counts.get["all"]) - bad, "bad": bad}
        if bad:
            staged_bad = self._bad.stage(batch)
            dead_letters(parsed(messages, self._config.payload, self._schema)).write.parquet(staged_bad.as_uri())
            self._bad.publish(batch, staged_bad, mark)
        else:
            self._bad.withdraw(batch)
        if mark["rows"]:
            self._good.publish(batch, staged, mark)
        else:
            self._good.withdraw(batch, staged)
        return mark

    def _checkpoint_id(self) -> str:
        metadata = (self._config.checkpoint / "metadata").read_text()
        return str(json.loads(metadata)["id"])


def _offsets(text: Any) -> dict[str, int]:
    value = json.loads(text) if isinstance(text, str) else text
    return {str(key): int(offset) for key, offset in value.items()} if isinstance(value, dict) else {}
