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
from bridge_spark.log.chunks import Answer, ChunkReader, InSealedSegment, Moved, Nothing, Piece, Unreadable
from bridge_spark.log.record_batch import SegmentError
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.core.chunk import Chunk
from mqttbroker.core.chunk_reads import EXPIRED, FAILED, MOVED, NOTHING, READ, ChunkReads, LogView, ReadRequest

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


class StreamReads:
    """The threads that answer the requests of ``reads``; ``update_clock`` is called before each answer."""

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
        self._requests: queue.SimpleQueue[Optional[ReadRequest]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stream-reads", daemon=True)
        reads.log = StreamLogView(logs)
        reads.on_request = self._requests.put

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Answer nothing any more."""
        self._reads.on_request = None
        self._requests.put(None)
        self._thread.join()

    def committed(self, partitions: List[Tuple[str, int]]) -> None:
        """Records of these partitions were committed; called on the event loop's thread."""
        for stream, partition in partitions:
            self._reads.advanced(stream, partition)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._answer(request)
            except Exception as error:
                # A defect must not end the thread: no reader would get anything.
                log.exception("event=defect in=stream_reads")
                _apply(request, Unreadable(0, f"{type(error).__name__}: {error}"))
            try:
                self._loop.call_soon_threadsafe(self._answered, request)
            except RuntimeError:  # the loop is closed
                return

    def _answer(self, request: ReadRequest) -> None:
        if request.time >= 0:
            try:
                found = self._logs.offset_for_timestamp(request.stream, request.partition, request.time)
            except (KeyError, OSError, SegmentError, ArchiveError) as error:
                _apply(request, Unreadable(0, f"no offset for the time {request.time}: {error}"))
            else:
                start = self._logs.partition(request.stream, request.partition).view.log_start_offset
                _apply(request, Moved(max(found, start), False))
            return
        place = request.offset, request.segment, request.position, request.size, request.skipping
        answer = self._reader.read(request.stream, request.partition, *place)
        if isinstance(answer, InSealedSegment):
            answer = Unreadable(answer.segment.end_offset, f"{answer.path.name}: sealed segments are not read yet")
        _apply(request, answer)

    def _answered(self, request: ReadRequest) -> None:
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
