"""The ingest job with Delta and Iceberg tables on S3: rows, dead letters, new columns, aggregates, kills, backfills.

Tables are read without Spark.  The server is localbucket.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession
from support.broker_process import to_toml
from support.ingest_jobs import QUICK_SPARK
from support.killed_driver import KILLED_DRIVER, killed
from support.s3_server import SECRET_KEY, S3Server, s3_server
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run, run_backfill
from bridge_spark.tables.compact import main as compact
from bridge_spark.tables.ingest_config import parse_config
from bridge_spark.tables.ingest_session import IngestError

pytestmark = pytest.mark.one_build
SLOW = pytest.mark.slow(reason="the same at another step")

__all__ = ["spark"]


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3", "lake") as server:
        yield server


def document(root: Path, server: S3Server, table_format: str, **table: Any) -> dict[str, Any]:
    place = "n.t" if table_format == "iceberg" else "s3://lake/t"
    given = {
        "stream": "sensors",
        "schema": "n long not null",
        "table_format": table_format,
        "output": place,
        "checkpoint": str(root / "checkpoint"),
        "extra_fields": "add",
        "max_offsets_per_trigger": 300,
        **table,
    }
    return {
        "source": {"path": str(root / "data")},
        "spark": {"master": "local[2,4]", "conf": QUICK_SPARK},
        "storage": server.delta_options(),
        "catalog": catalog_of(root, server),
        "tables": {"t": given},
    }


def catalog_of(root: Path, server: S3Server) -> dict[str, str]:
    return {
        "name": "here",
        "type": "sql",
        "uri": f"sqlite:///{root}/catalog.db",
        "warehouse": "s3://lake/warehouse",
        **server.iceberg_properties(),
    }


def rows(root: Path, server: S3Server, table_format: str, kind: str = "") -> list[dict[str, Any]]:
    """The rows of the table, or of the one that belongs to it, in order of partition and offset."""
    if table_format == "iceberg":
        catalog = load_catalog(**catalog_of(root, server))
        name = f"n.t{kind and '_'}{kind}"
        found = catalog.load_table(name).scan().to_arrow() if catalog.table_exists(name) else None
    else:
        place = f"s3://lake/t{kind and '.'}{kind}".replace("backfill_", "backfill.")
        known = DeltaTable.is_deltatable(place, server.delta_options())
        found = DeltaTable(place, storage_options=server.delta_options()).to_pyarrow_table() if known else None
    return [] if found is None else sorted(found.to_pylist(), key=lambda row: (row["partition"], row["offset"]))


def places(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for row in found]


@pytest.mark.parametrize(
    ("table_format", "where"),
    [
        pytest.param("iceberg", "published", marks=pytest.mark.slow(reason="kills of a local table run in test_ingest.py")),
        pytest.param("iceberg", "written", marks=SLOW),
        pytest.param("delta", "published", marks=SLOW),
        pytest.param("delta", "written", marks=SLOW),
    ],
)
def test_rows_on_s3_are_there_once_after_a_kill(
    spark: SparkSession, tmp_path: Path, s3: S3Server, table_format: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bad messages are dead letters; the last ones have a field that becomes a column."""
    writer = StreamWriter(tmp_path / "data", partitions=2)
    for partition in (0, 1):
        writer.append(
            partition,
            [message(n, payload=b"bad" if n % 50 == 7 else b'{"n": 1, "colour": "red"}' if n > 290 else None) for n in range(300)],
        )
    settings = document(tmp_path, s3, table_format)
    killed(KILLED_DRIVER, where, json.dumps(settings))
    known = places(rows(tmp_path, s3, table_format))
    assert len(known) == (294 if where == "published" else 0)
    s3.fail("PUT|POST", "", every=9, times=5)
    (told,) = run(parse_config(settings), once=True, session=spark)
    assert s3.failed() > 0
    assert told.rows == 588 - len(known)
    everything = {(partition, offset) for partition in (0, 1) for offset in range(300)}
    bad = {place for place in everything if place[1] % 50 == 7}
    found = rows(tmp_path, s3, table_format)
    assert places(found) == sorted(everything - bad) and {*known} <= {*places(found)}
    assert {row["offset"] for row in found if row["colour"] == "red"} == {*range(291, 300)}
    assert places(rows(tmp_path, s3, table_format, "rejected")) == sorted(bad)
    config = tmp_path / "ingest.toml"
    config.write_text(to_toml(settings))
    assert compact([str(config)]) == 0
    out = capsys.readouterr().out
    assert "small files merged" in out and SECRET_KEY not in out
    assert places(rows(tmp_path, s3, table_format)) == sorted(everything - bad)


@pytest.mark.parametrize("table_format", ["delta", pytest.param("iceberg", marks=SLOW)])
def test_aggregates_and_backfills_on_s3(spark: SparkSession, tmp_path: Path, s3: S3Server, table_format: str) -> None:
    StreamWriter(tmp_path / "data").append(
        0, [*(message(20_000 * n, payload=b'{"n": %d}' % n) for n in range(9)), message(200_000, payload=b"bad")]
    )
    settings = parse_config(
        document(
            tmp_path,
            s3,
            table_format,
            extra_fields="ignore",
            watermark="1 second",
            deduplicate_by=["n"],
            aggregates={"minute": {"window": "1 minute", "values": ["n"], "group_by": []}},
        )
    )
    run(settings, once=True, session=spark)
    assert [row["n"] for row in rows(tmp_path, s3, table_format)] == [*range(9)]
    name = "n.t_minute" if table_format == "iceberg" else ""
    windows = (
        load_catalog(**catalog_of(tmp_path, s3)).load_table(name).scan().to_arrow()
        if name
        else DeltaTable("s3://lake/t.minute", storage_options=s3.delta_options()).to_pyarrow_table()
    )
    assert sorted(zip(windows["count"].to_pylist(), windows["n_mean"].to_pylist())) == [(2, 0.5), (3, 3.0)]
    for _ in range(2):
        run_backfill(settings, {0: 2}, {0: 10}, session=spark)
        assert [row["n"] for row in rows(tmp_path, s3, table_format, "backfill")] == [*range(2, 9)]
        assert places(rows(tmp_path, s3, table_format, "backfill_rejected")) == [(0, 9)]
    run_backfill(settings, {0: 0}, {0: 2}, session=spark)
    assert [row["n"] for row in rows(tmp_path, s3, table_format, "backfill")] == [*range(9)]
    with pytest.raises(IngestError, match="the range overlaps .*backfill .range=0.2_0.10"):
        run_backfill(settings, {0: 9}, {0: 10}, session=spark)


def test_a_storage_that_refuses_is_one_line_without_credentials(spark: SparkSession, tmp_path: Path, s3: S3Server) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0)])
    settings = document(tmp_path, s3, "delta", output="s3://missing/t")
    with pytest.raises(IngestError, match=r"ingest: tables\.t: .*missing") as caught:
        run(parse_config(settings), once=True, session=spark)
    assert "\n" not in str(caught.value) and SECRET_KEY not in str(caught.value)
