"""Resolves the start and end of a read from its options.

The precedence is that of Spark's Kafka source: the timestamp for all partitions, then timestamps per partition, then
offsets.  Partitions that an option does not name fall through to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge_spark.log.predicates import Predicate
from bridge_spark.source import offsets
from bridge_spark.source.offsets import Offsets
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.options import SourceOptions
from bridge_spark.source.storage import Manifest, Storage
from bridge_spark.source.time_index import offsets_at


def check_partitions(options: SourceOptions, manifest: Manifest) -> None:
    """Raise `StreamError` for offsets of another stream, and `OptionError` for partitions that the stream does not have."""
    for name, document in options.positions:
        offsets.check_stream(document, options.stream, manifest, options.accept_incarnation, name)
    for name, named in (
        ("startingOffsets", options.starting_offsets),
        ("startingOffsetsByTimestamp", options.starting_timestamps),
        ("endingOffsets", options.ending_offsets),
        ("endingOffsetsByTimestamp", options.ending_timestamps),
    ):
        for partition in named if isinstance(named, dict) else ():
            if partition not in manifest:
                raise OptionError(name, f"there is no partition {partition}, only 0 to {len(manifest) - 1}")


def starting(options: SourceOptions, storage: Storage, manifest: Manifest, default: Offsets) -> Offsets:
    """The first offset to read, by partition.

    Raises `OptionError` for a time after the last record, unless startingOffsetsByTimestampStrategy is ``latest``.
    """
    begin = offsets.resolve("startingOffsets", options.starting_offsets, default, manifest)
    name, times = _times("starting", options.starting_timestamp, options.starting_timestamps, manifest)
    for partition, offset in offsets_at(storage, manifest, times).items():
        if offset == manifest[partition].high_watermark and not options.latest_if_no_offset:
            raise OptionError(
                name, f"partition {partition} has received nothing since then (startingOffsetsByTimestampStrategy=latest begins at its end)"
            )
        begin[partition] = offset
    return begin


def ending(options: SourceOptions, storage: Storage, manifest: Manifest, begin: Offsets) -> Offsets:
    """The end offset, exclusive, by partition; a time after the last record means the end of the partition.

    Raises `OptionError` if an end is before ``begin``.
    """
    end = offsets.resolve("endingOffsets", options.ending_offsets, offsets.latest(manifest), manifest)
    name, times = _times("ending", options.ending_timestamp, options.ending_timestamps, manifest)
    end.update(offsets_at(storage, manifest, times))
    for partition, offset in begin.items():
        if end[partition] < offset and (partition in times or options.ending_offsets is not None):
            raise OptionError(
                name if partition in times else "endingOffsets",
                f"partition {partition} would end at {end[partition]}, before it starts at {offset}",
            )
    return end


def narrowed(storage: Storage, manifest: Manifest, predicate: Predicate, begin: Offsets, end: Offsets) -> tuple[Offsets, Offsets]:
    """The smallest range that holds every matching row."""
    low, high = dict(begin), dict(end)
    for partition in begin:
        if predicate.partition.contains(partition):
            low[partition], high[partition] = predicate.offsets(begin[partition], end[partition])
        else:
            low[partition] = high[partition]
    since = predicate.timestamp.lowest
    if since is not None:
        times = {partition: since for partition in begin if low[partition] < high[partition]}
        for partition, offset in offsets_at(storage, manifest, times).items():
            low[partition] = min(max(low[partition], offset), high[partition])
    return low, high


def _times(kind: str, timestamp: int | None, per_partition: Mapping[int, int] | None, manifest: Manifest) -> tuple[str, Mapping[int, int]]:
    """The option that takes precedence, and its time for each partition."""
    if timestamp is not None:
        return f"{kind}Timestamp", {partition: timestamp for partition in manifest}
    return f"{kind}OffsetsByTimestamp", per_partition or {}
