"""The stream log: append-only partitions of record batches in segment files.

The rule kept here: a reader never sees what could be taken back.  Records go to
the disk before the transaction that makes them count; the high watermark moves
after it, and nothing beyond the watermark is listed, served or searched.

`<directory>/<stream>/stream.json` says what the stream is; below it, in one
directory per partition, stand `<first offset, 20 digits>.seg`, its sparse index
`.idx` and `high_watermark` (`bridge_spark.segment` has the formats).  One thread,
the writer, calls `recover` and then `append`, `sync`, `rollback` and `committed`;
`streams`, `manifest`, `committed_file` and `offset_for_timestamp` are for any.

Several files are synced at the price of one or two: writeback is started for
all of them before the first is waited for (4 files: 0.85 ms, one after the
other 1.35 ms; a pool of threads took as long as the former and twice its CPU).
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import zlib
from itertools import zip_longest
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from bridge_spark import segment
from bridge_spark.segment import IndexEntry, Segment, SegmentError, View, Watermark
from sessions.message import Message

FORMAT_VERSION = 1
RETENTION_INTERVAL = 1.0  # seconds between looks for what retention may take

Key = Tuple[str, int]  # stream and partition
End = Tuple[int, int, str]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_SEGMENT_FILE = re.compile(r"(\d{20})\.seg")

logger = logging.getLogger(__name__)


class StreamLogError(Exception):
    """The files of a stream are not what the configuration or the database says."""


class StreamLogDamage(StreamLogError):
    """Files are damaged or missing; `bridge_spark.log_repair` mends that."""


class StreamConfig:
    """What one stream keeps and for how long; raises `ValueError` on impossible values.

    ``retention_age`` and ``segment_age`` are seconds, ``retention_bytes`` (of the
    stream, all partitions) and ``segment_bytes`` bytes; None keeps for ever.
    """

    def __init__(
        self,
        name: str,
        filters: Sequence[str],
        partitions: int = 1,
        key: str = "topic",
        retention_age: Optional[float] = None,
        retention_bytes: Optional[int] = None,
        segment_bytes: int = 64 * 1024 * 1024,
        segment_age: float = 3600.0,
    ) -> None:
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"stream name {name!r}: letters, digits, '_', '-' and '.', no leading '.'"
            )
        for what, value in (
            ("partitions", partitions),
            ("segment_bytes", segment_bytes),
            ("segment_age", segment_age),
            ("retention_age", retention_age),
            ("retention_bytes", retention_bytes),
        ):
            if value is not None and value <= 0:
                raise ValueError(f"stream {name!r}: {what} must be positive, not {value}")
        self.name = name
        self.filters = list(filters)
        self.partitions = partitions
        self.key = key
        self.retention_age = retention_age
        self.retention_bytes = retention_bytes
        self.segment_bytes = segment_bytes
        self.segment_age = segment_age


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, the same on every start and machine."""
    return zlib.crc32(key) % partitions


