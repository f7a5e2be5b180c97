"""The ingest job: writes streams to Parquet, Delta or Iceberg tables, exactly once for every reader.

If one table fails the job stops the others between two batches and ends.  The next run continues from the checkpoints.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import parse_options
from bridge_spark.source.storage import StreamError
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.ingest_config import RETRY_OPTION, IngestConfig, load_config
from bridge_spark.tables.ingest_metrics import IngestMetrics
from bridge_spark.tables.ingest_progress import Report, TableProgress, Terminal
from bridge_spark.tables.ingest_session import IngestError, make_session, one_line, require_spark
from bridge_spark.tables.jobs.backfill_range import BackfillRange, Bound, parse_bound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bridge_spark.tables.jobs.query_job import QueryJob

POLL_S = 0.5
_TRIGGER = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}


def run(
    config: IngestConfig,
    *,
    once: bool = False,
    trigger: str = "1s",
    stop: threading.Event | None = None,
    report: Report | None = None,
    session: SparkSession | None = None,
) -> list[TableProgress]:
    """Ingest until ``stop`` is set, or with ``once`` until everything available is read.

    ``report`` is called about twice a second and once at the end.  Raises `IngestError` after stopping all tables.
    """
    stop = stop or threading.Event()
    if session is None:
        require_spark()
    _check_sources(config)
    spark = session or _session(config)
    # Imported here, after the check that PySpark is installed.
    from bridge_spark.tables.jobs.aggregate_pipeline import aggregate_job
    from bridge_spark.tables.jobs.table_pipeline import table_job

    jobs: list[QueryJob] = []
    try:
        for table in config.tables:
            jobs.append(table_job(table, spark, config.where))
            for aggregate in table.sink.aggregates:
                jobs.append(aggregate_job(table, aggregate, spark, config.where))
        for job in jobs:
            job.start(None if once else interval(trigger))
            job.wait_until_reading()
        while any([job.is_active() for job in jobs]) and not stop.wait(POLL_S):
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


def run_backfill(config: IngestConfig, begin: Bound, end: Bound, *, session: SparkSession | None = None) -> list[TableProgress]:
    """Read a range of each table's stream into its `backfill` directory.  Raises `IngestError`."""
    if session is None:
        require_spark()
    _check_sources(config)
    spark = session or _session(config)
    # Imported here, after the check that PySpark is installed.
    from bridge_spark.tables.jobs.backfill import backfill

    try:
        return [backfill(table, spark, config.where, BackfillRange(begin, end)) for table in config.tables]
    finally:
        if session is None:
            spark.stop()


def main(argv: Sequence[str]) -> int:
    """`mqttbroker ingest CONFIG [--once | --backfill FROM TO] [--trigger 1s] [--metrics-port N]`.

    Exit code 0 if everything was read or the job was asked to stop, 1 if it failed, 2 for invalid arguments or
    settings.  A signal ends a backfill at once; repeating the backfill replaces its rows.
    """
    arguments = _arguments(argv)
    stop = threading.Event()
    if arguments.backfill is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    terminal = Terminal(sys.stdout)
    metrics: IngestMetrics | None = None
    try:
        config = load_config(arguments.config)
        interval(arguments.trigger)
        if arguments.backfill is not None:
            tables = run_backfill(config, *_range(*arguments.backfill))
        else:
            metrics = _metrics(config, arguments.metrics_port)
            tables = run(
                config,
                once=arguments.once,
                trigger=arguments.trigger,
                stop=stop,
                report=terminal if metrics is None else _report_to(terminal, metrics),
            )
    except ConfigError as error:
        print(f"mqttbroker ingest: {error}", file=sys.stderr)
        return 2
    except IngestError as error:
        print(f"mqttbroker ingest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mqttbroker ingest: interrupted", file=sys.stderr)
        return 1
    finally:
        if metrics is not None:
            metrics.close()
    terminal.finish(tables)
    return 0


def _session(config: IngestConfig) -> SparkSession:
    try:
        return make_session(config)
    except IngestError:
        raise
    except Exception as error:  # of PySpark and py4j, which have no common class
        raise IngestError(f"Spark does not start: {one_line(error)}") from None


def _check_sources(config: IngestConfig) -> None:
    """Check that the sources can be read, and are those of the checkpoints, before Spark starts and without the retries
    of a running query."""
    from bridge_spark.tables.checkpoint import Checkpoint  # loads Arrow, which the command needs for nothing else

    for table in config.tables:
        options = parse_options({key: value for key, value in table.source.items() if key != RETRY_OPTION})
        storage = open_storage(options)
        try:
            manifest = storage.manifest()
            for path in (table.checkpoint, *(aggregate.checkpoint for aggregate in table.sink.aggregates)):
                Checkpoint(path).check_stream(options, manifest)
        except StreamError as error:
            raise IngestError(f"{config.where}: tables.{table.name}: {error}") from None
        finally:
            storage.close()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mqttbroker ingest", description="Write streams to Parquet, Delta or Iceberg tables.")
    parser.add_argument("config", type=Path, help="TOML file of tables, see conf/ingest.toml")
    parser.add_argument("--once", action="store_true", help="read everything available and end")
    parser.add_argument(
        "--backfill",
        nargs=2,
        metavar=("FROM", "TO"),
        help="read a range into directories of its own and end: times of receipt like "
        "2026-01-31T12:00:00Z, or offsets of partitions like '{\"0\": 123}'; TO is exclusive",
    )
    parser.add_argument("--trigger", default="1s", metavar="TIME", help="start a batch every TIME, like 500ms, 1s, 5m (default 1s)")
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve Prometheus metrics on this port; 0 takes a free port and prints it"
    )
    return parser.parse_args(argv)


def _range(first: str, last: str) -> tuple[Bound, Bound]:
    try:
        begin, end = parse_bound(first), parse_bound(last)
        BackfillRange(begin, end).check()
    except ValueError as error:
        raise ConfigError("ingest", "backfill", str(error)) from None
    return begin, end


def _metrics(config: IngestConfig, port: int | None) -> IngestMetrics | None:
    chosen = config.metrics_port if port is None else port
    if chosen is None:
        return None
    try:
        metrics = IngestMetrics(config.metrics_host, chosen)
    except (OSError, OverflowError) as error:
        raise IngestError(f"metrics on {config.metrics_host}:{chosen}: {error}") from None
    print(f"metrics on {config.metrics_host}:{metrics.port}", flush=True)
    return metrics


def _report_to(terminal: Terminal, metrics: IngestMetrics) -> Report:
    def report(tables: list[TableProgress]) -> None:
        metrics.update(tables)
        terminal(tables)

    return report


def _report(jobs: list[QueryJob], report: Report | None) -> None:
    for job in jobs:
        job.update_progress()
    if report is not None:
        report([job.progress for job in jobs])


def interval(trigger: str) -> str:
    """A trigger like "500ms" as an interval of Spark.  Raises `ConfigError`."""
    match = _TRIGGER.fullmatch(trigger.strip())
    if match is None:
        raise ConfigError("ingest", "trigger", f"{trigger!r} is not a time like 500ms, 1s or 5m")
    return f"{match[1]} {_UNITS[match[2]]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
