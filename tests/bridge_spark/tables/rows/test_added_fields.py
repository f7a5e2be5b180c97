"""bridge_spark.tables.rows.added_fields: unknown fields become columns, no value is lost, no type changes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import run, run_backfill
from bridge_spark.tables.ingest_config import IngestConfig, parse_config
from bridge_spark.tables.ingest_session import IngestError
from bridge_spark.tables.output.delta_table import DeltaBatchTable
from bridge_spark.tables.output.parquet_table import ParquetBatchTable
from bridge_spark.tables.recorded_columns import AddedColumns
from bridge_spark.tables.rows.added_fields import MAX_ADDED, new_fields

pytestmark = pytest.mark.one_build

__all__ = ["spark"]

FORMATS = ("parquet", "delta")
Row = dict[str, Any]


@pytest.mark.parametrize("seen, expected", [
    (["1a", "-a"], {"a": "double"}), (["ta", "fa", "na"], {"a": "boolean"}), (['"a', "[b", "{c"], dict.fromkeys("abc", "string")),
    (["1a", '"a'], {"a": "string"}), (["na"], {}), (["1b", "1a"], {"a": "double", "b": "double"}), (["1A", "1a"], {"a": "double"}),
    (["1value"], {}), (["1VALUE"], {}), (["1old"], {"old": "string"}), (["1Old"], {"old": "string"}), (["1gone"], {}), (["1before"], {}),
    (["1range", "1Range"], {}), (["1_x", "1a b", "1é", "1a.b", "1"], {}),
])  # fmt: skip
def test_which_fields_become_columns(seen: list[str], expected: dict[str, str]) -> None:
    types = {"value": "double", "old": "string", "gone": "int", "before": "double"}
    found = new_fields(seen, ["value"], AddedColumns({"before": "double"}), types).types
    assert found == expected and list(found) == sorted(found)


@pytest.mark.parametrize("seen, columns, spellings", [
    (["1temp", "1Temp"], {"temp": "double"}, {"Temp": "temp"}), (["1TEMP", "1Temp"], {"Temp": "double"}, {"TEMP": "Temp"}),
    (["1temp", '"Temp'], {"temp": "string"}, {"Temp": "temp"}), (["ntemp", "1Temp"], {"Temp": "double"}, {}),
    (["1Before"], {}, {"Before": "before"}), (["1beFore", '"Before'], {}, {"beFore": "before", "Before": "before"}),
    (["1BEFORE", "nBEFore"], {}, {}), (["1old"], {"Old": "string"}, {"old": "Old"}), (["1value", "1Range"], {}, {}),
])  # fmt: skip
def test_spellings_of_a_field_fill_one_column(seen: list[str], columns: dict[str, str], spellings: dict[str, str]) -> None:
    added = AddedColumns({"before": "double"}, {"BEFORE": "before"})
    types = {"Value": "double", "Old": "string", "before": "double"}
    assert new_fields(seen, ["Value"], added, types) == AddedColumns(columns, spellings)


def test_the_number_of_spellings_is_limited() -> None:
    spellings = {"x" * number: "c" for number in range(MAX_ADDED)}
    assert not new_fields(["1C"], [], AddedColumns({"c": "double"}, spellings), {"c": "double"})


def test_the_number_of_added_columns_is_limited() -> None:
    added = {f"c{number}": "double" for number in range(MAX_ADDED - 1)}
    assert new_fields(["1x", "1y"], [], AddedColumns(added), added) == AddedColumns({"x": "double"})


def config(tmp_path: Path, schema: str = "n int not null") -> IngestConfig:
    tables = {
        table_format: {
            "stream": "sensors",
            "schema": schema,
            "columns": ["offset"],
            "extra_fields": "add",
            "table_format": table_format,
            "output": str(tmp_path / table_format),
        }
        for table_format in FORMATS
    }
    return parse_config({"source": {"path": str(tmp_path / "data")}, "tables": tables})


def rows(directory: Path) -> list[Row]:
    """The rows as another engine reads them, without NULL columns."""
    delta = DeltaTable.is_deltatable(str(directory))
    files = DeltaTable(directory).file_uris() if delta else [f"{directory}/**/*.parquet"]
    found = duckdb.sql(f'FROM read_parquet({files}, union_by_name = true, hive_partitioning = false) ORDER BY "offset"')
    return [{name: value for name, value in zip(found.columns, row) if value is not None and value != {}} for row in found.fetchall()]


BATCHES: list[tuple[list[Row], list[Row], list[str] | None]] = [
    ([{"n": 1}], [{"n": 1}], ["offset", "n", "_extra"]),
    ([{"n": 2, "unit": "°\"C", "v": 1}, {"n": 3, "v": 2.5e3, "ok": True, "far": None, "Offset": 1}],
     [{"n": 2, "unit": "°\"C", "v": 1.0}, {"n": 3, "v": 2500.0, "ok": True, "_extra": {"far": "null", "Offset": "1"}}],
     ["offset", "n", "ok", "unit", "v", "_extra"]),
    ([{"n": 4, "unit": None, "v": "high", "ok": 1, "far": [1, {"a": "b"}]}, {"n": 5, "v": 2**53 + 1}, {"n": 6, "unit": 7}],
     [{"n": 4, "far": '[1,{"a":"b"}]', "_extra": {"v": '"high"', "ok": "1"}}, {"n": 5, "_extra": {"v": "9007199254740993"}},
      {"n": 6, "unit": "7"}], None),
]  # fmt: skip


def test_new_fields_get_columns(spark: SparkSession, tmp_path: Path) -> None:
    writer, offset, wanted = StreamWriter(tmp_path / "data"), 0, []
    for given, expected, columns in BATCHES:
        writer.append(0, [message(offset + number, "t", json.dumps(one).encode()) for number, one in enumerate(given)])
        wanted += [{"offset": offset + number, **one} for number, one in enumerate(expected)]
        offset += len(given)
        before = {*tmp_path.glob("parquet/0*0*.parquet")}
        run(config(tmp_path), once=True, session=spark)
        [added] = {*tmp_path.glob("parquet/0*0*.parquet")} - before
        assert columns is None or pq.read_schema(added).names == columns
    run_backfill(config(tmp_path), {0: 0}, {0: offset}, session=spark)
    for table in FORMATS:
        assert rows(tmp_path / table) == wanted
    wanted[2]["_extra"] = {"Offset": "1"}  # "far", which was null in that row, has a column now
    for table in FORMATS:
        assert rows(tmp_path / f"{table}.backfill") == wanted


def test_new_fields_of_a_struct_stay_in_extra(spark: SparkSession, tmp_path: Path) -> None:
    payload = {"n": 1, "o": {"v": 2.0, "w": [3]}, "p": 4}
    StreamWriter(tmp_path / "data").append(0, [message(0, "t", json.dumps(payload).encode())])
    tables = {
        "t": {
            "stream": "sensors",
            "schema": "n int, o struct<v double>",
            "fields": ["n", "o.v"],
            "columns": [],
            "extra_fields": "add",
            "output": str(tmp_path / "t"),
        }
    }
    run(parse_config({"source": {"path": str(tmp_path / "data")}, "tables": tables}), once=True, session=spark)
    assert pq.read_table(tmp_path / "t", partitioning=None).to_pylist() == [{"n": 1, "v": 2.0, "p": 4.0, "_extra": [("o", '{"w":[3]}')]}]


def test_fields_that_differ_in_case_fill_one_column(spark: SparkSession, tmp_path: Path) -> None:
    """No value is lost: each is in the column, or in `_extra`."""
    batches: list[tuple[list[Row], list[Row]]] = [
        ([{"n": 0, "temp": 1}, {"n": 1, "Temp": 2}, {"n": 2, "temp": 3, "Temp": 4}, {"N": 9, "n": 3}],
         [{"n": 0, "temp": 1.0}, {"n": 1, "temp": 2.0}, {"n": 2, "temp": 3.0, "_extra": {"Temp": "4"}}, {"n": 3, "_extra": {"N": "9"}}]),
        ([{"n": 4, "temp": "x", "Temp": 5}, {"n": 5, "TEMP": 6, "Temp": 7}, {"n": 6, "TEMP": "y", "Temp": None}, {"n": 7, "temp": None, "TEMP": 8}],
         [{"n": 4, "temp": 5.0, "_extra": {"temp": '"x"'}}, {"n": 5, "temp": 7.0, "_extra": {"TEMP": "6"}},
          {"n": 6, "_extra": {"TEMP": '"y"'}}, {"n": 7, "temp": 8.0}]),
    ]  # fmt: skip
    writer, offset, wanted = StreamWriter(tmp_path / "data"), 0, []
    for given, expected in batches:
        writer.append(0, [message(offset + number, "t", json.dumps(one).encode()) for number, one in enumerate(given)])
        wanted += [{"offset": offset + number, **one} for number, one in enumerate(expected)]
        offset += len(given)
        run(config(tmp_path), once=True, session=spark)
    run_backfill(config(tmp_path), {0: 0}, {0: offset}, session=spark)
    for table in FORMATS:
        assert rows(tmp_path / table) == wanted
        assert rows(tmp_path / f"{table}.backfill") == wanted


def test_a_text_too_long_for_sparks_json_parser_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    payloads = [json.dumps({"n": 1, "t": text}).encode() for text in ("short", "x" * 21_000_000)]
    StreamWriter(tmp_path / "data").append(0, [message(number, "t", payload) for number, payload in enumerate(payloads)])
    settings = config(tmp_path)
    run(dataclasses.replace(settings, tables=settings.tables[:1]), once=True, session=spark)
    short, long = rows(tmp_path / "parquet")
    assert short["t"] == "short" and "t" not in long and len(long["_extra"]["t"]) == 21_000_002


def test_columns_of_the_schema_may_have_any_name(spark: SparkSession, tmp_path: Path) -> None:
    payload = {"a.b": 1, "c`d e": 2, "*": 3, "new": 4}
    StreamWriter(tmp_path / "data").append(0, [message(0, "t", json.dumps(payload).encode())])
    settings = config(tmp_path, "`a.b` int, `c``d e` int, `*` int")
    run(dataclasses.replace(settings, tables=settings.tables[:1]), once=True, session=spark)
    assert rows(tmp_path / "parquet") == [{"offset": 0, **payload}]


def test_added_columns_survive_kills_and_may_enter_the_schema(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(0, "t", b'{"n": 1, "v": 2}')])

    def die(*_: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched, pytest.raises(IngestError):
        for table in (ParquetBatchTable, DeltaBatchTable):
            patched.setattr(table, "publish", die)
        run(config(tmp_path), once=True, session=spark)
    # A Delta table has the files that its log names.
    assert not [*tmp_path.glob("parquet/0*0*.parquet"), *tmp_path.glob("delta/_delta_log/*.json")]
    run(config(tmp_path), once=True, session=spark)
    writer.append(0, [message(1, "t", b'{"n": 2, "v": 3}')])
    run(config(tmp_path, "n int not null, v double"), once=True, session=spark)
    writer.append(0, [message(2, "t", b'{"n": 3, "v": 4}')])
    run(config(tmp_path), once=True, session=spark)
    for table in FORMATS:
        assert rows(tmp_path / table) == [{"offset": number, "n": number + 1, "v": number + 2.0} for number in range(3)]
