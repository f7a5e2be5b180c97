"""Requests for chunks: the memory of all of them is bounded, equal ones share a read, and nobody waits for ever."""

from __future__ import annotations

from mqttbroker.core.streams.chunk import Chunk
from mqttbroker.core.streams.chunk_reads import MAX_TIME_REQUESTS, MOVED, READ, ChunkReads, ChunkUser, ReadRequest
from mqttbroker.core.terms.terms import BrokerTerms

SIZE = 100


class User(ChunkUser):
    """A reader that keeps its chunk until it is told otherwise."""

    def __init__(self, reads: ChunkReads) -> None:
        super().__init__()
        self.reads = reads
        self.chunk: Chunk | None = None
        self.given_up = 0
        self.woken = 0
        self.request: ReadRequest

    def ask(self, offset: int) -> None:
        self.request = self.reads.request(self, ReadRequest("s", 0, offset, -1, -1, SIZE, False))

    def ask_time(self, time: int) -> None:
        request = ReadRequest("s", 0, 0, -1, -1, 0, False)
        request.time = time
        self.request = self.reads.request(self, request)

    def close(self) -> None:
        self.closed = True
        self.reads.withdraw(self.request)

    def answered(self, request: ReadRequest) -> None:
        self.chunk = request.chunk

    def give_up_chunk(self) -> bool:
        if self.chunk is None:
            return False
        chunk, self.chunk = self.chunk, None
        self.given_up += 1
        self.reads.release(chunk)
        return True

    def advanced(self) -> None:
        self.woken += 1


class Reads:
    """`ChunkReads` with room for so many chunks, and the requests that it has made."""

    def __init__(self, chunks: int) -> None:
        terms = BrokerTerms()
        terms.max_total_stream_chunk_bytes = chunks * SIZE
        self.reads = ChunkReads(terms)
        self.requests: list[ReadRequest] = []
        self.reads.on_request = self.requests.append

    def answer(self) -> None:
        """Answer the oldest request with a full chunk."""
        request = self.requests.pop(0)
        request.outcome = READ
        request.chunk = Chunk(bytes(SIZE), request.offset, 0, 0, False, "file")
        self.reads.answered(request)


def test_equal_requests_share_one_read_and_its_memory() -> None:
    made = Reads(10)
    users = [User(made.reads) for _ in range(5)]
    for user in users:
        user.ask(7)
    assert len(made.requests) == 1
    made.answer()
    assert all(user.chunk is users[0].chunk for user in users) and made.reads.held == SIZE
    for user in users:
        assert made.reads.held == SIZE
        user.give_up_chunk()
    assert made.reads.held == 0


def test_requests_beyond_the_limit_wait_for_memory() -> None:
    made = Reads(2)
    users = [User(made.reads) for _ in range(5)]
    for offset, user in enumerate(users):
        user.ask(offset)
    assert len(made.requests) == 2 and made.reads.held == 2 * SIZE
    made.answer()
    made.answer()
    assert not made.requests, "both chunks are in use"
    users[0].give_up_chunk()
    assert [request.offset for request in made.requests] == [2] and made.reads.held <= 2 * SIZE


def test_chunks_that_cannot_be_used_are_dropped_for_others() -> None:
    made = Reads(2)
    slow, other, third = User(made.reads), User(made.reads), User(made.reads)
    slow.ask(0)
    other.ask(1)
    made.answer()
    made.answer()
    made.reads.set_idle(slow, True)
    third.ask(2)
    assert slow.given_up == 1 and other.given_up == 0 and len(made.requests) == 1


def test_a_chunk_becomes_idle_while_others_wait() -> None:
    made = Reads(1)
    slow, other = User(made.reads), User(made.reads)
    slow.ask(0)
    made.answer()
    other.ask(1)
    assert not made.requests
    made.reads.set_idle(slow, True)
    assert slow.given_up == 1 and [request.offset for request in made.requests] == [1]


def test_closed_users_get_nothing_and_hold_nobody_up() -> None:
    made = Reads(1)
    first, gone, last = User(made.reads), User(made.reads), User(made.reads)
    first.ask(0)
    gone.ask(1)
    last.ask(2)
    gone.close()
    made.answer()
    first.give_up_chunk()
    assert [request.offset for request in made.requests] == [2]
    last.close()
    made.answer()
    assert made.reads.held == 0 and last.chunk is None


def test_what_readers_remember_of_topics_leaves_room_for_chunks() -> None:
    made = Reads(2)
    user = User(made.reads)
    remembered = 0
    while made.reads.remember(10):
        remembered += 10
    assert remembered == SIZE == made.reads.held
    for offset in range(3):
        user.ask(offset)
        made.answer()
        user.give_up_chunk()
    made.reads.forget_topics(remembered)
    assert made.reads.held == 0 == made.reads.remembered


def test_requests_for_times_are_made_a_few_at_a_time_and_not_for_closed_users() -> None:
    made = Reads(1)
    users = [User(made.reads) for _ in range(1000)]
    for time, user in enumerate(users):
        user.ask_time(time)
    assert len(made.requests) == MAX_TIME_REQUESTS
    for user in users[:-1]:
        user.close()
    for _ in range(MAX_TIME_REQUESTS):
        request = made.requests.pop(0)
        request.outcome = MOVED
        made.reads.answered(request)
    assert [request.time for request in made.requests] == [999], "the others have withdrawn"


def test_equal_requests_for_a_time_share_one() -> None:
    made = Reads(1)
    for _ in range(50):
        User(made.reads).ask_time(7)
    assert len(made.requests) == 1


def test_users_at_the_end_are_told_once() -> None:
    made = Reads(1)
    users = [User(made.reads) for _ in range(3)]
    for user in users:
        made.reads.wait_at_end(user, "s", 0)
    made.reads.forget(users[2], "s", 0)
    made.reads.advanced("s", 1)
    made.reads.advanced("s", 0)
    made.reads.advanced("s", 0)
    assert [user.woken for user in users] == [1, 1, 0] and not made.reads.following
