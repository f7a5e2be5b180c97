"""The results of a payload parser, checked in two ways."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from bridge_spark.source.row_parser import BadPayload, RowParser


def results(parser: RowParser, payloads: list[bytes]) -> list[tuple[Any, str | None]]:
    """(value, reason) of each payload; checks that the payloads give the same one by one."""
    found = parser.parse(pa.array(payloads, pa.binary()))
    found.values.validate(full=True)
    values, reasons = found.values.to_pylist(), found.reasons.to_pylist()
    for payload, value, reason in zip(payloads, values, reasons, strict=True):
        try:
            single, why = pa.array(parser.one(payload), parser.type)[0].as_py(), None
        except BadPayload as bad:
            single, why = None, str(bad)
        assert (repr(single), why) == (repr(value), reason)
    return list(zip(values, reasons))
