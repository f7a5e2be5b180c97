"""The offset range of a read.

A range of offsets always means the same rows.  Offsets that are no longer kept raise `DataLoss` or, with
failOnDataLoss=false, are skipped; nothing else changes a chosen range.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import MappingProxyType

from bridge_spark.log.incarnation import UNKNOWN
from bridge_spark.source.option_values import (
    EARLIEST,
    INCARNATION,
    LATEST,
    SELECTIONS,
    STREAM,
    OffsetSpec,
    OptionError,
)
from bridge_spark.source.storage import Manifest, StreamError

logger = logging.getLogger(__name__)

Offsets = dict[int, int]
"""The next offset to read, by partition."""


class DataLoss(StreamError):
    """Offsets of the range are not kept (any more)."""

    def __init__(self, losses: list[str]) -> None:
        super().__init__(f"mqtt source: {'; '.join(losses)} (set failOnDataLoss=false to go on without them)")


def to_json(offsets: Offsets, entries: Mapping[str, str] = MappingProxyType({})) -> dict[str, int]:
    """Offsets in the form of Spark's checkpoint; equal offsets give equal text.

    ``entries``: the options that select rows (`SELECTIONS`), and `of_stream`, kept as ``<name>=<value>``: 0.
    """
    document = {str(partition): offsets[partition] for partition in sorted(offsets)}
    return document | {f"{name}={value}": 0 for name, value in sorted(entries.items())}


def of_stream(stream: str, manifest: Manifest) -> dict[str, str]:
    """The entries that say whose offsets they are."""
    known = manifest.incarnation.id
    return {STREAM: stream, **({INCARNATION: known} if known else {})}


def check_stream(
    document: Mapping[str, int],
    stream: str,
    manifest: Manifest,
    accepted: str | None = None,
    option: str | None = None,
) -> None:
    """Raise `StreamError` if offsets are not those of the stream: they would mean other records.

    ``document`` is that of a checkpoint, or of the ``option``.  One without entries may be of an earlier version, and
    counts as that of the stream.  ``accepted``: an incarnation whose offsets the user says to be those of the stream.
    """
    entries = _entries(document)
    what = "the checkpoint is" if option is None else f"the offsets of option '{option}' are"
    name, incarnation = entries.get(STREAM, stream), entries.get(INCARNATION, "")
    if name != stream:
        raise StreamError(
            f"mqtt source: option 'stream': {what} of stream {name!r}, not of {stream!r}, whose offsets mean "
            f"other messages: give {stream!r} a checkpoint of its own"
        )
    now = manifest.incarnation
    if not incarnation or incarnation in (now.id, accepted) or now == UNKNOWN:
        return
    shared = next((earlier.ends for earlier in now.earlier if earlier.id == incarnation), None)
    reason = "it was made anew, restored, or is another broker's"
    if shared is not None:
        ends = dict(enumerate(shared))
        beyond = {partition: offset for partition, offset in from_json(document).items() if offset > ends.get(partition, 0)}
        if not beyond:
            return
        partition, offset = next(iter(beyond.items()))
        reason = (
            f"a backup that was restored, it has those messages of partition {partition} up to offset "
            f"{ends.get(partition, 0)}, and {offset} was reached"
        )
    raise StreamError(
        f"mqtt source: stream {stream!r}: {what} of its incarnation {incarnation!r}, not of {now.id or 'this backup'!r}: {reason}; "
        f"use a new checkpoint, or option 'acceptIncarnation'={incarnation!r} if the offsets mean the same messages"
    )


def from_json(document: Mapping[str, int]) -> Offsets:
    """The offsets of a `to_json` document."""
    return {int(partition): int(offset) for partition, offset in document.items() if "=" not in partition}


def check_selection(document: Mapping[str, int], selection: Mapping[str, str]) -> None:
    """Raise `OptionError` if a checkpoint's offsets were reached with another selection of rows.

    A checkpoint without any entry may be of an earlier version: then a selection is a warning.
    """
    before = _entries(document)
    if not before and selection:
        logger.warning(
            "mqtt source: the checkpoint does not say that its rows were selected by %s: they were not, or an "
            "earlier version has written it",
            " and ".join(f"{key} {selection[key]!r}" for key in selection),
        )
        return
    for name in SELECTIONS:
        old, new = before.get(name), selection.get(name)
        if old != new:
            raise OptionError(
                name,
                f"the checkpoint was written with {'none' if old is None else repr(old)}, not "
                f"{'none' if new is None else repr(new)}: use a new checkpoint, with startingOffsets="
                f"'{json.dumps(to_json(from_json(document)))}' to continue there",
            )


def _entries(document: Mapping[str, int]) -> dict[str, str]:
    return dict(key.split("=", 1) for key in document if "=" in key)


def earliest(manifest: Manifest) -> Offsets:
    return {partition: state.log_start for partition, state in manifest.items()}


def latest(manifest: Manifest) -> Offsets:
    return {partition: state.high_watermark for partition, state in manifest.items()}


def resolve(option: str, spec: OffsetSpec | None, default: Offsets, manifest: Manifest) -> Offsets:
    """Resolve the value of ``option`` against the manifest.

    ``default`` is used for an absent option and for partitions it does not name.  Raises `OptionError` for an unknown
    partition.
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
    """The part of the range that is kept.

    Raises `DataLoss` if that is not the whole range and ``fail`` is set.  An empty range loses nothing.
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
            losses.append(
                f"partition {partition} ends at offset {high_watermark}, before {max(first, last)}: "
                f"another stream has taken its place or its end was lost"
            )
        elif first < min(last, log_start):
            losses.append(f"partition {partition}: retention has removed the offsets {first} to {min(last, log_start) - 1}")
        kept_end[partition] = min(last, high_watermark)
        kept_start[partition] = min(max(first, log_start), kept_end[partition])
    if losses and fail:
        raise DataLoss(losses)
    return kept_start, kept_end


def limit_rows(start: Offsets, end: Offsets, max_rows: int) -> Offsets:
    """An end at most ``max_rows`` rows after ``start``.

    The rows are divided among partitions in proportion to their backlog.  Advances by at least one row.
    """
    waiting = {partition: max(0, end[partition] - start.get(partition, 0)) for partition in sorted(end)}
    total = sum(waiting.values())
    if total <= max_rows:
        return dict(end)
    shares = {partition: rows * max_rows // total for partition, rows in waiting.items()}
    left = max_rows - sum(shares.values())
    by_remainder = sorted(waiting, key=lambda partition: (-(waiting[partition] * max_rows % total), partition))
    for partition in by_remainder[:left]:
        shares[partition] += 1
    return {partition: start.get(partition, 0) + share if waiting[partition] else end[partition] for partition, share in shares.items()}
