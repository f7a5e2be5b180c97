"""The verdict: compares the tables, read without Spark, with the publishers' outboxes.

Each row has the number of checks beside the number of findings, so a run that checked nothing does not look like one
that found nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import duckdb
import pandas  # type: ignore[import-untyped]
import pyarrow  # type: ignore[import-untyped]
import pyarrow.dataset  # type: ignore[import-untyped]

from chaos_spark.outbox import Reading, reading_of

MISSING = "acknowledged readings that are in no table"
TWICE = "readings that are in the tables twice"
WRONG = "rows that are not as the reading was sent"
ORDER = "readings of a sensor out of order"
PLACES = "offsets of the log that are in no table, or twice"
LOST = "lost offsets, each of one missing reading"
READERS = "rows that pyarrow, DuckDB and pandas see differently"
GLIMPSES = "rows that a reader saw after a kill, later changed or gone"
REFUSED = "drivers that stopped and named the offsets that retention took"
WINDOWS = "windows of aggregates that are not as pandas makes them"
PUBLISHERS = "packets and sessions of publishers"
PROCESSES = "processes that do not start, end or go on as they must"
ROWS = (MISSING, TWICE, WRONG, ORDER, PLACES, LOST, READERS, GLIMPSES, REFUSED, WINDOWS, PUBLISHERS, PROCESSES)

NAMED = 10  # findings of a row that are printed


class Row(NamedTuple):
    """A row of the table, or a dead letter, whose value is None."""

    partition: int
    offset: int
    topic: str
    sensor: str
    n: int
    value: float | None
    client_id: str
    qos: int


class Findings:
    """Checks and findings, by row of the verdict."""

    def __init__(self) -> None:
        self.checked: Counter[str] = Counter()
        self.faults: dict[str, list[str]] = {row: [] for row in ROWS}

    def fault(self, row: str, text: str) -> None:
        self.faults[row].append(text)

    def table(self) -> str:
        """One line per row: number of checks, number of findings."""
        lines = [f"{'':64}{'checked':>10}{'found':>8}"]
        lines += [f"{row:64}{self.checked[row]:>10,}{len(self.faults[row]):>8,}" for row in ROWS]
        return "\n".join(lines)

    def text(self) -> str:
        """The findings by row; "" if there are none."""
        lines: list[str] = []
        for row, texts in self.faults.items():
            if texts:
                lines += [f"{row}:", *(f"  {text}" for text in texts[:NAMED])]
            if len(texts) > NAMED:
                lines.append(f"  and {len(texts) - NAMED} more")
        return "\n".join(lines)


# --- readers --------------------------------------------------------------------------------------------------------

COLUMNS = ["partition", "offset", "topic", "sensor", "n", "value", "client_id", "qos"]


def read_table(directory: Path) -> list[Row]:
    """The rows of the table, read with pyarrow."""
    if not any(directory.rglob("*.parquet")):
        return []
    columns = pyarrow.dataset.dataset(directory, format="parquet").to_table(COLUMNS).to_pydict()
    return [Row(*values) for values in zip(*(columns[name] for name in COLUMNS))]


def read_dead_letters(directory: Path) -> list[Row]:
    """The dead letters, read with pyarrow; raises ValueError for one that is no reading."""
    if not any(directory.rglob("*.parquet")):
        return []
    return [Row(*place, *reading_of(payload), None, *sender) for place, payload, sender in _messages(str(directory))]


def read_messages(files: list[str]) -> list[Row]:
    """The rows of a table of messages whose payloads nothing has parsed yet; raises ValueError for one that is no reading."""
    return [Row(*place, *_parsed(payload), *sender) for place, payload, sender in _messages(files)] if files else []


def _messages(source: str | list[str]) -> Iterator[tuple[tuple[int, int, str], bytes, tuple[str, int]]]:
    """Of each message partition, offset and topic; the payload; client id and QoS."""
    names = ["partition", "offset", "topic", "payload", "client_id", "qos"]
    columns = pyarrow.dataset.dataset(source, format="parquet").to_table(names).to_pydict()
    for row in zip(*(columns[name] for name in names)):
        yield row[:3], row[3], row[4:]


def _parsed(payload: bytes) -> tuple[str, int, float | None]:
    """Sensor, number and value of a payload; without a value of one that does not parse."""
    if not payload.startswith(b"{"):
        return (*reading_of(payload), None)
    fields = json.loads(payload)
    return fields["sensor"], fields["n"], fields["value"]


def judge_readers(findings: Findings, directory: Path, rows: list[Row]) -> None:
    """Check that DuckDB and pandas read the same ``rows``."""
    expected = sorted(rows)
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    by_duckdb = duckdb.sql(f"SELECT {names} FROM read_parquet('{directory}/**/*.parquet')").fetchall()
    frame = pandas.read_parquet(directory, columns=COLUMNS)
    by_pandas = list(zip(*(frame[name].tolist() for name in COLUMNS)))
    for reader, found in (("DuckDB", by_duckdb), ("pandas", by_pandas)):
        findings.checked[READERS] += len(found)
        if sorted(found) != expected:
            findings.fault(READERS, f"{reader} finds {len(found)} rows, pyarrow {len(expected)}: not the same")


# --- judging --------------------------------------------------------------------------------------------------------

Ranges = list[tuple[int, int, int]]
"""Partition, first offset, end offset."""


def judge(
    findings: Findings, rows: list[Row], dead: list[Row], last: Mapping[str, int],
    places: Mapping[int, Collection[int]], lost: Ranges,
) -> None:  # fmt: skip
    """Check the table.

    ``last``: the last number of each sensor.  ``places``: the offsets of all messages of the log, by partition.  ``lost``:
    offsets that retention removed before they were read.
    """
    everything = sorted([*rows, *dead])
    _judge_rows(findings, rows, dead)
    times = Counter((row.sensor, row.n) for row in everything)
    findings.checked[TWICE] += len(times)
    for (sensor, n), count in times.items():
        if count > 1:
            findings.fault(TWICE, f"reading {n} of {sensor} is there {count} times")
        if not 0 < n <= last.get(sensor, 0):
            findings.fault(WRONG, f"reading {n} of {sensor} was never sent")
    missing = [(sensor, n) for sensor, end in last.items() for n in range(1, end + 1) if (sensor, n) not in times]
    findings.checked[MISSING] += sum(last.values())
    _judge_lost(findings, everything, missing, lost)
    _judge_places(findings, everything, places, lost)


def _judge_rows(findings: Findings, rows: list[Row], dead: list[Row]) -> None:
    findings.checked[WRONG] += len(rows) + len(dead)
    for row in [*rows, *dead]:
        reading = Reading(row.sensor, row.n)
        sent = (reading.topic, reading.value if reading.parses else None, reading.sensor, reading.qos)
        if (row.topic, row.value, row.client_id, row.qos) != sent:
            findings.fault(WRONG, f"{row} in the {'dead letters' if row.value is None else 'table'}")


def _judge_lost(findings: Findings, everything: list[Row], missing: list[tuple[str, int]], lost: Ranges) -> None:
    """Check that readings are missing only where offsets were lost, one reading per offset."""
    findings.checked[LOST] += (total := sum(end - first for _, first, end in lost))
    if lost and total != len(missing):
        findings.fault(LOST, f"{total} offsets were lost, but {len(missing)} readings are missing")
    before: dict[str, Row] = {}
    excused: set[tuple[str, int]] = set()
    for row in everything:
        old = before.get(row.sensor, row._replace(offset=-1, n=0))
        before[row.sensor] = row
        findings.checked[ORDER] += 1
        if row.n < old.n:
            findings.fault(ORDER, f"{row.sensor} has {old.n} at offset {old.offset} and {row.n} at {row.offset}")
        gone = sum(
            max(0, min(end, row.offset) - max(first, old.offset + 1)) for partition, first, end in lost if partition == row.partition
        )
        if row.n - old.n - 1 <= gone:
            excused.update((row.sensor, n) for n in range(old.n + 1, row.n))
    for sensor, n in missing:
        if (sensor, n) not in excused:
            findings.fault(MISSING, f"reading {n} of {sensor} is missing")


def _judge_places(findings: Findings, everything: list[Row], places: Mapping[int, Collection[int]], lost: Ranges) -> None:
    found = Counter((row.partition, row.offset) for row in everything)
    for partition, first, end in lost:
        found.update((partition, offset) for offset in range(first, end))
    findings.checked[PLACES] += sum(map(len, places.values()))
    for partition, offsets in places.items():
        for offset in offsets:
            if (count := found.pop((partition, offset), 0)) != 1:
                findings.fault(PLACES, f"partition {partition}, offset {offset}: {count} times")
    for partition, offset in found:
        findings.fault(PLACES, f"partition {partition}, offset {offset} is not in the log")


class Glimpses:
    """Reads the table at some moments, by ``read``: rows seen before must still be there, each once."""

    def __init__(self, findings: Findings, read: Callable[[], list[Row]]) -> None:
        self.findings = findings
        self._read = read
        self.seen: set[Row] = set()

    def look(self) -> None:
        try:
            rows = self._read()
        except (pyarrow.ArrowException, OSError) as error:
            self.findings.fault(GLIMPSES, f"the table cannot be read: {error}")
            return
        now = set(rows)
        self.findings.checked[GLIMPSES] += len(rows)
        if len(now) != len(rows):
            self.findings.fault(GLIMPSES, f"{len(rows) - len(now)} rows are there twice")
        if gone := self.seen - now:
            self.findings.fault(GLIMPSES, f"{len(gone)} rows that were there are gone, one of them {min(gone)}")
        self.seen |= now
