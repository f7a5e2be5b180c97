#!/usr/bin/env python3
"""How fast Spark reads a stream and Parquet files with the same rows; the ingest job; writing; the latency of a query.

    spark.py [--rows N] [--rounds N] [--seconds N] [SCENARIO ...]

All runs use one warm session and one log; runs that are compared alternate. CPU time is that of the JVM, of Python (the
workers and this process) and of the broker, each with its child processes. Prints one line of JSON per run:

    rows_per_s       of the whole run; of the ingest job from its start to its end
    cpu_s_per_m      of all three per million rows; jvm_s_per_m, python_s_per_m, broker_s_per_m
    broker_cpu_pct   of one core, while it serves a read
    p50_ms, p95_ms   from before the PUBLISH until a streaming query at a trigger of 200 ms has its row

MQTTBROKER is the command that starts the broker (default: that of this Python).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import OURS, descendants, free_port
from scenarios import PARQUET, SPARK_LATENCY, SPARK_READS, SPARK_WRITES, spark_scenarios

from bridge_spark.ingest import run as ingest
from bridge_spark.log.sealed.writer import ClosedSegment, seal
from bridge_spark.log.segment_names import sealed_file_name
from bridge_spark.log.stream_log import StreamConfig, StreamLogs, partition_of
from bridge_spark.tables.ingest_config import IngestConfig, parse_config
from bridge_spark.tables.ingest_session import make_session
from mqttbroker.codec.packets import Connack, Connect, Puback, Publish, decode
from sessions.message import Message

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Run = dict[str, Any]
STREAM, SEEN = "bench", "seen"
PARTITIONS = 4
AT_ONCE = 4_000  # rows of one commit, in four batches
PAYLOAD = 128
SEGMENT_BYTES = 16 * 1024 * 1024
START_US = 1_700_000_000_000_000
FEW = "topic string, payload binary, timestamp timestamp"
SCHEMA = "n long not null, time timestamp, value double not null, unit string"
TRIGGER = "200 milliseconds"
RATE = 100  # messages per second whose latency is measured
WARM = 10  # messages sent before those, one after the other
START_SECONDS = 30.0
SEEN_SECONDS = 60.0


# --- the rows -------------------------------------------------------------------------------------------------------


def message(number: int) -> Message:
    """Row ``number``: 128 bytes of JSON from one of a hundred devices, received 10 µs after the one before."""
    device = number % 100
    noise = number * 2654435761 % 4294967296
    body = (f'{{"n": {number}, "time": "2026-01-31T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}Z", '
            f'"value": {20 + noise / 1e9:.4f}, "pressure": {1000 + noise % 9973 / 100:.2f}, "unit": "C"')  # fmt: skip
    payload = f'{body}, "id": "{f"{noise:08x}{number:032x}"[: PAYLOAD - len(body) - 11]}"}}'.encode()
    topic = f"bench/plant-{device % 4}/machine-{device}/temperature"
    return Message(topic, payload, 1, False, b"", f"device-{device}", START_US + number * 10, 0)


def fill(data: Path, rows: int, make: Callable[[int], Message] = message) -> None:
    """Write a stream of ``rows`` rows that ``make`` gives, as the broker's writer thread does, but without syncing.

    Their timestamps are old, so segments have no maximum age: it would close one after every commit.
    """
    directory = data / "streams"
    directory.mkdir(parents=True)
    logs = StreamLogs(directory, [StreamConfig(STREAM, ["bench/#"], PARTITIONS, segment_bytes=SEGMENT_BYTES, segment_age=math.inf)])
    logs.recover(None)
    places: dict[str, int] = {}
    for start in range(0, rows, AT_ONCE):
        found: dict[tuple[str, int], list[Message]] = {}
        for number in range(start, min(start + AT_ONCE, rows)):
            one = make(number)
            place = places.setdefault(one.topic, partition_of(one.topic.encode(), PARTITIONS))
            found.setdefault((STREAM, place), []).append(one)
        logs.append(found)
        logs.committed()
    logs.close()


def sealed_copy(data: Path, copy: Path) -> None:
    """Copy a data directory and seal every segment but the last of each partition."""
    shutil.copytree(data, copy)
    for directory in sorted((copy / "streams" / STREAM).glob("[0-9]*")):
        files = sorted(directory.glob("*.seg"))
        for path, following in zip(files, files[1:]):
            first = int(path.stem)
            source = ClosedSegment(path, STREAM, int(directory.name), first, int(following.stem), path.stat().st_size)
            seal(source, path.with_name(sealed_file_name(first)))
            path.unlink()
            path.with_suffix(".idx").unlink(missing_ok=True)


# --- processes ------------------------------------------------------------------------------------------------------


def cpu_s(pid: int, children: bool = True) -> float:
    """User and system time of a process and, with ``children``, of its children that have ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


