"""Reads the chunks that `ChunkReads` asks for, on threads, and answers on the event loop.

The threads do little but system calls: a thread that computes would hold the interpreter's lock, and with it the event
loop, for milliseconds. So packets are made of chunks by the core, in small parts.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from typing import Callable, List, Optional, Tuple

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.chunks import Answer, ChunkReader, InSegment, Moved, Nothing, Piece, Unreadable, locate
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.sealed.row_process import RowProcess
from bridge_spark.log.stream_config import can_seal
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.core.chunk import Chunk
from mqttbroker.core.chunk_reads import EXPIRED, FAILED, MOVED, NOTHING, READ, WAITING, ChunkReads, LogView, ReadRequest

IDLE_SECONDS = 30.0  # without a read of a sealed segment, after which the process that reads them ends

log = logging.getLogger("mqttbroker.streams")


class StreamLogView(LogView):
    """The bounds of the partitions of `logs`."""

    def __init__(self, logs: StreamLogs) -> None:
        self._logs = logs

    def bounds(self, stream: str, partition: int) -> Tuple[int, int]:
        try:
            view = self._logs.partition(stream, partition).view
        except KeyError:
            return 0, 0
        return view.log_start_offset, view.high_watermark


class _ReadThread:
    """A thread that has ``answer`` set the outcome of requests, one after the other; ``rest`` is called on it when there was
    none for a while, and at its end."""

    def __init__(
        self,
        name: str,
        answer: Callable[[ReadRequest], None],
        answered: Callable[[ReadRequest], None],
        rest: Callable[[], None],
    ) -> None:
        self._answer = answer
        self._answered = answered
        self._rest = rest
        self._requests: queue.SimpleQueue[Optional[ReadRequest]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, request: Optional[ReadRequest]) -> None:
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
                self._answer(request)
            except Exception as error:
                # A defect must not end the thread: no reader would get anything.
                log.exception("event=defect in=stream_reads")
                _apply(request, Unreadable(0, f"{type(error).__name__}: {error}"))
            self._answered(request)
        self._rest()


class StreamReads:
    """The threads that answer the requests of ``reads``; ``update_clock`` is called before each answer.

    Sealed segments and times, which take longer, have a thread of their own.
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
        self._process = RowProcess()
        self._stopped = False
        self._segments = _ReadThread("stream-reads", self._answer, self._hand_back, lambda: None)
        self._sealed = _ReadThread("sealed-reads", self._answer_slowly, self._hand_back, self._process.close)
        reads.log = StreamLogView(logs)
        reads.on_request = self._segments.put

    def start(self) -> None:
        self._segments.start()
        self._sealed.start()

    def stop(self) -> None:
        """Answer nothing any more."""
        self._stopped = True
        self._reads.on_request = None
        self._process.kill()
        for thread in (self._segments, self._sealed):
            thread.put(None)
            thread.join()

    def committed(self, partitions: List[Tuple[str, int]]) -> None:
        """Records of these partitions were committed; called on the event loop's thread."""
        for stream, partition in partitions:
            self._reads.advanced(stream, partition)

    def _answer(self, request: ReadRequest) -> None:
        """Read from a segment, or leave the request to the other thread."""
        if request.time >= 0:
            return
        answer = self._read(request)
        if not isinstance(answer, InSegment):
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

    def _answer_slowly(self, request: ReadRequest) -> None:
        if request.time >= 0:
            self._find_time(request)
            return
        while not self._stopped:
            answer = locate(self._logs, request.stream, request.partition, request.offset)
            if isinstance(answer, InSegment) and request.skipping:
                answer = Moved(answer.segment.end_offset, False)  # the whole file cannot be read
            if not isinstance(answer, InSegment):
                _apply(request, answer)
                return
            found = self._read_sealed(request, answer)
            if found is not None:
                _apply(request, found)
                return

    def _read_sealed(self, request: ReadRequest, place: InSegment) -> Optional[Answer]:
        """A batch of a sealed segment; None if the file is not there any more."""
        if not can_seal():
            return Unreadable(0, f"{place.path.name} is sealed, and pyarrow is not installed")
        try:
            found = self._process.read(place.path, place.segment.size, request.offset, request.size)
        except FileNotFoundError:
            return None
        except OSError as error:
            return Unreadable(0, f"{place.path.name}: {error.strerror or error}")
        if found.reason:
            return Unreadable(found.end, f"{place.path.name}: {found.reason}")
        if found.data:
            return Piece(found.data, place.segment.first_offset, 0, True, place.path.name)
        return Moved(found.end, False)

    def _find_time(self, request: ReadRequest) -> None:
        try:
            found = self._logs.offset_for_timestamp(request.stream, request.partition, request.time)
            start = self._logs.partition(request.stream, request.partition).view.log_start_offset
        except (KeyError, OSError, SegmentError, ArchiveError) as error:
            _apply(request, Unreadable(0, f"no offset for the time {request.time}: {error}"))
        else:
            _apply(request, Moved(max(found, start), False))

    def _hand_back(self, request: ReadRequest) -> None:
        if request.outcome == WAITING and not self._stopped:
            self._sealed.put(request)
            return
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
        request.chunk = Chunk(
            answer.data, request.offset, answer.segment, answer.position, answer.made, answer.file
        )
    elif isinstance(answer, Moved):
        request.outcome = EXPIRED if answer.expired else MOVED
        request.found = answer.offset
    elif isinstance(answer, Nothing):
        request.outcome = NOTHING
    elif isinstance(answer, Unreadable):
        request.outcome = FAILED
        request.found = answer.end
        request.reason = answer.reason
