"""``make demo``: sensors publish over MQTT, the broker stores the readings in a stream, Spark writes them to a table.

The broker is a process, each sensor an MQTT client, and the ingest job the one of ``mqttbroker ingest``. The table is
compared with the published readings: the exit status is 1 if a QoS 1 reading is missing, or if a QoS 2 reading is
missing or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import logging
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from aiomqtt import Client, ProtocolVersion
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from bridge_spark.ingest import run
from bridge_spark.tables.ingest_config import IngestConfig, parse_config
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError, make_session

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

WINDOW = 100  # messages of one sensor in flight
START_SECONDS = 30.0
STALLED_SECONDS = 30.0
BROKER_CONFIG = """
[streams.sensors]
filters = ["sensors/+/reading"]
partitions = 4
key = "topic"
"""
UNITS = ["°C", "bar", "mm/s", "l/min", "kW", "rpm"]


class DemoError(Exception):
    """The demo cannot continue; the message is one line."""


class Sensor:
    """A sensor with its readings, (ISO time, value); reading n is published at QoS n % 3."""

    def __init__(self, name: str, unit: str, readings: list[tuple[str, float]]) -> None:
        self.name = name
        self.unit = unit
        self.readings = readings

    @property
    def topic(self) -> str:
        return f"sensors/{self.name}/reading"

    def published(self, qos: int) -> int:
        return len(range(qos, len(self.readings), 3))


# --- readings -----------------------------------------------------------------------------------------------------


def read_sensors(directory: Path) -> list[Sensor]:
    """One sensor per CSV file with the columns ``timestamp,value``; raises DemoError."""
    sensors = []
    for path in sorted(directory.glob("*.csv")):
        readings = []
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            if next(rows, None) != ["timestamp", "value"]:
                raise DemoError(f"{path}: the first line must be timestamp,value")
            for row in rows:
                try:
                    moment, value = row
                    readings.append((datetime.fromisoformat(moment).isoformat(), float(value)))
                except ValueError:
                    raise DemoError(f"{path}: line {rows.line_num}: must be timestamp,value, got {row}") from None
        sensors.append(Sensor(re.sub(r"[^\w.-]", "_", path.stem), "", readings))
    if not sensors:
        raise DemoError(f"{directory}: there is no CSV file")
    return sensors


def simulate(count: int = 12, readings: int = 2000, seed: int = 1883) -> list[Sensor]:
    """A small plant: each sensor has a daily cycle, a drift and noise; a seed always gives the same readings."""
    sensors = []
    for index in range(count):
        chance = random.Random(f"{seed}/{index}")
        level, swing, noise = chance.uniform(20, 90), chance.uniform(1, 10), chance.uniform(0.05, 1)
        drift, start, series = 0.0, datetime(2026, 1, 1), []
        for number in range(readings):
            drift = 0.99 * drift + chance.gauss(0, noise)
            value = level + swing * math.sin(2 * math.pi * number / 288) + drift
            series.append(((start + timedelta(minutes=5 * number)).isoformat(), round(value, 3)))
        sensors.append(Sensor(f"machine_{index:02}", UNITS[index % len(UNITS)], series))
    return sensors


# --- the broker and its clients -----------------------------------------------------------------------------------


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """Send standard error, that of child processes included, to a file; print the file if the block fails.

    A JVM logs to standard error while it starts, before any of its settings apply, and keeps the file afterwards.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except BaseException:
        os.write(terminal, path.read_bytes())
        raise
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


@contextmanager
def running_broker(directory: Path) -> Iterator[Callable[[str], int]]:
    """A broker on free ports with its data in ``directory``; yields what waits for its port of "tcp" or "http"."""
    config = directory / "broker.toml"
    config.write_text(BROKER_CONFIG, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "mqttbroker", "serve", "--config", str(config), "--port", "0"]
    command += ["--http-port", "0", "--data-dir", str(directory / "data"), "--log-level", "info"]
    log = directory / "broker.log"
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield lambda kind: _wait_for_port(process, log, kind)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], log: Path, kind: str) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        said = log.read_text(encoding="utf-8")
        match = re.search(rf"event=listening type={kind} .*\bport=(\d+)", said)
        if match:
            return int(match[1])
        if ended:
            break
        time.sleep(0.05)
    raise DemoError("the broker did not start: " + " ".join(said.split()[-30:]))


