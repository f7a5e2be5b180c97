"""Sizes of rows in Arrow arrays, and batches of a limited size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]


def row_bytes(columns: Iterable[pa.Array], count: int) -> Any:
    """The bytes of each of ``count`` rows, as a NumPy array; about, as offsets and NULL flags are left out."""
    return sum(map(_bytes, columns), np.zeros(count, np.int64))


def pieces(sizes: Any, limit: int) -> Iterator[tuple[int, int]]:
    """Start and end of successive groups of rows of ``sizes`` bytes: at most ``limit`` bytes, or one row."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, before + limit, "right")), start + 1)
        yield start, end
        start = end


def _bytes(column: pa.Array) -> Any:
    kind, types = column.type, pa.types
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if types.is_struct(kind):
        return row_bytes(column.flatten(), len(column))
    if types.is_list(kind) or types.is_map(kind):
        before = np.concatenate([[0], np.cumsum(_bytes(column.values))])
        return np.diff(before[column.offsets.to_numpy()])
    try:
        return np.full(len(column), (kind.bit_width + 7) // 8, np.int64)
    except ValueError:  # of variable width: at most all of it
        return np.full(len(column), column.nbytes, np.int64)
