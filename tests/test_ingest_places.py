"""The ingest job's directories: names of every kind, disks that cannot be used, ranges of a backfill.

The rule kept here: what a table holds is told by readers that know nothing of Spark.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_session import StreamWriter, message, spark
from test_ingest import document, plain

from bridge_spark.ingest import run, run_backfill
from bridge_spark.tables.ingest_config import parse_config

pytestmark = pytest.mark.one_build

__all__ = ["spark"]


@pytest.mark.timeout(180)
def test_a_directory_may_have_any_name(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "50% größer #1 [a]"
    StreamWriter(root / "data").append(0, [message(0), message(1, payload=b"bad")])
    config = parse_config(document(root))
    run(config, once=True, session=spark)
    run_backfill(config, {0: 0}, {0: 2}, session=spark)
    for place in ("out", "out.backfill"):
        assert [[row["offset"] for row in plain(root / name)] for name in (place, f"{place}.rejected")] == [[0], [1]]
    assert [path.name for path in tmp_path.iterdir()] == [root.name]
