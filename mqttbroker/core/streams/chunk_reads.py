"""Requests to read chunks of streams, and the memory of all chunks.

The core reads no file: `ChunkReads.on_request` gets each request, which is answered on the event loop's thread. Equal
requests share one read, so that many readers at the end of a stream cost one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

from mqttbroker.core.streams.chunk import Chunk
from mqttbroker.core.terms.terms import BrokerTerms

# Outcomes of a request.
WAITING: Final = 0
READ: Final = 1  # `chunk` is there
MOVED: Final = 2  # there is no record at the offset, and nothing is missing; reading continues at `found`
EXPIRED: Final = 3  # the same, but retention has removed records
NOTHING: Final = 4  # the offset is the end of the partition
FAILED: Final = 5  # `reason` says why; the records up to `found` are damaged, or 0 if nothing can be read
UNAVAILABLE: Final = 6  # `reason` says why; nothing is damaged, and a later request may succeed

MAX_TIME_REQUESTS: Final = 16  # requests for the offsets of times that are made at once; others wait

Place = tuple[str, int, int, int, int, bool, int]


@mypyc_attr(allow_interpreted_subclasses=True)
class LogView:
    """The offsets of streams that are known without reading a file."""

    @abstractmethod
    def bounds(self, stream: str, partition: int) -> tuple[int, int]:
        """The first offset of a partition and the end offset of its committed records; (0, 0) if there is none."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkUser:
    """One that asks for chunks."""

    def __init__(self) -> None:
        self.closed = False  # it wants no answer any more

    @abstractmethod
    def answered(self, request: ReadRequest) -> None:
        """The request has its outcome; a chunk must be given back with `ChunkReads.release`."""

    @abstractmethod
    def give_up_chunk(self) -> bool:
        """Release a chunk that cannot be used for now, because others need the memory; false if it can be used."""

    @abstractmethod
    def advanced(self) -> None:
        """The partition has records at the offset that was its end."""


class ReadRequest:
    """Asks for the records of a partition from ``offset`` on, in a chunk of about ``size`` bytes.

    They are probably at byte ``position`` of the segment whose first offset is ``segment``; -1 if that is not known.
    With ``skipping``, damaged records are left out: the outcome is the next offset that can be read. With a ``time``, in
    µs since the epoch, the outcome is the first offset that was received then or later, and nothing is read.
    """

    def __init__(self, stream: str, partition: int, offset: int, segment: int, position: int, size: int, skipping: bool) -> None:
        self.stream = stream
        self.partition = partition
        self.offset = offset
        self.segment = segment
        self.position = position
        self.size = size
        self.skipping = skipping
        self.time = -1
        self.users: list[ChunkUser] = []
        self.wanted = 0  # the number of users that have not withdrawn
        self.outcome = WAITING
        self.chunk: Chunk | None = None
        self.found = 0
        self.reason = ""

    @property
    def place(self) -> Place:
        return self.stream, self.partition, self.offset, self.segment, self.position, self.skipping, self.time


