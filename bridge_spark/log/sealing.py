"""Sealing beside a running broker: one segment after the other, by a process of its own.

The rule kept here: at every moment one whole file on disk holds each record, and readers find it.  The sealed file is
written and read back under another name, synced, renamed, the directory synced; then the writer shows it to readers, and
later lets the segment's own file go (`stream_log`).  Whatever fails leaves the segment as it is, costs one line in the log
and is tried again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Dict, Optional, Set, Tuple

from bridge_spark.log import segment_file
from bridge_spark.log.files import sync_directory
from bridge_spark.log.sealed import UNFINISHED, file_name
from bridge_spark.log.sealer import Sealer, SealingFailed
from bridge_spark.log.segment import SegmentError
from bridge_spark.log.segment_file import Segment
from bridge_spark.log.stream_log import Key, StreamLogs

FIRST_RETRY = 60.0  # seconds after a failure; each further one of the same segment doubles it
LAST_RETRY = 3600.0
FAILURES = 3  # so many segments in a row that cannot be sealed, and the others wait for the first to be tried again
ROOM_BYTES = 64 * 1024 * 1024  # stays free beside a sealed file as large as its segment: the broker's own need goes before

Job = Tuple[Key, Path, Segment]

logger = logging.getLogger(__name__)


class Sealing:
    """Seals what `logs` has to seal, from `start` to `stop`; without effect where no stream wants it."""

    def __init__(self, logs: StreamLogs) -> None:
        self._logs = logs
        self._sealer = Sealer()
        self._stopping = False
        self._thread: Optional[threading.Thread] = None
        self._done: Dict[Tuple[Key, int], float] = {}  # sealed, or failed and not to be tried before
        self._waits: Dict[Tuple[Key, int], float] = {}

    def start(self) -> None:
        if self._logs.wants_sealing:
            self._thread = threading.Thread(target=self._run, name="sealing", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End at once; a segment that is just being sealed stays as it is."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping = True
        self._logs.closed_more.set()
        while thread.is_alive():
            self._sealer.kill()
            thread.join(0.05)

    def _run(self) -> None:
        more = self._logs.closed_more
        more.set()
        while not self._stopping:
            more.wait(self._pause())
            more.clear()
            self._round()

    def _round(self) -> None:
        """Seal what can be sealed now."""
        failures = 0
        try:
            while not self._stopping and failures < FAILURES and (job := self._next()) is not None:
                failures = 0 if self._seal(*job) else failures + 1
        finally:
            self._sealer.close()

    def _pause(self) -> Optional[float]:
        """Seconds until something is tried again; None when nothing is."""
        later = [self._done[key] for key in self._waits]
        return max(0.0, min(later) - time.monotonic()) if later else None

    def _next(self) -> Optional[Job]:
        now = time.monotonic()
        known: Set[Tuple[Key, int]] = set()
        for job in self._logs.unsealed():
            name = (job[0], job[2].first_offset)
            if self._done.get(name, 0.0) <= now:
                return job
            known.add(name)
        self._done = {name: until for name, until in self._done.items() if name in known}
        self._waits = {name: wait for name, wait in self._waits.items() if name in known}
        return None

    def _seal(self, key: Key, directory: Path, part: Segment) -> bool:
        """False if it failed, and will be tried again."""
        name = (key, part.first_offset)
        unfinished = directory / f"{file_name(part.first_offset)}.{os.getpid()}{UNFINISHED}"
        try:
            sealed = self._write(key, directory, part, unfinished)
            os.rename(unfinished, directory / sealed.file)
            sync_directory(directory)
        except (SealingFailed, SegmentError, OSError) as error:
            with suppress(OSError):
                unfinished.unlink()
            if not self._stopping and (directory / part.file).exists():
                self._failed(name, directory / part.file, error)
                return False
            self._done[name] = float("inf")
            self._waits.pop(name, None)
            return True
        self._done[name] = float("inf")
        self._waits.pop(name, None)
        self._logs.put_sealed(key, sealed)
        logger.info("event=segment_sealed file=%s bytes=%d before=%d", directory / sealed.file, sealed.size, part.size)
        return True

    def _write(self, key: Key, directory: Path, part: Segment, target: Path) -> Segment:
        """The segment, written as `target` and on disk."""
        free = os.statvfs(directory)
        if free.f_bavail * free.f_frsize < part.size + ROOM_BYTES:
            raise SealingFailed(f"less than {part.size + ROOM_BYTES} bytes are free")
        stream, number = key
        self._sealer.do({
            "do": "seal",
            "source": str(directory / part.file),
            "target": str(target),
            "stream": stream,
            "partition": number,
            "first_offset": part.first_offset,
            "end_offset": part.end_offset,
            "size": part.size,
        })
        sealed = segment_file.examine_sealed(target)
        if (sealed.first_offset, sealed.end_offset) != (part.first_offset, part.end_offset):
            raise SealingFailed("other offsets were sealed")
        return sealed

    def _failed(self, name: Tuple[Key, int], path: Path, error: Exception) -> None:
        self._logs.sealing_failures += 1
        wait = self._waits[name] = min(2 * self._waits.get(name, FIRST_RETRY / 2), LAST_RETRY)
        self._done[name] = time.monotonic() + wait
        logger.warning("event=not_sealed file=%s retry_s=%.0f reason=%s", path, wait, error)
