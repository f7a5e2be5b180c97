"""Payloads to rows: the frame that all formats share.

The rule kept here: a payload becomes rows or a dead letter with the reason,
never both and never neither, and which of them, and with what values, is said
by `RowParser.one` alone.  `RowParser.fast` takes many payloads at once or
refuses them all; whatever it refuses is cut smaller until the few payloads
that it cannot take are left to `one`.  So the result depends neither on how
the payloads were cut into batches nor on which way one of them took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import pyarrow as pa  # type: ignore[import-untyped]

_PORTION = 1024
_FEW = 64
_STUMBLES = 16


class BadPayload(ValueError):
    """Why a payload is no row, in a few words that many payloads share."""


class Refused(Exception):
    """`RowParser.fast` cannot take these payloads; ``row`` is the first that it
    may have stumbled over, if it can tell."""

    def __init__(self, row: Optional[int] = None) -> None:
        super().__init__(row)
        self.row = row


class Parsed(NamedTuple):
    """Rows of payloads, in order.

    ``values`` has the parser's type and is NULL where ``reasons`` is not;
    ``payloads`` is the index of each row's payload, None where each payload
    gave exactly one row.
    """

    values: pa.Array
    reasons: pa.Array
    payloads: Optional[pa.Array]


class RowParser(ABC):
    """One format and one type of rows (``type``, an Arrow type)."""

    type: pa.DataType

    def fast(self, payloads: pa.Array) -> pa.Array:
        """One value of each payload, where all are good; raises `Refused`."""
        raise Refused

    @abstractmethod
    def one(self, payload: bytes) -> list[Any]:
        """The rows of one payload as Python values of ``type``, at least one;
        raises `BadPayload`."""

    def parse(self, payloads: pa.Array) -> Parsed:
        """The rows of all ``payloads`` (binary, without NULL)."""
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
        self._waiting: list[tuple[int, Any, Optional[str]]] = []

    def add(self, start: int, end: int, stumbles: int = 0) -> None:
        """The rows of the payloads from ``start`` up to ``end``; ``stumbles``
        counts those that were taken out of the way of the ones before."""
        while start < end:
            try:
                values = self._parser.fast(self._payloads.slice(start, end - start))
            except Refused as refused:
                row, count = refused.row, end - start
                if count <= _PORTION and row is not None and row < count and stumbles < _STUMBLES:
                    self.add(start, start + row, stumbles + 1)
                    self._one_by_one(start + row, start + row + 1)
                    start, stumbles = start + row + 1, stumbles + 1
                elif count <= _FEW:
                    self._one_by_one(start, end)
                    return
                else:
                    step = _PORTION if count > _PORTION else _FEW
                    for first in range(start, end, step):
                        self.add(first, min(first + step, end), stumbles if step == _FEW else 0)
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
                self._waiting.extend((number, row, None) for row in rows)

    def _flush(self) -> None:
        if self._waiting:
            numbers, values, reasons = zip(*self._waiting)
            self._append(pa.array(values, self._parser.type), pa.array(reasons, pa.string()), numbers)
            self._waiting = []

    def _append(self, values: pa.Array, reasons: pa.Array, numbers: Sequence[int]) -> None:
        self._pieces.append(values)
        self._reasons.append(reasons)
        self._index.append(numbers)
