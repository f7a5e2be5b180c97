"""Copies a partition up to one offset while a broker appends to it.

The copy has every record up to the offset that retention has not removed, and none after it.  Each batch is checked.
Records that retention removes during the copy are missing at its beginning only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge_spark.log.archive.index import copy_index
from bridge_spark.log.check import describe, read_file, survey
from bridge_spark.log.high_watermark import Watermark, encode_watermark, read_watermark
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.sealed.footer import verify_file
from bridge_spark.log.segment_names import sealed_file_in, segment_file_name, segment_offsets


@contextmanager
def backup_lock(streams: Path) -> Iterator[None]:
    """Keep the broker from removing the unsealed files of segments that it seals meanwhile.

    A copy ends inside a segment, and a sealed segment cannot be cut.
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


def backup_in_progress(streams: Path) -> bool:
    """Whether a backup holds the lock.  Raises `OSError`."""
    lock = os.open(streams, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


class DamagedLog(Exception):
    """The log is damaged; the text names the file and the position."""


def copy_partition(directory: Path, target: Path, end: int) -> int:
    """Copy the partition up to the offset `end` to the new directory `target`; return the first offset of the copy.

    Raises `DamagedLog` if a record before `end` is missing, or `OSError`.
    """
    target.mkdir(parents=True)
    start = read_watermark(directory).log_start_offset
    offsets = segment_offsets(directory) if directory.is_dir() else []
    firsts = [first for first in offsets if start <= first < end]
    start = expected = firsts[0] if firsts else min(start, end)
    copied: list[Path] = []
    last, size = end, 0
    for index, first in enumerate(firsts):
        following = firsts[index + 1] if index + 1 < len(firsts) else end
        sealed = _copy_sealed(directory, target, first, following) or _copy_sealed(directory, target, first, following)
        if sealed is not None:
            copied.append(sealed)
            expected, last, size = following, end, 0
            continue
        name = segment_file_name(first)
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
        start = end  # retention removed everything
        last, size = end, 0
    # After the files: the archive has the segments that retention has removed meanwhile.
    copy_index(directory, target, end)
    (target / "high_watermark").write_bytes(encode_watermark(Watermark(end, last, size, start)))
    return start


def _copy_sealed(directory: Path, target: Path, first: int, end: int) -> Path | None:
    """The copy of the segment, if it is sealed and ends at `end`; one that was sealed during the backup may end after it."""
    name = sealed_file_in(directory, first)
    try:
        shutil.copyfile(directory / name, target / name)
    except FileNotFoundError:
        return None
    try:
        footer = verify_file(target / name)
        reason = "" if footer.end_offset == end else f"ends at offset {footer.end_offset}, not {end}"
    except SegmentError as error:
        reason = error.reason
    if not reason:
        return target / name
    (target / name).unlink()
    if not (directory / segment_file_name(first)).exists():
        raise DamagedLog(f"{directory / name}: {reason}")
    return None
