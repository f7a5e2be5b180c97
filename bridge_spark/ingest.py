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

from bridge_spark.config_section import ConfigError
from bridge_spark.ingest_config import IngestConfig, load_config
from bridge_spark.ingest_progress import Report, TableProgress, Terminal
from bridge_spark.ingest_session import IngestError, make_session
from bridge_spark.table_job import TableJob

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
    spark = session or make_session(config)
    jobs: list[TableJob] = []
    try:
        for table in config.tables:
            jobs.append(TableJob(table, spark, config.where))
        for job in jobs:
            job.start(None if once else interval(trigger))
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
        interval(arguments.trigger)
        tables = run(config, once=arguments.once, trigger=arguments.trigger, stop=stop, report=terminal)
    except ConfigError as error:
        print(f"mqttbroker ingest: {error}", file=sys.stderr)
        return 2
    except IngestError as error:
        print(f"mqttbroker ingest: {error}", file=sys.stderr)
        return 1
    terminal.finish(tables)
    return 0


def _report(jobs: list[TableJob], report: Optional[Report]) -> None:
    for job in jobs:
        job.update_lag()
    if report is not None:
        report([job.progress for job in jobs])


def interval(trigger: str) -> str:
    match = _TRIGGER.fullmatch(trigger.strip())
    if match is None:
        raise ConfigError("ingest", "trigger", f"{trigger!r} is not a time like 500ms, 1s or 5m")
    return f"{match[1]} {_UNITS[match[2]]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