class Broker:
    """A broker on a data directory with the stream, until `stop`."""

    def __init__(self, directory: Path, data: Path) -> None:
        self.port, self.http_port = free_port(), free_port()
        config = directory / "broker.toml"
        config.write_text(
            f'[streams.{STREAM}]\nfilters = ["bench/#"]\npartitions = {PARTITIONS}\nseal = false\n'
            f'[streams.{SEEN}]\nfilters = ["seen/#"]\n'
            '[streams.once]\nfilters = ["once/#"]\nseal = false\ndedup = true\n'
            '[streams.plain]\nfilters = ["plain/#"]\nseal = false\n', encoding="ascii"
        )  # fmt: skip
        command = shlex.split(os.environ.get("MQTTBROKER") or f"{shlex.quote(sys.executable)} -P -m mqttbroker")
        command += ["serve", "--config", str(config), "--port", str(self.port), "--http-port", str(self.http_port)]
        self.process = subprocess.Popen([*command, "--data-dir", str(data), "--log-level", "error"], stdout=sys.stderr)
        self.url = f"http://127.0.0.1:{self.http_port}"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/readyz", timeout=5).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("spark: the broker does not start") from None
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(START_SECONDS)


class Meter:
    """CPU time of the JVM, of Python and of the broker."""

    def __init__(self, spark: SparkSession, broker: Broker) -> None:
        jvm = spark._jvm
        assert jvm is not None
        self.jvm = int(jvm.java.lang.ProcessHandle.current().pid())
        self.broker = broker.process.pid

    def read(self) -> tuple[float, float, float]:
        """Seconds so far: JVM, Python, broker."""
        jvm = cpu_s(self.jvm, children=False)
        workers = sum(map(cpu_s, descendants(self.jvm))) - jvm
        return jvm, workers + cpu_s(os.getpid(), children=False), sum(map(cpu_s, descendants(self.broker)))

    def measure(self, rows: int, work: Callable[[], None]) -> Run:
        before, began = self.read(), time.perf_counter()
        work()
        seconds, after = time.perf_counter() - began, self.read()
        millions = rows / 1e6
        jvm, python, broker = (round(max(0.0, end - start) / millions, 2) for start, end in zip(before, after))
        return {
            "ok": True, "rows": rows, "seconds": round(seconds, 3), "rows_per_s": round(rows / seconds),
            "cpu_s_per_m": round(jvm + python + broker, 2), "jvm_s_per_m": jvm, "python_s_per_m": python,
            "broker_s_per_m": broker, "broker_cpu_pct": round(100 * broker * millions / seconds, 2),
        }  # fmt: skip


# --- measurements ---------------------------------------------------------------------------------------------------


class Spark:
    """One session, a log of ``rows`` rows in ``directory`` and, once it is needed, the same log sealed."""

    def __init__(self, directory: Path, rows: int) -> None:
        self.directory = directory
        self.rows = rows
        self.data = {False: directory / "data", True: directory / "sealed"}
        fill(self.data[False], rows)
        self.spark = make_session(IngestConfig(()))
        # A broker with a new database does not truncate the log.
        self.broker = Broker(directory, self.data[False])
        self.other: Broker | None = None
        self.meter = Meter(self.spark, self.broker)

    def close(self) -> None:
        self.spark.stop()
        self.broker.stop()
        if self.other is not None:
            self.other.stop()

    def source(self, how: str, few: bool) -> DataFrame:
        if how == PARQUET:
            return self.spark.read.schema(FEW).parquet(self._parquet()) if few else self.spark.read.parquet(self._parquet())
        sealed = how.endswith("-sealed")
        if sealed and self.other is None:
            sealed_copy(self.data[False], self.data[True])
            self.other = Broker(self.directory, self.data[True])
        broker = self.other if sealed and self.other is not None else self.broker
        self.meter.broker = broker.process.pid
        reader = self.spark.read.format("mqtt").option("stream", STREAM)
        by_path = how.startswith("path")
        reader = reader.option("path", str(self.data[sealed])) if by_path else reader.option("url", broker.url)
        return (reader.schema(FEW) if few else reader).load()

    def _parquet(self) -> str:
        files = self.directory / "parquet"
        if not files.exists():
            self.source("path", False).write.option("compression", "snappy").parquet(str(files))
        return str(files)

    def read(self, how: str, few: bool) -> Run:
        rows = self.source(how, few)
        return self.meter.measure(self.rows, lambda: rows.write.format("noop").mode("overwrite").save())

    def check(self, how: str, few: bool) -> None:
        """Compare the number of rows; this also warms up the session."""
        if (count := self.source(how, few).count()) != self.rows:
            raise SystemExit(f"spark: {how} has {count} rows of {self.rows}")

    def ingest(self, number: int) -> Run:
        config = parse_config({"source": {"path": str(self.data[False])}, "tables": {"t": {
            "stream": STREAM, "schema": SCHEMA, "output": str(self.directory / f"table-{number}")}}})  # fmt: skip
        done: list[int] = []
        found = self.meter.measure(self.rows, lambda: done.extend(table.rows for table in ingest(config, once=True, session=self.spark)))
        return {**found, "ok": done == [self.rows]}

    def write(self, stream: str) -> Run:
        """Rows of 128 bytes to a hundred topics, from two tasks."""
        rows = self.spark.range(0, self.rows, 1, 2).selectExpr(
            f"concat('{stream}/machine-', id % 100, '/temperature') AS topic", f"lpad(id, {PAYLOAD}, 'x') AS payload"
        )
        self.meter.broker = self.broker.process.pid
        before = self._end(stream)
        writer = rows.write.format("mqtt").mode("append").option("url", f"mqtt://127.0.0.1:{self.broker.port}")
        once = str(stream == "once").lower()
        found = self.meter.measure(self.rows, lambda: writer.option("deduplicate", once).save())
        return {**found, "ok": self._end(stream) - before == self.rows}

    def _end(self, stream: str) -> int:
        """The number of messages that a stream has had."""
        with urllib.request.urlopen(f"{self.broker.url}/streams/{stream}", timeout=30) as answer:
            return sum(partition["high_watermark"] for partition in json.load(answer)["partitions"])

    def latency(self, number: int, seconds: float) -> Run:
        """Publish at a steady rate while a streaming query runs; returns the latencies."""
        took: list[float] = []
        arrived = threading.Event()

        def see(batch: DataFrame, _: int) -> None:
            sent = [float(row.payload) for row in batch.select("payload").collect()]
            took.extend(time.time() - moment for moment in sent)
            arrived.set()

        messages = self.spark.readStream.format("mqtt").options(url=self.broker.url, stream=SEEN).load()
        query = (
            messages.writeStream.foreachBatch(see)
            .trigger(processingTime=TRIGGER)
            .option("checkpointLocation", str(self.directory / f"checkpoint-{number}"))
            .start()
        )
        try:
            while query.lastProgress is None:
                time.sleep(0.05)
            for count in [1] * WARM + [int(RATE * seconds)]:
                wanted = len(took) + count
                publish(self.broker.port, count)
                while len(took) < wanted and arrived.wait(SEEN_SECONDS):
                    arrived.clear()
        finally:
            query.stop()
        ok = len(took) == WARM + int(RATE * seconds)
        ranks = statistics.quantiles([1000 * each for each in took[WARM:]] or [0.0, 0.0], n=100)
        return {"ok": ok, "rows": len(took), "p50_ms": round(ranks[49], 1), "p95_ms": round(ranks[94], 1)}


