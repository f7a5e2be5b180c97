"""A copy of a partition up to one offset, while a broker appends to it.

The rule kept here: the copy holds every record that is kept up to the offset and
none behind it, each batch checked on its way; what retention removes while
the copy is made is missing from its beginning, and from nowhere else.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List

from bridge_spark.log.log_check import (
    describe,
    read_file,
    read_watermark,
    segment_name,
    segment_offsets,
    survey,
)
from bridge_spark.log.sealed import file_name, verify
from bridge_spark.log.segment import SegmentError, Watermark, encode_watermark

@contextmanager
def hold(streams: Path) -> Iterator[None]:
    """Keep a broker from removing the segments that it seals meanwhile.

    Who copies up to an offset needs the segment that has it as it was written: a sealed one cannot be cut.
    """
    try:
        lock = os.open(streams, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def is_held(streams: Path) -> bool:
    """Whether a backup is under way.  Raises `OSError`."""
    lock = os.open(streams, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


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
    copied: List[Path] = []
    last, size = end, 0
    for index, first in enumerate(firsts):
        following = firsts[index + 1] if index + 1 < len(firsts) else end
        if _copy_sealed(directory, target, first, following):
            copied.append(target / file_name(first))
            expected, last, size = following, end, 0
            continue
        name = segment_name(first)
        try:
            data = read_file(directory / name)
        except FileNotFoundError:
            if read_watermark(directory).log_start_offset <= first:
                raise DamagedLog(f"{directory / name}: is missing") from None
            for earlier in copied:
                earlier.unlink()
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
        copied.append(target / name)
        last = first
    if expected < end:
        if read_watermark(directory).log_start_offset < end:
            raise DamagedLog(f"{directory}: offsets {expected} to {end - 1} are missing")
        start = end  # retention took everything
        last, size = end, 0
    (target / "high_watermark").write_bytes(encode_watermark(Watermark(end, last, size, start)))
    return start


def _copy_sealed(directory: Path, target: Path, first: int, end: int) -> bool:
    """Copy the segment if it is sealed and ends there; one that was sealed since ends behind it."""
    name = file_name(first)
    try:
        shutil.copyfile(directory / name, target / name)
    except FileNotFoundError:
        return False
    try:
        part = verify(target / name)
        reason = "" if part.end_offset == end else f"ends at offset {part.end_offset}, not {end}"
    except SegmentError as error:
        reason = error.reason
    if not reason:
        return True
    (target / name).unlink()
    if not (directory / segment_name(first)).exists():
        raise DamagedLog(f"{directory / name}: {reason}")
    return False
