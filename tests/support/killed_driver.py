"""A driver of the ingest job that is killed with SIGKILL at a known step of its first batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.spark_session import python_path

KILLED_DRIVER = """
import json, os, signal, sys
from pathlib import Path
from bridge_spark.tables.output.delta_table import DeltaBatchTable
from bridge_spark.tables.output.iceberg_table import IcebergBatchTable
from bridge_spark.tables.output.parquet_table import ParquetBatchTable
from bridge_spark import ingest
from bridge_spark.tables.ingest_config import parse_config

where, document = sys.argv[1], json.loads(sys.argv[2])

def die():
    from pyspark import SparkContext
    jvm = SparkContext._active_spark_context._jvm.java.lang.ProcessHandle.current().pid()
    os.kill(jvm, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

for kind in (ParquetBatchTable, DeltaBatchTable, IcebergBatchTable):
    def publish_or_die(table, batch, staged, marker, publish=kind.publish):
        rejected = table.place.endswith("rejected")
        if where == "written" and not rejected:
            die()
        publish(table, batch, staged, marker)
        if where == "published" and not rejected:
            die()

    kind.publish = publish_or_die

ingest.run(parse_config(document), once=True)
"""


def killed(code: str, *arguments: str) -> None:
    """Run a driver that is killed with SIGKILL at a known step."""
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], env=environment, capture_output=True, timeout=150)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
