"""Reads the chunks that `ChunkReads` asks for, on threads, and answers on the event loop.

The threads do little but system calls: a thread that computes would hold the interpreter's lock, and with it the event
loop, for milliseconds. So packets are made of chunks by the core, in small parts.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.chunks import (
    Answer,
    ChunkReader,
    InArchive,
    InSegment,
    Moved,
    Nothing,
    Piece,
    Unavailable,
    Unreadable,
    failure,
    locate,
    log_start,
)
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.sealed.row_process import ProcessEnded, RowProcess
from bridge_spark.log.stream_config import can_seal
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.core.streams.chunk import Chunk
from mqttbroker.core.streams.chunk_reads import (
    EXPIRED,
    FAILED,
    MOVED,
    NOTHING,
    READ,
    UNAVAILABLE,
    WAITING,
    ChunkReads,
    LogView,
    ReadRequest,
)

IDLE_SECONDS = 30.0  # without a read of a sealed segment, after which a process that reads them ends

log = logging.getLogger("mqttbroker.streams")


class StreamLogView(LogView):
    """The bounds of the partitions of `logs`."""

    def __init__(self, logs: StreamLogs) -> None:
        self._logs = logs

    def bounds(self, stream: str, partition: int) -> tuple[int, int]:
        try:
            found = self._logs.partition(stream, partition)
        except KeyError:
            return 0, 0
        return log_start(found), found.view.high_watermark


class _ReadThread:
    """A thread that answers requests, one after the other.

    ``answer`` sets the outcome of a request. A request that still waits for one goes to the thread ``following``, any
    other one to ``answered``. ``rest`` is called after `IDLE_SECONDS` without a request, and at the end of the thread.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[ReadRequest], None],
        answered: Callable[[ReadRequest], None],
        rest: Callable[[], None],
        following: _ReadThread | None = None,
    ) -> None:
        self._answer = answer
        self._answered = answered
        self._rest = rest
        self._following = following
        self._requests: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, request: ReadRequest | None) -> None:
        """Answer a request; None ends the thread."""
        self._requests.put(request)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._rest()
                continue
            if request is None:
                break
            try:
                if request.wanted:
                    self._answer(request)
                else:
                    request.outcome = NOTHING
            except Exception as error:
                # A defect must not end the thread: no reader would get anything.
                log.exception("event=defect in=stream_reads")
                _apply(request, Unreadable(0, f"{type(error).__name__}: {error}"))
            if request.outcome == WAITING and self._following is not None:
                self._following.put(request)
            else:
                self._answered(request)
        self._rest()


