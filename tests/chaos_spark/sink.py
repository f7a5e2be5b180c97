"""Kills of the driver and of the broker while a streaming query writes to a stream with deduplication.

The query reads one stream of a broker and writes to another one.  The moments are numbers of rows that have arrived.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from chaos.log_reader import LogReader
from support.broker_process import BrokerProcess
from support.class_archive import QUICK_JVM
from support.spark_session import python_path

from bridge_spark.sink.options import parse_options
from bridge_spark.sink.packets import field
from bridge_spark.sink.publisher import Publisher
from bridge_spark.sink.rows import PacketEncoder

PATIENCE = 300.0
BATCH = 1500
CONFIG = {
    "streams": {
        "in": {"filters": ["in/#"], "partitions": 3, "seal": False},
        "out": {"filters": ["out/#"], "partitions": 2, "seal": False, "dedup": True},
    },
    "limits": {"receive_maximum": 100},
}
DRIVER = """
import os, sys
from pyspark.sql import SparkSession
from bridge_spark.java import use_java
url, sink, root, size, java = sys.argv[1:]
use_java()
spark = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false") \\
    .config("spark.sql.shuffle.partitions", "2").config("spark.driver.extraJavaOptions", java).getOrCreate()
spark.sparkContext.setLogLevel("OFF")
with open(root + "/pids.new", "w") as file:
    file.write(f"{os.getpid()} {spark._jvm.java.lang.ProcessHandle.current().pid()}")
os.replace(root + "/pids.new", root + "/pids")
rows = spark.readStream.format("mqtt").options(
    url=url, stream="in", startingOffsets="earliest", maxOffsetsPerTrigger=size).load()
rows.selectExpr("concat('out/', topic) AS topic", "payload").writeStream.format("mqtt").options(url=sink) \\
    .option("checkpointLocation", root + "/checkpoint").trigger(availableNow=True).start().awaitTermination()
"""


class Result(NamedTuple):
    """``inside``: kills of the driver within a batch; ``found``: numbers of the rows that arrived."""

    inside: int
    broker_kills: int
    found: Counter[int]


class Driver:
    """The query as a process; it ends when everything is written."""

    def __init__(self, broker: BrokerProcess, root: Path) -> None:
        self.root = root
        (root / "pids").unlink(missing_ok=True)
        self._log = (root / "driver.log").open("ab")
        sink = f"mqtt://127.0.0.1:{broker.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", DRIVER, broker.url, sink, str(root), str(BATCH), QUICK_JVM],
            env=os.environ | {"PYTHONPATH": python_path(), "PYSPARK_PYTHON": sys.executable},
            stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def kill(self, workers: bool) -> None:
        """SIGKILL driver and JVM, and the Python workers or not: those end when they have noticed."""
        if workers:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            for pid in map(int, (self.root / "pids").read_text().split()):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        self._log.close()

    def in_batch(self) -> bool:
        checkpoint = self.root / "checkpoint"
        begun, ended = (len(list((checkpoint / name).glob("[0-9]*"))) for name in ("offsets", "commits"))
        return begun > ended


def fill(port: int, rows: int) -> None:
    """Publish ``rows`` numbers to the stream ``in``."""
    publisher = Publisher(parse_options({"url": f"mqtt://127.0.0.1:{port}"}), "fill", str)
    numbers = [(field(b"in/%d" % (number % 9)), 0x32, b"", b"%d" % number) for number in range(rows)]
    publisher.publish(PacketEncoder(5, None).encode(numbers, 0))
    publisher.finish()


def chaos(driver_kills: int, broker_kills: int, seed: int) -> Result:
    """Write until everything has arrived, with these kills on the way."""
    moments = random.Random(seed)
    rows = BATCH * (driver_kills + broker_kills + 2)
    kinds = ["driver"] * driver_kills + ["broker"] * broker_kills
    moments.shuffle(kinds)
    at = sorted(moments.sample(range(1, rows - BATCH), len(kinds)))
    inside = 0
    with tempfile.TemporaryDirectory() as directory, BrokerProcess(config=CONFIG) as broker:
        root = Path(directory)
        fill(broker.port, rows)
        reader = LogReader(broker.data_dir, "out")
        driver: Driver | None = None
        try:
            for kind, moment in zip(kinds, at):
                driver = driver or Driver(broker, root)
                _await(driver, reader, moment)
                if kind == "broker":
                    broker.restart(kill=True)
                    continue
                driver.kill(workers=moments.random() < 0.5)
                inside += driver.in_batch()
                driver = None
            driver = driver or Driver(broker, root)
            assert driver.process.wait(PATIENCE) == 0, (root / "driver.log").read_text()[-3000:]
            # Workers of a killed driver may still be sending.
            found: Counter[int] = Counter(int(record.payload) for record in reader.records())
        finally:
            if driver is not None and driver.process.poll() is None:
                driver.kill(workers=True)
    return Result(inside, broker_kills, found)


def _await(driver: Driver, reader: LogReader, rows: int) -> None:
    """Wait until so many rows have arrived."""
    deadline = time.monotonic() + PATIENCE
    while len(reader.records()) < rows or not (driver.root / "pids").exists():
        assert driver.process.poll() is None, (driver.root / "driver.log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"{len(reader.records())} of {rows} rows arrived in {PATIENCE} s"
        time.sleep(0.02)
