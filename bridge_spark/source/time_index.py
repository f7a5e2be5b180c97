"""Finds offsets by receipt time.

Reading from the returned offset includes every record received at or after the time, even if the clock stepped back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import partial

from bridge_spark.log.record_batch import SegmentError, timestamps
from bridge_spark.log.sealed.footer import read_footer, search_row_groups
from bridge_spark.log.segment_names import is_sealed
from bridge_spark.source.offsets import Offsets
from bridge_spark.source.plan import Slice
from bridge_spark.source.slice_reader import LOOKUPS, log_batches
from bridge_spark.source.storage import Manifest, PartitionState, Segment, SegmentGone, Storage, StreamError


def offsets_at(storage: Storage, manifest: Manifest, times: Mapping[int, int]) -> Offsets:
    """For each partition of ``times``, the first offset received at or after the time (microseconds since the epoch),
    or the partition's end.

    Of an older segment, only the part after its last index entry is read.
    """
    answers = {timestamp: storage.offsets_at(timestamp) for timestamp in set(times.values())}
    found: Offsets = {}
    for partition, timestamp in times.items():
        state, known = manifest[partition], answers[timestamp]
        if known is None:
            # The lookup may find a record that is newer than the manifest.
            found[partition] = min(_first_at(storage, partition, state, timestamp), state.high_watermark)
        else:
            found[partition] = min(known.get(partition, state.high_watermark), state.high_watermark)
    return found


def _first_at(storage: Storage, partition: int, state: PartitionState, timestamp: int) -> int:
    for _ in range(LOOKUPS):
        try:
            return _search(storage, partition, state, timestamp)
        except SegmentGone:  # sealed since, or removed by retention
            state = storage.manifest()[partition]
    return _search(storage, partition, state, timestamp)


def _search(storage: Storage, partition: int, state: PartitionState, timestamp: int) -> int:
    archived = storage.archived_at(partition, timestamp) if state.archive is not None else None
    if archived is not None and archived.first_offset < state.local_start:
        found = _search_sealed(storage, partition, archived, timestamp)
        if found is not None:
            return found
    for segment in state.segments:
        if is_sealed(segment.file):
            found = _search_sealed(storage, partition, segment, timestamp)
            if found is not None:
                return found
            continue
        index = storage.index(partition, segment)
        number = bisect_left(index, timestamp, key=lambda entry: entry.timestamp)
        start = index[number - 1] if number else None
        part = Slice(
            partition,
            segment.file,
            start.position if start else 0,
            segment.size,
            start.first_offset if start else segment.first_offset,
            segment.end_offset,
            segment.size,
        )
        for data, batch in log_batches(storage, part):
            for offset, received in enumerate(timestamps(data, batch), batch.first_offset):
                if received >= timestamp and offset >= state.log_start:
                    return offset
    return state.high_watermark


def _search_sealed(storage: Storage, partition: int, segment: Segment, timestamp: int) -> int | None:
    read = partial(storage.read, partition, segment.file)
    try:
        footer = read_footer(read, segment.size)
        found = search_row_groups(read, footer, timestamp)
    except SegmentError as error:
        where = storage.describe(partition, segment.file)
        raise StreamError(f"mqtt source: {where} is corrupt: {error.reason}") from None
    return found if found < footer.end_offset else None
