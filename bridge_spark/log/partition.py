"""One partition of a stream: its segment files, and the high watermark that readers may go up to.

The rule kept here: what is on disk beyond the last commit is cut before anything else is written there, a segment is
given up in the order watermark, readers, file, and one that was sealed goes after its sealed file has come to the disk
and to the readers.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from bridge_spark.log import segment, segment_file
from bridge_spark.log.files import sync_directory, write_all
from bridge_spark.log.log_check import segment_offsets
from bridge_spark.log.sealed import SUFFIX, UNFINISHED
from bridge_spark.log.segment import IndexEntry, SegmentError, Watermark
from bridge_spark.log.segment_file import Segment, View
from bridge_spark.log.stream_config import StreamConfig, StreamLogDamage, StreamLogError
from sessions.message import Message

End = Tuple[int, int, str]

logger = logging.getLogger(__name__)


class Partition:
    """The files of one partition; every method belongs to the writer thread.

    ``view`` is replaced as a whole, so any thread may read it.
    """

    def __init__(self, config: StreamConfig, number: int, directory: Path) -> None:
        self.config = config
        self.number = number
        self.directory = directory
        self._watermark_path = directory / "high_watermark"
        self.view = View(0, 0, ())
        self.unsynced: Dict[int, int] = {}  # descriptors and where their new bytes begin
        self.created = False  # a file stands there that the directory on disk may not know
        self.closed: Tuple[Segment, ...] = ()  # committed, and get no more records
        self._active: Optional[Segment] = None
        self._log_start = 0
        self._end = 0
        self._pending: List[Segment] = []
        self._pending_entries: List[Tuple[Segment, IndexEntry]] = []
        self._files: Dict[int, int] = {}  # first offset -> descriptor of an open segment
        self._uncut = False
        self._watermark_fd = -1

    @property
    def size(self) -> int:
        return sum(part.size for part in self.view.segments)

    def _path(self, first_offset: int, suffix: str = ".seg") -> Path:
        return self.directory / f"{first_offset:020d}{suffix}"

    def _where(self, reason: str) -> str:
        return f"stream {self.config.name!r} partition {self.number}: {reason} ({self.directory})"

    # -- start ----------------------------------------------------------------

    def recover(self, end: Optional[int], thorough: bool) -> None:
        """Cut the files back to the offset `end`; None: to the high watermark, or
        with `thorough` to the last good batch.

        Raises `StreamLogError` when the log does not reach `end`.
        """
        self.directory.mkdir(exist_ok=True)
        watermark = self._read_watermark()
        seen, start = watermark.high_watermark, watermark.log_start_offset
        if end is None and not thorough:
            end = seen
        if end is not None and end < seen:
            reason = (
                f"the database ends at offset {end} but readers have been shown offsets up to"
                f" {seen}: it is older than the log; restore the database that belongs to the"
                " log, or run mqttbroker repair-store, which keeps the longer log"
            )
            raise StreamLogError(self._where(reason))
        for unfinished in self.directory.glob(f"*{UNFINISHED}"):
            unfinished.unlink()
        firsts = []
        for first in segment_offsets(self.directory):
            if start <= first and (end is None or first < end):
                firsts.append(first)
            else:  # given up by retention, or of no commit
                self._remove(first)
        parts = self._examine_all(firsts, end, thorough)
        found = parts[-1].end_offset if parts else seen if end is None else start
        if end is not None and found != end:
            missing = f"offsets {found} to {end - 1} are missing"
            ends = f"the log ends at offset {found} but the database at {end}: {missing}"
            raise StreamLogDamage(self._where(ends))
        if found < seen:
            logger.warning("event=offsets_lost partition=%s first_offset=%d last_offset=%d", self.directory, found, seen - 1)
        self._open(parts, found)

    def _open(self, parts: List[Segment], end: int) -> None:
        """Go on behind the `parts`, whose files keep nothing else."""
        for part in parts:
            if not part.sealed:
                os.truncate(self._path(part.first_offset), part.size)
        self._log_start = parts[0].first_offset if parts else end
        self._end = end
        self._active = parts[-1] if parts and not parts[-1].sealed else None
        self.closed = tuple(parts if self._active is None else parts[:-1])
        if self._active is not None:
            first = self._active.first_offset
            self._files[first] = os.open(self._path(first), os.O_RDWR)
        self._watermark_fd = os.open(self._watermark_path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._watermark_fd, segment.WATERMARK_BYTES)
        self._publish()
        sync_directory(self.directory)

    def _read_watermark(self) -> Watermark:
        try:
            return segment.decode_watermark(self._watermark_path.read_bytes())
        except FileNotFoundError:
            pass
        except SegmentError as error:
            logger.warning("event=watermark_unreadable file=%s reason=%s", self._watermark_path, error)
        return Watermark(0, 0, 0, 0)

    def _remove(self, first_offset: int) -> None:
        for suffix in (".seg", ".idx", SUFFIX):
            self._path(first_offset, suffix).unlink(missing_ok=True)

    def _examine_all(self, firsts: List[int], end: Optional[int], thorough: bool) -> List[Segment]:
        parts: List[Segment] = []
        for first, following in zip_longest(firsts, firsts[1:]):
            limit = end if following is None else following
            part = self._examine(first, limit, thorough or following is None)
            if part.size > 0:
                parts.append(part)
            if following is None or part.end_offset == following:
                continue
            if end is not None:
                missing = f"offsets {part.end_offset} to {following - 1} are missing"
                raise StreamLogDamage(self._where(f"{missing} from segment {part.file}"))
            for other in firsts[firsts.index(following) :]:
                self._remove(other)
            break
        return parts

    def _examine(self, first: int, limit: Optional[int], thorough: bool) -> Segment:
        """The segment as it is on disk; where it is there twice, one goes."""
        path, unsealed = self._path(first, SUFFIX), self._path(first)
        try:
            part = segment_file.examine_sealed(path)
        except FileNotFoundError:
            return segment_file.examine(unsealed, first, limit, thorough)
        except SegmentError as error:
            found = segment_file.examine(unsealed, first, limit, True) if unsealed.exists() else None
            if found is None or found.end_offset != limit:
                raise StreamLogDamage(self._where(f"{path.name}: {error}")) from None
            logger.warning("event=sealed_copy_removed file=%s reason=%s", path, error)
            path.unlink()
            return found
        if limit is not None and part.end_offset > limit:
            raise StreamLogDamage(self._where(f"{path.name} ends at offset {part.end_offset}, not {limit}"))
        if unsealed.exists():
            # Who gave the file its name may have been killed before the name was on disk.
            sync_directory(self.directory)
        self.remove_unsealed(first)
        return part

    def close(self) -> None:
        """Close the files; the partition is of no more use."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
        self._pending.clear()
        self._pending_entries.clear()
        if self._watermark_fd >= 0:
            os.close(self._watermark_fd)
            self._watermark_fd = -1

    # -- one batch ------------------------------------------------------------

    def append(self, records: Sequence[Message], now: float) -> End:
        """Write `records` after all others; the new end, which counts once `commit` is called."""
        if self._uncut:
            self._cut()
        if not self._pending and self._active is not None:
            self._pending.append(self._active)
        start = 0
        times = [message.timestamp for message in records]
        for data in segment.encode_batches(records, self.end()[0]):
            part = self._writable(len(data), now)
            first_offset = part.end_offset
            count = segment.read_header(data).count
            fd = self._files[part.first_offset]
            self.unsynced.setdefault(fd, part.size)
            write_all(fd, data, part.size)
            received = times[start : start + count]
            part, entry = segment_file.extend(part, first_offset, count, len(data), received)
            self._pending[-1] = part
            if entry is not None:
                self._pending_entries.append((part, entry))
            start += count
        return self.end()

    def end(self) -> End:
        """The end of all that is written: offset, position in the segment, its first offset."""
        part = self._pending[-1] if self._pending else self._active
        if part is None:
            return self._end, 0, f"{self._end:020d}"
        return part.end_offset, part.size, part.stem

    def _writable(self, size: int, now: float) -> Segment:
        """The segment that takes a batch of `size` bytes, a new one if need be."""
        if self._pending:
            part = self._pending[-1]
            age = now - part.first_timestamp / 1e6
            full = part.size + size > self.config.segment_bytes
            if part.size == 0 or not (full or age >= self.config.segment_age):
                return part
        part = segment_file.empty_segment(self.end()[0])
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._files[part.first_offset] = os.open(self._path(part.first_offset), flags, 0o644)
        self.created = True
        self._pending.append(part)
        return part

    def rollback(self) -> None:
        """Forget what was appended since the last commit."""
        self._uncut = self._uncut or bool(self._pending)
        self._pending.clear()
        self._pending_entries.clear()
        self.unsynced.clear()
        self.created = False
        if self._uncut:
            self._cut()

    def _cut(self) -> None:
        """Take bytes without a commit off the disk; until that works nothing is appended."""
        active = self._active
        for first in list(self._files):
            if active is not None and first == active.first_offset:
                os.ftruncate(self._files[first], active.size)
            else:
                self._remove(first)
                # A file that came back after a power loss would be taken for what is written there next.
                sync_directory(self.directory)
                os.close(self._files.pop(first))
        self._uncut = False

    def commit(self) -> bool:
        """What was appended counts from now on; True when a segment was closed.

        Does not fail: what a full disk keeps from the index is only slower to find.
        """
        pending = self._pending
        if not pending:
            return False
        self.closed += tuple(pending[:-1])
        self._active = pending[-1]
        self._end = self._active.end_offset
        rolled = len(pending) > 1
        self._pending = []
        for part in pending[:-1]:
            os.close(self._files.pop(part.first_offset))
        self._write_index()
        self._publish()
        return rolled

    def _write_index(self) -> None:
        for part, entry in self._pending_entries:
            try:
                fd = os.open(self._path(part.first_offset, ".idx"), os.O_WRONLY | os.O_CREAT, 0o644)
                with open(fd, "wb", buffering=0):
                    place = (part.index_entries - 1) * segment.INDEX_ENTRY.size
                    write_all(fd, segment.INDEX_ENTRY.pack(*entry), place)
            except OSError as error:
                logger.warning("event=index_behind file=%s.idx reason=%s", self.directory / part.stem, error)
        self._pending_entries.clear()

    def _publish(self) -> None:
        """Let readers see what is committed."""
        active = self._active
        segments = self.closed if active is None else (*self.closed, active)
        self.view = View(self._log_start, self.end()[0], segments)
        try:
            self._write_watermark(self._log_start)
        except OSError as error:
            logger.warning("event=watermark_behind file=%s reason=%s", self._watermark_path, error)

    def _write_watermark(self, log_start: int) -> None:
        end, position, stem = self.end()
        watermark = Watermark(end, int(stem), position, log_start)
        write_all(self._watermark_fd, segment.encode_watermark(watermark), 0)

    # -- sealing --------------------------------------------------------------

    def roll(self, now: float) -> bool:
        """Close the last segment if it is old, though nothing new comes; whether it was."""
        part = self._active
        if part is None or self._pending or self._uncut or now - part.first_timestamp / 1e6 < self.config.segment_age:
            return False
        self._close_active(part)
        self._publish()
        return True

    def _close_active(self, part: Segment) -> None:
        os.close(self._files.pop(part.first_offset))
        self.closed += (part,)
        self._active = None

    def adopt(self, part: Segment) -> bool:
        """Show readers the sealed file, which is on disk, instead of the segment's own.

        False, and the file goes, when retention was quicker.
        """
        closed = list(self.closed)
        place = bisect_left(closed, part.first_offset, key=attrgetter("first_offset"))
        if place == len(closed) or closed[place].first_offset != part.first_offset:
            self._path(part.first_offset, SUFFIX).unlink(missing_ok=True)
            return False
        closed[place] = part
        self.closed = tuple(closed)
        self._publish()
        return True

    def remove_unsealed(self, first_offset: int) -> None:
        """The files of a segment whose sealed file readers have been shown."""
        for suffix in (".seg", ".idx"):
            self._path(first_offset, suffix).unlink(missing_ok=True)

    # -- retention ------------------------------------------------------------

    def expire(self, before: int) -> None:
        """Remove the oldest segments as long as all their records are older than `before`."""
        count = 0
        while count < len(self.closed) and self.closed[count].last_timestamp < before:
            count += 1
        active = self._active
        idle = not self._pending and not self._uncut and count == len(self.closed)
        if idle and active is not None and active.last_timestamp < before:
            self._close_active(active)
            count += 1
        if count:
            self.drop(count)

    def drop(self, count: int) -> None:
        """Remove the `count` oldest closed segments, for readers first, then their files."""
        dropped, kept = self.closed[:count], self.closed[count:]
        oldest = kept[0] if kept else self._active
        log_start = self._end if oldest is None else oldest.first_offset
        # The unlinking may reach the disk before the watermark's bytes do.
        self._write_watermark(log_start)
        os.fdatasync(self._watermark_fd)
        self.closed = kept
        self._log_start = log_start
        self._publish()
        for part in dropped:
            self._remove(part.first_offset)
        first, last = dropped[0].first_offset, dropped[-1].end_offset - 1
        logger.info("event=retention_removed partition=%s first_offset=%d last_offset=%d", self.directory, first, last)
