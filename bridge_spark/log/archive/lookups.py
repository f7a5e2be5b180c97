"""Finds offsets by time in archived segments, by a process that ends when it is idle."""

from __future__ import annotations

import threading

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.archive.index import ArchivedSegment
from bridge_spark.log.sealed.job_process import JobFailed, JobProcess

IDLE_S = 60.0
TIMEOUT_S = 20.0  # of one lookup


class ArchiveLookups:
    """Lookups one after the other, from any thread."""

    def __init__(self) -> None:
        self._process = JobProcess(nice=0)  # a request waits for it
        self._lock = threading.Lock()
        self._idle: threading.Timer | None = None

    def find_time(self, location: str, stream: str, partition: int, segment: ArchivedSegment, timestamp: int) -> int:
        """The first offset of the segment that was received at or after `timestamp`.  Raises `ArchiveError`."""
        with self._lock:
            self._cancel()
            try:
                job = {
                    "do": "find time",
                    "location": location,
                    "stream": stream,
                    "partition": partition,
                    "name": segment.file,
                    "timestamp": timestamp,
                }
                return int(self._process.run_within(job, TIMEOUT_S))
            except JobFailed as error:
                self._process.close()
                raise ArchiveError(str(error)) from None
            finally:
                self._idle = threading.Timer(IDLE_S, self._end)
                self._idle.daemon = True
                self._idle.start()

    def _cancel(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end(self) -> None:
        with self._lock:
            if self._idle is threading.current_thread():
                self._process.close()

    def close(self) -> None:
        """End the process; a lookup that runs fails."""
        self._process.kill()
        with self._lock:
            self._cancel()
            self._process.close()
