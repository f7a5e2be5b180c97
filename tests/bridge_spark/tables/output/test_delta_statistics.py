"""Statistics of data files in Delta's log: other engines see them, each bound holds, and files are skipped by them."""

from __future__ import annotations

import json
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_spark.tables.output.data_files import DataFile, DataFileWriter, SyncedFile
from bridge_spark.tables.output.delta_statistics import INDEXED_COLUMNS, statistics
from bridge_spark.tables.output.delta_table import DeltaBatchTable

pytestmark = pytest.mark.one_build

UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("b", pa.int8()),
        ("s", pa.string()),
        ("ts", UTC),
        ("local", pa.timestamp("us")),
        ("d", pa.date32()),
        ("dec", pa.decimal128(38, 2)),
        ("f", pa.float32()),
        ("g", pa.float64()),
        ("k", pa.bool_()),
        ("x", pa.binary()),
        ("l", pa.list_(pa.float64())),
        ("m", pa.map_(pa.string(), pa.int64())),
        ("o", pa.struct([("l", pa.list_(pa.int64())), ("a.b", pa.int32()), ("i", pa.struct([("g", pa.float64())]))])),
    ]
)
FIRST = datetime(2026, 1, 2, 3, 4, 5, 123456, timezone.utc)
ROWS: list[dict[str, Any]] = [
    {
        "n": 2**60,
        "b": -1,
        "s": "é" * 40,
        "ts": FIRST,
        "local": FIRST.replace(tzinfo=None),
        "d": date(2026, 1, 2),
        "dec": Decimal("123456789012345678901234567890123456.78"),
        "f": 0.1,
        "g": 1.5,
        "k": True,
        "x": b"a",
        "l": [1.0],
        "m": [("a", 1)],
        "o": {"l": [9], "a.b": 3, "i": {"g": 2.5}},
    },
    {
        "n": 1,
        "b": 5,
        "s": "x" * 32 + "yz",
        "ts": FIRST.replace(microsecond=999_001),
        "d": None,
        "dec": Decimal("-0.50"),
        "g": float("nan"),
        "o": {"a.b": None},
    },
    {"s": None, "g": 7.0, "o": None},
]


class Files:
    """The storage of data files in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(self, name: str) -> Any:
        return SyncedFile(self.directory / name)

    def delete(self, name: str) -> None:
        (self.directory / name).unlink()


def written(directory: Path, rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> DataFile:
    [file] = DataFileWriter(Files(directory), schema, "ingest-").write(pa.Table.from_pylist(rows, schema).to_batches())
    return file


def test_bounds_and_counts_of_each_type(tmp_path: Path) -> None:
    text = statistics(written(tmp_path, ROWS), {})
    assert '"dec":-0.50' in text and '"dec":123456789012345678901234567890123456.78' in text
    float32 = pa.scalar(0.1, pa.float32()).as_py()
    assert json.loads(text, parse_float=str) == {
        "numRecords": 3,
        "minValues": {
            "n": 1,
            "b": -1,
            "s": "x" * 32,
            "ts": "2026-01-02T03:04:05.123Z",
            "local": "2026-01-02T03:04:05.123",
            "d": "2026-01-02",
            "dec": "-0.50",
            "f": repr(float32),
            "o": {"a.b": 3, "i": {"g": "2.5"}},
        },
        "maxValues": {
            "n": 2**60,
            "b": 5,
            "s": "é" * 32 + "\U0010ffff",
            "ts": "2026-01-02T03:04:06.000Z",
            "local": "2026-01-02T03:04:05.124",
            "d": "2026-01-02",
            "dec": "123456789012345678901234567890123456.78",
            "f": repr(float32),
            "o": {"a.b": 3, "i": {"g": "2.5"}},
        },
        "nullCount": {
            "n": 1,
            "b": 1,
            "s": 1,
            "ts": 1,
            "local": 2,
            "d": 2,
            "dec": 1,
            "f": 2,
            "g": 0,
            "k": 2,
            "x": 2,
            "o": {"a.b": 2, "i": {"g": 2}},
        },
    }


def test_only_the_first_columns_have_statistics(tmp_path: Path) -> None:
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(INDEXED_COLUMNS + 5)])
    file = written(tmp_path, [{name: 1 for name in schema.names}], schema)
    for properties, count in (
        ({}, INDEXED_COLUMNS),
        ({"delta.dataSkippingNumIndexedCols": "2"}, 2),
        ({"delta.dataSkippingNumIndexedCols": "-1"}, INDEXED_COLUMNS + 5),
    ):
        found = json.loads(statistics(file, properties))
        assert [len(found[key]) for key in ("minValues", "maxValues", "nullCount")] == [count] * 3


FEW = pa.schema([("s", pa.string()), ("ts", UTC), ("g", pa.float64())])
VALUES = st.fixed_dictionaries(
    {
        "s": st.none() | st.text(max_size=40) | st.text("a\U0010ffff", min_size=31, max_size=40),
        "ts": st.none() | st.datetimes(timezones=st.just(timezone.utc)),
        "g": st.none() | st.floats(),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=5))
def test_bounds_hold_for_all_values(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    file = written(tmp_path_factory.mktemp("files"), rows, FEW)
    found = json.loads(statistics(file, {}))
    for name in FEW.names:
        given = [row[name] for row in rows if row[name] is not None]
        least, greatest = found["minValues"].get(name), found["maxValues"].get(name)
        if name == "ts":
            least, greatest = (value and datetime.fromisoformat(value) for value in (least, greatest))
        order = str.encode if name == "s" else lambda value: value
        assert least is None or all(order(least) <= order(value) for value in given)
        assert greatest is None or all(order(value) <= order(greatest) for value in given)
        assert found["nullCount"][name] == len(rows) - len(given)


def test_other_engines_skip_files_by_the_statistics(tmp_path: Path) -> None:
    table = DeltaBatchTable(str(tmp_path / "t"))
    table.prepare()
    rows = [{**ROWS[0], "n": number, "ts": FIRST.replace(hour=number)} for number in range(3)]
    for number, row in enumerate(rows):
        table.committed(number, "c")
        writer = table.writer(f"ingest-{number:010d}-", SCHEMA)
        table._commit(number, [*writer.write(pa.Table.from_pylist([row], SCHEMA).to_batches())], "c")
    actions = pa.table(DeltaTable(tmp_path / "t").get_add_actions(flatten=True)).sort_by("min.n")
    assert actions.column("min.n").to_pylist() == actions.column("max.n").to_pylist() == [0, 1, 2]
    assert actions.column("null_count.n").to_pylist() == [0, 0, 0]
    assert actions.column("min.dec").to_pylist() == [ROWS[0]["dec"]] * 3
    assert actions.column("min.ts").to_pylist() == [row["ts"].replace(microsecond=123000) for row in rows]
    assert actions.column("max.local").to_pylist() == [ROWS[0]["local"].replace(microsecond=124000)] * 3
    place = str(tmp_path / "t")
    skipped = tmp_path / "t" / actions.column("path").to_pylist()[0]
    skipped.unlink()  # an engine that would read this file could not answer
    assert DeltaTable(place).to_pyarrow_dataset().to_table(filter=pc.field("n") > 1, columns=["n"]).column("n").to_pylist() == [2]
    assert polars.scan_delta(place).filter(polars.col("n") == 2).select("n").collect().to_series().to_list() == [2]
