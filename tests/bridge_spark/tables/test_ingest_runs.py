"""The ingest job as a process: under spark-submit, over a range, on a cluster, and its JVM.

Each test starts its own Spark, so `make slow` runs it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.broker_process import to_toml
from support.class_archive import QUICK_JVM
from support.ingest_jobs import document, parquet_rows
from support.raw_client import RawClient
from support.spark_cluster import CLUSTER_SETTINGS, cluster
from support.spark_process import (
    READINGS,
    TOKEN,
    SparkProcess,
    broker_with_readings,
    run_program,
    spark_environment,
    spark_program,
)
from support.spark_session import START_US, StreamWriter, message

from bridge_spark import ingest

pytestmark = [pytest.mark.one_build, pytest.mark.slow(reason="starts a Spark of its own")]

__all__ = ["cluster"]

ONE_BATCH_ONLY = "1000000h"
COMMAND = [sys.executable, "-P", "-m", "mqttbroker", "ingest"]


def write_stream(data: Path) -> None:
    """150 messages in each of two partitions; three do not parse."""
    writer = StreamWriter(data, partitions=2)
    for partition in (0, 1):
        writer.append(partition, [message(n, payload=b"bad" if n % 50 == 7 else None) for n in range(150)])


def write_config(root: Path, **table: object) -> Path:
    config = root / "ingest.toml"
    config.write_text(to_toml(document(root, **table)))
    return config


def last_word(text: str) -> str:
    """The last totals of table `t`, without the time; the JVM may print more after them."""
    return [line for line in text.splitlines() if line.startswith("t: ")][-1].partition(" in ")[0]


def test_a_submitted_job_reports_and_ends_on_a_signal(tmp_path: Path) -> None:
    write_stream(tmp_path / "data")
    config = write_config(tmp_path, max_offsets_per_trigger=100)
    submit = [
        "--master",
        "local[2]",
        "--driver-java-options",
        QUICK_JVM,
        "--conf",
        "spark.sql.parquet.compression.codec=gzip",
        ingest.__file__,
        str(config),
    ]
    running = [*submit, "--trigger", ONE_BATCH_ONLY, "--metrics-port", "0"]
    with SparkProcess(tmp_path / "job", running, program="spark-submit") as job:
        port = job.wait_for(r"metrics on 127\.0\.0\.1:(\d+)\n")[1]
        job.wait_for(r"t: 98 rows, .* lag 200 offsets .*, 2 bad")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            metrics = dict(re.findall(r'^mqtt_ingest_(\w+){table="t"} (\S+)', answer.read().decode(), re.MULTILINE))
        age = float(metrics.pop("lag_seconds"))
        assert age == pytest.approx(time.time() - (START_US / 1e6 + 0.049), abs=60)
        assert metrics == {
            "rows_total": "98.0",
            "bad_total": "2.0",
            "batches_total": "1.0",
            "lag_offsets": "200.0",
            "late_total": "0.0",
            "duplicates_total": "0.0",
        }
        assert job.terminate() == 0
    assert last_word(job.log.read_text()) == "t: 98 rows, 2 bad, 1 batches"
    assert len(parquet_rows(tmp_path / "out")) == 98
    done = run_program([spark_program("spark-submit"), *submit, "--once"], spark_environment(), tmp_path)
    assert (done.returncode, last_word(done.stdout)) == (0, "t: 196 rows, 4 bad, 2 batches"), done.stderr[-2000:]
    for directory, bad in (("out", False), ("out.rejected", True)):
        assert [(row["partition"], row["offset"]) for row in parquet_rows(tmp_path / directory)] == [
            (partition, n) for partition in (0, 1) for n in range(150) if (n % 50 == 7) == bad
        ]
    file = next((tmp_path / "out").rglob("*.parquet"))
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == "GZIP", "the command line says so"


CHECKS = """
import json, sys
from bridge_spark.tables.ingest_config import IngestConfig
from bridge_spark.tables.ingest_session import make_session

session = make_session(IngestConfig((), "job", "local[2]", {"spark.driver.extraJavaOptions": sys.argv[1]}))
arrow, system = session._jvm.org.apache.arrow, session._jvm.java.lang.System
print(json.dumps([
    [system.getProperty(name) for name in ("arrow.enable_unsafe_memory_access", "arrow.enable_null_check_for_get", "a.b")],
    arrow.memory.BoundsChecking.BOUNDS_CHECKING_ENABLED, arrow.vector.NullCheckingForGet.NULL_CHECKING_ENABLED]))
session.stop()
"""


def test_the_jvm_runs_without_arrow_checks(tmp_path: Path) -> None:
    done = run_program([sys.executable, "-P", "-c", CHECKS, f"{QUICK_JVM} -Da.b=c"], spark_environment(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["true", "false", "c"], False, False]


def test_the_command_reads_a_range_and_refuses_an_overlap(tmp_path: Path) -> None:
    write_stream(tmp_path / "data")
    config = write_config(tmp_path)

    def backfill(*ends: str) -> subprocess.CompletedProcess[str]:
        return run_program([*COMMAND, config, "--backfill", *ends], spark_environment(), tmp_path)

    done = backfill("2023-11-14T22:13:20.020", "2023-11-14T23:13:20.100+01:00")
    assert (done.returncode, last_word(done.stdout)) == (0, "t: 158 rows, 2 bad, 1 batches"), done.stderr
    refused = backfill("2023-11-14T22:13:20.099Z", "2023-11-14T22:13:21Z")
    assert (refused.returncode, refused.stdout) == (1, "")
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("mqttbroker ingest: ")]
    assert line.startswith(f"mqttbroker ingest: {config}: tables.t: the range overlaps {tmp_path}/out.backfill/range=")
    assert [(row["partition"], row["n"]) for row in parquet_rows(tmp_path / "out.backfill")] == [
        (partition, n) for partition in (0, 1) for n in range(20, 100) if n % 50 != 7
    ]
    assert [path.name for path in (tmp_path / "out.backfill").iterdir()] == ["range=20231114T221320.020000Z_20231114T221320.100000Z"]


def test_on_a_cluster_workers_read_by_url_and_write_the_table(cluster: str, tmp_path: Path) -> None:
    """The batch is too large for one task."""
    everything = READINGS + 40
    with broker_with_readings() as broker:
        with RawClient(broker.port) as publisher:
            publisher.connect("large")
            for n in range(READINGS, everything):
                publisher.publish(f"sensors/s{n % 4}", b'{"n": %d, "more": "%s"}' % (n, b"x" * 300_000), 1)
        config = tmp_path / "ingest.toml"
        job = {"source": {"url": broker.url, "token": TOKEN}, "spark": {"master": cluster, "conf": CLUSTER_SETTINGS}}
        config.write_text(to_toml({**document(tmp_path), **job}))
        done = run_program([*COMMAND, config, "--once"], spark_environment(), tmp_path)
    assert (done.returncode, last_word(done.stdout)) == (0, f"t: {everything} rows, 0 bad, 1 batches"), done.stderr
    table = parquet_rows(tmp_path / "out")
    assert sorted(row["n"] for row in table) == list(range(everything))
    assert len({(row["partition"], row["offset"]) for row in table}) == everything
    for worker in (tmp_path / "worker1", tmp_path / "worker2"):
        (executor,) = worker.glob("work/app-*/*/stderr")
        told = executor.read_text()
        assert "Finished task" in told, "both had a part of the batch"
        assert '"-Darrow.enable_unsafe_memory_access=true"' in told
