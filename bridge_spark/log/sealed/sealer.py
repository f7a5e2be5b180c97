"""The sealer: a thread of the broker that has closed segments sealed by a process, one at a time, and compacted.

The sealed file is written and read back under a temporary name, synced, renamed, and the directory synced.  Then the
stream log shows it to readers and later removes the unsealed file, so a complete file holds each record at any moment.
A failure leaves the segment as it is, is logged, and is retried.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from itertools import dropwhile
from operator import attrgetter
from pathlib import Path
from typing import Any

from bridge_spark.log.files import sync_directory
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.sealed.job_process import JobFailed, JobProcess
from bridge_spark.log.sealed.job_thread import JobThread
from bridge_spark.log.segment import Segment, read_sealed_segment
from bridge_spark.log.segment_names import UNFINISHED_SUFFIX, sealed_file_name
from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import Key, StreamLogs

FIRST_RETRY = 60.0  # seconds after a failure; doubled by each further failure of the same segment
LAST_RETRY = 3600.0
MAX_FAILURES = 3  # consecutive failures after which sealing pauses until the first retry
COMPACT_AFTER = 16  # sealed segments after which partitions are compacted, though more are to be sealed
RESERVED_BYTES = 64 * 1024 * 1024  # disk space left to the broker, beyond a sealed file as large as its segment

SealJob = tuple[Key, Path, Segment]

logger = logging.getLogger(__name__)


class Sealer:
    """Seals the closed segments of `logs` from `start` to `stop`."""

    def __init__(self, logs: StreamLogs) -> None:
        self._logs = logs
        self._process = JobProcess()
        self._thread = JobThread("sealing", logs.segment_closed, self._process, self._seal_all, self._pause)
        self._not_before: dict[tuple[Key, int], float] = {}  # when to try a segment again; infinity once it is done
        self._retry_waits: dict[tuple[Key, int], float] = {}
        self._started = False
        self._compacted: dict[Key, dict[int, int]] = {}  # generations that the log does not show yet, by first offset
        self._compact_after: dict[Key, float] = {}  # when to try again after a failure

    def start(self) -> None:
        """Start, if there is a stream to be sealed; without effect once started."""
        if self._logs.has_sealed_streams and not self._started:
            self._started = True
            self._thread.start()

    def stop(self) -> None:
        """Stop at once.  A segment that is being sealed stays unsealed."""
        self._thread.stop()

    def _seal_all(self) -> None:
        """Seal every segment that is not waiting for a retry, and compact what is due."""
        failures = count = 0
        while not self._thread.stopping and failures < MAX_FAILURES and (job := self._next()) is not None:
            failures = 0 if self._seal(*job) else failures + 1
            count += 1
            if count % COMPACT_AFTER == 0:
                self._compact_due()
        self._compact_due()

    def _compact_due(self) -> None:
        compactable = list(self._logs.compactable())
        known_keys = {key for key, _, _ in compactable}
        self._compact_after = {key: after for key, after in self._compact_after.items() if key in known_keys}
        for key, partition, segments in compactable:
            if self._thread.stopping:
                return
            if self._is_due(key, partition.config, segments):
                self._compact(key, partition.directory, partition.config, segments)

    def _pause(self) -> float | None:
        """Seconds until the next retry; None if there is none."""
        retries = [self._not_before[key] for key in self._retry_waits] + list(self._compact_after.values())
        return max(0.0, min(retries) - time.monotonic()) if retries else None

    def _next(self) -> SealJob | None:
        now = time.monotonic()
        known: set[tuple[Key, int]] = set()
        for job in self._logs.unsealed():
            name = (job[0], job[2].first_offset)
            if self._not_before.get(name, 0.0) <= now:
                return job
            known.add(name)
        self._not_before = {name: until for name, until in self._not_before.items() if name in known}
        self._retry_waits = {name: wait for name, wait in self._retry_waits.items() if name in known}
        return None

    def _seal(self, key: Key, directory: Path, segment: Segment) -> bool:
        """Seal one segment; False if it failed and will be retried."""
        name = (key, segment.first_offset)
        unfinished = directory / f"{sealed_file_name(segment.first_offset)}.{os.getpid()}{UNFINISHED_SUFFIX}"
        try:
            sealed = self._write(key, directory, segment, unfinished)
            os.rename(unfinished, directory / sealed.file)
            sync_directory(directory)
        except (JobFailed, SegmentError, OSError) as error:
            with suppress(OSError):
                unfinished.unlink()
            if not self._thread.stopping and (directory / segment.file).exists():
                self._failed(name, directory / segment.file, error)
                return False
            self._not_before[name] = float("inf")
            self._retry_waits.pop(name, None)
            return True
        self._not_before[name] = float("inf")
        self._retry_waits.pop(name, None)
        self._logs.add_sealed(key, sealed)
        logger.info("event=segment_sealed file=%s bytes=%d before=%d", directory / sealed.file, sealed.size, segment.size)
        return True

    def _write(self, key: Key, directory: Path, segment: Segment, target: Path) -> Segment:
        """Write and sync the sealed segment `target`."""
        free = os.statvfs(directory)
        if free.f_bavail * free.f_frsize < segment.size + RESERVED_BYTES:
            raise JobFailed(f"less than {segment.size + RESERVED_BYTES} bytes are free")
        stream, number = key
        self._process.run(
            {
                "do": "seal",
                "source": str(directory / segment.file),
                "target": str(target),
                "stream": stream,
                "partition": number,
                "first_offset": segment.first_offset,
                "end_offset": segment.end_offset,
                "size": segment.size,
            }
        )
        sealed = read_sealed_segment(target)
        if (sealed.first_offset, sealed.end_offset) != (segment.first_offset, segment.end_offset):
            raise JobFailed("the sealed file has other offsets")
        return sealed

    def _is_due(self, key: Key, config: StreamConfig, segments: list[Segment]) -> bool:
        """Whether so much of a partition is not compacted that it is compacted now."""
        if self._compact_after.get(key, 0.0) > time.monotonic():
            return False
        self._compact_after.pop(key, None)
        awaited = self._compacted.get(key, {})
        if any(segment.generation < awaited.get(segment.first_offset, 0) for segment in segments):
            return False  # the log shows them after its next commit
        self._compacted.pop(key, None)
        dirty = list(dropwhile(attrgetter("generation"), segments))
        size = sum(segment.size for segment in dirty)
        return size * 100 >= config.compact_dirty_percent * sum(segment.size for segment in segments) and size > 0

    def _compact(self, key: Key, directory: Path, config: StreamConfig, segments: list[Segment]) -> None:
        """Compact the sealed segments of a partition; a failure is logged, and repeated later."""
        now = self._logs.now()
        written: list[dict[str, Any]] = []
        try:
            free, size = os.statvfs(directory), sum(segment.size for segment in segments)
            if free.f_bavail * free.f_frsize < size + RESERVED_BYTES:
                raise JobFailed(f"less than {size + RESERVED_BYTES} bytes are free")
            written = self._process.run(
                {
                    "do": "compact",
                    "files": [str(directory / segment.file) for segment in segments],
                    "key": config.key,
                    "tombstones_before": int((now - config.compact_tombstones) * 1e6),
                    "now": int(now * 1e6),
                    "most_keys": config.compact_keys,
                }
            )
            for each in written:
                os.rename(each["unfinished"], directory / each["file"])
            sync_directory(directory)
            found = [read_sealed_segment(directory / each["file"]) for each in written]
        except (JobFailed, SegmentError, OSError) as error:
            with suppress(OSError):
                for unfinished in directory.glob(f"*{UNFINISHED_SUFFIX}"):
                    unfinished.unlink()
            self._compact_after[key] = time.monotonic() + FIRST_RETRY
            if not self._thread.stopping:
                self._logs.compaction_failures += 1
                logger.warning("event=not_compacted partition=%s retry_s=%.0f reason=%s", directory, FIRST_RETRY, error)
            return
        self._compacted[key] = {segment.first_offset: segment.generation for segment in found}
        for segment in found:
            self._logs.add_sealed(key, segment)
        removed = sum(each["removed"] for each in written)
        logger.info("event=compacted partition=%s segments=%d removed=%d", directory, len(written), removed)

    def _failed(self, name: tuple[Key, int], path: Path, error: Exception) -> None:
        self._logs.sealing_failures += 1
        wait = self._retry_waits[name] = min(2 * self._retry_waits.get(name, FIRST_RETRY / 2), LAST_RETRY)
        self._not_before[name] = time.monotonic() + wait
        logger.warning("event=not_sealed file=%s retry_s=%.0f reason=%s", path, wait, error)
