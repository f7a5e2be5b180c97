"""Parses payloads to rows; the base of all formats.

A payload becomes rows, a dead letter with a reason, or both where a format has parts that are read apart from each other
(Sparkplug's metrics): then the dead letter stands for the parts without a row.  `RowParser.one` defines the result of each payload.
`RowParser.fast` parses many payloads at once or refuses them all; refused payloads are split into smaller groups, and
the last few go through `one`.  So the result does not depend on how payloads were batched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

PORTION = 1024
"""Payloads that are parsed at once where a larger group was refused."""
_FEW = 64
_MAX_REFUSALS = 16


class BadPayload(ValueError):
    """Why a payload is rejected, in a few words without values from the payload."""


class Refused(Exception):
    """`RowParser.fast` cannot parse these payloads; ``row`` is the first that may be the cause, if known."""

    def __init__(self, row: int | None = None) -> None:
        super().__init__(row)
        self.row = row


class Parsed(NamedTuple):
    """Rows of payloads, in order.

    ``values`` has the parser's type and is NULL where ``reasons`` is not.  ``payloads`` is the index of each row's
    payload; None if each payload gave one row.
    """

    values: pa.Array
    reasons: pa.Array
    payloads: pa.Array | None


class RowParser(ABC):
    """Parses one format to rows of ``type``, an Arrow type."""

    type: pa.DataType

    def fast(self, payloads: pa.Array) -> pa.Array:
        """One value per payload if all are valid; raises `Refused`."""
        raise Refused

    @abstractmethod
    def one(self, payload: bytes) -> list[Any]:
        """The rows of one payload, at least one, as Python values of ``type``; raises `BadPayload`.

        A `BadPayload` among them, at most one, is a dead letter for a part of the payload.
        """

    def parse(self, payloads: pa.Array) -> Parsed:
        """The rows of ``payloads`` (binary, no NULL)."""
        rows = _Rows(self, payloads)
        rows.add(0, len(payloads))
        return rows.result()


class _Rows:
    """Collects the rows of one batch of payloads."""

    def __init__(self, parser: RowParser, payloads: pa.Array) -> None:
        self._parser = parser
        self._payloads = payloads
        self._pieces: list[pa.Array] = []
        self._reasons: list[pa.Array] = []
        self._index: list[Sequence[int]] = []
        self._several = False
        self._waiting: list[tuple[int, Any, str | None]] = []

    def add(self, start: int, end: int, refusals: int = 0) -> None:
        """Add the rows of the payloads ``start`` to ``end``, exclusive; ``refusals`` counts the refusals within this
        group so far."""
        while start < end:
            try:
                values = self._parser.fast(self._payloads.slice(start, end - start))
            except Refused as refused:
                row, count = refused.row, end - start
                if count <= PORTION and row is not None and row < count and refusals < _MAX_REFUSALS:
                    self.add(start, start + row, refusals + 1)
                    self._one_by_one(start + row, start + row + 1)
                    start, refusals = start + row + 1, refusals + 1
                elif count <= _FEW:
                    self._one_by_one(start, end)
                    return
                else:
                    step = PORTION if count > PORTION else _FEW
                    for first in range(start, end, step):
                        self.add(first, min(first + step, end), refusals if step == _FEW else 0)
                    return
            else:
                self._flush()
                self._append(values, pa.nulls(end - start, pa.string()), range(start, end))
                return

    def result(self) -> Parsed:
        self._flush()
        if not self._pieces:
            return Parsed(pa.nulls(0, self._parser.type), pa.nulls(0, pa.string()), None)
        index = pa.concat_arrays([pa.array(numbers, pa.int32()) for numbers in self._index]) if self._several else None
        return Parsed(pa.concat_arrays(self._pieces), pa.concat_arrays(self._reasons), index)

    def _one_by_one(self, start: int, end: int) -> None:
        for number, payload in enumerate(self._payloads.slice(start, end - start).to_pylist(), start):
            try:
                rows = self._parser.one(payload)
            except BadPayload as bad:
                self._waiting.append((number, None, str(bad)))
            else:
                self._several = self._several or len(rows) != 1
                self._waiting.extend((number, None, str(row)) if isinstance(row, BadPayload) else (number, row, None) for row in rows)

    def _flush(self) -> None:
        if self._waiting:
            numbers, values, reasons = zip(*self._waiting)
            self._append(pa.array(values, self._parser.type), pa.array(reasons, pa.string()), numbers)
            self._waiting = []

    def _append(self, values: pa.Array, reasons: pa.Array, numbers: Sequence[int]) -> None:
        self._pieces.append(values)
        self._reasons.append(reasons)
        self._index.append(numbers)
