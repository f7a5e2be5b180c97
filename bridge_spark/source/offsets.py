"""Offsets of a read: where it starts, how far it goes, what is still there.

The rule kept here: a range of offsets means the same rows for ever.  What is
no longer there is said with its offsets, or skipped only when told to; nothing
else moves a range once it was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from bridge_spark.source.option_values import EARLIEST, LATEST, OffsetSpec, OptionError
from bridge_spark.source.storage import Manifest, StreamError

Offsets = dict[int, int]
"""The next offset to read, by partition."""


class DataLoss(StreamError):
    """Offsets of the range are not there (any more)."""

    def __init__(self, losses: list[str]) -> None:
        super().__init__(f"mqtt source: {'; '.join(losses)} (set failOnDataLoss=false to go on without them)")


def to_json(offsets: Offsets) -> dict[str, int]:
    """Offsets as Spark keeps them; equal offsets give equal text."""
    return {str(partition): offsets[partition] for partition in sorted(offsets)}


def from_json(document: Mapping[str, int]) -> Offsets:
    """The inverse of `to_json`."""
    return {int(partition): int(offset) for partition, offset in document.items()}


def earliest(manifest: Manifest) -> Offsets:
    return {partition: state.log_start for partition, state in manifest.items()}


def latest(manifest: Manifest) -> Offsets:
    return {partition: state.high_watermark for partition, state in manifest.items()}


def resolve(option: str, spec: Optional[OffsetSpec], default: Offsets, manifest: Manifest) -> Offsets:
    """The offsets that the value of ``option`` means now.

    ``default`` stands for an option that is not given and for partitions it
    does not name; raises `OptionError` for a partition that does not exist.
    """
    if spec is None:
        return dict(default)
    if spec == EARLIEST:
        return earliest(manifest)
    if spec == LATEST:
        return latest(manifest)
    assert isinstance(spec, dict)
    resolved = dict(default)
    for partition, offset in spec.items():
        state = manifest.get(partition)
        if state is None:
            raise OptionError(option, f"there is no partition {partition}, only 0 to {len(manifest) - 1}")
        named = {EARLIEST: state.log_start, LATEST: state.high_watermark}
        resolved[partition] = named.get(offset, offset)
    return resolved


def check_kept(start: Offsets, end: Offsets, manifest: Manifest, fail: bool) -> tuple[Offsets, Offsets]:
    """The part of the range that is there.

    Raises `DataLoss` when that is not all of it and ``fail`` is set.  Empty
    ranges lose nothing.
    """
    losses: list[str] = []
    kept_start: Offsets = {}
    kept_end: Offsets = {}
    for partition in sorted(end):
        state = manifest.get(partition)
        first = start.get(partition, state.log_start if state else 0)
        last = end[partition]
        if state is None:
            losses.append(f"partition {partition} does not exist (any more)")
            continue
        log_start, high_watermark = state.log_start, state.high_watermark
        if max(first, last) > high_watermark:
            losses.append(f"partition {partition} ends at offset {high_watermark}, before {max(first, last)}: "
                          f"another stream has taken its place or its end was lost")
        elif first < min(last, log_start):
            losses.append(f"partition {partition}: retention has removed the offsets {first} "
                          f"to {min(last, log_start) - 1}")
        kept_end[partition] = min(last, high_watermark)
        kept_start[partition] = min(max(first, log_start), kept_end[partition])
    if losses and fail:
        raise DataLoss(losses)
    return kept_start, kept_end


def limit_rows(start: Offsets, end: Offsets, max_rows: int) -> Offsets:
    """An end at most ``max_rows`` after ``start``, shared out in proportion to
    what each partition has, so that none runs ahead; at least one row moves."""
    waiting = {partition: max(0, end[partition] - start.get(partition, 0)) for partition in sorted(end)}
    total = sum(waiting.values())
    if total <= max_rows:
        return dict(end)
    shares = {partition: rows * max_rows // total for partition, rows in waiting.items()}
    left = max_rows - sum(shares.values())
    by_remainder = sorted(waiting, key=lambda partition: (-(waiting[partition] * max_rows % total), partition))
    for partition in by_remainder[:left]:
        shares[partition] += 1
    return {partition: start.get(partition, 0) + share if waiting[partition] else end[partition]
            for partition, share in shares.items()}
