"""One partition of a stream: its segment files and its high watermark.

Bytes after the last commit are cut before anything else is written.  Retention removes a segment in the order
watermark, readers, file.  The file of a segment that was sealed is removed only after its sealed file is on disk and
visible to readers.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from bridge_spark.log.archive.index import INDEX_FILE as ARCHIVE_INDEX_FILE
from bridge_spark.log.archive.index import ArchiveIndex, ArchiveState
from bridge_spark.log.files import sync_directory, write_all
from bridge_spark.log.high_watermark import (
    WATERMARK_BYTES,
    WATERMARK_FILE,
    Watermark,
    decode_watermark,
    encode_watermark,
)
from bridge_spark.log.record_batch import SegmentError, encode_batches, iter_batches, read_header
from bridge_spark.log.segment import Segment, append_batch, empty_segment, read_sealed_segment, recover_segment
from bridge_spark.log.segment_names import (
    INDEX_SUFFIX,
    SEALED_SUFFIX,
    SEGMENT_SUFFIX,
    UNFINISHED_SUFFIX,
    generation_of,
    segment_offsets,
)
from bridge_spark.log.sparse_index import INDEX_ENTRY, IndexEntry
from bridge_spark.log.stream_config import StreamConfig, StreamLogDamage, StreamLogError
from sessions.message import Message

End = tuple[int, int, str]  # offset, position in the segment file, first offset of the segment in 20 digits

logger = logging.getLogger(__name__)


class PartitionView(NamedTuple):
    """The committed part of a partition, as readers see it.  The last segment may be the active one."""

    log_start_offset: int
    high_watermark: int
    segments: tuple[Segment, ...]

    def describe(self, partition: int, archive: ArchiveState) -> dict[str, Any]:
        """The partition's entry in a manifest; times in microseconds, sizes in bytes.

        `archive` must have been read after this view: then one of the two has each offset from ``log_start_offset``.
        """
        archived = {
            "archive": {
                "first_offset": archive.start,
                "end_offset": archive.end,
                "segments": archive.segments,
                "bytes": archive.size,
            }
        }
        return {
            "partition": partition,
            "log_start_offset": min(self.log_start_offset, archive.start) if archive.segments else self.log_start_offset,
            **(archived if archive.segments else {}),
            "high_watermark": self.high_watermark,
            "segments": [
                {
                    "file": segment.file,
                    "first_offset": segment.first_offset,
                    "end_offset": segment.end_offset,
                    "bytes": segment.size,
                    "first_timestamp_us": segment.first_timestamp,
                    "last_timestamp_us": segment.last_timestamp,
                    "sealed": segment.sealed,
                }
                for segment in self.segments
            ],
        }


class Partition:
    """The files of one partition.  Only the writer thread may call its methods.

    ``view`` is replaced, never changed, so any thread may read it.
    """

    def __init__(self, config: StreamConfig, number: int, directory: Path) -> None:
        self.config = config
        self.number = number
        self.directory = directory
        self._watermark_path = directory / WATERMARK_FILE
        self.view = PartitionView(0, 0, ())
        self._sync_lock = threading.Lock()  # for the three below, which `sync` uses on another thread
        self._unsynced: dict[int, int] = {}  # first offset of a segment -> position of its first unsynced byte
        self._created = False  # a file was created since the directory was last synced
        self._sync_failed = False  # of a segment in `_unsynced`: it is written again before it is synced
        self.closed: tuple[Segment, ...] = ()  # committed, and complete
        self.archive = ArchiveIndex(directory / ARCHIVE_INDEX_FILE)
        self._active: Segment | None = None
        self._log_start = 0
        self._end = 0
        self._pending: list[Segment] = []
        self._pending_entries: list[tuple[Segment, IndexEntry]] = []
        self._files: dict[int, int] = {}  # first offset -> descriptor of an open segment
        self._must_cut = False  # the files have bytes of a failed transaction
        self._watermark_fd = -1

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.view.segments)

    def _path(self, first_offset: int, suffix: str = SEGMENT_SUFFIX) -> Path:
        return self.directory / f"{first_offset:020d}{suffix}"

    def _error_text(self, reason: str) -> str:
        return f"stream {self.config.name!r} partition {self.number}: {reason} ({self.directory})"

    # -- start ----------------------------------------------------------------

    def recover(self, end: int | None, thorough: bool, logged: int | None = None) -> int:
        """Cut the files back to the offset `end`, and return the end of what is there.

        If `end` is None, cut back to the high watermark, or if `thorough` to the last undamaged batch.  Records from
        the offset `logged` on may be missing or incomplete: the caller appends them again.  Raises `StreamLogError` if
        the log does not reach `logged`, or `end` if it is None.
        """
        self.directory.mkdir(exist_ok=True)
        self._load_archive_index()
        watermark = self._read_watermark(logged is None)
        published, start = watermark.high_watermark, watermark.log_start_offset
        if end is None and not thorough:
            end = published
        if end is not None and end < published:
            reason = (
                f"the database ends at offset {end} but readers have seen offsets up to {published}: it is older than"
                " the log; restore the database that belongs to the log, or run mqttbroker repair-store, which keeps"
                " the longer log"
            )
            raise StreamLogError(self._error_text(reason))
        for unfinished in self.directory.glob(f"*{UNFINISHED_SUFFIX}"):
            unfinished.unlink()
        firsts = []
        for first in segment_offsets(self.directory):
            if start <= first and (end is None or first < end):
                firsts.append(first)
            else:  # removed by retention, or never committed
                self._remove(first)
        if logged is not None and firsts and firsts[0] > max(start, logged):
            # A power loss took the segments before: the commit log has their records, and those of the others.
            for first in firsts:
                self._remove(first)
            firsts = []
        segments = self._recover_segments(firsts, end, thorough, logged)
        found = segments[-1].end_offset if segments else published if end is None else start
        if end is not None and found != end and (logged is None or found < logged):
            missing = f"offsets {found} to {end - 1} are missing"
            ends = f"the log ends at offset {found} but the database at {end}: {missing}"
            raise StreamLogDamage(self._error_text(ends))
        if found < self.archive.current.end:
            reason = f"the log ends at offset {found} but its archive at {self.archive.current.end}"
            raise StreamLogError(self._error_text(reason))
        if found < published and logged is None:
            lost = self.directory, found, published - 1
            logger.warning("event=offsets_lost partition=%s first_offset=%d last_offset=%d", *lost)
        self._open(segments, found)
        if found >= published or logged is None:
            self._publish()
        if logged is not None:
            for segment in segments:
                if segment.end_offset > logged and not segment.sealed:
                    self._unsynced[segment.first_offset] = 0
                    self._sync_failed = True  # a sync may have failed before the start
        return found

    def _open(self, segments: list[Segment], end: int) -> None:
        """Continue after `segments`; truncate their files to their extent."""
        for segment in segments:
            if not segment.sealed:
                os.truncate(self._path(segment.first_offset), segment.size)
        self._log_start = segments[0].first_offset if segments else end
        self._end = end
        self._active = segments[-1] if segments and not segments[-1].sealed else None
        self.closed = tuple(segments if self._active is None else segments[:-1])
        if self._active is not None:
            first = self._active.first_offset
            self._files[first] = os.open(self._path(first), os.O_RDWR)
        self._watermark_fd = os.open(self._watermark_path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._watermark_fd, WATERMARK_BYTES)
        sync_directory(self.directory)

    def _load_archive_index(self) -> None:
        try:
            self.archive.load()
        except SegmentError as error:
            raise StreamLogDamage(self._error_text(f"{ARCHIVE_INDEX_FILE}: {error}")) from None

    def _read_watermark(self, expected: bool) -> Watermark:
        """The watermark, zeros if it cannot be read; that is a warning if it is ``expected`` to be readable."""
        try:
            return decode_watermark(self._watermark_path.read_bytes())
        except FileNotFoundError:
            pass
        except SegmentError as error:
            if expected:
                logger.warning("event=watermark_unreadable file=%s reason=%s", self._watermark_path, error)
        return Watermark(0, 0, 0, 0)

    def _remove(self, first_offset: int) -> None:
        for suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX, SEALED_SUFFIX):
            self._path(first_offset, suffix).unlink(missing_ok=True)
        for compacted in self.directory.glob(f"{first_offset:020d}.*{SEALED_SUFFIX}"):
            compacted.unlink(missing_ok=True)

    def _recover_segments(self, firsts: list[int], end: int | None, thorough: bool, logged: int | None) -> list[Segment]:
        segments: list[Segment] = []
        for first, following in zip_longest(firsts, firsts[1:]):
            limit = end if following is None else following
            unsure = following is None or (logged is not None and following > logged)
            segment = self._recover_segment(first, limit, thorough or unsure)
            if segment.size > 0:
                segments.append(segment)
            if following is None or segment.end_offset == following:
                continue
            if end is not None and (logged is None or segment.end_offset < logged):
                missing = f"offsets {segment.end_offset} to {following - 1} are missing"
                raise StreamLogDamage(self._error_text(f"{missing} from segment {segment.file}"))
            for other in firsts[firsts.index(following) :]:
                self._remove(other)
            break
        return segments

    def _recover_segment(self, first: int, limit: int | None, thorough: bool) -> Segment:
        """The segment as it is on disk; if it exists sealed and unsealed, remove one of the two."""
        unsealed = self._path(first)
        generations = sorted(self.directory.glob(f"{first:020d}.*{SEALED_SUFFIX}"), key=lambda each: generation_of(each.name))
        path = generations[-1] if generations else self._path(first, SEALED_SUFFIX)
        try:
            segment = read_sealed_segment(path)
        except FileNotFoundError:
            return recover_segment(unsealed, first, limit, thorough)
        except SegmentError as error:
            if len(generations) > 1 or (generations and self._path(first, SEALED_SUFFIX).exists()):
                # The last compaction did not end: the file before it has all records.
                logger.warning("event=sealed_copy_removed file=%s reason=%s", path, error)
                path.unlink()
                return self._recover_segment(first, limit, thorough)
            found = recover_segment(unsealed, first, limit, True) if unsealed.exists() else None
            if found is None or found.end_offset != limit:
                raise StreamLogDamage(self._error_text(f"{path.name}: {error}")) from None
            logger.warning("event=sealed_copy_removed file=%s reason=%s", path, error)
            path.unlink()
            return found
        if limit is not None and segment.end_offset > limit:
            raise StreamLogDamage(self._error_text(f"{path.name} ends at offset {segment.end_offset}, not {limit}"))
        for former in {self._path(first, SEALED_SUFFIX), *generations} - {path}:
            sync_directory(self.directory)
            former.unlink(missing_ok=True)
        if unsealed.exists():
            # The sealer may have been killed between renaming the sealed file and syncing the directory.
            sync_directory(self.directory)
        self.remove_unsealed(first)
        return segment

    def close(self) -> None:
        """Close the files.  Only `recover` may be called after it."""
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
        """Write `records` at the end; return the new end, which is valid once `commit` is called."""
        if self._must_cut:
            self._cut()
        if not self._pending and self._active is not None:
            self._pending.append(self._active)
        start = 0
        times = [message.timestamp for message in records]
        for data in encode_batches(records, self.end()[0]):
            segment = self._writable(len(data), now)
            first_offset = segment.end_offset
            count = read_header(data).count
            write_all(self._files[segment.first_offset], data, segment.size)
            # Noted behind the write: a sync that runs meanwhile may come before it.
            with self._sync_lock:
                self._unsynced.setdefault(segment.first_offset, segment.size)
            received = times[start : start + count]
            segment, entry = append_batch(segment, first_offset, count, len(data), received)
            self._pending[-1] = segment
            if entry is not None:
                self._pending_entries.append((segment, entry))
            start += count
        return self.end()

    def end(self) -> End:
        """The end of everything written, committed or not."""
        segment = self._pending[-1] if self._pending else self._active
        if segment is None:
            return self._end, 0, f"{self._end:020d}"
        return segment.end_offset, segment.size, segment.stem

    def _writable(self, size: int, now: float) -> Segment:
        """The segment for a batch of `size` bytes; roll to a new one if needed."""
        if self._pending:
            segment = self._pending[-1]
            age = now - segment.first_timestamp / 1e6
            full = segment.size + size > self.config.segment_bytes
            if segment.size == 0 or not (full or age >= self.config.segment_age):
                return segment
        segment = empty_segment(self.end()[0])
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._files[segment.first_offset] = os.open(self._path(segment.first_offset), flags, 0o644)
        with self._sync_lock:
            self._created = True
        self._pending.append(segment)
        return segment

    def rollback(self) -> None:
        """Discard everything appended since the last commit."""
        self._must_cut = self._must_cut or bool(self._pending)
        self._pending.clear()
        self._pending_entries.clear()
        if self._must_cut:
            self._cut()

    def _cut(self) -> None:
        """Remove uncommitted bytes from the files.  Nothing is appended before this has succeeded."""
        active = self._active
        for first in list(self._files):
            if active is not None and first == active.first_offset:
                os.ftruncate(self._files[first], active.size)
            else:
                self._remove(first)
                # Otherwise the file could reappear after a power loss and be read as the segment written next.
                sync_directory(self.directory)
                os.close(self._files.pop(first))
        self._must_cut = False

    def commit(self) -> bool:
        """Make everything appended visible to readers; True if a segment was closed.

        Does not fail.  An index entry that cannot be written only makes lookups slower.
        """
        pending = self._pending
        if not pending:
            return False
        self.closed += tuple(pending[:-1])
        self._active = pending[-1]
        self._end = self._active.end_offset
        rolled = len(pending) > 1
        self._pending = []
        for segment in pending[:-1]:
            os.close(self._files.pop(segment.first_offset))
        self._write_index()
        self._publish()
        return rolled

    def _write_index(self) -> None:
        for segment, entry in self._pending_entries:
            try:
                fd = os.open(self._path(segment.first_offset, INDEX_SUFFIX), os.O_WRONLY | os.O_CREAT, 0o644)
                with open(fd, "wb", buffering=0):
                    position = (segment.index_entries - 1) * INDEX_ENTRY.size
                    write_all(fd, INDEX_ENTRY.pack(*entry), position)
            except OSError as error:
                logger.warning("event=index_behind file=%s.idx reason=%s", self.directory / segment.stem, error)
        self._pending_entries.clear()

    def _publish(self) -> None:
        """Show readers the committed records."""
        active = self._active
        segments = self.closed if active is None else (*self.closed, active)
        self.view = PartitionView(self._log_start, self.end()[0], segments)
        try:
            self._write_watermark(self._log_start)
        except OSError as error:
            logger.warning("event=watermark_behind file=%s reason=%s", self._watermark_path, error)

    def _write_watermark(self, log_start: int) -> None:
        end, position, stem = self.end()
        watermark = Watermark(end, int(stem), position, log_start)
        write_all(self._watermark_fd, encode_watermark(watermark), 0)

    # -- the disk, on any thread ------------------------------------------------

    def sync(self) -> None:
        """Return when everything appended before the call is on disk.  Raises `OSError`; the next call syncs it.

        After a failed sync its bytes are checked and written again first: a sync that is only repeated reports success.
        """
        with self._sync_lock:
            unsynced, self._unsynced = self._unsynced, {}
            created, self._created = self._created, False
            again, self._sync_failed = self._sync_failed, False
        try:
            for first_offset, position in list(unsynced.items()):
                self._sync_segment(first_offset, position, again)
                del unsynced[first_offset]
            if created:
                sync_directory(self.directory)
        except BaseException:
            with self._sync_lock:
                for first_offset, position in unsynced.items():
                    self._unsynced[first_offset] = min(position, self._unsynced.get(first_offset, position))
                self._created = self._created or created
                self._sync_failed = self._sync_failed or bool(unsynced)
            raise

    def _sync_segment(self, first_offset: int, position: int, again: bool) -> None:
        try:
            fd = os.open(self._path(first_offset), os.O_RDWR)
        except FileNotFoundError:
            return  # removed by retention, or sealed
        try:
            if again:
                self._write_again(fd, first_offset, position)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _write_again(self, fd: int, first_offset: int, position: int) -> None:
        """Write the committed bytes behind a position once more; what is not valid any more is an `OSError`."""
        size = next((one.size for one in self.view.segments if one.first_offset == first_offset and not one.sealed), 0)
        data = os.pread(fd, max(0, size - position), position)
        try:
            for _ in iter_batches(data):
                pass
        except SegmentError as error:
            path = self._path(first_offset)
            raise OSError(errno.EIO, f"{error.reason}: a restart writes it again", str(path)) from None
        write_all(fd, data, position)

    # -- sealing --------------------------------------------------------------

    def roll(self, now: float) -> bool:
        """Close the active segment if it is older than `segment_age`; whether it was closed."""
        segment = self._active
        if segment is None or self._pending or self._must_cut:
            return False
        if now - segment.first_timestamp / 1e6 < self.config.segment_age:
            return False
        self._close_active(segment)
        self._publish()
        return True

    def _close_active(self, segment: Segment) -> None:
        os.close(self._files.pop(segment.first_offset))
        self.closed += (segment,)
        self._active = None

    def replace_with_sealed(self, segment: Segment) -> Segment | None:
        """Show readers the sealed or compacted file, which is on disk, instead of the file before; return what it was.

        If retention has removed the segment meanwhile, remove the file and return None.  A segment may be reported twice:
        the file that readers are shown already, or a later one, stays.
        """
        closed = list(self.closed)
        place = bisect_left(closed, segment.first_offset, key=attrgetter("first_offset"))
        if place == len(closed) or closed[place].first_offset != segment.first_offset:
            (self.directory / segment.file).unlink(missing_ok=True)
            return None
        former = closed[place]
        if former.sealed and former.generation >= segment.generation:
            if former.file != segment.file:
                (self.directory / segment.file).unlink(missing_ok=True)
            return None
        closed[place] = segment
        self.closed = tuple(closed)
        self._publish()
        return former

    def remove_unsealed(self, first_offset: int) -> None:
        """Remove the segment file and index of a sealed segment."""
        for suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX):
            self._path(first_offset, suffix).unlink(missing_ok=True)

    def remove_former(self, former: Segment) -> None:
        """Remove the files of a segment that has others now."""
        (self.directory / former.file).unlink(missing_ok=True)
        if not former.sealed:
            self.remove_unsealed(former.first_offset)

    # -- retention ------------------------------------------------------------

    @property
    def removable(self) -> tuple[Segment, ...]:
        """The closed segments that retention may remove: those that are in the archive, if there is one."""
        if self.config.archive is None:
            return self.closed
        archived = self.archive.current.end
        return self.closed[: bisect_right(self.closed, archived, key=attrgetter("end_offset"))]

    def unarchived(self) -> tuple[Segment, ...]:
        """The closed segments that are not in the archive.  For any thread."""
        archived, closed = self.archive.current.end, self.closed
        return closed[bisect_left(closed, archived, key=attrgetter("first_offset")) :]

    def expire(self, before: int) -> None:
        """Remove the oldest segments whose records are all older than `before`, in microseconds."""
        count = 0
        removable = self.removable
        while count < len(removable) and removable[count].last_timestamp < before:
            count += 1
        active = self._active if self.config.archive is None else None
        idle = not self._pending and not self._must_cut and count == len(self.closed)
        if idle and active is not None and active.last_timestamp < before:
            self._close_active(active)
            count += 1
        if count:
            self.drop(count)

    def drop(self, count: int) -> None:
        """Remove the `count` oldest closed segments: first from the readers' view, then from disk."""
        dropped, kept = self.closed[:count], self.closed[count:]
        oldest = kept[0] if kept else self._active
        log_start = self._end if oldest is None else oldest.first_offset
        # Otherwise the files could be gone after a power loss while the old watermark still names them.
        self._write_watermark(log_start)
        os.fdatasync(self._watermark_fd)
        self.closed = kept
        self._log_start = log_start
        self._publish()
        for segment in dropped:
            self._remove(segment.first_offset)
        first, last = dropped[0].first_offset, dropped[-1].end_offset - 1
        logger.info("event=retention_removed partition=%s first_offset=%d last_offset=%d", self.directory, first, last)
