"""The order of test files in a run, and which of them one process of pytest runs."""

from __future__ import annotations

import functools
from pathlib import Path

from support.paths import ROOT

TESTS = ROOT / "tests"
# A file that takes long would run alone at the end of a run, so these begin first, the longest of them first.
LONG = (
    "bridge_spark/tables/test_ingest_names.py", "mqttbroker/cluster/nodes/test_checks.py", "project/test_docs_examples.py",
    "chaos_spark/test_chaos_spark.py", "mqttbroker/net/test_fire_and_forget.py", "mqttbroker/admin/test_dashboard.py",
    "project/test_docs_tutorial.py", "mqttbroker/admin/data/test_repair.py", "sessions/test_session_model.py",
    "durability/test_disk_faults.py", "behaviour/test_stopped_process.py", "bridge_spark/tables/output/test_batch_table.py",
    "bridge_spark/tables/output/test_object_storage.py", "bridge_spark/log/sealed/test_sealer.py",
    "project/test_alerts_example.py", "bridge_spark/source/test_spark_connect.py", "project/test_bench.py",
    "mqttbroker/net/test_workers.py", "durability/test_store_power_loss.py", "durability/test_chaos_short.py",
    "project/test_notebook.py",
)  # fmt: skip
# One process of pytest runs all files of a folder with such a parameter: the session of Spark and the Kafka brokers that they
# share cost as much to start as many tests. The first of LONG are one file of each.
SHARED = {"spark: SparkSession": TESTS / "bridge_spark", "kafka: KafkaCluster": TESTS / "mqttbroker" / "cluster"}


def place_of(file: Path) -> int:
    """The place of a file in the order."""
    try:
        return LONG.index(file.relative_to(TESTS).as_posix())
    except ValueError:
        return len(LONG)


@functools.cache
def part_of(file: Path) -> str | None:
    """The fixture that a file shares with others; None if it shares none."""
    text = file.read_text(encoding="utf-8")
    return next((shared for shared, folder in SHARED.items() if folder in file.parents and shared in text), None)
