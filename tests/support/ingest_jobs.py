"""Settings of ingest jobs, and the rows of their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from support.class_archive import QUICK_JVM

QUICK_SPARK = {"spark.driver.extraJavaOptions": QUICK_JVM}


def document(root: Path, **table: Any) -> dict[str, Any]:
    """Settings of one table ``t`` that reads the stream in ``root/data``."""
    given = {"stream": "sensors", "schema": "n long not null", "output": str(root / "out"), **table}
    return {"source": {"path": str(root / "data")}, "spark": {"master": "local[2]", "conf": QUICK_SPARK}, "tables": {"t": given}}


def parquet_rows(directory: Path) -> list[dict[str, Any]]:
    """Rows of a table as pyarrow reads them, in order of partition and offset."""
    if not any(directory.rglob("*.parquet")):
        return []
    rows: list[dict[str, Any]] = pq.read_table(directory).to_pylist()
    return sorted(rows, key=lambda row: (row["partition"], row["offset"]))
