"""The statistics of a data file in Delta's log, by which readers skip files.

They are made from the footer of the Parquet file.  Each bound holds for all values of the file: a text is cut to 32
characters, a timestamp to milliseconds, and a greatest value that was cut is raised.  There are no bounds for
binaries, booleans and floating-point columns with NaN, and nothing for the values in arrays and maps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from bridge_spark.tables.output.data_files import DataFile, leaf_columns

INDEXED_COLUMNS = 32
"""Delta's default of the table property `delta.dataSkippingNumIndexedCols`."""
_PROPERTY = "delta.dataSkippingNumIndexedCols"
_MAX_TEXT = 32
_LAST_CHARACTER = "\U0010ffff"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Bounds(NamedTuple):
    """Each value is at least ``least`` and at most ``greatest``; None for no bound."""

    least: Any = None
    greatest: Any = None


def statistics(file: DataFile, properties: Mapping[str, str | None]) -> str:
    """The JSON text for the file; ``properties`` are those of the table."""
    metadata = file.metadata()
    found: dict[str, Any] = {"numRecords": file.rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    most = int(properties.get(_PROPERTY) or INDEXED_COLUMNS)
    for place, leaf in enumerate(leaf_columns(metadata.schema.to_arrow_schema())):
        if 0 <= most <= place:
            break
        if leaf.repeated:
            continue
        groups = [metadata.row_group(number).column(leaf.number).statistics for number in range(metadata.num_row_groups)]
        if all(group is not None and group.has_null_count for group in groups):
            _put(found["nullCount"], leaf.path, sum(group.null_count for group in groups))
        bounds = _Bounds() if leaf.number in file.nan else _bounds(groups, leaf.kind)
        if bounds.least is not None:
            _put(found["minValues"], leaf.path, bounds.least)
        if bounds.greatest is not None:
            _put(found["maxValues"], leaf.path, bounds.greatest)
    return _json(found)


def _bounds(groups: list[Any], kind: pa.DataType) -> _Bounds:
    """The bounds of a column over all row groups."""
    if not groups or any(group is None or not group.has_min_max and group.num_values for group in groups):
        return _Bounds()
    filled = [group for group in groups if group.num_values]
    types = pa.types
    if not filled or types.is_binary(kind) or types.is_boolean(kind):
        return _Bounds()
    if types.is_timestamp(kind):
        zone = "" if kind.tz is None else "Z"
        return _Bounds(
            _time(min(group.min_raw for group in filled) // 1000, zone), _time(-(-max(group.max_raw for group in filled) // 1000), zone)
        )
    least, greatest = min(group.min for group in filled), max(group.max for group in filled)
    if types.is_string(kind):
        return _Bounds(least[:_MAX_TEXT], _text_above(greatest))
    if types.is_date(kind):
        return _Bounds(least.isoformat(), greatest.isoformat())
    if types.is_floating(kind):
        return _Bounds(*(value if value - value == 0 else None for value in (least, greatest)))
    if types.is_integer(kind) or types.is_decimal(kind):
        return _Bounds(least, greatest)
    return _Bounds()


def _text_above(text: str) -> str | None:
    """``text``, or a text of `_MAX_TEXT` characters and one more that comes after it; None if there is none."""
    if len(text) <= _MAX_TEXT:
        return text
    return None if text[_MAX_TEXT] == _LAST_CHARACTER else text[:_MAX_TEXT] + _LAST_CHARACTER


def _time(milliseconds: int, zone: str) -> str | None:
    try:
        time = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return None
    return time.replace(tzinfo=None).isoformat(timespec="milliseconds") + zone


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _json(value: Any) -> str:
    """As `json.dumps`, with decimals as numbers."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_json(item)}" for name, item in value.items()) + "}"
    return format(value, "f") if isinstance(value, Decimal) else json.dumps(value)
