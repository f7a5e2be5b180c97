"""What the ingest job has done so far, and how it says so on the terminal.

The rule kept here: the numbers are of this run and never count a batch twice;
a pipe gets whole lines, only a terminal is written over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Optional


class TableProgress:
    """What one table has received in this run.

    ``rows`` went to the table, ``bad`` to the dead letters; ``lag`` counts the
    offsets between what is done and what the broker has, None until known.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = 0
        self.bad = 0
        self.batches = 0
        self.lag: Optional[int] = None


Report = Callable[[list[TableProgress]], None]


class Terminal:
    """Progress as text: one line that is rewritten on a terminal, else one
    line per table every few seconds."""

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
            self._note_rates(tables, passed)
            self._last_time = now
            if not self._tty:
                self._print(tables, "\n")
        if self._tty:
            self._print(tables, "\r")

    def finish(self, tables: list[TableProgress]) -> None:
        """The last word: totals and the rate of the whole run."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        for table in tables:
            total = table.rows + table.bad
            self._write(f"{table.name}: {table.rows:,} rows, {table.bad:,} bad, {table.batches} batches in "
                        f"{seconds:.1f} s ({total / seconds:,.0f} rows/s)", "\n")

    def _note_rates(self, tables: list[TableProgress], passed: float) -> None:
        for table in tables:
            total = table.rows + table.bad
            self._rates[table.name] = (total - self._last_rows.get(table.name, 0)) / passed
            self._last_rows[table.name] = total

    def _print(self, tables: list[TableProgress], end: str) -> None:
        self._write(" | ".join(
            f"{table.name}: {table.rows:,} rows, {self._rates.get(table.name, 0.0):,.0f} rows/s, "
            f"lag {'?' if table.lag is None else format(table.lag, ',')} offsets, {table.bad:,} bad"
            for table in tables), end)

    def _write(self, text: str, end: str) -> None:
        clear = "\x1b[K" if self._tty else ""
        self._out.write(f"{text}{clear}{end}")
        self._out.flush()
