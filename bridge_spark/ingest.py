"""The ingest job: streams to Parquet tables, exactly once for every reader.

The rule kept here: a batch of messages is in the table before Spark's
checkpoint says so, and a repeated batch changes nothing.  So the driver may be
killed between any two steps, and neither Spark nor a plain reader of the files
ever finds a row twice or misses one that the checkpoint has passed.  Spark's
own Parquet sink does not promise that to plain readers.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Optional

from bridge_spark.batch_table import BatchTable, ForeignBatch
from bridge_spark.ingest_config import ConfigError, IngestConfig, TableConfig, load_config

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType

POLL_S = 0.5
STOP_WAIT_S = 60.0
_TRIGGER = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}
_CHECKPOINT_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


class IngestError(Exception):
    """Why the job cannot go on, in one line."""


class TableProgress:
    """What one table has received in this run.

    ``rows`` went to the table, ``bad`` to the dead letters; ``lag`` counts the
    offsets between what is done and what the broker has, None until known.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = 0
        self.bad = 0
        self.batches = 0
        self.lag: Optional[int] = None


Report = Callable[[list[TableProgress]], None]


def make_session(config: IngestConfig) -> SparkSession:
    """A Spark session for the job, or for anything that reads streams:
    UTC, no web interface, quiet; ``config.spark`` overrides each setting.

    Raises `IngestError` where there is no Java or no PySpark.
    """
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise IngestError("Spark needs Java 17 or newer: install one (Debian: openjdk-17-jre-headless) "
                          "or set JAVA_HOME")
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise IngestError("PySpark is not installed: pip install 'mqttbroker[spark]'") from None
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _show_workers_this_package()
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_FILES,
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }
    builder = SparkSession.builder.appName("mqttbroker ingest")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        master = config.master or "local[*,4]"
        builder = builder.master(master)
        if master.startswith("local"):
            settings |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
    for key, value in (settings | config.spark).items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    if importlib.util.find_spec("pyspark_mqtt") is None:
        from bridge_spark.datasource import MqttDataSource

        session.dataSource.register(MqttDataSource)
    return session


def run(
    config: IngestConfig,
    *,
    once: bool = False,
    trigger: str = "1s",
    stop: Optional[threading.Event] = None,
    report: Optional[Report] = None,
    session: Optional[SparkSession] = None,
) -> list[TableProgress]:
    """Ingest until everything there is was read (``once``) or ``stop`` is set.

    ``report`` is called about twice a second and once at the end.  Raises
    `IngestError`; the other tables are stopped in good order then.
    """
    stop = stop or threading.Event()
    spark = session or make_session(config)
    jobs: list[_TableJob] = []
    try:
        for table in config.tables:
            jobs.append(_TableJob(table, spark, config.where))
        for job in jobs:
            job.start(None if once else _interval(trigger))
        while any(job.is_active() for job in jobs) and not stop.wait(POLL_S):
            _report(jobs, report)
        for job in jobs:
            job.stop()
            job.check()
        _report(jobs, report)
        return [job.progress for job in jobs]
    finally:
        for job in jobs:
            job.close()
        if session is None:
            spark.stop()


class _TableJob:
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
            self._schema: StructType = table_schema(table)
        except SchemaError as error:
            raise IngestError(f"{self._where}.schema: {error}") from None
        self._made_by = hashlib.sha256(
            repr((table.source.get("filter"), table.format, self._schema.json(), sorted(table.parse_options.items()),
                  table.columns)).encode()
        ).hexdigest()[:16]
        self._lock = self._take_over()

    def start(self, interval: Optional[str]) -> None:
        """Start the query: every ``interval``, or once over what is there."""
        try:
            messages = self._spark.readStream.format("mqtt").schema(self._source_schema()) \
                .options(**self._config.source).load()
            writer = messages.writeStream.queryName(self._config.name).foreachBatch(self._write) \
                .option("checkpointLocation", self._config.checkpoint.as_uri())
            writer = writer.trigger(processingTime=interval) if interval else writer.trigger(availableNow=True)
            self._query = writer.start()
        except Exception as error:
            raise IngestError(f"{self._where}: {_one_line(error)}") from None

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
            raise IngestError(f"{self._where}: {self._failure or _one_line(error)}")

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
            print(f"{self._where}: not stopped in good order: {_one_line(error)}", file=sys.stderr)
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

    def _source_schema(self) -> str:
        from bridge_spark.columns import SCHEMA_DDL
        from bridge_spark.payloads import DEAD_LETTER_COLUMNS

        wanted = {column for column, _ in self._config.columns} | {"payload", "topic"}
        if self._config.format != "raw":
            wanted |= set(DEAD_LETTER_COLUMNS)
        fields = re.findall(r"(\w+) ([^ ]+)(?:, |$)", SCHEMA_DDL)
        return ", ".join(f"{name} {kind}" for name, kind in fields if name in wanted)

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
        found = parsed(messages, self._config, self._schema).observe(
            counts, F.count(F.lit(1)).alias("all"), F.count(F.col(REASON)).alias("bad"))
        staged = self._good.stage(batch)
        good_rows(found, self._config, self._schema).write.parquet(staged.as_uri())
        bad = int(counts.get["bad"])
        mark = {**identity, "rows": int(counts.get["all"]) - bad, "bad": bad}
        if bad:
            staged_bad = self._bad.stage(batch)
            dead_letters(parsed(messages, self._config, self._schema)).write.parquet(staged_bad.as_uri())
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