def _write_all(fd: int, data: bytes, position: int) -> None:
    written = os.pwrite(fd, data, position)
    while written < len(data):
        written += os.pwrite(fd, data[written:], position + written)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or as before."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb", buffering=0) as file:
        _write_all(file.fileno(), data, 0)
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


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
        firsts = []
        for match in map(_SEGMENT_FILE.fullmatch, sorted(os.listdir(self.directory))):
            first = int(match[1]) if match is not None else -1
            if start <= first and (end is None or first < end):
                firsts.append(first)
            elif first >= 0:  # given up by retention, or of no commit
                self._remove(first)
        parts = self._examine_all(firsts, end, thorough)
        found = parts[-1].end_offset if parts else seen if end is None else start
        if end is not None and found != end:
            missing = f"offsets {found} to {end - 1} are missing"
            ends = f"the log ends at offset {found} but the database at {end}: {missing}"
            raise StreamLogDamage(self._where(ends))
        if found < seen:
            logger.warning("%s", self._where(f"offsets {found} to {seen - 1} are lost"))
        self._open(parts, found)

    def _open(self, parts: List[Segment], end: int) -> None:
        """Go on behind the `parts`, whose files keep nothing else."""
        for part in parts:
            os.truncate(self._path(part.first_offset), part.size)
        self._log_start = parts[0].first_offset if parts else end
        self._end = end
        self.closed = tuple(parts[:-1])
        self._active = parts[-1] if parts else None
        if self._active is not None:
            first = self._active.first_offset
            self._files[first] = os.open(self._path(first), os.O_RDWR)
        self._watermark_fd = os.open(self._watermark_path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._watermark_fd, segment.WATERMARK_BYTES)
        self._publish()
        _sync_directory(self.directory)

    def _read_watermark(self) -> Watermark:
        try:
            return segment.decode_watermark(self._watermark_path.read_bytes())
        except FileNotFoundError:
            pass
        except SegmentError as error:
            logger.warning("%s: %s", self._watermark_path, error)
        return Watermark(0, 0, 0, 0)

    def _remove(self, first_offset: int) -> None:
        for suffix in (".seg", ".idx"):
            self._path(first_offset, suffix).unlink(missing_ok=True)

    def _examine_all(self, firsts: List[int], end: Optional[int], thorough: bool) -> List[Segment]:
        parts: List[Segment] = []
        for first, following in zip_longest(firsts, firsts[1:]):
            limit = end if following is None else following
            path = self._path(first)
            part = segment.examine(path, first, limit, thorough or following is None)
            if part.size > 0:
                parts.append(part)
            if following is None or part.end_offset == following:
                continue
            if end is not None:
                missing = f"offsets {part.end_offset} to {following - 1} are missing"
                raise StreamLogDamage(self._where(f"{missing} from segment {path.name}"))
            for other in firsts[firsts.index(following) :]:
                self._remove(other)
            break
        return parts

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
            _write_all(fd, data, part.size)
            received = times[start : start + count]
            part, entry = segment.extend(part, first_offset, count, len(data), received)
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
        part = segment.empty_segment(self.end()[0])
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
                    _write_all(fd, segment.INDEX_ENTRY.pack(*entry), place)
            except OSError as error:
                logger.warning("%s.idx: %s", self.directory / part.stem, error)
        self._pending_entries.clear()

    def _publish(self) -> None:
        """Let readers see what is committed."""
        active = self._active
        segments = self.closed if active is None else (*self.closed, active)
        end, position, stem = self.end()
        watermark = Watermark(end, int(stem), position, self._log_start)
        self.view = View(self._log_start, end, segments)
        try:
            _write_all(self._watermark_fd, segment.encode_watermark(watermark), 0)
        except OSError as error:
            logger.warning("%s: %s", self._watermark_path, error)

    # -- retention ------------------------------------------------------------

    def expire(self, before: int) -> None:
        """Remove the oldest segments as long as all their records are older than `before`."""
        count = 0
        while count < len(self.closed) and self.closed[count].last_timestamp < before:
            count += 1
        active = self._active
        idle = not self._pending and not self._uncut and count == len(self.closed)
        if idle and active is not None and active.last_timestamp < before:
            os.close(self._files.pop(active.first_offset))
            self.closed += (active,)
            self._active = None
            count += 1
        if count:
            self.drop(count)

    def drop(self, count: int) -> None:
        """Remove the `count` oldest closed segments, for readers first, then their files."""
        dropped = self.closed[:count]
        self.closed = self.closed[count:]
        oldest = self.closed[0] if self.closed else self._active
        self._log_start = self._end if oldest is None else oldest.first_offset
        self._publish()
        # The unlinking may reach the disk before the watermark's bytes do.
        os.fdatasync(self._watermark_fd)
        for part in dropped:
            self._remove(part.first_offset)
        first, last = dropped[0].first_offset, dropped[-1].end_offset - 1
        logger.info("%s: retention removed offsets %d to %d", self.directory, first, last)


