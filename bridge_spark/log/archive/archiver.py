"""The archiver: a thread of the broker that has sealed segments copied to archives by a process.

In order of offsets, a segment is written to the archive, confirmed, and entered into the index, which is synced; only
then may retention remove the local file.  Retention of the archive takes segments out of the index before it removes
their files.  So each offset is in the index or the local log at any moment, and each step can be repeated.  A failure
is logged, counted and retried.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from bridge_spark.log.archive.index import ArchivedSegment
from bridge_spark.log.partition import Partition
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.sealed.job_process import JobFailed, JobProcess
from bridge_spark.log.sealed.job_thread import JobThread
from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import StreamLogs

FIRST_RETRY = 5.0  # seconds after a failure of a stream's archive; doubled by each further one
LAST_RETRY = 300.0
RETENTION_INTERVAL = 60.0  # seconds between two checks of retention
JOB_TIMEOUT = 300.0  # seconds after which a job has failed, beside those for its bytes
LOWEST_RATE = 100_000  # bytes per second
REMOVED_AT_ONCE = 1000  # files per job
MAX_FAILURES = 3  # partitions whose segments fail before the stream's archive waits for the retry
JOB_ERRORS = (JobFailed, SegmentError, OSError)

logger = logging.getLogger(__name__)


class StreamArchive:
    """The archive of one stream; used by the archiver's thread only, but for ``problem``."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.is_open = False
        self.not_before = 0.0
        self.retry_wait = FIRST_RETRY / 2
        self.problem = ""
        self.removals: list[tuple[int, list[str]]] = []  # partition and files that the index no longer has

    @property
    def partitions(self) -> range:
        return range(self.config.partitions)


