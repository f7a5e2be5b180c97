"""A copy of a partition up to one offset, while a broker appends to it.

The rule kept here: the copy holds every record that is kept up to the offset and
none behind it, each batch checked on its way; what retention removes while
the copy is made is missing from its beginning, and from nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import List

from bridge_spark.log_check import (
    describe,
    read_file,
    read_watermark,
    segment_name,
    segment_offsets,
    survey,
)
from bridge_spark.segment import Watermark, encode_watermark


class DamagedLog(Exception):
    """The log is damaged; the text names the file and the place."""


def copy_partition(directory: Path, target: Path, end: int) -> int:
    """Copy the partition to the new directory `target`; the first offset of the copy.

    Raises `DamagedLog` when a record before `end` is not there, or `OSError`.
    """
    target.mkdir(parents=True)
    start = read_watermark(directory).log_start_offset
    offsets = segment_offsets(directory) if directory.is_dir() else []
    firsts = [first for first in offsets if start <= first < end]
    start = expected = firsts[0] if firsts else min(start, end)
    copied: List[int] = []
    size = 0
    for index, first in enumerate(firsts):
        following = firsts[index + 1] if index + 1 < len(firsts) else end
        name = segment_name(first)
        try:
            data = read_file(directory / name)
        except FileNotFoundError:
            if read_watermark(directory).log_start_offset <= first:
                raise DamagedLog(f"{directory / name}: is missing") from None
            for earlier in copied:
                (target / segment_name(earlier)).unlink()
            copied.clear()
            start = expected = following
            continue
        spans = survey(data, first, following)
        for span in spans:
            if span.reason:
                raise DamagedLog(describe(str(directory / name), span))
        expected = spans[-1].end_offset if spans else first
        if expected < following:
            raise DamagedLog(f"{directory / name}: offsets {expected} to {following - 1} are missing")
        size = sum(span.size for span in spans)
        (target / name).write_bytes(data[:size])
        copied.append(first)
    if expected < end:
        if read_watermark(directory).log_start_offset < end:
            raise DamagedLog(f"{directory}: offsets {expected} to {end - 1} are missing")
        start = end  # retention took everything
    mark = Watermark(end, copied[-1] if copied else end, size if copied else 0, start)
    (target / "high_watermark").write_bytes(encode_watermark(mark))
    return start
