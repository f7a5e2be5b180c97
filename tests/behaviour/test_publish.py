"""PUBLISH and its acknowledgements over TCP, in both directions and between versions (MQTT 5.0 sections 3.3 to 3.7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from support.broker_process import BrokerProcess
from support.core import Core
from support.raw_client import RawClient

from mqttbroker.codec.packets import Disconnect, Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties
from mqttbroker.core.client.connection import CONNECTED, CONNECTING


def full_properties() -> Properties:
    """All properties that are forwarded with a message."""
    properties = Properties()
    properties.payload_format_indicator = 1
    properties.content_type = "text/plain"
    properties.response_topic = "answer/here"
    properties.correlation_data = b"\x00\x01"
    properties.user_properties = [("b", "1"), ("a", "2"), ("b", "1"), ("", "")]
    return properties


@pytest.mark.parametrize("granted", [0, 1, 2])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("receiver", [3, 4, 5])
@pytest.mark.parametrize("sender", [3, 4, 5])
def test_a_message_goes_from_any_version_to_any_other(
    connect: Callable[..., RawClient], sender: int, receiver: int, qos: int, granted: int
) -> None:
    topic = f"any/{sender}/{receiver}/{qos}/{granted}"
    subscriber = connect(f"s-{topic}", receiver)
    subscriber.subscribe(topic, options=granted)
    publisher = connect(f"p-{topic}", sender)
    assert publisher.publish(topic, b"payload", qos) == 0
    message = subscriber.take()
    assert (message.topic, message.payload, message.qos) == (topic, b"payload", min(qos, granted))
    assert (message.retain, message.dup, message.packet_id) == (False, False, 1 if min(qos, granted) else 0)
    subscriber.expect_nothing()


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_properties_reach_version_5_only_and_keep_their_order(connect: Callable[..., RawClient], qos: int) -> None:
    topic = f"properties/{qos}"
    five, four = connect(f"five-{qos}"), connect(f"four-{qos}", 4)
    five.subscribe(topic)
    four.subscribe(topic)
    publisher = connect(f"props-{qos}")
    for payload in (b"x", b""):
        publisher.publish(topic, payload, qos, properties=full_properties())
        assert repr(five.take().properties) == repr(full_properties())
        message = four.take()
        assert (message.topic, message.payload, message.qos) == (topic, payload, qos)


def test_properties_of_a_queued_message_are_kept(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("s", 4, clean_start=False)
        subscriber.subscribe("t")
        subscriber.close()
        core.connect("p").publish("t", b"x", 1, properties=full_properties())
        core.kill()
        subscriber = core.connect("s", 5, clean_start=False)
        assert repr(subscriber.take().properties) == repr(full_properties())


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_no_matching_subscribers(connect: Callable[..., RawClient], version: int, qos: int) -> None:
    client = connect(f"nobody-{version}-{qos}", version)
    expected = 0x10 if version == 5 else 0
    assert client.publish("nobody/listens", b"", qos) == expected
    assert client.publish("nobody/listens", b"", qos, retain=True) == expected


@pytest.mark.parametrize("topic", ["$SYS/x", "$share/group/x"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_topics_that_no_client_may_publish_to(tmp_path: Path, topic: str, qos: int) -> None:
    with Core(tmp_path) as core:
        watching = core.connect("w")
        watching.subscribe("$SYS/#")
        client = core.connect("c")
        assert client.publish(topic, b"x", qos, retain=True) == (0x87 if qos else 0)
        watching.expect_nothing()
        assert len(core.broker.retained) == 0 and core.control.status().drops["not_authorized"] == 1


@pytest.mark.parametrize("version", [4, 5])
def test_successful_acknowledgements_have_no_reason_code(broker: BrokerProcess, version: int) -> None:
    with RawClient(broker.port, version) as client:
        client.connect(f"short-{version}")
        client.subscribe("short", options=0)
        client.send(Publish("short", b"", 1, False, False, 1), Publish("short", b"", 2, False, False, 2), Pubrel(2))
        wanted = b"\x40\x02\x00\x01", b"\x50\x02\x00\x02", b"\x70\x02\x00\x02"
        message = Publish("short", b"").encode(version)
        data = b""
        while len(data) < 12 + 2 * len(message):
            data += client.socket.recv(1000)
        for part in wanted:
            assert data.count(part) == 1
            data = data.replace(part, b"")
        assert data == message * 2


def test_packet_ids_start_at_1(connect: Callable[..., RawClient]) -> None:
    subscriber, publisher = connect("counting"), connect("counted")
    subscriber.subscribe("count")
    ids = []
    for n in range(6):
        publisher.publish("count", b"", n % 3)
        ids.append(subscriber.take().packet_id)
    assert ids == [0, 1, 2, 0, 3, 4]


def test_order_of_messages_and_of_acknowledgements(connect: Callable[..., RawClient]) -> None:
    subscriber, publisher = connect("ordered"), connect("orderly")
    subscriber.subscribe("order/#")
    for qos in (1, 2):
        publisher.send(*(Publish("order/1", b"%d" % n, qos, False, False, n) for n in range(1, 301)))
        kind = Puback if qos == 1 else Pubrec
        assert [publisher.expect(kind).packet_id for _ in range(300)] == list(range(1, 301))
        if qos == 2:
            publisher.send(*(Pubrel(n) for n in range(1, 301)))
            assert [publisher.expect(Pubcomp).packet_id for _ in range(300)] == list(range(1, 301))
        assert [int(subscriber.take().payload) for _ in range(300)] == list(range(1, 301))


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_publisher_gets_its_acknowledgement_before_its_own_message(connect: Callable[..., RawClient], version: int, qos: int) -> None:
    """As with Mosquitto, if no session or stream keeps the message."""
    topic = f"echo/{version}/{qos}"
    client = connect(f"echo-{version}-{qos}", version)
    for topic_filter in (topic, f"$share/echo/{topic}") if version == 5 else (topic,):
        client.subscribe(topic_filter, options=qos)
        client.send(Publish(topic, b"x", qos, packet_id=7))
        assert isinstance(client.receive(), Puback if qos == 1 else Pubrec)
        assert isinstance(client.receive(), Publish)
        client.unsubscribe(topic_filter)
        if qos == 2:
            client.send(Pubrel(7))
            client.wait_for(Pubcomp)


def test_a_shared_subscription_matches_where_full_queues_refuse(tmp_path: Path) -> None:
    with Core(tmp_path, queue_full="refuse") as core:
        core.connect("s").subscribe("$share/g/t", options=0)
        publisher = core.connect("p")
        assert publisher.publish("t", b"x", 1) == 0
        assert publisher.publish("u", b"x", 1) == 0x10


def test_a_repeated_qos_2_message_is_published_once(connect: Callable[..., RawClient]) -> None:
    subscriber, publisher = connect("once"), connect("again")
    subscriber.subscribe("once")
    for dup in (False, True, True):
        publisher.send(Publish("once", b"x", 2, False, dup, 7))
        assert publisher.expect(Pubrec).packet_id == 7
    for _ in range(2):
        publisher.send(Pubrel(7))
        publisher.expect(Pubcomp)
    publisher.send(Publish("once", b"y", 2, False, False, 7))
    publisher.expect(Pubrec)
    assert [subscriber.take().payload, subscriber.take().payload] == [b"x", b"y"]
    subscriber.expect_nothing()


def test_pubrel_of_an_unknown_packet_id(connect: Callable[..., RawClient]) -> None:
    client = connect("unknown")
    client.send(Pubrel(5))
    answer = client.expect(Pubcomp)
    assert (answer.packet_id, answer.reason_code) == (5, 0x92)


def test_dup_of_a_publisher_is_not_forwarded(connect: Callable[..., RawClient]) -> None:
    subscriber, publisher = connect("fresh"), connect("stale")
    subscriber.subscribe("fresh")
    publisher.send(Publish("fresh", b"", 1, False, True, 1))
    assert not subscriber.take().dup


def test_clients_cannot_publish_to_sys(broker: BrokerProcess, connect: Callable[..., RawClient]) -> None:
    five, four = connect("sys-5"), connect("sys-4", 4)
    listener = connect("sys-l")
    listener.subscribe("$SYS/mine", "$SYS/broker/version")
    listener.take()
    for topic in ("$SYS/mine", "$SYS/broker/version", "$SYS"):
        for qos in (1, 2):
            assert five.publish(topic, b"x", qos, retain=True) == 0x87
            assert four.publish(topic, b"x", qos, retain=True) == 0
        five.publish(topic, b"x", 0, retain=True)
    five.ping()
    listener.expect_nothing()


# --- flow control -------------------------------------------------------------------------------------------------


def test_the_broker_respects_the_clients_receive_maximum(connect: Callable[..., RawClient]) -> None:
    properties = Properties()
    properties.receive_maximum = 2
    subscriber, publisher = connect("slow", properties=properties), connect("fast")
    subscriber.subscribe("flow")
    for n in range(5):
        publisher.publish("flow", b"%d" % n, 1)
    publisher.publish("flow", b"free", 0)
    publisher.ping()
    got = subscriber.ping()
    assert [packet.payload for packet in got] == [b"0", b"1", b"free"]
    subscriber.send(Puback(got[0].packet_id))
    assert [packet.payload for packet in subscriber.ping()] == [b"2"]


def test_a_client_that_exceeds_the_brokers_receive_maximum_is_disconnected(tmp_path: Path) -> None:
    with Core(tmp_path, receive_maximum=2) as core:
        core.connect("keeper", 4, clean_start=False).subscribe("kept")
        client = core.connect("p")
        assert client.connack.properties.receive_maximum == 2
        core.eager = False
        client.send(Publish("kept", b"", 1, False, False, 1), Publish("kept", b"", 2, False, False, 2))
        core.settle()
        assert len(client.arrived()) == 2
        client.send(Publish("kept", b"", 1, False, False, 3))
        core.settle()
        client.send(Publish("kept", b"", 2, False, False, 4))
        core.settle()
        assert [type(packet) for packet in client.arrived()] == [Puback, Pubrec]
        client.send(Publish("kept", b"", 1, False, False, 5))
        assert client.expect(Disconnect).reason_code == 0x93
        old = core.connect("old", 4)
        old.send(*(Publish("kept", b"", 1, False, False, n) for n in range(1, 10)))
        core.settle()
        assert len(old.arrived()) == 9


def test_qos_0_for_a_stalled_client_is_dropped_and_counted(tmp_path: Path) -> None:
    with Core(tmp_path, max_outbox_bytes=1024) as core:
        subscriber, publisher = core.connect("s"), core.connect("p")
        subscriber.subscribe("t")
        subscriber.connection.outbox.pause()
        for n in range(30):
            publisher.publish("t", b"x" * 100)
        for n in range(3):
            publisher.publish("t", b"kept", 1)
        subscriber.connection.outbox.resume()
        got = subscriber.arrived()
        dropped = core.control.status().drops["slow_subscriber"]
        assert 15 <= dropped <= 22 and len(got) == 33 - dropped
        assert [packet.payload for packet in got[-3:]] == [b"kept"] * 3


# --- message expiry -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_message_expiry_is_counted_down(tmp_path: Path, qos: int) -> None:
    properties = full_properties()
    properties.message_expiry_interval = 100
    with Core(tmp_path) as core:
        subscriber = core.connect("s", 4, clean_start=False)
        subscriber.subscribe("t")
        subscriber.close()
        publisher = core.connect("p")
        publisher.publish("t", b"x", qos, properties=properties)
        publisher.publish("t", b"y", qos)
        core.advance(30)
        kept = Properties()
        kept.session_expiry_interval = 1000
        subscriber = core.connect("s", 5, clean_start=False, properties=kept)
        message = subscriber.expect(Publish)
        assert message.properties.message_expiry_interval == 70
        assert message.properties.user_properties == properties.user_properties
        assert subscriber.expect(Publish).properties.message_expiry_interval == -1
        subscriber.close()
        core.advance(20)
        subscriber = core.connect("s", 5, clean_start=False, properties=kept)
        assert subscriber.expect(Publish).properties.message_expiry_interval == 50


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_message_expiry_is_forwarded_at_once(connect: Callable[..., RawClient], qos: int) -> None:
    properties = Properties()
    properties.message_expiry_interval = 60
    five, four, publisher = connect(f"e5{qos}"), connect(f"e4{qos}", 4), connect(f"ep{qos}")
    five.subscribe(f"expiry/{qos}")
    four.subscribe(f"expiry/{qos}")
    publisher.publish(f"expiry/{qos}", b"x", qos, properties=properties)
    assert five.take().properties.message_expiry_interval == 60
    assert four.take().payload == b"x"


@pytest.mark.parametrize("kill", [False, True])
def test_expired_messages_are_never_sent(tmp_path: Path, kill: bool) -> None:
    properties = Properties()
    with Core(tmp_path) as core:
        subscriber = core.connect("s", 4, clean_start=False)
        subscriber.subscribe("t")
        subscriber.close()
        publisher = core.connect("p")
        for seconds in (5, 50, 10, 1):
            properties.message_expiry_interval = seconds
            publisher.publish("t", b"%d" % seconds, 2, properties=properties)
        if kill:
            core.kill()
        core.advance(10)
        subscriber = core.connect("s", 4, clean_start=False)
        assert subscriber.take().payload == b"50"
        subscriber.expect_nothing()
        assert core.control.status().drops["expired"] == 3


# --- redelivery ---------------------------------------------------------------------------------------------------


def test_a_repeated_pubrec_is_answered_by_pubrel(connect: Callable[..., RawClient]) -> None:
    subscriber, publisher = connect("rec"), connect("recp")
    subscriber.subscribe("rec")
    publisher.publish("rec", b"", 2)
    packet_id = subscriber.expect(Publish).packet_id
    for _ in range(2):
        subscriber.send(Pubrec(packet_id))
        assert subscriber.expect(Pubrel).packet_id == packet_id
    subscriber.send(Pubcomp(packet_id))
    subscriber.expect_nothing()


def test_acknowledgements_in_their_longest_form(connect: Callable[..., RawClient]) -> None:
    """Acknowledgements with reason code, Reason String and User Properties are accepted like short ones."""
    properties = Properties()
    properties.reason_string = "because"
    properties.user_properties = [("k", "v")]
    subscriber, publisher = connect("long"), connect("longp")
    subscriber.subscribe("long")
    publisher.publish("long", b"", 1)
    publisher.publish("long", b"", 2)
    one, two = subscriber.expect(Publish), subscriber.expect(Publish)
    answers: list[Packet] = [Puback(one.packet_id, 0, properties), Pubrec(two.packet_id, 0x10, properties)]
    subscriber.send(*answers)
    assert subscriber.expect(Pubrel).packet_id == two.packet_id
    subscriber.send(Pubcomp(two.packet_id, 0, properties))
    subscriber.expect_nothing()
    publisher.send(Publish("long", b"", 2, False, False, 9))
    publisher.wait_for(Pubrec)
    publisher.send(Pubrel(9, 0, properties))
    assert publisher.expect(Pubcomp).reason_code == 0


# --- long messages --------------------------------------------------------------------------------------------------

LONG = bytes(range(256)) * 8192  # 2 MiB


def properties_of(**given: object) -> Properties:
    properties = Properties()
    for name, value in given.items():
        setattr(properties, name, value)
    return properties


LONG_PACKETS: dict[str, tuple[int, tuple[Packet | bytes, ...]]] = {
    "QoS 0": (1, (Publish("long/a", LONG, 0),)),
    "QoS 1": (1, (Publish("long/a", LONG, 1, packet_id=7),)),
    "QoS 2": (1, (Publish("long/a", LONG, 2, packet_id=7), Pubrel(7))),
    "again": (1, (Publish("long/a", LONG, 2, packet_id=7), Publish("long/a", LONG, 2, False, True, 7), Pubrel(7))),
    "retained": (1, (Publish("long/a", LONG, 1, True, False, 7),)),
    "two lengths": (2, (Publish("long/a", LONG, 1, packet_id=7), Publish("long/a", LONG[1:], 1, packet_id=8))),
    "properties": (1, (Publish("long/a", LONG, 1, packet_id=7, properties=properties_of(content_type="x")),)),
    "alias": (
        2,
        (
            Publish("long/a", LONG, 1, packet_id=7, properties=properties_of(topic_alias=3)),
            Publish("", LONG[1:], 2, packet_id=8, properties=properties_of(topic_alias=3)),
            Pubrel(8),
        ),
    ),
    "many properties": (
        1,
        (Publish("long/a", LONG, 1, packet_id=7, properties=properties_of(user_properties=[("name", "x" * 60_000)] * 4)),),
    ),
    "text": (1, (Publish("long/a", b"x" * len(LONG), 0, properties=properties_of(payload_format_indicator=1)),)),
    "no text": (0, (Publish("long/a", b"x" * len(LONG) + b"\xff", 1, packet_id=7, properties=properties_of(payload_format_indicator=1)),)),
    "for nobody": (0, (Publish("none", LONG, 1, packet_id=7),)),
    "wildcard": (0, (Publish("long/#", LONG, 1, packet_id=7),)),
    "packet id 0": (0, (b"\x32\x80\x80\x40\0\6long/a\0\0" + bytes((1 << 20) - 10),)),
    "QoS 3": (0, (b"\x36\x80\x80\x40\0\6long/a\0\7" + bytes((1 << 20) - 10),)),
    "half a property": (0, (b"\x32\x80\x80\x40\0\6long/a\0\7\xff\xff\xff\x7f\x26" + bytes((1 << 20) - 15),)),
}


@pytest.mark.parametrize("case", LONG_PACKETS)
@pytest.mark.parametrize(
    "first, piece, version, third",
    [
        (0, 70_001, 4, "transient"), (1, 1_000_000, 5, "transient"), (3, 300_000, 4, "kept"), (0, 70_001, 5, "kept"),
        (1, 1_000_000, 4, "shared"), (3, 300_000, 5, "shared"),
    ],
)  # fmt: skip
def test_a_long_message_received_in_parts_is_forwarded_unchanged(
    tmp_path: Path, case: str, first: int, piece: int, version: int, third: str
) -> None:
    """The last part also holds the packet after the message."""
    delivered, packets = LONG_PACKETS[case]
    if version == 4 and case in ("alias", "half a property", "no text"):
        return
    found = []
    for pieces in (piece, 1 << 24):
        with Core(tmp_path / str(pieces)) as core:
            clients = [
                core.connect("five", 5),
                core.connect("four", 4),
                core.connect("third", 5, clean_start=third != "kept"),
            ]
            for client in clients[:2]:
                client.subscribe("long/+")
            clients[2].subscribe("$share/group/long/+" if third == "shared" else "long/+")
            publisher = core.connect("p", version)
            sent = b"".join(given if isinstance(given, bytes) else given.encode(version) for given in packets) + b"\xc0\0"
            for start in range(first, len(sent), pieces):
                if start == first:
                    publisher.send(sent[:first])
                publisher.send(sent[start : start + pieces])
            clients += [publisher, core.connect("late", 5)]
            clients[-1].subscribe("long/+")
            counters = core.broker.outbound.counters
            found.append(
                (
                    [[(type(packet).__name__, crc32(packet.encode(client.version))) for packet in client.arrived()] for client in clients],
                    [counters.publish_received, counters.publish_bytes_received, counters.messages_received],
                )
            )
    assert found[0] == found[1]
    assert [len(arrived) for arrived in found[0][0][:3]] == [delivered] * 3


def test_an_incomplete_long_message_is_discarded_at_disconnect(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber, publisher = core.connect("s"), core.connect("p")
        subscriber.subscribe("+")
        sent = Publish("a", LONG, 1, packet_id=1).encode(5)
        publisher.send(sent[:1_000_000])
        core.connect("p")
        publisher.reader.receive(sent[1_000_000:], core.seconds)
        subscriber.expect_nothing()


def test_a_long_message_may_follow_another_in_one_buffer(tmp_path: Path) -> None:
    """Both arrived while the CONNACK was pending."""
    with Core(tmp_path) as core:
        subscriber, publisher = core.connect("s"), core.connect("p")
        subscriber.subscribe("+")
        packets = [Publish("a", b"first", 1, packet_id=1), Publish("b", LONG, 1, packet_id=2)]
        sent = b"".join(packet.encode(5) for packet in packets)
        publisher.connection.state = CONNECTING
        publisher.send(sent[:100])
        publisher.connection.state = CONNECTED
        publisher.send(sent[100:])
        assert [publisher.expect(Puback).packet_id for _ in packets] == [1, 2]
        assert [subscriber.take().payload for _ in packets] == [b"first", LONG]