async def replay(sensor: Sensor, port: int, advance: Callable[[int], None]) -> None:
    """Publish a sensor's metadata, retained, and then its readings in order."""
    meta = json.dumps({"sensor": sensor.name, "unit": sensor.unit, "readings": len(sensor.readings)})
    quiet = logging.getLogger("demo.clients")
    quiet.setLevel(logging.ERROR)  # aiomqtt warns if more than ten messages are in flight
    async with Client(
        "127.0.0.1", port, identifier=f"sensor-{sensor.name}", protocol=ProtocolVersion.V5, max_inflight_messages=WINDOW, logger=quiet
    ) as client:
        await client.publish(f"sensors/{sensor.name}/meta", meta, qos=1, retain=True)
        for start in range(0, len(sensor.readings), WINDOW):
            part = list(enumerate(sensor.readings[start : start + WINDOW], start))
            payloads = [json.dumps({"seq": seq, "ts": moment, "value": value}) for seq, (moment, value) in part]
            await asyncio.gather(
                *(client.publish(sensor.topic, payload, qos=seq % 3, timeout=60) for (seq, _), payload in zip(part, payloads))
            )
            advance(len(part))


async def replay_all(sensors: list[Sensor], port: int, advance: Callable[[int], None]) -> set[str]:
    """Replay all sensors concurrently; returns the topics whose retained messages a new subscriber then receives."""
    try:
        async with asyncio.TaskGroup() as group:
            for sensor in sensors:
                group.create_task(replay(sensor, port, advance))
    except ExceptionGroup as failed:
        raise DemoError(f"a sensor could not publish: {failed.exceptions[0]}") from None
    retained: set[str] = set()
    async with Client("127.0.0.1", port, identifier="demo-reader", protocol=ProtocolVersion.V5) as client:
        await client.subscribe("sensors/+/meta", qos=1)
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                async for message in client.messages:
                    retained.add(str(message.topic))
                    if len(retained) == len(sensors):
                        break
    return retained


# --- the table ----------------------------------------------------------------------------------------------------


class Ingest:
    """The ingest job in a thread: it reads from ``source`` and writes a table of Parquet files."""

    def __init__(self, spark: SparkSession, source: dict[str, str], table: Path, moved: Callable[[int], None]) -> None:
        columns = ["topic", "qos", "partition", "offset", "timestamp as received", "client_id"]
        self.config = parse_config({
            "source": source,
            "tables": {"readings": {
                "stream": "sensors", "format": "json", "columns": columns, "output": str(table),
                "schema": "seq long not null, ts timestamp, value double not null",
            }},
        })  # fmt: skip
        self.spark = spark
        self.moved = moved
        self.rows = 0
        self.bad = 0
        self.failure: Exception | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="ingest")

    def wait_for(self, rows: int, stalled: float = STALLED_SECONDS) -> None:
        """Wait until ``rows`` messages have arrived, or none has for ``stalled`` seconds."""
        seen, since = -1, time.monotonic()
        while self.thread.is_alive() and self.rows + self.bad < rows and time.monotonic() - since < stalled:
            if self.rows + self.bad != seen:
                seen, since = self.rows + self.bad, time.monotonic()
            self.stop.wait(0.1)

    def finish(self) -> None:
        """Stop the job after its current batch; raises the error that ended it, if one did."""
        self.stop.set()
        self.thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            run(self.config, trigger="1s", stop=self.stop, report=self._report, session=self.spark)
        except Exception as error:
            self.failure = error

    def _report(self, tables: list[TableProgress]) -> None:
        self.rows, self.bad = tables[0].rows, tables[0].bad
        self.moved(self.rows + self.bad)


def summary(spark: SparkSession, table: Path) -> list[Row]:
    return spark.sql(f"""
        SELECT split(topic, '/')[1] AS sensor, count(*) AS count, min(value) AS min, avg(value) AS mean,
               max(value) AS max, first(partition) AS partition, min(offset) AS first_offset, max(offset) AS last_offset
        FROM parquet.`{table.as_uri()}` GROUP BY topic ORDER BY topic""").collect()


