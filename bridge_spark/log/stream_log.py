"""The stream log: append-only partitions of record batches in segment files.

Readers see committed records only: records are appended when the store's commit log has them on disk, and nothing beyond
the high watermark is listed, served or searched.  Segments are synced before the commit log is dropped; a start appends
what a power loss took.

`<directory>/<stream>/stream.json` describes the stream (see `stream_files`).  Each partition has a directory with `high_watermark`, segment
files `<first offset, 20 digits>.seg` and their sparse indexes `.idx`, or `.parquet` where a segment is sealed.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.archive.index import ArchivedSegment
from bridge_spark.log.archive.lookups import ArchiveLookups
from bridge_spark.log.backup import backup_in_progress
from bridge_spark.log.files import sync_directory
from bridge_spark.log.high_watermark import published_end
from bridge_spark.log.incarnation import Incarnation, make_incarnation, renew_incarnation
from bridge_spark.log.partition import End, Partition, PartitionView
from bridge_spark.log.segment import Segment, search_segment
from bridge_spark.log.segment_names import INDEX_SUFFIX
from bridge_spark.log.sparse_index import INDEX_ENTRY
from bridge_spark.log.stream_config import (
    FORMAT_VERSION,
    FORMAT_WITHOUT_ARCHIVE,
    StreamConfig,
    StreamLogDamage,
    StreamLogError,
    partition_of,
)
from bridge_spark.log.stream_files import (
    DELETED_FILE,
    DESCRIPTION_FILE,
    end_partition,
    finish_deletion,
    finish_deletions,
    mark_deleted,
    partitions_refused,
    read_description,
    remove_files,
    write_description,
)
from sessions.message import Message

__all__ = ["StreamConfig", "StreamLogDamage", "StreamLogError", "StreamLogs", "partition_of"]

RETENTION_INTERVAL = 1.0  # seconds between two retention checks
UNSEALED_STAYS = 5.0  # seconds a segment file stays beside its sealed file, for readers that are listing the directory

Key = tuple[str, int]  # stream and partition

logger = logging.getLogger(__name__)


class ArchiveTotals(NamedTuple):
    """Segments and bytes in archives, and closed segments that these do not have yet."""

    segments: int
    size: int
    waiting: int


class StreamLogs:
    """The logs of all streams, below `directory` (``streams`` in the data directory).

    `clock` returns seconds since the Unix epoch.  Implements `StreamLog` of `sessions.store.interface`: the writer
    thread calls `recover`, then `append`, `rollback` and `committed`.  `sync`, `streams`, `manifest`, `committed_file`,
    `offset_for_timestamp`, `unsealed` and `add_sealed` may be called from any thread.
    """

    def __init__(
        self,
        directory: str | Path,
        streams: Sequence[StreamConfig],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        # Both are replaced, never changed, so any thread may read them.
        self._streams = {config.name: config for config in streams}
        if len(self._streams) != len(streams):
            raise ValueError("two streams have the same name")
        self._clock = clock
        self._partitions: dict[Key, Partition] = {}
        for config in streams:
            for number in range(config.partitions):
                path = self.directory / config.name / str(number)
                self._partitions[config.name, number] = Partition(config, number, path)
        self._touched: dict[Key, Partition] = {}
        self._next_retention = 0.0
        self._sealed: deque[tuple[Key, Segment]] = deque()
        self._removable: deque[tuple[float, Key, Segment]] = deque()  # when which former file may be removed
        self.segment_closed = threading.Event()  # set when `unsealed` may have new segments
        self.sealed_segments = 0  # since the start
        self.sealed_bytes_saved = 0
        self.sealing_failures = 0
        self.compacted_segments = 0
        self.compaction_failures = 0
        self.segment_sealed = threading.Event()  # set when `next_to_archive` may have a new segment
        self.archive_failures = 0
        self._archives: dict[str, tuple[str, str]] = {}  # location and owner, by stream
        self._incarnations: dict[str, Incarnation] = {}
        self._stored_filters: dict[str, list[str]] = {}
        self._lookups = ArchiveLookups()

    # -- the writer thread ----------------------------------------------------

    def recover(self, ends: Mapping[Key, int] | None, logged: Mapping[Key, int] = {}) -> dict[Key, int]:
        """Create or open every stream, cut back to the end offsets of the store; return the ends of what is there.

        A partition without an end offset is cut back to its high watermark.  If `ends` is None, for a broker without a
        database, every undamaged batch is kept.  Records from the offsets `logged` on may be missing: the caller
        appends them.  Streams that are not configured are not touched.  Raises `StreamLogError`, or `OSError`.
        """
        finish_deletions(self.directory, ends or {})
        for config in self._streams.values():
            self._write_description(config)
        found: dict[Key, int] = {}
        shortened: set[str] = set()  # streams whose next records get offsets that readers have seen
        for key, partition in self._partitions.items():
            partition.close()
            published = published_end(partition.directory)
            found[key] = partition.recover(None if ends is None else ends.get(key), ends is None, logged.get(key))
            if found[key] < published and key not in logged:
                shortened.add(key[0])
        for name in shortened:
            reached = [found[name, number] for number in range(self._streams[name].partitions)]
            self._incarnations[name] = renew_incarnation(self.directory / name, reached)
        if self._streams:
            for name in self._streams:
                sync_directory(self.directory / name)
            sync_directory(self.directory)
            sync_directory(self.directory.parent)
        return found

    def _write_description(self, config: StreamConfig) -> None:
        directory = self.directory / config.name
        known = read_description(directory)
        description: dict[str, Any] = {
            "name": config.name,
            "partitions": config.partitions,
            "filters": config.filters,
            "key": config.key,
            "format_version": FORMAT_WITHOUT_ARCHIVE,
        }
        location, owner = "" if config.archive is None else str(config.archive), ""
        past: list[str] = []
        if known is not None:
            owner = known.get("archive_owner", "")
            # Without the setting, the archive is no longer written, but still read.
            location = location or known.get("archive", "")
            former = [*known.get("past_filters", ()), *known.get("filters", ())]
            past = [each for each in dict.fromkeys(former) if each not in config.filters]
            if refused := partitions_refused(known, config.partitions):
                raise StreamLogError(f"stream {config.name!r} {refused}")
        if past:
            description["past_filters"] = past
        if config.definition is not None:
            description["definition"] = config.definition
        if location:
            owner = owner or uuid.uuid4().hex
            self._archives[config.name] = location, owner
            description |= {"archive": location, "archive_owner": owner, "format_version": FORMAT_VERSION}
        if known != description:
            directory.mkdir(parents=True, exist_ok=True)
            write_description(directory, description)
        self._incarnations = {**self._incarnations, config.name: make_incarnation(directory)}
        self._stored_filters = {**self._stored_filters, config.name: [*config.filters, *past]}

    def append(self, records: Mapping[Key, Sequence[Message]]) -> dict[Key, End]:
        """Write records, not yet durable; return the new end of each partition.

        Raises `OSError`, `StreamLogError` for a partition that is not configured, or `ValueError` for a record that
        exceeds the format; the caller must then call `rollback`.
        """
        now = self._clock()
        ends: dict[Key, End] = {}
        for key, messages in records.items():
            partition = self._partitions.get(key)
            if partition is None:
                raise StreamLogError(f"no stream {key[0]!r} with a partition {key[1]}")
            self._touched[key] = partition
            ends[key] = partition.append(messages, now) if messages else partition.end()
        return ends

    def sync(self) -> None:
        """Sync everything appended before the call.  Raises `OSError`."""
        for partition in self._partitions.values():
            partition.sync()

    def rollback(self) -> None:
        """Discard everything appended since the last `committed`: an append failed.

        Raises `OSError` if a file cannot be cut; the cut is repeated before the next append.
        """
        touched = self._touched
        self._touched = {}
        failures: list[OSError] = []
        for partition in touched.values():
            try:
                partition.rollback()
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def committed(self) -> None:
        """Show everything appended to readers.  Does not fail.

        Also applies retention, once a second and after a roll.
        """
        rolled = False
        for partition in self._touched.values():
            rolled = partition.commit() or rolled
        self._touched.clear()
        now = self._clock()
        if self._sealed or self._removable:
            try:
                self._switch_to_sealed(now)
            except OSError as error:
                logger.warning("event=sealing_failed reason=%s", error)
        if rolled or not 0 < self._next_retention - now <= RETENTION_INTERVAL:
            self._next_retention = now + RETENTION_INTERVAL
            try:
                self._apply_retention(now)
            except OSError as error:
                logger.warning("event=retention_failed reason=%s", error)
        if rolled:
            self.segment_closed.set()

    def _switch_to_sealed(self, now: float) -> None:
        """Show readers the sealed files; later remove the unsealed ones, unless a backup runs that may cut them."""
        while self._sealed:
            key, segment = self._sealed.popleft()
            partition = self._partitions.get(key)
            if partition is None:  # the stream was deleted
                (self.directory / key[0] / str(key[1]) / segment.file).unlink(missing_ok=True)
            elif (former := partition.replace_with_sealed(segment)) is not None:
                self._removable.append((now + UNSEALED_STAYS, key, former))
                if former.sealed:
                    self.compacted_segments += 1
                else:
                    self.sealed_segments += 1
                    self.sealed_bytes_saved += segment.unsealed_size - segment.size
                self.segment_sealed.set()
                if partition.config.compact:
                    self.segment_closed.set()
        if self._removable and self._removable[0][0] <= now and not backup_in_progress(self.directory):
            while self._removable and self._removable[0][0] <= now:
                _, key, former = self._removable.popleft()
                partition = self._partitions.get(key)
                if partition is not None:
                    partition.remove_former(former)

    def _apply_retention(self, now: float) -> None:
        for name, config in self._streams.items():
            partitions = [self._partitions[name, n] for n in range(config.partitions)]
            if config.seal:
                for partition in partitions:
                    if partition.roll(now):
                        self.segment_closed.set()
            if config.archive is not None and any(partition.removable for partition in partitions):
                # A backup ends inside a segment, so it needs the local file of one that was archived meanwhile.
                if backup_in_progress(self.directory):
                    continue
            if config.retention_age is not None:
                for partition in partitions:
                    partition.expire(int((now - config.retention_age) * 1e6))
            if config.retention_bytes is None:
                continue
            excess = sum(partition.size for partition in partitions) - config.retention_bytes
            while excess > 0 and any(partition.removable for partition in partitions):
                closed = [partition for partition in partitions if partition.removable]
                oldest = min(closed, key=lambda partition: partition.closed[0].last_timestamp)
                excess -= oldest.closed[0].size
                oldest.drop(1)

    def add(self, config: StreamConfig) -> dict[Key, int]:
        """Create a stream, and return the ends of its partitions.

        They continue after those of a deleted stream of that name.  Raises `StreamLogError` if the name is taken, or
        the directory has records of a stream that is not configured, and `OSError`; nothing is created then.
        """
        directory = self.directory / config.name
        if config.name in self._streams:
            raise StreamLogError(f"there is a stream {config.name!r} already")
        if (directory / DESCRIPTION_FILE).exists():
            raise StreamLogError(f"{directory} has records of a stream that is not configured any more: choose another name")
        partitions: dict[Key, Partition] = {}
        found: dict[Key, int] = {}
        try:
            if (directory / DELETED_FILE).exists():
                finish_deletion(directory, {})
            self._write_description(config)
            for number in range(config.partitions):
                partition = Partition(config, number, directory / str(number))
                partitions[config.name, number] = partition
                found[config.name, number] = partition.recover(None, False)
            sync_directory(directory)
            sync_directory(self.directory)
        except BaseException:
            for partition in partitions.values():
                partition.close()
            with suppress(OSError):
                mark_deleted(directory)
            raise
        self._partitions = {**self._partitions, **partitions}
        self._streams = {**self._streams, config.name: config}
        return found

    def alter(self, config: StreamConfig) -> None:
        """Let another configuration of a stream, with the same partitions, apply to what comes after.

        Raises `OSError`; nothing is changed then.
        """
        self._write_description(config)
        for number in range(config.partitions):
            self._partitions[config.name, number].config = config
        self._streams = {**self._streams, config.name: config}
        if config.seal:
            self.segment_closed.set()

    def delete(self, name: str, ends: Mapping[Key, int]) -> None:
        """Delete a stream that is marked as deleted; `ends` are those of its partitions in the store.

        Its records are gone for readers when this returns; another thread removes the files.  Raises `OSError`; the
        next start repeats then what is missing.
        """
        directory = self.directory / name
        keys = [key for key in self._partitions if key[0] == name]
        partitions = [self._partitions[key] for key in keys]
        self._partitions = {key: partition for key, partition in self._partitions.items() if key[0] != name}
        self._streams = {other: config for other, config in self._streams.items() if other != name}
        reached = []
        failures: list[OSError] = []
        for key, partition in zip(keys, partitions):
            self._touched.pop(key, None)
            partition.close()
            end = max(ends.get(key, 0), partition.view.high_watermark)
            partition.view = PartitionView(end, end, ())
            try:
                end_partition(partition.directory, end)
            except OSError as error:
                failures.append(error)
            else:
                reached.append((key[1], end))
        if failures:
            raise failures[0]
        threading.Thread(target=_remove, args=(directory, reached), name="deleting", daemon=True).start()

    def close(self) -> None:
        """Close every file without writing or syncing."""
        self._lookups.close()
        for partition in self._partitions.values():
            partition.close()

    # -- any thread -----------------------------------------------------------

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return self._clock()

    def streams(self) -> list[str]:
        """The names of the streams, sorted."""
        return sorted(self._streams)

    def config(self, name: str) -> StreamConfig:
        """The configuration of a stream.  Raises `KeyError` for an unknown stream."""
        return self._streams[name]

    def configs(self) -> list[StreamConfig]:
        """The configurations of all streams."""
        return list(self._streams.values())

    def stored_filters(self, name: str) -> Sequence[str]:
        """The filters of a stream, and those that it had before: it may have records of all of them.

        Empty for an unknown stream.
        """
        return self._stored_filters.get(name, ()) if name in self._streams else ()

    def manifest(self, name: str) -> dict[str, Any]:
        """The committed segments of a stream (see `PartitionView.describe`).

        Raises `KeyError` for an unknown stream.
        """
        described = []
        partitions = self._partitions
        for number in range(self._streams[name].partitions):
            partition = partitions[name, number]
            view = partition.view
            described.append(view.describe(number, partition.archive.current))
        archived = any("archive" in partition for partition in described)
        return {
            "stream": name,
            "format_version": FORMAT_VERSION if archived else FORMAT_WITHOUT_ARCHIVE,
            **({"archive": self._archives[name][0]} if archived else {}),
            "incarnation": self._incarnations[name].document(),
            "partitions": described,
        }

    def stored(self, name: str) -> int:
        """The number of records that were ever stored in a stream: the sum of its high watermarks.

        Raises `KeyError` for an unknown stream.
        """
        numbers = range(self._streams[name].partitions)
        return sum(self._partitions[name, number].view.high_watermark for number in numbers)

    def archived(self, name: str, partition: int, start: int, end: int, limit: int) -> list[ArchivedSegment]:
        """The archived segments with offsets from `start` up to `end`, in order.

        Raises `KeyError` for an unknown partition, `SegmentError` if the archive's index is damaged, and `OSError`.
        """
        return self._partitions[name, partition].archive.between(start, end, limit)

    def committed_file(self, name: str, partition: int, file: str) -> tuple[Path, int]:
        """The path of a segment or index file and the number of its committed bytes.

        Raises `KeyError` if the file is not in the manifest.
        """
        found = self._partitions[name, partition]
        for segment in reversed(found.view.segments):
            if file == segment.file:
                return found.directory / file, segment.size
            if file == f"{segment.stem}{INDEX_SUFFIX}" and not segment.sealed:
                return found.directory / file, segment.index_entries * INDEX_ENTRY.size
        raise KeyError(file)

    def offset_for_timestamp(self, name: str, partition: int, timestamp: int) -> int:
        """The offset of the first record received at or after `timestamp` (microseconds), or the high watermark.

        Raises `KeyError` for an unknown partition, `OSError`, `SegmentError` if the segment is damaged, and
        `ArchiveError`.
        """
        found = self._partitions[name, partition]
        while True:
            view = found.view
            archived = found.archive.at_time(timestamp)
            if archived is not None and archived.first_offset < view.log_start_offset:
                try:
                    return self._lookups.find_time(self._archives[name][0], name, partition, archived, timestamp)
                except ArchiveError:
                    if found.archive.at_time(timestamp) == archived:
                        raise
                    continue
            segment = next((s for s in view.segments if s.last_timestamp >= timestamp), None)
            if segment is None:
                return view.high_watermark
            try:
                return search_segment(found.directory / segment.file, segment, timestamp)
            except FileNotFoundError:
                if found.view is view:
                    raise

    def archiving(self) -> list[StreamConfig]:
        """The streams with an archive to write to."""
        return [config for config in self._streams.values() if config.archive is not None]

    def archive_totals(self) -> ArchiveTotals:
        """The archives of all streams together."""
        partitions = [self._partitions[config.name, n] for config in self.archiving() for n in range(config.partitions)]
        states = [partition.archive.current for partition in partitions]
        return ArchiveTotals(
            sum(state.segments for state in states),
            sum(state.size for state in states),
            sum(len(partition.unarchived()) for partition in partitions),
        )

    def archive_location(self, name: str) -> str:
        """Where the archive of a stream is.  Raises `KeyError` if it never had one."""
        return self._archives[name][0]

    def archive_owner(self, name: str) -> str:
        """The id that the archive has of this stream."""
        return self._archives[name][1]

    def partition(self, name: str, number: int) -> Partition:
        """A partition, of which only `view`, `closed`, `directory` and `archive` are for any thread."""
        return self._partitions[name, number]

    @property
    def has_sealed_streams(self) -> bool:
        """Whether any stream is configured to be sealed."""
        return any(config.seal for config in self._streams.values())

    def unsealed(self) -> Iterator[tuple[Key, Path, Segment]]:
        """The closed segments that need sealing, with their partition's directory; per partition the oldest first."""
        for key, partition in self._partitions.items():
            if partition.config.seal:
                for segment in partition.closed:
                    if not segment.sealed:
                        yield key, partition.directory, segment

    def compactable(self) -> Iterator[tuple[Key, Partition, list[Segment]]]:
        """The sealed segments of each partition that is to be compacted: all from its first one on, without a gap."""
        for key, partition in self._partitions.items():
            if partition.config.compact:
                closed = partition.closed
                sealed = list(takewhile(attrgetter("sealed"), closed))
                if sealed:
                    yield key, partition, sealed

    def add_sealed(self, key: Key, segment: Segment) -> None:
        """The sealed file of a segment is on disk.  Readers see it after the next commit."""
        self._sealed.append((key, segment))


def _remove(directory: Path, ends: Sequence[tuple[int, int]]) -> None:
    try:
        remove_files(directory, ends)
    except OSError as error:
        logger.warning("event=files_kept directory=%s reason=%s", directory, error)
