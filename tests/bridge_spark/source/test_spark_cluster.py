"""A standalone cluster: a master, two workers with their own directories and packages, and a driver, which share only
the broker's address."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.spark_cluster import CLUSTER_SETTINGS, cluster
from support.spark_process import (
    READINGS,
    TOKEN,
    broker_with_readings,
    install_into,
    reading,
    run_program,
    spark_environment,
)

pytestmark = pytest.mark.one_build

__all__ = ["cluster"]

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


def test_workers_read_over_http(cluster: str, tmp_path: Path) -> None:
    """Spark sends the driver's PYTHONPATH to the workers; a relative path does not exist there."""
    install_into(tmp_path / "driver" / "packages")
    environment = spark_environment() | {"PYTHONPATH": "packages"}
    with broker_with_readings() as broker:
        arguments = [cluster, broker.url, TOKEN, json.dumps(CLUSTER_SETTINGS), (tmp_path / "checkpoint").as_uri()]
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
