"""CONNECT, CONNACK, DISCONNECT and takeover over TCP (MQTT 5.0 sections 3.1, 3.2, 3.14 and 4.13)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import Core
from support.paths import VECTORS
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.codec.packets import Auth, Connack, Connect, Disconnect, Pingreq, Pingresp, Publish, Pubrel, Will
from mqttbroker.codec.properties import Properties

MALFORMED = json.loads((VECTORS / "packets_malformed.json").read_text(encoding="utf-8"))["vectors"]


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_client_of_each_version_connects(broker: BrokerProcess, version: int) -> None:
    with RawClient(broker.port, version) as client:
        connack = client.connect(f"versions-{version}", keep_alive=30)
        assert (connack.reason_code, connack.session_present) == (0, False)
        client.send(Pingreq())
        client.expect(Pingresp)
        assert client.subscribe(f"versions/{version}", options=1).reason_codes == [1]
        assert client.publish(f"versions/{version}", b"x", 1) == 0
        assert client.take().payload == b"x"
        client.disconnect()


def test_connack_has_the_granted_limits(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        properties = client.connect("grants").properties
        assert properties.receive_maximum == -1  # 65535, the value without the property
        assert properties.maximum_packet_size == 10 * 1024 * 1024
        assert properties.topic_alias_maximum == 10
        assert properties.assigned_client_identifier is None


@pytest.mark.parametrize("mode", ["commit", "interval", "off"])
def test_connack_has_the_durability_setting_on_request(mode: str, start_broker: Callable[..., BrokerProcess]) -> None:
    asking = Properties()
    asking.user_properties = [("other", "x"), ("mqttbroker-durability", "")]
    small = Properties()
    small.user_properties = asking.user_properties
    small.maximum_packet_size = 40
    broker = start_broker(config={"durability": mode})
    with RawClient(broker.port) as client:
        told = client.connect("asks", properties=asking).properties.user_properties
        assert told == [("mqttbroker-durability", mode)]
        client.subscribe("$SYS/broker/store/durability")
        assert client.take().payload.decode() == mode
    with RawClient(broker.port) as client:
        connack = client.connect("small", properties=small)  # [MQTT-3.2.2-20]
        assert connack.reason_code == 0 and connack.properties.user_properties == []
    with RawClient(broker.port) as client:
        assert client.connect("does-not").properties.user_properties == []
    assert f'durability="{mode}"' in broker.get("/metrics").decode()


@pytest.mark.parametrize(
    "version, clean_start, code",
    [(5, True, 0), (5, False, 0), (4, True, 0), (4, False, 2), (3, True, 2), (3, False, 2)],
)
def test_an_empty_client_id_by_version(broker: BrokerProcess, version: int, clean_start: bool, code: int) -> None:
    with RawClient(broker.port, version) as client:
        connack = client.connect("", clean_start=clean_start)
        assert connack.reason_code == code and not connack.session_present
        if code:
            client.expect_closed()
        elif version == 5:
            assert connack.properties.assigned_client_identifier


@pytest.mark.parametrize("asked, client_id, told", [
    (1, "c1", "replies/c1/in"), (0, "c1", None), (-1, "c1", None), (1, "", "replies/auto-1/in"),
    (1, "a/b", None), (1, "+", None), (1, "a#", None), (1, "x" * 65535, None),
])  # fmt: skip
def test_response_information_is_sent_on_request(tmp_path: Path, asked: int, client_id: str, told: str | None) -> None:
    properties = Properties()
    properties.request_response_information = asked
    with Core(tmp_path, others={"response_information": "replies/%c/in"}) as core:
        assert core.connect(client_id, properties=properties).connack.properties.response_information == told


@pytest.mark.parametrize("version, others", [(5, {}), (4, {"response_information": "replies"}), (5, {"response_information": "%u"})])
def test_response_information_is_omitted(tmp_path: Path, version: int, others: dict[str, str]) -> None:
    """None is configured, the protocol version has none, or the client has no user name to insert."""
    properties = Properties()
    properties.request_response_information = 1
    with Core(tmp_path, others=others) as core:
        assert core.connect("c", version, properties=properties).connack.properties.response_information is None


def test_assigned_client_ids_differ(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as one, RawClient(broker.port) as two:
        names = {client.connect().properties.assigned_client_identifier for client in (one, two)}
        assert len(names) == 2 and None not in names


@pytest.mark.parametrize("packet", [b"\xc0\x00", b"\x30\x03\x00\x01a", b"\x82\x06\x00\x01\x00\x01a\x00", b"\xe0\x00", b"\xf0\x00"])
def test_a_packet_before_connect_closes_the_connection_without_an_answer(broker: BrokerProcess, packet: bytes) -> None:
    with RawClient(broker.port) as client:
        client.send(packet)
        assert client.expect_closed() == []


@pytest.mark.parametrize("version", [4, 5])
def test_a_second_connect_is_a_protocol_error(connect: Callable[..., RawClient], version: int) -> None:
    client = connect("twice", version)
    client.send(Connect("twice", version))
    packets = client.expect_closed()
    assert [packet.reason_code for packet in packets if isinstance(packet, Disconnect)] == ([0x82] if version == 5 else [])
    assert len(packets) == (1 if version == 5 else 0)


@pytest.mark.parametrize("data, code", [
    (b"\x10\x0e\x00\x04MQTT\x06\x02\x00\x3c\x00\x00\x01c", 0x84),
    (b"\x10\x0e\x00\x04MQTT\x05\x03\x00\x3c\x00\x00\x01c", 0x81),
    (b"\x10\x0d\x00\x04MQTT\x03\x02\x00\x3c\x00\x01c", 1),
    (b"\x10\x0d\x00\x04HTTP\x04\x02\x00\x3c\x00\x01c", None),
    (b"GET / HTTP/1.1\r\n\r\n", None),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", None),
])  # fmt: skip
def test_an_invalid_connect_is_refused_as_its_version_allows(broker: BrokerProcess, data: bytes, code: int | None) -> None:
    with RawClient(broker.port, 5 if code is not None and code > 5 else 4) as client:
        client.send(data)
        answers = client.expect_closed()
        assert [answer.reason_code for answer in answers if isinstance(answer, Connack)] == ([] if code is None else [code])


@pytest.mark.parametrize("version", [4, 5])
def test_malformed_packets_close_only_their_sender(broker: BrokerProcess, connect: Callable[..., RawClient], version: int) -> None:
    """Every malformed vector over TCP, one connection each, beside another client."""
    bystander = connect("bystander")
    bystander.subscribe("bystander/#", options=1)
    count = 0
    for row in MALFORMED:
        data = bytes.fromhex(row["hex"])
        kind = data[0] >> 4
        if row["version"] != version or kind in (0, 2, 9, 11, 13):
            continue
        with RawClient(broker.port, version) as client:
            if kind != 1:
                assert client.connect("offender").reason_code == 0
            client.send(data + Publish("bystander/no", b"").encode(version))
            answers = client.expect_closed()
        if version == 5 and kind != 1:
            assert [type(answer) for answer in answers] == [Disconnect], row["name"]
            if not row["name"].startswith("PUBLISH: Subscription Identifier"):
                assert answers[0].reason_code == int(row["code"], 16), row["name"]
        else:
            assert all(isinstance(answer, Connack) and answer.reason_code for answer in answers), row["name"]
        count += 1
        assert bystander.publish("bystander/yes", b"%d" % count, 1) == 0
        message = bystander.take()
        assert (message.topic, message.payload) == ("bystander/yes", b"%d" % count)
    assert count > 15


def test_reason_strings_follow_request_problem_information(broker: BrokerProcess) -> None:
    quiet = Properties()
    quiet.request_problem_information = 0
    for properties, wanted in ((Properties(), True), (quiet, False)):
        with RawClient(broker.port) as client:
            client.connect("reasons", properties=properties)
            client.send(b"\x82\x00")
            (packet,) = client.expect_closed()
            assert isinstance(packet, Disconnect) and packet.reason_code == 0x81
            assert (packet.properties.reason_string is not None) is wanted


def test_auth_without_a_method_is_a_protocol_error(connect: Callable[..., RawClient]) -> None:
    client = connect("auth")
    client.send(Auth(0x18).encode(5))
    (packet,) = client.expect_closed()
    assert isinstance(packet, Disconnect) and packet.reason_code in (0x81, 0x82)


# --- packet sizes -------------------------------------------------------------------------------------------------


def test_packets_above_the_brokers_maximum_close_the_connection(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"limits": {"max_packet_size": "1KiB"}})
    with RawClient(broker.port) as client:
        assert client.connect("large").properties.maximum_packet_size == 1024
        client.subscribe("t", options=0)
        client.publish("t", b"x" * (1024 - 3 - 2 - 1 - 1))
        assert len(client.take().payload) == 1017
        client.send(Publish("t", b"x" * 1018).encode(5)[:8])
        (packet,) = client.expect_closed()
        assert isinstance(packet, Disconnect) and packet.reason_code == 0x95


@pytest.mark.parametrize("limit", ["max_connect_size", "max_packet_size"])
@pytest.mark.parametrize("sent", [100, 301], ids=["cut", "whole"])
@pytest.mark.parametrize("version, answers", [(4, []), (5, [0x95])])
def test_a_connect_larger_than_the_limit_is_refused(tmp_path: Path, limit: str, sent: int, version: int, answers: list[int]) -> None:
    with Core(tmp_path, **{limit: 300}) as core:
        for size, taken in ((300, True), (301, False)):
            client = core.client(version)
            data = Connect("c" * 200, version, True, 60, None, "u", b"").encode(version)
            data = Connect("c" * 200, version, True, 60, None, "u", b"p" * (size - len(data))).encode(version)
            assert len(data) == size
            client.send(data[:sent], data[sent:]) if taken else client.send(data[:sent])
            assert client.closed is not taken
            assert [packet.reason_code for packet in client.arrived()] == ([0] if taken else answers)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("kept", [0, 60])
def test_messages_above_the_clients_maximum_are_not_sent(tmp_path: Path, qos: int, kept: int) -> None:
    with Core(tmp_path) as core:
        properties = session_expiry(kept)
        properties.maximum_packet_size = 100
        client = core.connect("small", properties=properties)
        client.subscribe("t", options=qos)
        publisher = core.connect("p", 4)
        for size in (50, 200, 60):
            publisher.publish("t", b"x" * size, qos)
        assert [len(client.take().payload) for _ in range(2)] == [50, 60]
        client.expect_nothing()
        assert core.control.status().drops["too_large"] == 1
        session = core.broker.registry.get("small")
        assert session is not None and session.deliveries.queued_messages == 0


# --- takeover -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("other", [4, 5])
def test_a_second_connection_of_a_client_id_closes_the_first(connect: Callable[..., RawClient], version: int, other: int) -> None:
    first = connect("taken", version)
    second = connect("taken", other)
    packets = first.expect_closed()
    if version == 5:
        assert [(type(packet), packet.reason_code) for packet in packets] == [(Disconnect, 0x8E)]
    else:
        assert packets == []
    second.expect_nothing()


def test_a_takeover_of_a_pending_connect(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("c", properties=session_expiry(60)).close()
        core.kill()
        core.eager = False
        first, second, third = core.client(), core.client(), core.client(4)
        first.send(Connect("c", 5, False, properties=session_expiry(60)))
        second.send(Connect("c", 5, False, properties=session_expiry(60)))
        core.take()
        third.send(Connect("c", 4, False))
        core.settle()
        assert (first.arrived(), first.closed) == ([], True)
        assert (second.arrived(), second.closed) == ([], True)
        assert third.expect(Connack).session_present
        assert core.broker.clients.connected == 1


# --- sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first, second, present",
    [
        ({"properties": session_expiry(60)}, {"clean_start": False}, True),
        ({"properties": session_expiry(60)}, {"clean_start": True}, False),
        ({}, {"clean_start": False}, False),
        ({"properties": session_expiry(0)}, {"clean_start": False}, False),
    ],
)
def test_session_present(
    connect: Callable[..., RawClient],
    broker: BrokerProcess,
    first: dict[str, Any],
    second: dict[str, Any],
    present: bool,
) -> None:
    connect("present", **first).disconnect()
    with RawClient(broker.port) as client:
        assert client.connect("present", **second).session_present is present
        client.disconnect(properties=session_expiry(0))


def test_connack_of_3_1_has_no_session_present(broker: BrokerProcess) -> None:
    for version, present in ((3, False), (3, False), (4, True)):
        with RawClient(broker.port, version) as client:
            assert client.connect("v3", clean_start=False).session_present is present


@pytest.mark.parametrize("version, code", [(4, 3), (5, 0x89)])
def test_a_new_session_above_the_limit_is_refused(tmp_path: Path, version: int, code: int) -> None:
    with Core(tmp_path, max_sessions=1) as core:
        core.connect("one", properties=session_expiry(60)).disconnect()
        assert core.client(version).connect("two").reason_code == code
        core.connect("one")


def test_session_present_of_a_3_1_1_client(connect: Callable[..., RawClient], broker: BrokerProcess) -> None:
    for clean_start, present in ((False, False), (False, True), (True, False), (False, False)):
        with RawClient(broker.port, 4) as client:
            assert client.connect("v4", clean_start=clean_start).session_present is present
            client.disconnect()


def test_a_session_ends_after_its_expiry_interval(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        for seconds, present in ((9.0, True), (11.0, False)):
            core.connect("c", clean_start=False, properties=session_expiry(10)).close()
            core.advance(seconds)
            client = core.connect("c", clean_start=False, properties=session_expiry(10))
            assert client.connack.session_present is present
            core.advance(100)
            client.ping()
        assert core.broker.lifecycle.expired == 1


def test_a_session_that_never_ends(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("five", properties=session_expiry(0xFFFFFFFF)).close()
        core.connect("four", 4, clean_start=False).close()
        core.advance(10 * 365 * 86400)
        assert core.connect("five", clean_start=False).connack.session_present
        assert core.connect("four", 4, clean_start=False).connack.session_present


def test_session_expiry_includes_the_time_of_a_restart(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        core.connect("away", properties=session_expiry(10)).close()
        core.connect("there", properties=session_expiry(10))
        core.advance(6)
        core.kill()
        core.advance(6)
        assert core.broker.registry.get("away") is None
        assert core.broker.registry.get("there") is not None
        core.advance(6)
        assert len(core.broker.registry) == 0
        core.kill()
        assert len(core.broker.registry) == 0


@pytest.mark.parametrize("at_connect, at_disconnect, seconds, present", [
    (10, 100, 50, True), (100, 10, 50, False), (100, 0, 0, False), (100, None, 50, True),
])  # fmt: skip
def test_session_expiry_can_change_at_disconnect(
    tmp_path: Path, at_connect: int, at_disconnect: int | None, seconds: int, present: bool
) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c", properties=session_expiry(at_connect))
        client.disconnect(properties=None if at_disconnect is None else session_expiry(at_disconnect))
        core.advance(seconds)
        assert core.connect("c", clean_start=False, properties=session_expiry(1)).connack.session_present is present


def test_session_expiry_cannot_be_raised_from_0_at_disconnect(connect: Callable[..., RawClient]) -> None:
    client = connect("risen")
    client.send(Disconnect(0, session_expiry(10)))
    (packet,) = client.expect_closed()
    assert isinstance(packet, Disconnect) and packet.reason_code == 0x82


def test_the_broker_can_limit_session_expiry(tmp_path: Path) -> None:
    with Core(tmp_path, max_session_expiry=5.0) as core:
        client = core.connect("c", properties=session_expiry(10))
        assert client.connack.properties.session_expiry_interval == 5
        client.disconnect(properties=session_expiry(1000))
        core.advance(6)
        assert not core.connect("c", clean_start=False).connack.session_present


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, code", [(4, 3), (5, 0x89)])
def test_connections_above_the_limit_are_refused(tmp_path: Path, version: int, code: int) -> None:
    with Core(tmp_path, max_connections=1) as core:
        first = core.connect("one")
        client = core.client(version)
        assert client.connect("two").reason_code == code and client.closed
        first.disconnect()
        assert core.client(version).connect("two").reason_code == 0


@pytest.mark.parametrize("topic, retain, code", [("w/" * 200 + "w", False, 0x90), ("w", True, 0x9A), ("w", False, 0)])
def test_a_will_that_cannot_be_published_is_refused(tmp_path: Path, topic: str, retain: bool, code: int) -> None:
    with Core(tmp_path, retain_available=False) as core:
        for version, answer in ((5, code), (4, None if code else 0)):
            client = core.client(version)
            client.send(Connect("c", version, will=Will(topic, b"", 0, retain)))
            assert [packet.reason_code for packet in client.arrived()] == ([] if answer is None else [answer])
            assert client.closed is bool(code)


def test_a_connection_without_connect_times_out(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        silent, slow = core.client(), core.client()
        for byte in b"\x10\x7f\x00\x04MQTT\x05\x02":
            core.advance(1)
            slow.send(bytes([byte]))
            assert not silent.closed and not slow.closed
        core.advance(0.5)
        assert silent.closed and slow.closed


def test_acknowledgements_of_unknown_packet_ids_are_ignored(connect: Callable[..., RawClient]) -> None:
    client = connect("unknown-ids")
    client.send(b"\x40\x02\x00\x09", b"\x50\x02\x00\x09", b"\x70\x02\x00\x09")
    answer = client.expect(Pubrel)
    assert (answer.packet_id, answer.reason_code) == (9, 0x92)
    client.expect_nothing()