class Terminal:
    """Progress as text: one line that is rewritten on a terminal, else one
    line per table every few seconds."""

    def __init__(self, out: IO[str], every_s: float = 5.0) -> None:
        self._out = out
        self._tty = out.isatty()
        self._every = every_s
        self._last_rows: dict[str, int] = {}
        self._last_time = self._started = time.monotonic()
        self._rates: dict[str, float] = {}

    def __call__(self, tables: list[TableProgress]) -> None:
        now = time.monotonic()
        passed = now - self._last_time
        if passed >= (1.0 if self._tty else self._every):
            self._note_rates(tables, passed)
            self._last_time = now
            if not self._tty:
                self._print(tables, "\n")
        if self._tty:
            self._print(tables, "\r")

    def finish(self, tables: list[TableProgress]) -> None:
        """The last word: totals and the rate of the whole run."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        for table in tables:
            total = table.rows + table.bad
            self._write(f"{table.name}: {table.rows:,} rows, {table.bad:,} bad, {table.batches} batches in "
                        f"{seconds:.1f} s ({total / seconds:,.0f} rows/s)", "\n")

    def _note_rates(self, tables: list[TableProgress], passed: float) -> None:
        for table in tables:
            total = table.rows + table.bad
            self._rates[table.name] = (total - self._last_rows.get(table.name, 0)) / passed
            self._last_rows[table.name] = total

    def _print(self, tables: list[TableProgress], end: str) -> None:
        self._write(" | ".join(
            f"{table.name}: {table.rows:,} rows, {self._rates.get(table.name, 0.0):,.0f} rows/s, "
            f"lag {'?' if table.lag is None else format(table.lag, ',')} offsets, {table.bad:,} bad"
            for table in tables), end)

    def _write(self, text: str, end: str) -> None:
        clear = "\x1b[K" if self._tty else ""
        self._out.write(f"{text}{clear}{end}")
        self._out.flush()


def main(argv: Sequence[str]) -> int:
    """`mqttbroker ingest CONFIG [--once] [--trigger 1s]`.

    Exit code 0 when all was read or the job was asked to stop, 1 when it
    failed, 2 for arguments and settings that cannot be used.
    """
    parser = argparse.ArgumentParser(prog="mqttbroker ingest", description="Write streams to Parquet tables.")
    parser.add_argument("config", type=Path, help="TOML file of tables, see conf/ingest.toml")
    parser.add_argument("--once", action="store_true", help="read what is there and end")
    parser.add_argument("--trigger", default="1s", metavar="TIME",
                        help="start a batch every TIME, like 500ms, 1s, 5m (default 1s)")
    arguments = parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    terminal = Terminal(sys.stdout)
    try:
        config = load_config(arguments.config)
        _interval(arguments.trigger)
        tables = run(config, once=arguments.once, trigger=arguments.trigger, stop=stop, report=terminal)
    except ConfigError as error:
        print(f"mqttbroker ingest: {error}", file=sys.stderr)
        return 2
    except IngestError as error:
        print(f"mqttbroker ingest: {error}", file=sys.stderr)
        return 1
    terminal.finish(tables)
    return 0


def _report(jobs: list[_TableJob], report: Optional[Report]) -> None:
    for job in jobs:
        job.update_lag()
    if report is not None:
        report([job.progress for job in jobs])


def _interval(trigger: str) -> str:
    match = _TRIGGER.fullmatch(trigger.strip())
    if match is None:
        raise ConfigError("ingest", "trigger", f"{trigger!r} is not a time like 500ms, 1s or 5m")
    return f"{match[1]} {_UNITS[match[2]]}"


def _offsets(text: Any) -> dict[str, int]:
    value = json.loads(text) if isinstance(text, str) else text
    return {str(key): int(offset) for key, offset in value.items()} if isinstance(value, dict) else {}


def _one_line(error: BaseException) -> str:
    """The line of an error that says what happened, without Java's and Python's stacks."""
    text = str(error)
    own = re.findall(r"mqtt source: .*", text)
    if own:
        return str(own[-1]).strip()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith((" ", "\t", "Traceback"))]
    return lines[0].strip() if lines else type(error).__name__


def _show_workers_this_package() -> None:
    """Python workers are new processes: a source tree that is not installed must be on their path."""
    root = str(Path(__file__).resolve().parent.parent)
    there = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if "site-packages" not in root and root not in there:
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (root, *there) if part)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