class StreamReads:
    """The threads that answer the requests of ``reads``; ``update_clock`` is called before each answer.

    There is a thread for segments that are not sealed, one for sealed segments and times, which take longer, and one
    for archives, which may take very long. The last two have a process each that decodes segments.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        logs: StreamLogs,
        reads: ChunkReads,
        update_clock: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._logs = logs
        self._reads = reads
        self._update_clock = update_clock
        self._reader = ChunkReader(logs)
        self._sealed_process = RowProcess()
        self._archive_process = RowProcess()
        self._stopped = False
        self._archived = _ReadThread("archive-reads", self._answer_archived, self._hand_back, self._archive_process.close)
        self._sealed = _ReadThread("sealed-reads", self._answer_sealed, self._hand_back, self._sealed_process.close, self._archived)
        self._segments = _ReadThread("stream-reads", self._answer, self._hand_back, lambda: None, self._sealed)
        reads.log = StreamLogView(logs)
        reads.on_request = self._segments.put

    def start(self) -> None:
        self._segments.start()
        self._sealed.start()
        self._archived.start()

    def stop(self) -> None:
        """Answer nothing any more."""
        self._stopped = True
        self._reads.on_request = None
        self._sealed_process.kill()
        self._archive_process.kill()
        for thread in (self._segments, self._sealed, self._archived):
            thread.put(None)
            thread.join()

    def committed(self, partitions: list[tuple[str, int]]) -> None:
        """Records of these partitions were committed; called on the event loop's thread."""
        for stream, partition in partitions:
            self._reads.advanced(stream, partition)

    def _answer(self, request: ReadRequest) -> None:
        """Read from a segment that is not sealed."""
        if request.time >= 0:
            return
        answer = self._read(request)
        if not isinstance(answer, (InSegment, InArchive)):
            _apply(request, answer)

    def _read(self, request: ReadRequest) -> Answer:
        return self._reader.read(
            request.stream,
            request.partition,
            request.offset,
            request.segment,
            request.position,
            request.size,
            request.skipping,
        )

    def _answer_sealed(self, request: ReadRequest) -> None:
        """Read from a sealed segment, or find a time in a partition without an archive."""
        if request.time < 0:
            self._decode(self._sealed_process, request, False)
        elif not self._is_archived(request):
            self._find_time(request)

    def _answer_archived(self, request: ReadRequest) -> None:
        if request.time < 0:
            self._decode(self._archive_process, request, True)
        else:
            self._find_time(request)

    def _is_archived(self, request: ReadRequest) -> bool:
        try:
            return self._logs.partition(request.stream, request.partition).archive.current.segments > 0
        except KeyError:
            return False

    def _decode(self, process: RowProcess, request: ReadRequest, from_archive: bool) -> None:
        """Read from a sealed segment, also from an archived one if ``from_archive``."""
        missing: Answer | None = None
        while not self._stopped:
            place = locate(self._logs, request.stream, request.partition, request.offset)
            if not isinstance(place, (InSegment, InArchive)):
                _apply(request, place)
                return
            if isinstance(place, InArchive) and not from_archive:
                return
            found: Answer | None
            if request.skipping:
                found = Moved(place.segment.end_offset, False)  # the whole file cannot be read
            elif place == missing:
                found = Unreadable(0, f"{place.segment.file} is missing")
            else:
                found = self._read_sealed(process, request, place)
            if found is not None:
                _apply(request, found)
                return
            missing = place

    def _read_sealed(self, process: RowProcess, request: ReadRequest, place: InSegment | InArchive) -> Answer | None:
        """A batch of a sealed segment; None if the file is not there."""
        segment = place.segment
        location = place.location if isinstance(place, InArchive) else ""
        if not can_seal():
            return Unavailable(f"{segment.file} is sealed, and pyarrow is not installed")
        terms = self._reads.terms
        process.nice, process.cache_bytes = terms.sealed_reader_nice, terms.sealed_reader_cache_bytes
        for last in (False, True):
            try:
                found = process.read(place.path, segment.size, request.offset, request.size, location)
                break
            except FileNotFoundError:
                return None
            except ProcessEnded as error:
                if last or self._stopped:
                    return Unavailable(f"{segment.file}: {error}")
            except OSError as error:
                return failure(segment.file, error)
            except ArchiveError as error:
                return Unavailable(f"archive of stream {request.stream}: {error}")
        if found.reason:
            return Unreadable(found.end, f"{segment.file}: {found.reason}")
        if found.data:
            return Piece(found.data, segment.first_offset, 0, True, segment.file)
        return Moved(found.end, False)

    def _find_time(self, request: ReadRequest) -> None:
        try:
            found = self._logs.offset_for_timestamp(request.stream, request.partition, request.time)
            start = log_start(self._logs.partition(request.stream, request.partition))
        except (KeyError, OSError, SegmentError, ArchiveError) as error:
            _apply(request, Unreadable(0, f"no offset for the time {request.time}: {error}"))
        else:
            _apply(request, Moved(max(found, start), False))

    def _hand_back(self, request: ReadRequest) -> None:
        try:
            self._loop.call_soon_threadsafe(self._answered, request)
        except RuntimeError:  # the loop is closed
            pass

    def _answered(self, request: ReadRequest) -> None:
        if not self._stopped:
            self._update_clock()
            self._reads.answered(request)


def _apply(request: ReadRequest, answer: Answer) -> None:
    """Set the outcome of a request."""
    if isinstance(answer, Piece):
        request.outcome = READ
        request.chunk = Chunk(answer.data, request.offset, answer.segment, answer.position, answer.made, answer.file)
    elif isinstance(answer, Moved):
        request.outcome = EXPIRED if answer.expired else MOVED
        request.found = answer.offset
    elif isinstance(answer, Nothing):
        request.outcome = NOTHING
    elif isinstance(answer, Unreadable):
        request.outcome = FAILED
        request.found = answer.end
        request.reason = answer.reason
    elif isinstance(answer, Unavailable):
        request.outcome = UNAVAILABLE
        request.reason = answer.reason