class StreamLogs:
    """The logs of all streams, below `directory` (the data directory's ``streams``).

    `clock` gives seconds since the Unix epoch.  Implements the `Log` protocol of
    `sessions.store`; the module's docstring says which thread calls what.
    """

    def __init__(
        self,
        directory: Union[str, Path],
        streams: Sequence[StreamConfig],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self._streams = {config.name: config for config in streams}
        if len(self._streams) != len(streams):
            raise ValueError("two streams have the same name")
        self._clock = clock
        self._partitions: Dict[Key, Partition] = {}
        for config in streams:
            for number in range(config.partitions):
                directory_of = self.directory / config.name / str(number)
                self._partitions[config.name, number] = Partition(config, number, directory_of)
        self._touched: Dict[Key, Partition] = {}
        self._next_retention = 0.0

    # -- the writer thread ----------------------------------------------------

    def recover(self, ends: Optional[Mapping[Key, int]]) -> None:
        """Make or open every stream, cut back to the ends that the database knows.

        A partition without an end is cut back to its high watermark, which is
        the start unless another database knew more.  None, for a broker without
        a database: every good batch is kept.  Streams that are not configured
        stay as they are.  Raises `StreamLogError`, or `OSError`.
        """
        for config in self._streams.values():
            self._describe(config)
        for key, partition in self._partitions.items():
            partition.close()
            partition.recover(None if ends is None else ends.get(key), ends is None)

    def _describe(self, config: StreamConfig) -> None:
        directory = self.directory / config.name
        path = directory / "stream.json"
        description = {
            "name": config.name,
            "partitions": config.partitions,
            "filters": config.filters,
            "key": config.key,
            "format_version": FORMAT_VERSION,
        }
        if path.exists():
            try:
                known = json.loads(path.read_bytes())
                partitions, version = known["partitions"], known["format_version"]
            except (ValueError, KeyError, TypeError) as error:
                raise StreamLogDamage(f"{path} is damaged: {error!r}") from None
            if version != FORMAT_VERSION:
                raise StreamLogError(f"{path}: format {version}; this program's is {FORMAT_VERSION}")
            if partitions != config.partitions:
                change = f"{partitions} partitions and cannot get {config.partitions}"
                raise StreamLogError(f"stream {config.name!r} has {change}: keys would move")
            if known == description:
                return
        directory.mkdir(parents=True, exist_ok=True)
        _replace_file(path, (json.dumps(description, indent=2) + "\n").encode())
        _sync_directory(self.directory)
        _sync_directory(self.directory.parent)

    def append(self, records: Mapping[Key, Sequence[Message]]) -> Dict[Key, End]:
        """Write records, not yet durable; the new end of each partition: offset, position
        in the segment file, the segment's first offset in 20 digits.

        Raises `OSError`, `StreamLogError` for a partition that is not configured,
        `ValueError` for a record that does not fit the format; call `rollback` then.
        """
        now = self._clock()
        ends: Dict[Key, End] = {}
        for key, messages in records.items():
            partition = self._partitions.get(key)
            if partition is None:
                raise StreamLogError(f"no stream {key[0]!r} with a partition {key[1]}")
            self._touched[key] = partition
            ends[key] = partition.append(messages, now) if messages else partition.end()
        return ends

    def sync(self) -> None:
        """Return when everything appended is on the disk.  Raises `OSError`."""
        unsynced: Dict[int, int] = {}
        for partition in self._touched.values():
            unsynced.update(partition.unsynced)
        if len(unsynced) > 1:
            for fd, position in unsynced.items():
                # Starts to write the pages without waiting; only clean ones are
                # let go, and from there on none is.
                os.posix_fadvise(fd, position, 0, os.POSIX_FADV_DONTNEED)
        for fd in unsynced:
            os.fdatasync(fd)
        for partition in self._touched.values():
            partition.unsynced.clear()
            if partition.created:
                _sync_directory(partition.directory)
                partition.created = False

    def rollback(self) -> None:
        """The transaction failed: nothing appended since the last `committed` is left.

        Raises `OSError` when a file cannot be cut; that is tried again before the
        next append.
        """
        touched = self._touched
        self._touched = {}
        failures: List[OSError] = []
        for partition in touched.values():
            try:
                partition.rollback()
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def committed(self) -> None:
        """The transaction is durable: show its records to readers; does not fail.

        Also lets retention look for what is over, once a second and after a roll.
        """
        rolled = False
        for partition in self._touched.values():
            partition.unsynced.clear()
            partition.created = False
            rolled = partition.commit() or rolled
        self._touched.clear()
        now = self._clock()
        if rolled or not 0 < self._next_retention - now <= RETENTION_INTERVAL:
            self._next_retention = now + RETENTION_INTERVAL
            try:
                self._retain(now)
            except OSError as error:
                logger.warning("retention: %s", error)

    def _retain(self, now: float) -> None:
        for name, config in self._streams.items():
            partitions = [self._partitions[name, n] for n in range(config.partitions)]
            if config.retention_age is not None:
                for partition in partitions:
                    partition.expire(int((now - config.retention_age) * 1e6))
            if config.retention_bytes is None:
                continue
            excess = sum(partition.size for partition in partitions) - config.retention_bytes
            while excess > 0 and any(partition.closed for partition in partitions):
                closed = [partition for partition in partitions if partition.closed]
                oldest = min(closed, key=lambda partition: partition.closed[0].last_timestamp)
                excess -= oldest.closed[0].size
                oldest.drop(1)

    def close(self) -> None:
        """Close every file; nothing is written or synced."""
        for partition in self._partitions.values():
            partition.close()

    # -- any thread -----------------------------------------------------------

    def streams(self) -> List[str]:
        """The names of the streams, sorted."""
        return sorted(self._streams)

    def manifest(self, name: str) -> Dict[str, Any]:
        """What readers may see of a stream (`View.describe`); `KeyError` if there is none."""
        count = self._streams[name].partitions
        return {
            "stream": name,
            "partitions": [self._partitions[name, n].view.describe(n) for n in range(count)],
        }

    def committed_file(self, name: str, partition: int, file: str) -> Tuple[Path, int]:
        """The path of a segment or index file and how many of its bytes are committed.

        Raises `KeyError` when readers have no such file.
        """
        found = self._partitions[name, partition]
        for part in reversed(found.view.segments):
            if file == f"{part.stem}.seg":
                return found.directory / file, part.size
            if file == f"{part.stem}.idx":
                return found.directory / file, part.index_entries * segment.INDEX_ENTRY.size
        raise KeyError(file)

    def offset_for_timestamp(self, name: str, partition: int, timestamp: int) -> int:
        """The offset of the first record received at or after `timestamp` (microseconds),
        the high watermark when there is none.

        Raises `KeyError` for an unknown partition, `OSError`, and `SegmentError`
        when the segment is damaged.
        """
        found = self._partitions[name, partition]
        while True:
            view = found.view
            part = next((s for s in view.segments if s.last_timestamp >= timestamp), None)
            if part is None:
                return view.high_watermark
            try:
                return segment.search(found.directory / f"{part.stem}.seg", part, timestamp)
            except FileNotFoundError:
                if found.view is view:
                    raise