def publish(port: int, count: int) -> None:
    """Publish ``count`` messages at QoS 1; payloads are the Unix time of the PUBLISH."""
    with socket.create_connection(("127.0.0.1", port), START_SECONDS) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(Connect("bench", 4).encode(4))
        answers = _answers(line)
        assert isinstance(next(answers), Connack)
        began = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began + number / RATE - time.monotonic()))
            payload = repr(time.time()).encode()
            line.sendall(Publish(f"seen/{number % 10}", payload, 1, packet_id=number % 60_000 + 1).encode(4))
        for _ in range(count):
            assert isinstance(next(answers), Puback)


def _answers(line: socket.socket) -> Iterator[Any]:
    data = b""
    while True:
        packet, position = decode(data, 4)
        if packet is None:
            more = line.recv(1 << 16)
            assert more, "the broker closed the connection"
            data += more
        else:
            data = data[position:]
            yield packet


def measure(directory: Path, names: list[str], options: argparse.Namespace) -> Iterator[Run]:
    began, longest = time.monotonic(), 0.0
    spark = Spark(directory, options.rows)
    try:
        reads = {name: SPARK_READS[name] for name in names if name in SPARK_READS}
        for how, few in sorted({*reads.values(), *((PARQUET, few) for _, few in reads.values())}):
            spark.check(how, few)
        for number in range(options.rounds):
            start = time.monotonic()
            if number and start - began + longest > options.minutes * 60:
                return
            for name in names:
                about = {"scenario_name": name, "round": number}
                if name in reads:
                    how, few = reads[name]
                    yield {**about, "broker": OURS, **spark.read(how, few)}
                    yield {**about, "broker": PARQUET, **spark.read(PARQUET, few)}
                elif name in SPARK_WRITES:
                    yield {**about, "broker": OURS, **spark.write(SPARK_WRITES[name])}
                elif name == SPARK_LATENCY:
                    yield {**about, "broker": OURS, **spark.latency(number, options.seconds)}
                else:
                    yield {**about, "broker": OURS, **spark.ingest(number)}
            longest = max(longest, time.monotonic() - start)
    finally:
        spark.close()


def main() -> int:
    known = [scenario.name for scenario in spark_scenarios()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4_000_000, help="of the log (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of messages whose latency is measured (%(default)s)")
    parser.add_argument("--minutes", type=float, default=15.0, help="no round begins that would end later (%(default)s)")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(known))
    options = parser.parse_args()
    if unknown := set(options.scenarios) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names = [name for name in known if name in (options.scenarios or known)]
    with tempfile.TemporaryDirectory(prefix="mqttbroker-spark-") as directory:
        for run in measure(Path(directory), names, options):
            print(json.dumps(run), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
