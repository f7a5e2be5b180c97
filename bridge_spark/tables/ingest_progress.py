"""Progress of the ingest job by table, and its display on a terminal or as lines of text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any


class TableProgress:
    """Counts of one table in this run.

    ``rows`` were written to the table, ``bad`` to the dead letters because they do not parse, ``late`` came after the
    watermark, ``duplicates`` were dropped.  ``lag`` is the number of offsets that the broker has and the table does
    not, None until known; ``lag_s`` is the age of the newest message in the table, 0 without lag.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = 0
        self.bad = 0
        self.late = 0
        self.duplicates = 0
        self.batches = 0
        self.lag: int | None = None
        self._newest_us: int | None = None
        self._last_batch = -1

    @property
    def lag_s(self) -> float | None:
        if self.lag == 0:
            return 0.0
        return None if self._newest_us is None else max(0.0, time.time() - self._newest_us / 1e6)

    def set_newest(self, newest_us: int | None) -> None:
        """A batch was written whose newest message was received at that time, in microseconds."""
        if newest_us is not None:
            self._newest_us = max(newest_us, self._newest_us or 0)

    def update(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Add Spark's progress reports of the last batches; batches that were reported before are not counted again."""
        for batch in batches:
            if batch["batchId"] > self._last_batch and "addBatch" in batch["durationMs"]:
                self._last_batch = batch["batchId"]
                for operator in batch["stateOperators"]:
                    self.late += operator["numRowsDroppedByWatermark"]
                    self.duplicates += operator.get("customMetrics", {}).get("numDroppedDuplicateRows", 0)
        if batches:
            source = batches[-1]["sources"][0]
            end, latest = _offsets(source["endOffset"]), _offsets(source["latestOffset"])
            if end and latest:
                self.lag = sum(max(0, offset - end.get(partition, 0)) for partition, offset in latest.items())


Report = Callable[[list[TableProgress]], None]


class Terminal:
    """Progress as text: on a terminal one line that is rewritten, else a line every ``every_s`` seconds."""

    def __init__(self, out: IO[str], every_s: float = 5.0) -> None:
        self._out = out
        self._tty = out.isatty()
        self._every = every_s
        self._last_rows: dict[str, int] = {}
        self._last_time = self._started = time.monotonic()
        self._rates: dict[str, float] = {}

    def __call__(self, tables: list[TableProgress]) -> None:
        now = time.monotonic()
        passed = now - self._last_time
        if passed >= (1.0 if self._tty else self._every):
            self._update_rates(tables, passed)
            self._last_time = now
            if not self._tty:
                self._print(tables, "\n")
        if self._tty:
            self._print(tables, "\r")

    def finish(self, tables: list[TableProgress]) -> None:
        """Write totals and the rate of the whole run."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        for table in tables:
            total = table.rows + table.bad
            self._write(
                f"{table.name}: {table.rows:,} rows, {table.bad:,} bad{_dropped(table)}, {table.batches} "
                f"batches in {seconds:.1f} s ({total / seconds:,.0f} rows/s)",
                "\n",
            )

    def _update_rates(self, tables: list[TableProgress], passed: float) -> None:
        for table in tables:
            total = table.rows + table.bad
            self._rates[table.name] = (total - self._last_rows.get(table.name, 0)) / passed
            self._last_rows[table.name] = total

    def _print(self, tables: list[TableProgress], end: str) -> None:
        self._write(
            " | ".join(
                f"{table.name}: {table.rows:,} rows, {self._rates.get(table.name, 0.0):,.0f} rows/s, "
                f"lag {'?' if table.lag is None else format(table.lag, ',')} offsets"
                f"{'' if table.lag_s is None else f' {table.lag_s:,.0f} s'}, {table.bad:,} bad{_dropped(table)}"
                for table in tables
            ),
            end,
        )

    def _write(self, text: str, end: str) -> None:
        clear = "\x1b[K" if self._tty else ""
        self._out.write(f"{text}{clear}{end}")
        self._out.flush()


def _dropped(table: TableProgress) -> str:
    return "".join(f", {count:,} {name}" for name, count in (("late", table.late), ("duplicates", table.duplicates)) if count)


def _offsets(text: Any) -> dict[str, int]:
    value = json.loads(text) if isinstance(text, str) else text
    return {str(key): int(offset) for key, offset in value.items()} if isinstance(value, dict) else {}
