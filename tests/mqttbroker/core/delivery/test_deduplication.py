"""mqttbroker.core.delivery.deduplication: a repeat is acknowledged after the commit of the first, and stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos.log_reader import LogReader
from support.core import Core, CoreClient

from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.codec.packets import Puback, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import QUOTA_EXCEEDED
from mqttbroker.config.settings import Stream
from mqttbroker.server.assembly import stream_config

MakeCore = Callable[..., Core]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeCore]:
    """Makes the broker of this data directory; ``options`` are settings of its stream ``s`` of ``s/#``."""
    made: list[Core] = []

    def make(more: tuple[Stream, ...] = (), **options: Any) -> Core:
        for core in made:
            core.close()
        streams = (Stream("s", ("s/#",), partitions=2, seal=False, **{"dedup": True, **options}), *more)
        log = StreamLogs(tmp_path / "streams", [stream_config(stream) for stream in streams])
        core = Core(tmp_path, log=log, others={"streams": streams})
        made[:] = [core]
        return core

    yield make
    for core in made:
        core.close()


def numbered(seq: object, producer: str | None = "p") -> Properties:
    properties = Properties()
    if producer is not None:
        properties.user_properties.append(("producer-id", producer))
    properties.user_properties.append(("seq", str(seq)))
    return properties


def send(client: CoreClient, number: int, packet_id: int | None = None, qos: int = 1, topic: str = "s/t") -> None:
    packet_id = number + 1 if packet_id is None else packet_id
    client.send(Publish(topic, b"%d" % number, qos, False, False, packet_id, numbered(number)))


def payloads(core: Core, stream: str = "s") -> list[bytes]:
    assert core.log is not None
    return sorted(record.payload for record in LogReader(core.directory, stream).records())


def test_a_repeat_reaches_neither_stream_nor_subscriber_nor_retained_message(make: MakeCore) -> None:
    core = make()
    watcher = core.connect("watcher")
    watcher.subscribe("s/#", options=1)
    client = core.connect("client")
    assert client.publish("s/t", b"first", 1, properties=numbered(0)) == 0
    for qos in (0, 1, 2):
        assert client.publish("s/t", b"again", qos, retain=True, properties=numbered(0)) == 0
    assert client.publish("s/t", b"next", 2, properties=numbered(1)) == 0
    assert payloads(core) == [b"first", b"next"]
    assert [packet.payload for packet in watcher.arrived()] == [b"first", b"next"]
    assert core.broker.retained.get("s/t") is None
    counters = core.broker.context.counters
    assert (counters.stream_repeats, counters.stream_gaps, counters.stream_numbers_invalid) == (3, 0, 0)


def test_a_repeat_is_recognised_on_another_topic_partition_and_connection_but_not_of_another_user(
    make: MakeCore,
) -> None:
    core = make()
    one, two = core.connect("one"), core.connect("two")
    for client in (one, two):
        assert client.connection.session is not None
        client.connection.session.username = "u"
    assert one.publish("s/1", b"first", 1, properties=numbered(5)) == 0
    for number in range(8):
        assert two.publish(f"s/{number}", b"x", 1, properties=numbered(5)) == 0
    assert core.connect("three").publish("s/1", b"other user", 1, properties=numbered(5)) == 0
    assert core.connect("four").publish("s/1", b"other id", 1, properties=numbered(5, "q")) == 0
    assert payloads(core) == [b"first", b"other id", b"other user"]


def test_a_repeat_is_recognised_after_a_restart_and_a_gap_is_stored_and_counted(make: MakeCore) -> None:
    core = make()
    client = core.connect("client")
    for number in (0, 1, 2, 5, 9, 3):
        assert client.publish("s/t", b"%d" % number, 1, properties=numbered(number)) == 0
    assert core.broker.context.counters.stream_gaps == 2
    core.kill()
    client = core.connect("client")
    for number in range(11):
        assert client.publish("s/t", b"%d" % number, 1, properties=numbered(number)) == 0
    assert payloads(core) == sorted(b"%d" % number for number in range(11))
    assert core.broker.context.counters.stream_repeats == 6


@pytest.mark.parametrize("qos, kind", [(1, Puback), (2, Pubrec)])
def test_a_repeat_waits_for_the_commit_of_the_first(make: MakeCore, qos: int, kind: Any) -> None:
    core = make()
    client, other = core.connect("client"), core.connect("other")
    core.eager = False
    send(client, 0, qos=qos)
    core.take()
    send(other, 0, qos=qos)
    send(client, 1, qos=qos)
    send(other, 1, qos=qos)
    assert client.arrived() == other.arrived() == []
    core.commit()
    assert [(packet.packet_id, packet.reason_code) for packet in client.arrived()] == [(1, 0)]
    assert [type(packet) for packet in other.arrived()] == [kind]
    core.commit()
    assert [len(each.arrived()) for each in (client, other)] == [1, 1]
    core.settle()
    assert payloads(core) == [b"0", b"1"]