def arrived(spark: SparkSession, table: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """(rows, distinct readings) in the table, by sensor and QoS (seq % 3)."""
    rows = spark.sql(f"""
        SELECT split(topic, '/')[1] AS sensor, int(seq % 3) AS qos, count(*) AS rows, count(DISTINCT seq) AS readings
        FROM parquet.`{table.as_uri()}` GROUP BY ALL""").collect()
    return {(row.sensor, row.qos): (row.rows, row.readings) for row in rows}


def show(console: Console, rows: list[Row]) -> None:
    console.print("\nMade by Spark: the readings of each sensor, and where they stand in the stream")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("sensor", no_wrap=True)
    for name in ("count", "min", "mean", "max", "partition", "first", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.sensor,
            format(row["count"], ","),
            f"{row.min:.2f}",
            f"{row.mean:.2f}",
            f"{row.max:.2f}",
            str(row.partition),
            str(row.first_offset),
            str(row.last_offset),
        )
    console.print(table)


def compare(console: Console, sensors: list[Sensor], found: dict[tuple[str, int], tuple[int, int]], bad: int) -> bool:
    """Print published and arrived readings by QoS; returns whether each QoS kept its guarantee."""
    kept = bad == 0
    promises = ("at most once", "none missing", "each exactly once")
    for qos in range(3):
        published = sum(sensor.published(qos) for sensor in sensors)
        rows = sum(found.get((sensor.name, qos), (0, 0))[0] for sensor in sensors)
        missing = sum(sensor.published(qos) - found.get((sensor.name, qos), (0, 0))[1] for sensor in sensors)
        doubled = rows - (published - missing)
        good = qos == 0 and doubled == 0 or qos == 1 and missing == 0 or qos == 2 and missing == doubled == 0
        kept = kept and good
        console.print(
            f"QoS {qos}: published {published:,}, in the table {rows:,}: {missing:,} missing, "
            f"{doubled:,} doubled; {promises[qos]}: {'yes' if good else 'NO'}",
            highlight=False,
            soft_wrap=True,
        )
    if bad:
        console.print(f"{bad:,} messages could not be parsed")
    return kept


# --- the demo -----------------------------------------------------------------------------------------------------


def demo(console: Console, sensors: list[Sensor], directory: Path) -> bool:
    """Run the demo; returns whether nothing is missing or doubled. Raises DemoError and IngestError."""
    total = sum(len(sensor.readings) for sensor in sensors)
    table = directory / "tables" / "readings"
    bars = Progress(TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    with running_broker(directory) as port_of:
        console.print("broker and Spark start, which takes some seconds", highlight=False, soft_wrap=True)
        with console.status("starting"), stderr_in(directory / "spark-start.log"):
            spark = make_session(IngestConfig(()))
        try:
            port, http_port = port_of("tcp"), port_of("http")
            console.print(f"broker on port {port}, dashboard and streams on http://127.0.0.1:{http_port}/", highlight=False, soft_wrap=True)
            with bars:
                published = bars.add_task("published", total=total)
                ingested = bars.add_task("in the table", total=total)
                ingest = Ingest(spark, {"url": f"http://127.0.0.1:{http_port}"}, table, lambda rows: bars.update(ingested, completed=rows))
                ingest.thread.start()
                try:
                    retained = asyncio.run(replay_all(sensors, port, lambda count: bars.advance(published, count)))
                    ingest.wait_for(total)
                finally:
                    ingest.finish()
            show(console, summary(spark, table))
            kept = compare(console, sensors, arrived(spark, table), ingest.bad)
        finally:
            spark.stop()
    missing_meta = len(sensors) - len(retained)
    console.print(f"retained meta messages: {len(retained)} of {len(sensors)}", highlight=False)
    return kept and missing_meta == 0


Demo = Callable[[Console, list[Sensor], Path], bool]


def run_command(program: str, description: str, kept: str, perform: Demo, arguments: Sequence[str] | None) -> int:
    """The command of a demo, which ``perform`` does in a directory for what is ``kept`` on demand; returns the exit status."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--data", type=Path, metavar="DIR", help="CSV files (timestamp,value) instead of a simulated plant")
    parser.add_argument("--keep", type=Path, metavar="DIR", help=f"directory for {kept}")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    directory = options.keep or Path(tempfile.mkdtemp(prefix=f"mqttbroker-{program}-"))
    start = time.monotonic()
    try:
        sensors = read_sensors(options.data) if options.data else simulate()
        directory.mkdir(parents=True, exist_ok=True)
        complete = perform(console, sensors, directory.absolute())
    except (DemoError, IngestError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    finally:
        if options.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    console.print(f"{'everything is there' if complete else 'SOMETHING IS WRONG'}, {time.monotonic() - start:.0f} s", highlight=False)
    return 0 if complete else 1


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("demo", "From sensors to a Spark table, with one command.", "the broker's data and the table", demo, arguments)


if __name__ == "__main__":
    sys.exit(main())
