"""Wires: reading and writing are shared among clients, no bytes are lost, and closed connections are freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from support.core import Core
from support.manual_loop import Loop, Transport

from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import (
    Connect,
    Disconnect,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Subscription,
    Unsubscribe,
    decode,
)
from mqttbroker.core.client.outbox import LARGE_PART
from mqttbroker.core.packets.long_packet import MIN_PIECE
from mqttbroker.net.flush import LARGE_WRITE, LARGE_WRITES, FlushScheduler
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.wire import READ_PAUSE, READ_SLICE, Endpoint, Wire
from sessions.counters import Counters


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    with Core(tmp_path, durability="off") as made:
        yield made


def begin(core: Core) -> tuple[Loop, FlushScheduler]:
    loop = Loop()
    return loop, FlushScheduler(core.broker, loop, lambda _: None, True)


def join(core: Core, loop: Loop, scheduler: FlushScheduler, name: str) -> Wire:
    def defect(_: object) -> None:
        raise AssertionError("a defect")

    security = Security(core.settings)
    policy = ListenerPolicy(security.policy, core.terms, None, core.broker.outbound.counters)
    sockets = OpenSockets(1000, 1000, Counters())
    wire = Wire(Endpoint(scheduler, policy, sockets, lambda: name, defect))
    wire.connection_made(Transport())
    wire.data_received(Connect(name, 5).encode(5))
    wire.data_received(Subscribe(1, [Subscription("a/+", 0)]).encode(5))
    return wire


def test_a_client_that_sends_much_does_not_delay_others_and_loses_nothing(core: Core) -> None:
    loop, scheduler = begin(core)
    loud, quiet = join(core, loop, scheduler, "loud"), join(core, loop, scheduler, "quiet")
    loop.turn()
    counters = core.broker.outbound.counters
    packet = Publish("b/loud", bytes(100), 0, False, False, 0).encode(5)
    loop.look = 1.0  # each call uses up READ_TIME
    count = 5 * READ_SLICE // len(packet)
    loud.data_received(packet * count + Publish("a/last", b"", 0, False, False, 0).encode(5))
    assert 0 < counters.publish_received < count / 2 and not loud.transport.reading
    for number in range(1, 5):
        before = counters.publish_received
        quiet.data_received(Publish("a/quiet", b"%d" % number, 0, False, False, 0).encode(5))
        loop.turn()
        assert counters.publish_received > before + 1 and b"a/quiet" in quiet.transport.written
    loop.run()
    assert counters.publish_received == count + 5 and loud.transport.reading
    assert loud.transport.written.endswith(Publish("a/last", b"", 0, False, False, 0).encode(5))


def test_unhandled_data_is_handled_before_later_data(core: Core) -> None:
    loop, scheduler = begin(core)
    wire = join(core, loop, scheduler, "one")
    loop.turn()
    loop.look = 1.0
    wire.transport.written = b""
    sent = b"".join(Publish("a/1", b"%09d" % number, 0, False, False, 0).encode(5) for number in range(6000))
    wire.data_received(sent[:70_001])
    wire.data_received(sent[70_001:])
    loop.run()
    assert wire.transport.written == sent


def test_large_packets_are_written_in_parts_and_in_order(core: Core) -> None:
    loop, scheduler = begin(core)
    wire = join(core, loop, scheduler, "one")
    wire.data_received(Subscribe(2, [Subscription("a/+", 1)]).encode(5))
    loop.turn()
    counters = core.broker.outbound.counters
    wire.transport.written, before = b"", counters.bytes_sent
    large = Publish("a/1", bytes(10 * LARGE_PART), 1, False, False, 1)
    for packet in (Publish("a/0", b"before", 0), large, Publish("a/2", b"after", 0)):
        wire.data_received(packet.encode(5))
    written = [0]
    while loop.soon:
        loop.turn()
        written.append(len(wire.transport.written))
    assert len(wire.transport.parts) > 10 * LARGE_PART // LARGE_WRITE
    assert all(later - earlier <= LARGE_WRITE for earlier, later in pairwise(written))
    assert counters.bytes_sent - before == len(wire.transport.written)
    payloads, position = [], 0
    while position < len(wire.transport.written):
        packet, position = decode(wire.transport.written, 5, position)
        payloads.append(packet.payload if isinstance(packet, Publish) else type(packet))
    assert payloads == [b"before", Puback, large.payload, b"after"]
    parts = len(wire.transport.parts)
    wire.data_received(Publish("a/1", b"small", 1, False, False, 2).encode(5))
    loop.turn()
    assert b"small" in wire.transport.written and len(wire.transport.parts) == parts


@pytest.mark.parametrize("qos", [0, 1])
def test_a_long_packet_is_written_in_the_pieces_it_was_received_in(core: Core, qos: int) -> None:
    loop, scheduler = begin(core)
    reader, writer = join(core, loop, scheduler, "reader"), join(core, loop, scheduler, "writer")
    reader.data_received(Subscribe(2, [Subscription("a/+", qos)]).encode(5))
    writer.data_received(Unsubscribe(2, ["a/+"]).encode(5))
    loop.turn()
    packet = Publish("a/1", bytes(range(250)) * 8000, qos, packet_id=1 if qos else 0).encode(5)
    reader.transport.written, before = b"", core.broker.outbound.counters.publish_packet_bytes_sent
    pieces = [packet[at : at + 2 * MIN_PIECE] for at in range(0, len(packet), 2 * MIN_PIECE)]
    for piece in pieces:
        writer.data_received(piece)
        loop.turn()
    loop.run()
    assert reader.transport.written == packet  # the packet id is 1 on either side
    assert core.broker.outbound.counters.publish_packet_bytes_sent - before == len(packet)
    sent = [part.obj if isinstance(part, memoryview) else part for part in reader.transport.parts]
    assert set(map(id, sent)) >= set(map(id, pieces[1:]))


@pytest.mark.parametrize("readers", [1, 10])
def test_large_writes_per_flush_are_bounded_over_all_clients(core: Core, readers: int) -> None:
    loop, scheduler = begin(core)
    wires = [join(core, loop, scheduler, f"reader{number}") for number in range(readers)]
    loop.turn()
    for wire in wires:
        wire.transport.written = b""
    packet = Publish("a/1", bytes(5 * LARGE_WRITE), 0, packet_id=0).encode(5)
    wires[0].data_received(packet)
    before = 0
    while loop.soon:
        loop.turn()
        if before > 3 * LARGE_WRITES:  # each client was written to before the first was again
            assert all(wire.transport.written for wire in wires)
        after = sum(len(wire.transport.written) for wire in wires)
        assert after - before <= min(LARGE_WRITES, readers * LARGE_WRITE) + LARGE_PART
        before = after
    assert [wire.transport.written for wire in wires] == [packet] * readers


def test_nothing_is_written_while_writing_is_paused(core: Core) -> None:
    loop, scheduler = begin(core)
    wire = join(core, loop, scheduler, "slow")
    loop.turn()
    wire.transport.written = b""
    packet = Publish("a/1", bytes(3 * LARGE_WRITE), 0).encode(5)
    wire.data_received(packet)
    wire.pause_writing()
    loop.run()
    assert not wire.transport.written
    wire.resume_writing()
    loop.turn()
    assert len(wire.transport.written) == LARGE_WRITE
    wire.data_received(Publish("a/2", b"small", 0).encode(5))
    loop.run()
    assert wire.transport.written == packet + Publish("a/2", b"small", 0).encode(5)


@pytest.mark.parametrize("writers, readers", [(1, 1), (1, 10), (10, 1)])
def test_large_packets_keep_the_outbox_within_its_limit_and_delay_no_client(core: Core, writers: int, readers: int) -> None:
    loop, scheduler = begin(core)
    sending = [join(core, loop, scheduler, f"writer{number}") for number in range(writers)]
    for wire in sending:
        wire.data_received(Unsubscribe(2, ["a/+"]).encode(5))
    reading = [join(core, loop, scheduler, f"reader{number}") for number in range(readers)]
    calm = join(core, loop, scheduler, "calm")
    calm.data_received(Unsubscribe(2, ["a/+"]).encode(5) + Subscribe(3, [Subscription("calm", 0)]).encode(5))
    loop.turn()
    calm.transport.written = b""
    size = 4 * READ_PAUSE
    packet = Publish("a/1", bytes(size), 0).encode(5)
    pieces = [packet[: 2 * READ_PAUSE], packet[2 * READ_PAUSE : 3 * READ_PAUSE], packet[3 * READ_PAUSE :]]
    picture = Publish("calm", bytes(size), 0).encode(5)
    limit = core.broker.outbound.max_backlog
    for number in range(100):
        for wire in sending:
            if wire.transport.reading:
                wire.data_received(pieces[number % len(pieces)])
        if number == 20:
            calm.data_received(picture)
        loop.turn()
        for wire in reading:
            wire.transport.written = b""
            waiting = sum(map(len, wire.connection.outbox.parts)) - wire.connection.outbox.first_part_sent
            assert waiting <= limit + 2 * len(packet) and wire.connection.outbox.backlog == waiting
    assert calm.transport.written == picture
    assert not core.control.status().drops["slow_subscriber"]


def test_queued_large_messages_are_not_added_to_a_full_outbox(core: Core) -> None:
    loop, scheduler = begin(core)
    wire = join(core, loop, scheduler, "reader")
    wire.data_received(Subscribe(2, [Subscription("a/+", 1)]).encode(5))
    loop.turn()
    wire.transport.written = b""
    publisher = core.connect("p")
    size = 1_000_000
    for _ in range(30):
        publisher.publish("a/1", bytes(size), 1)
    most = 0
    while loop.soon:
        loop.turn()
        most = max(most, sum(map(len, wire.connection.outbox.parts)))
    assert len(wire.transport.written) > 30 * size and most <= core.broker.outbound.max_backlog + 2 * size


def test_short_packets_behind_a_large_one_are_joined(core: Core) -> None:
    loop, scheduler = begin(core)
    wire = join(core, loop, scheduler, "one")
    loop.turn()
    wire.transport.written = b""
    short = Publish("a/2", b"x" * 500, 0).encode(5)
    sent = short * 10 + Publish("a/1", bytes(10 * LARGE_WRITE), 0).encode(5) + short * 1000
    wire.data_received(sent)
    written = [0]
    while loop.soon:
        loop.turn()
        written.append(len(wire.transport.written))
    assert wire.transport.written == sent
    assert all(later - earlier <= LARGE_WRITE + LARGE_PART for earlier, later in pairwise(written))
    assert len(wire.transport.parts) < 50


def test_a_replay_continues_when_the_outbox_is_drained(tmp_path: Path) -> None:
    with Core(tmp_path, durability="off", max_outbox_bytes=65_536) as core:
        publisher = core.connect("p")
        for number in range(12):
            publisher.publish(f"t/{number}", bytes(100_000), 1, retain=True)
        loop, scheduler = begin(core)
        scheduler.flush()  # the connections of Core have no wire
        wire = join(core, loop, scheduler, "one")
        wire.data_received(Subscribe(2, [Subscription("t/+", 0)]).encode(5))
        loop.run()
        assert len(wire.transport.written) > 1_200_000


def test_reading_pauses_for_one_iteration_after_a_large_read(core: Core) -> None:
    loop, scheduler = begin(core)
    wire = join(core, loop, scheduler, "loud")
    loop.turn()
    wire.data_received(Publish("a/1", bytes(READ_PAUSE), 0).encode(5)[:READ_PAUSE])
    assert not wire.transport.reading
    loop.turn()
    assert wire.transport.reading


@pytest.mark.parametrize("qos", [1, 2])
def test_an_acknowledgement_continues_the_replay_that_waits_for_it(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path, durability="off", max_inflight=100, max_queued_messages=500) as core:
        publisher = core.connect("p")
        for number in range(1000):
            publisher.publish(f"t/{number}", b"x", qos, retain=True)
        loop, scheduler = begin(core)
        scheduler.flush()  # the connections of Core have no wire
        wire = join(core, loop, scheduler, "one")
        wire.data_received(Subscribe(2, [Subscription("t/+", 2)]).encode(5))
        count = 0
        while count < 1000:
            assert loop.soon, f"the replay stopped after {count}"
            while loop.soon:
                loop.turn()
            written, wire.transport.written = wire.transport.written, b""
            answers, position = b"", 0
            while position < len(written):
                packet, position = decode(written, 5, position)
                if isinstance(packet, Publish):
                    count += 1
                    answers += (Puback(packet.packet_id) if qos == 1 else Pubrec(packet.packet_id)).encode(5)
                elif isinstance(packet, Pubrel):
                    answers += Pubcomp(packet.packet_id).encode(5)
            wire.data_received(answers)


@pytest.mark.parametrize("polite", [True, False])
def test_a_closed_connection_leaves_no_reference_cycle(core: Core, polite: bool) -> None:
    loop, scheduler = begin(core)

    def visit(name: str) -> None:
        wire = join(core, loop, scheduler, name)
        wire.data_received(Publish(f"a/{name}", b"x", 0, False, False, 0).encode(5) * 2000)
        loop.turn()
        if polite:
            wire.data_received(Disconnect(0).encode(5))
        loop.turn()
        wire.connection_lost(None)
        while loop.soon:
            loop.turn()

    visit("first")
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            visit(f"c{number}")
        core.broker.router.cache.clear()
        assert gc.collect() < 20
    finally:
        gc.enable()


def test_a_flush_of_many_connections_is_cut_into_parts_and_does_not_delay_others(core: Core) -> None:
    loop, scheduler = begin(core)
    crowd = [join(core, loop, scheduler, f"c{number}") for number in range(200)]
    quick, sender = join(core, loop, scheduler, "quick"), join(core, loop, scheduler, "sender")
    other = join(core, loop, scheduler, "other")
    quick.data_received(Unsubscribe(2, ["a/+"]).encode(5) + Subscribe(3, [Subscription("q", 0)]).encode(5))
    loop.run()
    for wire in (*crowd, quick):
        wire.transport.written = b""
    loop.look = 0.0006  # so there is time for 32 connections
    sender.data_received(Publish("a/1", b"first", 0).encode(5))
    loop.turn()
    served = [wire for wire in crowd if wire.transport.written]
    assert 0 < len(served) < 100
    other.data_received(Publish("q", b"quick", 0).encode(5) + Publish("a/1", b"second", 0).encode(5))
    loop.turn()
    assert b"quick" in quick.transport.written and sum(b"first" in wire.transport.written for wire in crowd) < 150
    loop.run()
    both = Publish("a/1", b"first", 0).encode(5) + Publish("a/1", b"second", 0).encode(5)
    assert {wire.transport.written for wire in crowd} == {both}
    sender.data_received(Publish("a/1", b"third", 0).encode(5))
    scheduler.flush_all()
    assert all(b"third" in wire.transport.written for wire in crowd)


def test_more_messages_to_a_crowd_wait_until_each_of_its_clients_was_written_to(core: Core) -> None:
    loop, scheduler = begin(core)
    crowd = [join(core, loop, scheduler, f"c{number}") for number in range(200)]
    sender = join(core, loop, scheduler, "sender")
    first, *more = [Publish("a/1", payload * 200, 0).encode(5) for payload in (b"first ", b"second", b"third ")]
    loop.run()
    for wire in crowd:
        wire.transport.written = b""
    loop.look = 0.0006
    sender.data_received(first)
    loop.turn()
    sender.data_received(more[0])
    assert not sender.transport.reading
    sender.data_received(more[1])  # read before the pause
    while any(not wire.transport.written for wire in crowd):
        assert {wire.transport.written for wire in crowd} <= {b"", first}
        loop.turn()
    loop.run()
    assert {wire.transport.written for wire in crowd} == {first + b"".join(more)} and sender.transport.reading