class ChunkReads:
    """The requests of one broker. ``held`` is the memory of chunks and of what readers remember of topics, in bytes;
    ``remembered`` is the latter part, at most half of `max_total_stream_chunk_bytes`.

    If `max_total_stream_chunk_bytes` is reached, requests wait; chunks whose readers cannot use them are dropped, to be
    read again.
    """

    def __init__(self, terms: BrokerTerms) -> None:
        self.terms = terms
        self.log: LogView | None = None  # None: there are no streams
        self.on_request: Any = None  # called with each `ReadRequest`
        self.held: i64 = 0
        self.remembered: i64 = 0
        self._under_way: dict[Place, ReadRequest] = {}
        self._waiting: dict[ReadRequest, bool] = {}  # in the order in which they came
        self._waiting_times: dict[ReadRequest, bool] = {}  # likewise
        self._times = 0  # requests for times that are made
        self._at_end: dict[tuple[str, int], dict[ChunkUser, bool]] = {}
        self._holders: dict[ChunkUser, bool] = {}  # those with a chunk that they do not use at the moment

    def bounds(self, stream: str, partition: int) -> tuple[int, int]:
        """`LogView.bounds`."""
        log = self.log
        if log is None:
            return 0, 0
        return log.bounds(stream, partition)

    # -- requests -------------------------------------------------------------

    def request(self, user: ChunkUser, request: ReadRequest) -> ReadRequest:
        """Have a request answered, at once or when there is memory for its chunk; returns it, or an equal one that is
        under way and is answered in its place."""
        same = self._under_way.get(request.place)
        if same is not None:
            same.users.append(user)
            same.wanted += 1
            return same
        self._under_way[request.place] = request
        request.users.append(user)
        request.wanted = 1
        if request.time >= 0:
            self._waiting_times[request] = True
            self._start_times()
        elif self._has_room(request):
            self._start(request)
        else:
            self._waiting[request] = True
        return request

    def withdraw(self, request: ReadRequest) -> None:
        """One user of a request is closed."""
        request.wanted -= 1
        if request.wanted == 0:
            self._waiting.pop(request, None)
            self._waiting_times.pop(request, None)
            self._forget(request)

    def _forget(self, request: ReadRequest) -> None:
        """Let no further request join this one."""
        if self._under_way.get(request.place) is request:
            del self._under_way[request.place]

    def remember(self, size: i64) -> bool:
        """Count the memory of what a reader remembers of a topic; false if there is no room for it."""
        if self.remembered + size > self.terms.max_total_stream_chunk_bytes // 2:
            return False
        self.remembered += size
        self.held += size
        return True

    def forget_topics(self, size: i64) -> None:
        """A reader has forgotten topics that it had counted by `remember`."""
        self.remembered -= size
        self.held -= size

    def _start_times(self) -> None:
        while self._waiting_times and self._times < MAX_TIME_REQUESTS:
            request = next(iter(self._waiting_times))
            del self._waiting_times[request]
            self._times += 1
            self._start(request)

    def _has_room(self, request: ReadRequest) -> bool:
        maximum: i64 = self.terms.max_total_stream_chunk_bytes
        size: i64 = request.size
        if self._waiting:
            return False
        while self.held > self.remembered and self.held + size > maximum:
            if not self._reclaim():
                return False
        return True

    def _reclaim(self) -> bool:
        """Drop a chunk that is not in use; false if there is none."""
        while self._holders:
            user = next(iter(self._holders))
            del self._holders[user]
            if not user.closed and user.give_up_chunk():
                return True
        return False

    def _start(self, request: ReadRequest) -> None:
        if request.time < 0:
            self.held += request.size
        if self.on_request is not None:
            self.on_request(request)

    def answered(self, request: ReadRequest) -> None:
        """A request that `on_request` got has its outcome."""
        self._forget(request)
        if request.time < 0:
            self.held -= request.size
        else:
            self._times -= 1
            self._start_times()
        users = request.users
        chunk = request.chunk
        if chunk is not None:
            chunk.users = 1  # until all have it
            self.held += len(chunk.data)
        for user in users:
            if not user.closed:
                if chunk is not None:
                    chunk.users += 1
                user.answered(request)
        if chunk is not None:
            self.release(chunk)
        else:
            self._continue()

    def release(self, chunk: Chunk) -> None:
        """One user needs the chunk no longer."""
        chunk.users -= 1
        if chunk.users == 0:
            self.held -= len(chunk.data)
            self._continue()

    def _continue(self) -> None:
        """Start requests that wait for memory."""
        waiting = self._waiting
        maximum: i64 = self.terms.max_total_stream_chunk_bytes
        while waiting:
            request = next(iter(waiting))
            size: i64 = request.size
            if self.held > self.remembered and self.held + size > maximum:
                return
            del waiting[request]
            self._start(request)

    # -- memory ---------------------------------------------------------------

    def set_idle(self, user: ChunkUser, idle: bool) -> None:
        """Say whether a user has a chunk that it cannot use for now."""
        if idle:
            self._holders[user] = True
            if self._waiting and self._reclaim():
                self._continue()
        else:
            self._holders.pop(user, None)

    # -- the end of a partition -----------------------------------------------

    def wait_at_end(self, user: ChunkUser, stream: str, partition: int) -> None:
        """Call `ChunkUser.advanced` when the partition has more records."""
        key = (stream, partition)
        users = self._at_end.get(key)
        if users is None:
            self._at_end[key] = users = {}
        users[user] = True

    def forget(self, user: ChunkUser, stream: str, partition: int) -> None:
        """A user is closed."""
        self._holders.pop(user, None)
        users = self._at_end.get((stream, partition))
        if users is not None:
            users.pop(user, None)
            if not users:
                del self._at_end[(stream, partition)]

    @property
    def following(self) -> bool:
        """Whether a user waits at the end of a partition."""
        return bool(self._at_end)

    def advanced(self, stream: str, partition: int) -> None:
        """Records were committed in a partition."""
        users = self._at_end.pop((stream, partition), None)
        if users is not None:
            for user in users:
                if not user.closed:
                    user.advanced()
