"""A standalone cluster: a master, two workers with their own directories and packages, and a driver, all processes
that know of the broker only its address."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.class_archive import QUICK_JVM
from support.spark_process import (
    READINGS,
    TOKEN,
    SparkProcess,
    broker_with_readings,
    install_into,
    reading,
    run_program,
    spark_environment,
)

pytestmark = pytest.mark.one_build

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.executor.extraJavaOptions": QUICK_JVM,
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.sql.shuffle.partitions": "2",
}
DRIVER = """
import json, sys
from pyspark.sql import SparkSession

master, url, token, settings = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
builder = SparkSession.builder.master(master)
for key, value in settings.items():
    builder = builder.config(key, value)
session = builder.getOrCreate()
source = {"url": url, "token": token, "stream": "sensors", "minPartitions": "4", "startingOffsets": "earliest"}

def told(messages):
    return sorted(row.payload.decode() for row in messages.select("payload").collect())

batch = told(session.read.format("mqtt").options(**source).load())
messages = session.readStream.format("mqtt").options(**source, maxOffsetsPerTrigger="150").load()
streamed = []
query = messages.writeStream.foreachBatch(lambda rows, number: streamed.append(told(rows))) \\
    .option("checkpointLocation", sys.argv[5]).trigger(availableNow=True).start()
query.awaitTermination()
print(json.dumps([batch, streamed]))
session.stop()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a master with two workers of one core each."""
    with ExitStack() as stack:
        daemon = "org.apache.spark.deploy"
        master = stack.enter_context(SparkProcess(
            tmp_path / "master", [f"{daemon}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"],
            {"SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false"}))
        url = master.wait_for(r"Starting Spark master at (spark://\S+)")[1]
        workers = [stack.enter_context(SparkProcess(
            directory, [f"{daemon}.worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1",
                        "--memory", "600m", "--work-dir", str(directory / "work"), url],
            {"PYTHONPATH": install_into(directory / "packages")},
        )) for directory in (tmp_path / "worker1", tmp_path / "worker2")]
        for worker in workers:
            worker.wait_for("Successfully registered with master")
        yield url


@pytest.mark.timeout(240)
def test_workers_read_over_http(cluster: str, tmp_path: Path) -> None:
    """Spark sends the driver's Python path along: a relative one leads the workers nowhere, as on another machine."""
    install_into(tmp_path / "driver" / "packages")
    environment = spark_environment() | {"PYTHONPATH": "packages"}
    with broker_with_readings() as broker:
        arguments = [cluster, broker.url, TOKEN, json.dumps(SETTINGS), (tmp_path / "checkpoint").as_uri()]
        driver = run_program([sys.executable, "-c", DRIVER, *arguments], environment, tmp_path / "driver")
    assert driver.returncode == 0, driver.stderr
    batch, streamed = json.loads(driver.stdout)
    everything = sorted(reading(number).decode() for number in range(READINGS))
    assert batch == everything
    assert [len(part) for part in streamed] == [150, READINGS - 150]
    assert sorted(payload for part in streamed for payload in part) == everything
    for worker in (tmp_path / "worker1", tmp_path / "worker2"):
        (executor,) = worker.glob("work/app-*/*/stderr")
        tasks = re.findall(r"Finished task \S+ in stage (\d+)", executor.read_text())
        assert {"0", "1"} <= set(tasks), "each worker ran tasks of the batch and of the stream"
        assert (worker / "packages" / "used").exists(), "with the packages it has"
