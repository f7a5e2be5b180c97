"""Packets of one client, in memory: framing, the packets allowed in each state, and the order of acknowledgements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient
from support.paths import VECTORS
from support.properties import session_expiry

from mqttbroker.codec.packets import (
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
)
from mqttbroker.codec.properties import Properties


def keeper(core: Core) -> None:
    """Disconnect a persistent session that subscribes to ``kept/#``, so that its messages have to be stored."""
    core.connect("keeper", properties=session_expiry()).subscribe("kept/#")
    core.clients[-1].disconnect()


# --- framing ------------------------------------------------------------------------------------------------------

TALK = [
    Connect("c", 5, True, 60),
    Subscribe(1, [Subscription("a/#", 2), Subscription("b", 0)]),
    Publish("a/1", b"zero"),
    Publish("a/1", b"one" * 60, 1, False, False, 2),
    Puback(1),
    Publish("a/1", b"two", 2, False, False, 3),
    Pubrel(3),
    Pubrec(2),
    Pubcomp(2),
    Unsubscribe(4, ["a/#", "none"]),
    Pingreq(),
    Disconnect(),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
@pytest.mark.parametrize("version", [4, 5])
def test_packets_are_read_in_pieces_of_any_size(tmp_path: Path, version: int, size: int) -> None:
    with Core(tmp_path) as core:
        client = core.client(version)
        data = b"".join(packet.encode(version) for packet in [Connect("c", version, True, 60), *TALK[1:]])
        for start in range(0, len(data), size):
            client.send(data[start : start + size])
        answers = client.arrived()
        kinds = [Connack, Suback, Publish, Publish, Puback, Publish, Pubrec, Pubcomp, Pubrel, Unsuback, Pingresp]
        assert sorted(type(answer).__name__ for answer in answers) == sorted(kind.__name__ for kind in kinds)
        assert [type(answer) for answer in answers if not isinstance(answer, (Publish, Pubrel))] == [
            kind for kind in kinds if kind not in (Publish, Pubrel)
        ]
        assert client.closed
        assert core.broker.outbound.counters.messages_received == len(TALK)
        assert core.broker.outbound.counters.bytes_received == len(data)


@pytest.mark.parametrize("cut", range(1, 40))
def test_packets_are_read_when_split_at_any_byte(tmp_path: Path, cut: int) -> None:
    """Pieces of 40 bytes, the first one shorter: in one of the runs each byte is the last of a piece."""
    with Core(tmp_path) as core:
        client = core.client()
        data = b"".join(packet.encode(5) for packet in TALK)
        for start, end in zip([0, *range(cut, len(data), 40)], [*range(cut, len(data), 40), len(data)]):
            client.send(data[start:end])
        assert len(client.arrived()) == 11 and client.closed


def test_receive_stops_after_the_packet_at_stop(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c")
        client.subscribe("t", options=0)
        packets = [Publish("t", b"%d" % number).encode(5) for number in range(4)]
        data, each, reader = b"".join(packets), len(packets[0]), client.reader
        assert reader.receive(data[:3], 0.0) == 3
        assert reader.receive(data, 0.0, 3, 4) == each
        assert reader.receive(data, 0.0, each, each + 1) == 2 * each
        assert reader.receive(data[:-1], 0.0, 2 * each, len(data) - 1) == len(data) - 1
        assert reader.receive(data, 0.0, len(data) - 1) == len(data)
        assert [packet.payload for packet in client.arrived()] == [b"0", b"1", b"2", b"3"]


def malformed() -> list[Any]:
    rows = json.loads((VECTORS / "packets_malformed.json").read_text(encoding="utf-8"))["vectors"]
    from_clients = {1, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15}
    return [pytest.param(row, id=row["name"]) for row in rows if bytes.fromhex(row["hex"])[0] >> 4 in from_clients and row["version"] >= 4]


@pytest.mark.parametrize("version, taken", [(3, True), (4, False), (5, False)])
@pytest.mark.parametrize("again", ["6a 02 0001", "8a 06 0001 0001 61 00", "aa 05 0001 0001 61"])
def test_only_version_3_1_allows_dup_in_other_packets_than_publish(tmp_path: Path, again: str, version: int, taken: bool) -> None:
    data = bytes.fromhex(again)
    if version == 5 and data[0] != 0x6A:
        data = data[:1] + bytes([data[1] + 1]) + data[2:4] + b"\0" + data[4:]
    with Core(tmp_path) as core:
        client = core.connect("c", version)
        client.socket.sendall(data)
        answers = client.arrived()
        assert client.closed is not taken
        if taken:
            assert [answer.packet_id for answer in answers] == [1]


@pytest.mark.parametrize("data", [b"\x00\xc0", b"\x20\x80", b"\xd0\xff\xff"])
def test_a_packet_that_is_not_allowed_closes_the_connection_before_its_length_is_known(tmp_path: Path, data: bytes) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c")
        client.socket.sendall(data)
        assert [answer.reason_code for answer in client.arrived()] == [0x82] and client.closed


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize("row", malformed())
def test_a_malformed_packet_closes_only_its_own_connection(tmp_path: Path, row: Any, pieces: bool) -> None:
    data = bytes.fromhex(row["hex"])
    with Core(tmp_path) as core:
        bystander = core.connect("bystander")
        bystander.subscribe("seen")
        version = row["version"]
        client = core.client(version)
        before = data[0] >> 4 == 1
        if not before:
            client.connect("offender")
        for piece in [data[i : i + 1] for i in range(len(data))] if pieces else [data]:
            client.send(piece)
        client.send(Publish("seen", b"after the error"))
        answers = client.arrived()
        assert client.closed
        if before and row.get("level", -1) >= 5:
            assert [type(answer) for answer in answers] == [Connack]
            assert answers[0].reason_code == int(row["code"], 16)
        elif before:
            assert all(isinstance(answer, Connack) and answer.reason_code == 1 for answer in answers)
        elif version >= 5:
            assert [type(answer) for answer in answers] == [Disconnect]
            # A client's PUBLISH must not contain a Subscription Identifier [MQTT-3.3.4-6].
            barred = row["name"].startswith("PUBLISH: Subscription Identifier")
            assert answers[0].reason_code == (0x82 if barred else int(row["code"], 16))
        else:
            assert answers == []
        bystander.expect_nothing()
        assert core.broker.outbound.counters.protocol_errors == 1


@pytest.mark.parametrize("kind", range(16))
def test_packets_that_a_client_may_not_send(tmp_path: Path, kind: int) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c")
        if kind in (0, 1, 2, 9, 11, 13):
            client.send(bytes([kind << 4, 2, 0, 1]))
            assert client.expect(Disconnect).reason_code in (0x81, 0x82)
            assert client.closed
        first = core.client()
        if kind != 1:
            first.send(bytes([kind << 4, 2, 0, 1]))
            assert first.arrived() == [] and first.closed


def test_a_packet_that_is_not_allowed_is_refused_before_its_body_arrives(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.client()
        client.send(b"\x30\xff\xff\x7f")
        assert client.closed


def test_a_second_connect_is_an_error(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c")
        client.send(Connect("c"))
        assert client.expect(Disconnect).reason_code == 0x82
        assert client.closed


def test_a_remaining_length_of_more_than_four_bytes_is_refused_at_the_fourth(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c")
        client.send(b"\x30\xff\xff\xff\xff")
        assert client.expect(Disconnect).reason_code == 0x81


def test_packets_sent_with_connect_wait_for_the_session(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c", properties=session_expiry())
        client.subscribe("kept/1")
        client.close()
        core.connect("p").publish("kept/1", b"1", 1)
        core.kill()
        core.eager = False
        client = core.client()
        client.send(Connect("c", 5, False, properties=session_expiry()), Pingreq(), Publish("kept/1", b"2", 1, False, False, 1))
        assert client.arrived() == [] and client.connection.blocked
        client.send(Pingreq())
        core.settle()
        assert [type(p) for p in client.arrived()] == [Connack, Publish, Pingresp, Publish, Pingresp, Puback]


# --- acknowledgements and commits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_acknowledgements_are_sent_after_the_commit(tmp_path: Path, qos: int, version: int) -> None:
    with Core(tmp_path) as core:
        keeper(core)
        client = core.connect("p", version)
        core.eager = False
        client.send(Publish("kept/1", b"1", qos, False, False, 1))
        core.take()
        client.send(Publish("none", b"2", qos, False, False, 2))
        assert client.arrived() == []
        core.commit()
        answers = client.arrived()
        assert [type(answer) for answer in answers] == [Puback if qos == 1 else Pubrec] * 2
        assert [answer.packet_id for answer in answers] == [1, 2]
        assert [answer.reason_code for answer in answers] == ([0, 0x10] if version == 5 else [0, 0])


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_that_is_not_stored_is_acknowledged_at_once(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path) as core:
        listener = core.connect("l")
        listener.subscribe("t")
        client = core.connect("p")
        core.eager = False
        client.send(Publish("t", b"1", qos, False, False, 1))
        assert client.expect(Puback if qos == 1 else Pubrec).packet_id == 1
        if qos == 2:
            client.send(Pubrel(1))
            assert client.expect(Pubcomp).reason_code == 0
        assert not core.commit()


def test_an_entry_acknowledged_before_its_batch_is_closed_is_not_written(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("s", properties=session_expiry())
        subscriber.subscribe("t", options=1)
        client = core.connect("p")
        core.eager = False
        client.send(Publish("t", b"1", 1, False, False, 1))
        assert client.arrived() == []
        subscriber.send(Puback(subscriber.expect(Publish).packet_id))
        assert client.expect(Puback).packet_id == 1
        write_set = core.take()
        assert write_set is not None and not write_set.entries and not write_set.messages


def test_qos_2_is_sent_after_the_commit_and_qos_1_before_it(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        subscriber = core.connect("s", properties=session_expiry())
        subscriber.subscribe("t")
        client = core.connect("p")
        core.eager = False
        client.send(Publish("t", b"1", 1, False, False, 1), Publish("t", b"2", 2, False, False, 2))
        assert [packet.payload for packet in subscriber.arrived()] == [b"1"]
        core.commit()
        assert [packet.payload for packet in subscriber.arrived()] == [b"2"]
        subscriber.send(Pubrec(2))
        assert subscriber.arrived() == []
        core.commit()
        assert [type(packet) for packet in subscriber.arrived()] == [Pubrel]


def test_pubcomp_waits_for_the_release(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        keeper(core)
        client = core.connect("p", properties=session_expiry())
        client.send(Publish("kept/1", b"1", 2, False, False, 1))
        assert client.expect(Pubrec).reason_code == 0
        core.eager = False
        client.send(Pubrel(1))
        assert client.arrived() == []
        client.close()
        again = core.client()
        again.send(Connect("p", 5, False, properties=session_expiry()), Pubrel(1))
        assert [type(packet) for packet in again.arrived()] == [Connack]
        core.settle()
        answer = again.expect(Pubcomp)
        assert answer.reason_code == 0x92
        again.send(Pubrel(77))
        assert again.expect(Pubcomp).reason_code == 0x92


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("moment", ["gathering", "writing", "committed", "killed"])
def test_a_repeated_qos_2_publish_is_not_published_twice(tmp_path: Path, moment: str, version: int) -> None:
    fields: dict[str, Any] = {"properties": session_expiry()} if version == 5 else {}
    with Core(tmp_path) as core:
        keeper(core)
        client = core.connect("p", version, clean_start=False, **fields)
        core.eager = False
        client.send(Publish("kept/1", b"1", 2, False, False, 1))
        if moment == "writing":
            core.take()
        elif moment != "gathering":
            core.settle()
        client.close()
        if moment == "killed":
            core.kill()
        again = core.client(version)
        again.send(Connect("p", version, False, **fields), Publish("kept/1", b"1", 2, False, True, 1))
        if moment in ("gathering", "writing"):
            assert [type(packet) for packet in again.arrived()] in ([], [Connack])
        core.settle()
        answers = again.arrived()
        assert type(answers[-1]) is Pubrec and answers[-1].reason_code == 0
        session = core.broker.registry.get("keeper")
        assert session is not None and session.deliveries.queued_messages == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_repeated_qos_2_publish_is_not_acknowledged_when_the_first_was_lost(tmp_path: Path, moment: str) -> None:
    """The client disconnects before the commit fails, and reconnects before or after."""
    with Core(tmp_path) as core:
        keeper(core)
        client = core.connect("p", properties=session_expiry())
        core.eager = False
        client.send(Publish("kept/1", b"1", 2, False, False, 1))
        core.take()
        client.close()
        if moment == "after":
            core.fail()
            core.settle()
        again = core.client()
        again.send(Connect("p", 5, False, properties=session_expiry()), Publish("kept/1", b"1", 2, False, True, 1))
        if moment == "before":
            core.fail()
        core.settle()
        answers = [packet for packet in again.arrived() if isinstance(packet, Pubrec)]
        assert [answer.reason_code for answer in answers] == [0x97 if moment == "before" else 0]
        session = core.broker.registry.get("keeper")
        assert session is not None and session.deliveries.queued_messages == (0 if moment == "before" else 1)


def test_a_full_window_can_be_sent_again(tmp_path: Path) -> None:
    """A PUBLISH that is sent again does not count twice towards Receive Maximum."""
    with Core(tmp_path, receive_maximum=3) as core:
        keeper(core)
        messages = [Publish("kept/1", b"x", 2, False, False, n) for n in (1, 2, 3)]
        client = core.connect("p", properties=session_expiry())
        client.send(*messages)
        assert len(client.arrived()) == 3
        client.close()
        client = core.connect("p", clean_start=False, properties=session_expiry())
        client.send(*messages)
        assert [packet.packet_id for packet in client.arrived()] == [1, 2, 3]
        client.send(Publish("kept/1", b"x", 2, False, False, 4))
        assert client.expect(Disconnect).reason_code == 0x93


# --- when the store fails -----------------------------------------------------------------------------------------


def failing(core: Core, version: int, qos: int) -> CoreClient:
    keeper(core)
    client = core.connect("p", version, clean_start=version == 5)
    core.eager = False
    client.send(Publish("kept/1", b"1", qos, False, False, 1), Publish("kept/1", b"2", qos, False, False, 2))
    core.fail()
    return client


@pytest.mark.parametrize("qos", [1, 2])
def test_a_failed_commit_refuses_with_0x97(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path) as core:
        client = failing(core, 5, qos)
        answers = client.arrived()
        assert [type(answer) for answer in answers] == [Puback if qos == 1 else Pubrec] * 2
        assert [answer.reason_code for answer in answers] == [0x97, 0x97]
        assert core.broker.commits.error == "disk full"
        core.eager = True
        assert client.publish("kept/1", b"3", qos) == 0
        assert core.broker.commits.error == ""
        assert core.control.status().drops["store_failed"] == 2


@pytest.mark.parametrize("qos", [1, 2])
def test_a_failed_commit_closes_a_3_1_1_client(tmp_path: Path, qos: int) -> None:
    with Core(tmp_path) as core:
        client = failing(core, 4, qos)
        assert client.arrived() == [] and client.closed
        core.eager = True
        client = core.connect("p", 4, clean_start=False)
        assert client.publish("kept/1", b"1", qos) == 0
        session = core.broker.registry.get("keeper")
        assert session is not None and session.deliveries.queued_messages == 1


def test_a_failed_commit_closes_a_client_that_waits_for_suback_and_keeps_the_subscription(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("s", properties=session_expiry())
        core.eager = False
        client.send(Subscribe(1, [Subscription("t", 1)]))
        core.fail()
        assert client.expect(Disconnect).reason_code == 0x97
        core.settle()
        core.kill()
        session = core.broker.registry.get("s")
        assert session is not None and list(session.subscriptions) == ["t"]


def test_a_failed_commit_refuses_a_clean_start_that_discards_a_stored_session(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("s", properties=session_expiry())
        core.eager = False
        client = core.client()
        client.send(Connect("s"))
        core.fail()
        assert client.expect(Connack).reason_code == 0x97
        core.eager = True
        assert core.connect("s", clean_start=False, properties=session_expiry()).connack.session_present is False


# --- PUBLISH ------------------------------------------------------------------------------------------------------


def test_cached_properties_belong_to_their_packet(tmp_path: Path) -> None:
    def told(text: str, expiry: int = -1) -> Properties:
        properties = Properties()
        properties.content_type = text
        properties.message_expiry_interval = expiry
        return properties

    with Core(tmp_path) as core:
        listener, older = core.connect("l"), core.connect("o", 4)
        listener.subscribe("#", options=1)
        older.subscribe("#", options=1)
        client = core.connect("p")
        sent = [
            told("one"),
            told("one"),
            told("two"),
            Properties(),
            told("two"),
            told("two", 9),
            told("two", 9),
            told("x" * 600),
        ] * 2
        for qos in (0, 1):
            for number, properties in enumerate(sent):
                client.publish("t" * (number % 3 + 1), b"%d" % number, qos, properties=properties)
            got = listener.arrived()
            assert [packet.payload for packet in got] == [b"%d" % number for number in range(len(sent))]
            assert [repr(packet.properties) for packet in got] == [repr(properties) for properties in sent]
            assert [packet.payload for packet in older.arrived()] == [packet.payload for packet in got]
        # The same properties in a packet that ends inside them; the next packet begins with the bytes that are missing.
        packet = Publish("t", b"", 0, properties=told("on0")).encode(5)
        client.send(packet, bytes((packet[0], packet[1] - 1)) + packet[2:-1] + packet)
        assert client.wait_for(Disconnect).reason_code == 0x81


@pytest.mark.parametrize("topic_filter", ["t/1", "t/+"])
@pytest.mark.parametrize("cache", [1, 100])
def test_a_cached_route_follows_subscribes_and_unsubscribes(tmp_path: Path, topic_filter: str, cache: int) -> None:
    with Core(tmp_path, route_cache_size=cache) as core:
        publisher, other, listener = core.connect("p"), core.connect("o"), core.connect("l")
        for there in (False, True, False, True):
            if there:
                listener.subscribe(topic_filter, options=0)
            else:
                listener.unsubscribe(topic_filter)
            for evict in (False, True):
                publisher.publish("t/1", b"x")
                assert [packet.topic for packet in listener.arrived()] == ["t/1"] * there
                if evict:
                    other.publish("elsewhere", b"")


@pytest.mark.parametrize(
    "topic, code",
    [("a/" * 128 + "a", 0x90), ("a" * 101, 0x90), ("a" * 100, None), ("a/" * 49 + "a", None)],
    ids=["levels", "length", "longest", "deepest"],
)
def test_topic_names_above_the_limits_are_refused(tmp_path: Path, topic: str, code: int | None) -> None:
    with Core(tmp_path, max_topic_levels=50, max_topic_length=100) as core:
        client = core.connect("c")
        client.send(Publish(topic, b""))
        if code is None:
            client.expect_nothing()
            assert client.subscribe(topic).reason_codes == [2]
        else:
            assert client.expect(Disconnect).reason_code == code
            client = core.connect("c")
            assert client.subscribe(topic).reason_codes == [0x8F]


def test_payload_format_1_requires_utf_8(tmp_path: Path) -> None:
    properties = Properties()
    properties.payload_format_indicator = 1
    with Core(tmp_path) as core:
        client = core.connect("c")
        client.send(Publish("t", "grün".encode(), properties=properties))
        client.expect_nothing()
        client.send(Publish("t", b"\xff", properties=properties))
        assert client.expect(Disconnect).reason_code == 0x99


def test_retained_messages_can_be_disabled(tmp_path: Path) -> None:
    with Core(tmp_path, retain_available=False) as core:
        client = core.connect("c")
        assert client.connack.properties.retain_available == 0
        client.send(Publish("t", b"x", 0, True))
        assert client.expect(Disconnect).reason_code == 0x9A
