"""Ranges of a backfill, metrics of the ingest job, and the command that merges small files."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

import pytest
from support.paths import ROOT
from support.table_batches import batches, parquet_numbers, publish

from bridge_spark.ingest import main as ingest
from bridge_spark.tables.checkpoint import Checkpoint
from bridge_spark.tables.compact import main as compact
from bridge_spark.tables.ingest_metrics import IngestMetrics
from bridge_spark.tables.ingest_progress import TableProgress
from bridge_spark.tables.ingest_session import IngestError, require_spark
from bridge_spark.tables.jobs.backfill_range import BackfillRange, parse_bound
from bridge_spark.tables.output.parquet_table import ParquetBatchTable

pytestmark = pytest.mark.one_build


@pytest.mark.parametrize(
    ("begin", "end", "reason"),
    [
        ("2026-01-01T00:00:00Z", "2026-01-01", "not after its beginning"),
        ("2026-01-01", "2999-01-01", "is in the future"),
        ("2026-01-01", '{"0": 5}', "from a time to a time"),
        ('{"0": 5}', '{"0": 4}', "no end may be before its beginning"),
        ('{"0": 5}', '{"1": 9}', "must name the same partitions"),
        ("yesterday", "2026-01-01", "neither a time like"),
        ('{"0": "x"}', '{"0": 1}', "is not offsets like"),
    ],
)
def test_an_invalid_range_is_refused(begin: str, end: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BackfillRange(parse_bound(begin), parse_bound(end)).check()


def test_valid_ranges() -> None:
    BackfillRange(parse_bound("2026-01-01T01:00:00+02:00"), parse_bound("2026-01-01")).check()
    BackfillRange(parse_bound('{"0": 5, "1": 0}'), parse_bound('{"0": 5, "1": 7}')).check()


def test_metrics_are_those_of_the_tables() -> None:
    table = TableProgress("readings")
    table.rows, table.bad, table.lag = 12, 3, 4
    metrics = IngestMetrics("127.0.0.1", 0)
    try:
        metrics.update([table])
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        metrics.close()
    assert {
        'mqtt_ingest_rows_total{table="readings"} 12.0',
        'mqtt_ingest_bad_total{table="readings"} 3.0',
        'mqtt_ingest_lag_offsets{table="readings"} 4.0',
    } <= set(lines)


def test_the_command_prints_where_it_serves_metrics(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("bridge_spark.ingest.run", lambda *_, **__: [])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert ingest([str(ROOT / "conf" / "ingest.toml"), "--metrics-port", "0"]) == 0
    assert re.fullmatch(r"metrics on 127\.0\.0\.1:[1-9]\d+\n", capsys.readouterr().out)


def test_the_compact_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ingest.toml"
    config.write_text(f"[source]\npath = 'd'\n[tables.t]\nstream = 's'\nschema = 'n long'\noutput = '{tmp_path}/t'\n")
    table = ParquetBatchTable(tmp_path / "t")
    table.prepare()
    for batch in range(4):
        publish(table, batch)
    with Checkpoint(tmp_path / "t.checkpoint").lock("x"):
        assert compact([str(config)]) == 1
    assert compact([str(config)]) == 0
    told = capsys.readouterr()
    assert "another ingest is running" in told.err and f"{tmp_path}/t: 6 small files merged" in told.out
    assert parquet_numbers(tmp_path / "t") == batches(0, 1, 2, 3)
    assert compact([str(tmp_path / "none.toml")]) == 2


def test_without_pyspark_and_java_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(IngestError, match=r"^PySpark is not installed: pip install 'mqttbroker\[spark\]', [^\n]*$"):
        require_spark()