@pytest.mark.parametrize("qos", [1, 2])
def test_after_a_failed_commit_its_messages_are_new_and_later_ones_are_not(make: MakeCore, qos: int) -> None:
    core = make()
    client, other = core.connect("client"), core.connect("other")
    core.eager = False
    for number in (0, 1, 2):
        send(client, number, qos=qos)
    core.take()
    send(other, 1, qos=qos)  # in flight: refused like the first
    send(client, 3, qos=qos)  # in the batch that gathers
    core.fail()
    assert [(packet.packet_id, packet.reason_code) for packet in client.arrived()] == [(number, QUOTA_EXCEEDED) for number in (1, 2, 3)]
    assert [packet.reason_code for packet in other.arrived()] == [QUOTA_EXCEEDED]
    core.settle()
    assert [packet.reason_code for packet in client.arrived()] == [0]
    for number in (0, 1, 2, 3):
        send(client, number, 100 + number, qos=qos)
        send(other, number, 100 + number, qos=qos)
        core.settle()
    assert payloads(core) == [b"0", b"1", b"2", b"3"]
    core.kill()
    client = core.connect("client")
    send(client, 2)
    core.settle()
    assert payloads(core) == [b"0", b"1", b"2", b"3"]


def test_what_was_not_committed_at_a_kill_is_new(make: MakeCore) -> None:
    core = make()
    client = core.connect("client")
    send(client, 0)
    core.eager = False
    send(client, 1)
    core.kill()
    core.eager = True
    client = core.connect("client")
    for number in (0, 1):
        send(client, number)
    assert payloads(core) == [b"0", b"1"]


def test_a_repeated_qos_2_packet_is_still_a_duplicate_by_its_packet_id(make: MakeCore) -> None:
    core = make()
    client = core.connect("client")
    send(client, 0, 7, 2)
    send(client, 0, 7, 2)
    client.send(Pubrel(7))
    send(client, 0, 7, 2)
    client.send(Pubrel(7))
    assert payloads(core) == [b"0"]
    assert core.broker.context.counters.stream_repeats == 1


def test_a_message_for_two_streams_is_stored_where_it_is_new(make: MakeCore) -> None:
    other = Stream("o", ("s/o/#",), seal=False, dedup=True)
    plain = Stream("plain", ("s/#",), seal=False)
    core = make((other, plain))
    watcher = core.connect("watcher")
    watcher.subscribe("s/#", options=1)
    client = core.connect("client")
    for topic, number in (("s/t", 0), ("s/o/t", 0), ("s/o/t", 0), ("s/t", 0), ("s/o/t", 1), ("s/t", 1)):
        send(client, number, 9, topic=topic)
    assert payloads(core) == [b"0", b"1"]
    assert payloads(core, "o") == [b"0", b"1"]
    assert payloads(core, "plain") == [b"0", b"0", b"1"]
    assert [packet.payload for packet in watcher.arrived()] == [b"0", b"0", b"1"]


@pytest.mark.parametrize(
    "seq, producer, counted",
    [("x", "p", 1), ("-1", "p", 1), ("1.0", "p", 1), ("", "p", 1), (1 << 63, "p", 1), ("9" * 40, "p", 1), (1, "", 0),
     (1, "p" * 513, 1), ("²", "p", 1), (1, None, 0), ((1 << 63) - 1, "p" * 512, 0)],
)  # fmt: skip
def test_an_unusable_number_is_counted_and_the_message_is_stored_each_time(
    make: MakeCore, seq: object, producer: str | None, counted: int
) -> None:
    core = make()
    client = core.connect("client")
    for _ in range(2):
        assert client.publish("s/t", b"x", 1, properties=numbered(seq, producer)) == 0
    is_usable = bool(producer) and not counted
    assert len(payloads(core)) == (1 if is_usable else 2)
    assert core.broker.context.counters.stream_numbers_invalid == 2 * counted


def test_a_producer_beyond_the_limit_replaces_the_one_that_was_not_used_for_longest(make: MakeCore) -> None:
    core = make(dedup_producers=2)
    client = core.connect("client")

    def publish(producer: str) -> bool:
        """Whether the message was stored."""
        before = len(payloads(core))
        core.advance(1)
        assert client.publish("s/t", producer.encode(), 1, properties=numbered(0, producer)) == 0
        return len(payloads(core)) > before

    assert [publish(name) for name in "abcb"] == [True, True, True, False]
    assert publish("a")
    assert not publish("a")
    core.kill()
    client = core.connect("client")
    assert core.control.status().stream_producers == 2
    assert [publish(name) for name in "ca"] == [False, False]
    core = make(dedup_producers=1)
    client = core.connect("client")
    assert [publish(name) for name in "ac"] == [False, True]


def test_numbers_are_forgotten_while_deduplication_is_off(make: MakeCore) -> None:
    send(make().connect("client"), 0)
    send(make(dedup=False).connect("client"), 0)
    core = make()
    send(core.connect("client"), 0)
    assert payloads(core) == [b"0"] * 3
    assert core.control.status().stream_producers == 1
