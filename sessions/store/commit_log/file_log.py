"""The commit log as files in one directory: the newest segment is written to, older ones wait until they are dropped.

One thread appends. Another one makes the next segment ready, and drops segments. Zeros are written to a new segment
before it is used, and dropped ones are used again: so the sync of a record writes no metadata of the file system.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from sessions.store.commit_log.segment import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    RECORD_BYTES,
    BadHeader,
    decode_header,
    encode_header,
    encode_record,
    file_name,
    segment_files,
)
from sessions.store.commit_log.survey import Survey, survey
from sessions.store.disk import is_full, make_directory, sync_directory
from sessions.store.interface import CorruptStore, StoreError

SEGMENT_BYTES = 16 * 1024 * 1024
# The suffix of a segment that is not used yet.
UNUSED = ".new"
SALT_BYTES = 8
# A page: Linux keeps what one write writes as one unit, and a small write of a record would make all of it dirty.
_ZEROS = bytes(4096)

logger = logging.getLogger(__name__)


class _Closed(NamedTuple):
    """A segment that is not written to any more."""

    path: Path
    end_position: int  # behind its last record
    size: int


class FileCommitLog:
    """The log in ``directory``; segments have ``segment_bytes`` or, for one larger record, more."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self.position = 0  # of the last durable record
        self._segment_bytes = segment_bytes
        self._identity = b""
        self._lock = threading.Lock()  # for `_closed`, `_ready` and `size`
        self._closed: list[_Closed] = []
        self._ready: Path | None = None
        self._names = count()
        self._path: Path | None = None  # of the segment that is written to
        self._fd = -1
        self._salt = b""
        self._end = 0  # of the last record in it
        self._size = 0
        self._failed = False  # a write or a sync of it failed: its bytes behind `_end` are unknown
        self.size = 0  # bytes of all segments

    # -- start ----------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether there are segments. Raises `OSError`."""
        return self.directory.is_dir() and bool(segment_files(self.directory))

    def open(self, identity: bytes, position: int, closed: bool) -> Survey:
        """Read the log behind a position of the tables, which belong to ``identity``; ``closed`` if they need no log.

        All whole records are on disk then. Raises `StoreError` if the log is not the one of these tables or cannot be
        used, and `CorruptStore` if it is damaged.
        """
        self._identity = identity
        try:
            make_directory(self.directory)
            for unused in self.directory.glob(f"*{UNUSED}"):
                unused.unlink()
            self._prove_writable()
            if closed:
                self._finish_removal(position)
            found = survey(self.directory, identity)
            self._check(found, position, closed)
            self._continue(found, position)
        except OSError as error:
            raise StoreError(f"{error.filename or self.directory}: {error.strerror}") from error
        return found

    def _prove_writable(self) -> None:
        """Raises `OSError` if no file can be made in the directory; a full disk may get room later."""
        probe = self._unused_name()
        try:
            with open(probe, "wb", buffering=0) as file:
                file.write(_ZEROS[:1])
                os.fsync(file.fileno())
        except OSError as error:
            if not is_full(error):
                raise
        finally:
            probe.unlink(missing_ok=True)

    def _finish_removal(self, position: int) -> None:
        """Remove what a power loss left of a log that was removed: segments that begin at this position or before."""
        for path in segment_files(self.directory):
            with suppress(BadHeader):
                header = decode_header(path.read_bytes()[:HEADER_BYTES])
                if header.identity == self._identity and header.first_position <= position:
                    path.unlink()
                    sync_directory(self.directory)

    def _check(self, found: Survey, position: int, closed: bool) -> None:
        if found.damage:
            raise CorruptStore(str(found.damage[0]))
        if not found.segments:
            if not closed:
                raise CorruptStore(f"{self.directory}: the commit log is missing")
            return
        first = found.segments[0]
        if first.first_position > position + 1:
            raise StoreError(
                f"{first.path}: begins at position {first.first_position}, but the database ends at {position}:"
                " it is older than the log; restore the database that belongs to the log"
            )
        if found.next_position <= position:
            last = found.segments[-1].path
            raise CorruptStore(f"{last}: ends at position {found.next_position - 1}, but the database at {position}")

    def _continue(self, found: Survey, position: int) -> None:
        """Continue behind the last whole record."""
        self.position = max(position, found.next_position - 1)
        for segment in found.segments[:-1]:
            self._closed.append(_Closed(segment.path, segment.next_position, segment.size))
        for last in found.segments[-1:]:
            self._fd = os.open(last.path, os.O_RDWR)
            # A killed process may have left its last record in memory only.
            os.fdatasync(self._fd)
            self._path, self._salt, self._end, self._size = last.path, last.header.salt, last.end, last.size
        sync_directory(self.directory)
        self.size = sum(segment.size for segment in found.segments)

    # -- the appending thread ---------------------------------------------------

    def append(self, body: bytes) -> None:
        """Return when the record is on disk. Raises `OSError`: nothing is stored then, and the next call tries anew."""
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"a write set of {len(body)} bytes is too large for the commit log")
        needed = RECORD_BYTES + len(body) + 7
        if self._fd < 0 or self._failed or self._end + needed > self._size:
            self._roll(needed)
        position = self.position + 1
        try:
            self._write(encode_record(self._salt, position, body))
        except BaseException as error:
            self._failed = True
            self._void()
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self._path)
            raise
        self.position = position

    def _write(self, parts: tuple[bytes, ...]) -> None:
        data = b"".join(parts)
        written = os.pwrite(self._fd, data, self._end)
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._end + written)
        os.fdatasync(self._fd)
        self._end += len(data)

    def _void(self) -> None:
        """Overwrite the header of a record that failed: it may be whole on disk, and a start would read it.

        Records that follow go into a new segment, as nothing is known of this one behind its last durable record.
        """
        try:
            os.pwrite(self._fd, bytes(RECORD_BYTES), self._end)
            os.fdatasync(self._fd)
        except OSError as error:
            logger.warning("event=store_trouble what=%s file=%s reason=%s", "a failed record may be on disk", self._path, error)

    def _roll(self, needed: int) -> None:
        """Continue in a new segment, whose header and name are on disk."""
        first = self.position + 1
        size = max(self._segment_bytes, HEADER_BYTES + needed)
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is None or size > self._segment_bytes:
            with self._lock:
                self._ready = ready
            ready = self._unused_name()
            self._fill(ready, size)
        salt = os.urandom(SALT_BYTES)
        path = self.directory / file_name(first)
        fd = os.open(ready, os.O_RDWR)
        # Once the new name may be there, records of this position in the old segment are void.
        self._failed = True
        try:
            os.pwrite(fd, encode_header(self._identity, first, salt), 0)
            os.fdatasync(fd)
            os.rename(ready, path)
            sync_directory(self.directory)
        except BaseException:
            os.close(fd)
            ready.unlink(missing_ok=True)
            raise
        before, self._fd = self._fd, fd
        with self._lock:
            if self._path is not None:
                if self._path != path:
                    self._closed.append(_Closed(self._path, first, self._size))
                else:
                    self.size -= self._size
            self.size += size
        self._path, self._salt, self._end, self._size = path, salt, HEADER_BYTES, size
        self._failed = False
        if before >= 0:
            os.close(before)

    @property
    def closed_size(self) -> int:
        """Bytes of the segments that `drop` can drop."""
        with self._lock:
            return sum(closed.size for closed in self._closed)

    # -- the other thread -------------------------------------------------------

    @property
    def needs_segment(self) -> bool:
        """Whether `make_ready` has something to do."""
        return self._ready is None and self._end > self._size // 4

    def make_ready(self) -> None:
        """Make the next segment. Raises `OSError`; the appending thread tries itself then."""
        path = self._unused_name()
        self._fill(path, self._segment_bytes)
        with self._lock:
            self._ready = path

    def _unused_name(self) -> Path:
        return self.directory / f"{next(self._names)}{UNUSED}"

    def _fill(self, path: Path, size: int) -> None:
        """Write a file of zeros, and sync it."""
        try:
            with open(path, "wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                left = size
                while left > 0:
                    left -= os.write(file.fileno(), _ZEROS[:left])
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def drop(self, position: int) -> None:
        """Drop the segments whose records all have this position or a lower one. Raises `OSError`."""
        while True:
            with self._lock:
                if not self._closed or self._closed[0].end_position > position + 1:
                    return
                oldest = self._closed[0]
                keep = self._ready is None and oldest.size == self._segment_bytes
            unused = self._unused_name()
            with suppress(FileNotFoundError):  # gone already, if the sync below failed before
                if keep:
                    os.rename(oldest.path, unused)
                else:
                    os.unlink(oldest.path)
            # A file may get its new contents only after its old name is gone.
            sync_directory(self.directory)
            with self._lock:
                del self._closed[0]
                self.size -= oldest.size
                if keep and unused.exists():
                    self._ready = unused

    # -- the end ----------------------------------------------------------------

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Close the log, and remove all its files: the tables have everything. Raises `OSError`."""
        self.close()
        paths = [closed.path for closed in self._closed]
        if self._path is not None:
            paths.append(self._path)
        if self._ready is not None:
            paths.append(self._ready)
        for path in paths:
            path.unlink(missing_ok=True)
            # One after the other: a power loss must not leave a log with a gap.
            sync_directory(self.directory)
        self.size = 0
