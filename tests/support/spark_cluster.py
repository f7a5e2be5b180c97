"""A standalone Spark cluster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.class_archive import QUICK_JVM
from support.spark_process import SparkProcess, install_into

CLUSTER_SETTINGS = {
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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """The address of a master with two workers of one core each."""
    with ExitStack() as stack:
        daemon = "org.apache.spark.deploy"
        master = stack.enter_context(
            SparkProcess(
                tmp_path / "master",
                [f"{daemon}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"],
                {"SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false"},
            )
        )
        url = master.wait_for(r"Starting Spark master at (spark://\S+)")[1]
        workers = [
            stack.enter_context(
                SparkProcess(
                    directory,
                    [
                        f"{daemon}.worker.Worker",
                        "--host",
                        "127.0.0.1",
                        "--webui-port",
                        "0",
                        "--cores",
                        "1",
                        "--memory",
                        "600m",
                        "--work-dir",
                        str(directory / "work"),
                        url,
                    ],
                    {"PYTHONPATH": install_into(directory / "packages")},
                )
            )
            for directory in (tmp_path / "worker1", tmp_path / "worker2")
        ]
        for worker in workers:
            worker.wait_for("Successfully registered with master")
        yield url
