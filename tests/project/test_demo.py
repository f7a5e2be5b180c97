"""The demo: its input, its simulated plant, and its report of missing and doubled readings."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.paths import ROOT

sys.path.append(str(ROOT / "docs/examples/demo"))
from demo import DemoError, Sensor, compare, main, read_sensors, simulate  # noqa: E402

SENSORS = [Sensor("a", "", [("2026-01-01T00:00:00", 1.0)] * 7), Sensor("b", "", [("2026-01-01T00:00:00", 2.0)] * 2)]
ALL = {("a", 0): (3, 3), ("a", 1): (2, 2), ("a", 2): (2, 2), ("b", 0): (1, 1), ("b", 1): (1, 1)}


@pytest.mark.parametrize(
    ("change", "bad", "kept"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({("a", 0): (2, 2)}, 0, True),  # QoS 0 may be lost
        ({("a", 0): (4, 3)}, 0, False),  # but not doubled
        ({("a", 1): (3, 2)}, 0, True),  # QoS 1 may be doubled
        ({("a", 1): (2, 1)}, 0, False),  # but a double does not make up for one that is missing
        ({("b", 1): (0, 0)}, 0, False),
        ({("a", 2): (1, 1)}, 0, False),
        ({("a", 2): (3, 2)}, 0, False),
    ],
)
def test_compare(change: dict[tuple[str, int], tuple[int, int]], bad: int, kept: bool) -> None:
    out = io.StringIO()
    assert compare(Console(file=out, width=200), SENSORS, ALL | change, bad) is kept
    assert ("NO" in out.getvalue()) is (not kept and not bad)


def test_the_simulation_is_deterministic() -> None:
    first, second = simulate(3, 50), simulate(3, 50)
    assert [sensor.readings for sensor in first] == [sensor.readings for sensor in second]
    assert len({sensor.name for sensor in first}) == 3 and first[0].readings != first[1].readings
    assert sum(first[0].published(qos) for qos in range(3)) == 50


def test_sensors_are_read_from_csv_files(tmp_path: Path) -> None:
    (tmp_path / "odd name+#.csv").write_text("timestamp,value\n2013-07-04 00:00:00,69.5\n2013-07-04 01:00:00,-1\n")
    (sensor,) = read_sensors(tmp_path)
    assert sensor.readings == [("2013-07-04T00:00:00", 69.5), ("2013-07-04T01:00:00", -1.0)]
    assert sensor.topic == "sensors/odd_name__/reading"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "there is no CSV file"),
        ("time,v\n", "x.csv: the first line must be timestamp,value"),
        ("timestamp,value\n2013-07-04,1\nnever,2\n", "x.csv: line 3: must be timestamp,value, got ['never', '2']"),
        ("timestamp,value\n1\n", "x.csv: line 2: must be timestamp,value, got ['1']"),
    ],
)
def test_bad_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DemoError) as caught:
        read_sensors(tmp_path)
    assert str(caught.value).endswith(problem)
    assert main(["--data", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"demo: {caught.value}\n"
