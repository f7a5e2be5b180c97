"""Readers of streams take turns of a bounded time, and live messages go first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from support.core import Core
from support.manual_loop import Loop, Transport

from bridge_spark.log.record_batch import encode_batches
from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import Connect, Publish, Subscribe, Subscription
from mqttbroker.config.settings import Stream
from mqttbroker.core.streams.chunk import Chunk
from mqttbroker.core.streams.chunk_reads import READ, LogView, ReadRequest
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.stream_turns import STREAM_PART, STREAM_TIME
from mqttbroker.net.wire import Endpoint, Wire
from sessions.counters import Counters
from sessions.message import Message

RECORDS = 2000
RECORD = len(Publish("h/1", bytes(100), 0, False, False, 0).encode(4))


class View(LogView):
    """A partition with `RECORDS` records."""

    def bounds(self, stream: str, partition: int) -> tuple[int, int]:
        return 0, RECORDS


@pytest.fixture
def streaming(tmp_path: Path) -> Iterator[tuple[Core, list[ReadRequest]]]:
    """A core, and the requests for chunks that it has made; each has its answer, which the test hands over."""
    with Core(tmp_path, durability="off", others={"streams": (Stream("history", ("h/#",)),)}) as made:
        records = [Message("h/1", bytes(100), 0, False, b"", "c", 1, 0) for _ in range(RECORDS)]
        data = b"".join(encode_batches(records, 0))

        def answer(request: ReadRequest) -> None:
            request.outcome = READ
            request.chunk = Chunk(data, 0, 0, 0, False, "file")
            requests.append(request)

        requests: list[ReadRequest] = []
        made.broker.chunk_reads.log = View()
        made.broker.chunk_reads.on_request = answer
        yield made, requests


def join(core: Core, scheduler: FlushScheduler, name: str, topic_filter: str) -> Wire:
    def defect(_: object) -> None:
        raise AssertionError("a defect")

    policy = ListenerPolicy(Security(core.settings).policy, core.terms, None, core.broker.outbound.counters)
    wire = Wire(Endpoint(scheduler, policy, OpenSockets(1000, 1000, Counters()), lambda: name, defect))
    wire.connection_made(Transport())
    wire.data_received(Connect(name, 4).encode(4))
    wire.data_received(Subscribe(1, [Subscription(topic_filter, 0)]).encode(4))
    return wire


def test_readers_take_turns_of_bounded_time_and_live_messages_go_first(
    streaming: tuple[Core, list[ReadRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, requests = streaming
    loop = Loop()
    scheduler = FlushScheduler(core.broker, loop, lambda _: None, True)
    readers = [join(core, scheduler, f"reader{number}", "$replay/earliest/history") for number in range(3)]
    live = join(core, scheduler, "live", "a/+")
    loop.run()
    for request in requests:
        core.broker.chunk_reads.answered(request)
    now = [0.0]

    def monotonic() -> float:
        now[0] += 0.6 * STREAM_TIME
        return now[0]

    monkeypatch.setattr(time, "monotonic", monotonic)
    written = [[len(wire.transport.written) for wire in readers]]
    while loop.soon:
        live.transport.written = b""
        live.data_received(Publish("a/1", b"live", 0, False, False, 0).encode(4))
        loop.turn()
        assert b"live" in live.transport.written
        written.append([len(wire.transport.written) for wire in readers])
    parts = [[after - before for before, after in zip(*pair)] for pair in pairwise(written)]
    # The clock is read before the first part and behind each, so that two parts take longer than `STREAM_TIME`.
    assert all(sum(sizes) <= 2 * STREAM_PART * RECORD for sizes in parts)
    assert all(wire.transport.written.count(bytes(100)) == RECORDS for wire in readers)
    turns = [sizes.index(max(sizes)) for sizes in parts if max(sizes)]
    assert turns[:9] == [turns[0], turns[1], turns[2]] * 3 and sorted(turns[:3]) == [0, 1, 2]