class Archiver:
    """Archives sealed segments of `logs` from `start` to `stop`.  Does nothing if no stream has an archive.

    `clock` returns seconds since the Unix epoch.
    """

    def __init__(self, logs: StreamLogs, clock: Callable[[], float] = time.time) -> None:
        self._logs = logs
        self._clock = clock
        self._process = JobProcess()
        self._archives = [StreamArchive(config) for config in logs.archiving()]
        self._thread = JobThread("archive", logs.segment_sealed, self._process, self.work, self._pause)

    def start(self) -> None:
        if self._archives:
            self._thread.start()

    def stop(self) -> None:
        """Stop at once.  A segment that is being copied is copied again after the next start."""
        self._thread.stop()

    def problems(self) -> list[str]:
        """One line for each archive whose last job failed.  For any thread."""
        return [f"archive of stream {archive.config.name}: {archive.problem}" for archive in self._archives if archive.problem]

    def _pause(self) -> float:
        """Seconds until the next retry, or the next check of retention."""
        now = time.monotonic()
        return min(max(0.0, archive.not_before - now) if archive.problem else RETENTION_INTERVAL for archive in self._archives)

    def work(self) -> None:
        """Do everything that is due."""
        for archive in self._archives:
            if archive.not_before > time.monotonic():
                continue
            try:
                self._work(archive)
            except JOB_ERRORS as error:
                self._process.close()
                if not self._thread.stopping:
                    self._failed(archive, error)
            else:
                archive.problem, archive.retry_wait = "", FIRST_RETRY / 2

    def _work(self, archive: StreamArchive) -> None:
        """Raises one of `JOB_ERRORS`."""
        if not archive.is_open:
            self._open(archive)
            archive.is_open = True
        failures = self._upload(archive)
        self._apply_retention(archive)
        if failures:
            raise failures[0]

    def _upload(self, archive: StreamArchive) -> list[Exception]:
        """Archive the segments of all partitions in turn; return the failures, one per partition and few in all."""
        failures: list[Exception] = []
        left = list(archive.partitions)
        while left and len(failures) < MAX_FAILURES:
            for number in list(left):
                try:
                    if self._upload_next(archive, number):
                        continue
                except JOB_ERRORS as error:
                    self._process.close()
                    failures.append(error)
                left.remove(number)
        return failures

    def _run_job(self, archive: StreamArchive, kind: str, size: int = 0, **more: object) -> object:
        """Run a job that transfers `size` bytes."""
        job = {"do": kind, "location": str(archive.config.archive), "stream": archive.config.name, **more}
        return self._process.run_within(job, JOB_TIMEOUT + size / LOWEST_RATE)

    # -- start ----------------------------------------------------------------

    def _open(self, archive: StreamArchive) -> None:
        """Compare the archive with the index."""
        name = archive.config.name
        directories = [str(self._partition(archive, number).directory) for number in archive.partitions]
        found = self._run_job(
            archive,
            "open archive",
            owner=self._logs.archive_owner(name),
            directories=directories,
            stamp=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
        )
        assert isinstance(found, list)
        for number, answer in enumerate(found):
            index = self._partition(archive, number).archive
            if answer["adopted"]:
                index.insert([ArchivedSegment(*values) for values in answer["adopted"]])
                logger.warning("event=archive_index_restored stream=%s partition=%d segments=%d", name, number, len(answer["adopted"]))
            if answer["leftovers"]:
                archive.removals.append((number, answer["leftovers"]))
            for file in answer["renamed"]:
                logger.warning(
                    "event=archive_file_renamed stream=%s partition=%d file=%s reason=%s",
                    name,
                    number,
                    file,
                    "the log does not have these offsets",
                )
            if answer["lost"]:
                logger.error(
                    "event=archive_files_missing stream=%s partition=%d count=%d files=%s",
                    name,
                    number,
                    answer["lost"],
                    ",".join(answer["missing"]),
                )

    def _partition(self, archive: StreamArchive, number: int) -> Partition:
        return self._logs.partition(archive.config.name, number)

    # -- upload ---------------------------------------------------------------

    def _upload_next(self, archive: StreamArchive, number: int) -> bool:
        """Archive the oldest segment that is not archived; False if there is none, or it is not sealed yet."""
        partition = self._partition(archive, number)
        waiting = partition.unarchived()
        if self._thread.stopping or not waiting or not waiting[0].sealed:
            return False
        source = partition.directory / waiting[0].file
        name = ArchivedSegment(waiting[0].first_offset, waiting[0].end_offset, 0, 0, 0, 0).file
        values = self._run_job(archive, "upload", waiting[0].size, partition=number, source=str(source), name=name)
        assert isinstance(values, list)
        segment = ArchivedSegment(*values)
        partition.archive.append(segment)
        logger.info(
            "event=segment_archived stream=%s partition=%d file=%s bytes=%d", archive.config.name, number, segment.file, segment.size
        )
        return True

    # -- retention ------------------------------------------------------------

    def _apply_retention(self, archive: StreamArchive) -> None:
        if archive.config.archive_retention_age is not None:
            before = int((self._clock() - archive.config.archive_retention_age) * 1e6)
            for number in archive.partitions:
                self._take_out(archive, number, self._older_than(archive, number, before))
        if archive.config.archive_retention_bytes is not None:
            self._apply_size_limit(archive, archive.config.archive_retention_bytes)
        while archive.removals:
            number, names = archive.removals[0]
            self._run_job(archive, "remove", partition=number, names=names)
            archive.removals.pop(0)

    def _older_than(self, archive: StreamArchive, number: int, before: int) -> list[ArchivedSegment]:
        """The oldest segments whose records are all older than `before`, at most `REMOVED_AT_ONCE`."""
        found = self._oldest(archive, number)
        count = next((at for at, segment in enumerate(found) if segment.last_timestamp >= before), len(found))
        return found[:count]

    def _oldest(self, archive: StreamArchive, number: int) -> list[ArchivedSegment]:
        index = self._partition(archive, number).archive
        return index.between(index.current.start, index.current.end, REMOVED_AT_ONCE)

    def _apply_size_limit(self, archive: StreamArchive, limit: int) -> None:
        excess = sum(self._partition(archive, number).archive.current.size for number in archive.partitions) - limit
        oldest = {number: self._oldest(archive, number) for number in archive.partitions} if excess > 0 else {}
        removed: dict[int, list[ArchivedSegment]] = {}
        while excess > 0 and any(oldest.values()):
            number = min((each for each in oldest if oldest[each]), key=lambda each: oldest[each][0].last_timestamp)
            segment = oldest[number].pop(0)
            removed.setdefault(number, []).append(segment)
            excess -= segment.size
        for number, segments in removed.items():
            self._take_out(archive, number, segments)

    def _take_out(self, archive: StreamArchive, number: int, segments: list[ArchivedSegment]) -> None:
        if not segments:
            return
        self._partition(archive, number).archive.remove_before(segments[-1].end_offset)
        archive.removals.append((number, [segment.file for segment in segments]))
        logger.info(
            "event=archive_retention_removed stream=%s partition=%d first_offset=%d last_offset=%d",
            archive.config.name,
            number,
            segments[0].first_offset,
            segments[-1].end_offset - 1,
        )

    # -- failures -------------------------------------------------------------

    def _failed(self, archive: StreamArchive, error: Exception) -> None:
        self._logs.archive_failures += 1
        waiting = sum(len(self._partition(archive, number).unarchived()) for number in archive.partitions)
        wait = archive.retry_wait = min(2 * archive.retry_wait, LAST_RETRY)
        archive.not_before = time.monotonic() + wait * random.uniform(0.8, 1.2)
        archive.problem = f"{waiting} segments wait: {error}"
        name = archive.config.name
        logger.warning("event=not_archived stream=%s waiting=%d retry_s=%.0f reason=%s", name, waiting, wait, error)
