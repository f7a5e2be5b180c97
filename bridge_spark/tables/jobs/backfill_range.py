"""The range of a backfill: two times, or two offsets for each of some partitions.  Needs no Spark.

A range is half open.  A range of offsets has nothing of the partitions that it does not name.  Times are times of
receipt in the past, so that a range always has the same messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge_spark.tables.recorded_columns import RANGE_PREFIX

Bound = datetime | Mapping[int, int]
"""A time, or an offset for each partition."""

_TIME = "%Y%m%dT%H%M%S.%fZ"


def parse_bound(text: str) -> Bound:
    """One end of a range: an ISO 8601 time (UTC by default), or offsets like `{"0": 123}`.

    Raises `ValueError` with the reason.
    """
    if text.lstrip().startswith("{"):
        try:
            found = {int(key): offset for key, offset in json.loads(text).items()}
        except ValueError:
            found = {}
        if not found or not all(type(offset) is int and offset >= 0 for offset in found.values()):
            raise ValueError(f'{text!r} is not offsets like {{"0": 123}}')
        return found
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f'{text!r} is neither a time like 2026-01-31T12:00:00Z nor offsets like {{"0": 123}}') from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


@dataclass(frozen=True)
class BackfillRange:
    """From ``begin``, inclusive, to ``end``, exclusive."""

    begin: Bound
    end: Bound

    @property
    def directory(self) -> str:
        """The name of its directory."""
        return f"{RANGE_PREFIX}{_format(self.begin)}_{_format(self.end)}"

    def check(self) -> None:
        """Raise `ValueError` if the range is invalid or ends in the future."""
        begin, end = self.begin, self.end
        if isinstance(begin, datetime) and isinstance(end, datetime):
            if begin >= end:
                raise ValueError(f"the range ends at {end.isoformat()}, not after its beginning")
            if end > datetime.now(UTC):
                raise ValueError(f"{end.isoformat()} is in the future: messages received until then would be missing")
        elif isinstance(begin, datetime) or isinstance(end, datetime):
            raise ValueError("a range goes from a time to a time, or from offsets to offsets")
        elif begin.keys() != end.keys() or any(begin[partition] > end[partition] for partition in begin):
            raise ValueError("offsets must name the same partitions, and no end may be before its beginning")

    def overlaps(self, directory: str) -> bool:
        """Whether the range may have messages of the range with this directory name."""
        begin, end = self.begin, self.end
        first, last = (_parse(text) for text in directory.removeprefix(RANGE_PREFIX).split("_", 1))
        if isinstance(begin, datetime) and isinstance(end, datetime):
            return not (isinstance(first, datetime) and isinstance(last, datetime)) or (begin < last and first < end)
        if not (isinstance(begin, Mapping) and isinstance(end, Mapping) and isinstance(first, Mapping) and isinstance(last, Mapping)):
            return True
        return any(
            max(begin[partition], first[partition]) < min(end[partition], last[partition]) for partition in begin.keys() & first.keys()
        )


def _format(bound: Bound) -> str:
    if isinstance(bound, datetime):
        return bound.strftime(_TIME)
    return ",".join(f"{partition}.{offset}" for partition, offset in sorted(bound.items()))


def _parse(text: str) -> Bound | None:
    if re.fullmatch(r"\d+\.\d+(,\d+\.\d+)*", text):
        return {int(partition): int(offset) for partition, _, offset in (part.partition(".") for part in text.split(","))}
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None
