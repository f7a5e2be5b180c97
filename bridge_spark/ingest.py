"""The ingest job: streams to Parquet tables, exactly once for every reader.

The rule kept here: one table that fails ends the whole job, after the others
were stopped between two batches; whatever ends it, the next run continues
where the checkpoints stand.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from bridge_spark.source.open_storage import open_storage
from bridge_spark.source.options import parse_options
from bridge_spark.source.storage import StreamError
from bridge_spark.tables.aggregate_job import AggregateJob
from bridge_spark.tables.backfill import Edge, backfill, check_range, edge
from bridge_spark.tables.config_section import ConfigError
from bridge_spark.tables.ingest_config import PATIENCE, IngestConfig, load_config
from bridge_spark.tables.ingest_metrics import IngestMetrics
from bridge_spark.tables.ingest_progress import Report, TableProgress, Terminal
from bridge_spark.tables.ingest_session import IngestError, make_session, require_spark
from bridge_spark.tables.query_job import QueryJob
from bridge_spark.tables.table_job import TableJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 0.5
_TRIGGER = re.compile(r"(\d+)\s*(ms|s|m|h)")
_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours"}


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
    if session is None:
        require_spark()
    _look(config)
    spark = session or make_session(config)
    jobs: list[QueryJob] = []
    try:
        for table in config.tables:
            jobs.append(TableJob(table, spark, config.where))
            for aggregate in table.sink.aggregates:
                jobs.append(AggregateJob(table, aggregate, spark, config.where))
        for job in jobs:
            job.start(None if once else interval(trigger))
            job.wait_until_it_reads()
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


def run_backfill(
    config: IngestConfig, begin: Edge, end: Edge, *, session: Optional[SparkSession] = None
) -> list[TableProgress]:
    """Read a range of each table's stream into its `backfill` directory; raises `IngestError`."""
    if session is None:
        require_spark()
    _look(config)
    spark = session or make_session(config)
    try:
        return [backfill(table, spark, config.where, begin, end) for table in config.tables]
    finally:
        if session is None:
            spark.stop()


def main(argv: Sequence[str]) -> int:
    """`mqttbroker ingest CONFIG [--once | --backfill FROM TO] [--trigger 1s] [--metrics-port N]`.

    Exit code 0 when all was read or the job was asked to stop, 1 when it
    failed, 2 for arguments and settings that cannot be used.  A signal ends a
    backfill at once: repeating it replaces what it left.
    """
    arguments = _arguments(argv)
    stop = threading.Event()
    if arguments.backfill is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    terminal = Terminal(sys.stdout)
    metrics: Optional[IngestMetrics] = None
    try:
        config = load_config(arguments.config)
        interval(arguments.trigger)
        if arguments.backfill is not None:
            tables = run_backfill(config, *_range(*arguments.backfill))
        else:
            metrics = _metrics(config, arguments.metrics_port)
            tables = run(config, once=arguments.once, trigger=arguments.trigger, stop=stop,
                         report=terminal if metrics is None else _both(terminal, metrics))
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


def _look(config: IngestConfig) -> None:
    """Find out what is wrong with a source before Spark starts, and without the patience of a running query."""
    for table in config.tables:
        storage = open_storage(parse_options({key: value for key, value in table.source.items() if key != PATIENCE}))
        try:
            storage.manifest()
        except StreamError as error:
            raise IngestError(f"{config.where}: tables.{table.name}: {error}") from None
        finally:
            storage.close()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mqttbroker ingest", description="Write streams to Parquet or Delta tables.")
    parser.add_argument("config", type=Path, help="TOML file of tables, see conf/ingest.toml")
    parser.add_argument("--once", action="store_true", help="read what is there and end")
    parser.add_argument("--backfill", nargs=2, metavar=("FROM", "TO"),
                        help="read a range into directories of its own and end: times of receipt like "
                             "2026-01-31T12:00:00Z, or offsets of partitions like '{\"0\": 123}'; TO is not part of it")
    parser.add_argument("--trigger", default="1s", metavar="TIME",
                        help="start a batch every TIME, like 500ms, 1s, 5m (default 1s)")
    parser.add_argument("--metrics-port", type=int, metavar="PORT",
                        help="serve Prometheus metrics there; 0 takes a free port and says which")
    return parser.parse_args(argv)


def _range(first: str, last: str) -> tuple[Edge, Edge]:
    try:
        begin, end = edge(first), edge(last)
        check_range(begin, end)
    except ValueError as error:
        raise ConfigError("ingest", "backfill", str(error)) from None
    return begin, end


def _metrics(config: IngestConfig, port: Optional[int]) -> Optional[IngestMetrics]:
    chosen = config.metrics_port if port is None else port
    if chosen is None:
        return None
    try:
        metrics = IngestMetrics(config.metrics_host, chosen)
    except (OSError, OverflowError) as error:
        raise IngestError(f"metrics on {config.metrics_host}:{chosen}: {error}") from None
    print(f"metrics on {config.metrics_host}:{metrics.port}", flush=True)
    return metrics


def _both(terminal: Terminal, metrics: IngestMetrics) -> Report:
    def report(tables: list[TableProgress]) -> None:
        metrics.watch(tables)
        terminal(tables)

    return report


def _report(jobs: list[QueryJob], report: Optional[Report]) -> None:
    for job in jobs:
        job.update_progress()
    if report is not None:
        report([job.progress for job in jobs])


def interval(trigger: str) -> str:
    match = _TRIGGER.fullmatch(trigger.strip())
    if match is None:
        raise ConfigError("ingest", "trigger", f"{trigger!r} is not a time like 500ms, 1s or 5m")
    return f"{match[1]} {_UNITS[match[2]]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
