"""The broker's Receive Maximum: packets beyond it wait for commits, and only unreleased QoS 2 ids end a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.core import Core, CoreClient
from support.properties import session_expiry

from mqttbroker.codec.packets import Connect, Disconnect, Pingreq, Pingresp, Puback, Pubcomp, Publish, Pubrec, Pubrel
from mqttbroker.codec.properties import Properties


def core_with(directory: Path, receive_maximum: int, **limits: Any) -> Core:
    core = Core(directory, receive_maximum=receive_maximum, **limits)
    core.connect("keeper", 4, clean_start=False).subscribe("kept/#")
    core.clients[-1].close()
    return core


def message(packet_id: int, qos: int = 1, payload: bytes = b"x", properties: Properties | None = None) -> Publish:
    return Publish("kept/1", payload, qos, False, False, packet_id, properties)


def kept_payloads(core: Core) -> list[bytes]:
    again = core.connect("keeper", 4, clean_start=False)
    return [packet.payload for packet in again.arrived() if isinstance(packet, Publish)]


def ids(client: CoreClient, kind: type[Any]) -> list[int]:
    packets = client.arrived()
    assert {type(packet) for packet in packets} <= {kind}
    return [packet.packet_id for packet in packets]


@pytest.mark.parametrize("size", [1, 9, 10_000])
def test_a_burst_above_the_maximum_is_read_as_commits_make_room(tmp_path: Path, size: int) -> None:
    """The packets of one chunk, too, however it is split between reads."""
    with core_with(tmp_path, 2) as core:
        client = core.connect("p")
        core.eager = False
        packets = b"".join(message(n, payload=b"%d" % n).encode(5) for n in range(1, 8))
        for start in range(0, len(packets), size):
            client.send(packets[start : start + size])
        assert client.connection.acks.length == 2 and client.connection.blocked
        assert client.connection.publish_received == 2
        core.commit()
        assert ids(client, Puback) == [1, 2] and client.connection.acks.length == 2
        core.settle()
        assert ids(client, Puback) == [3, 4, 5, 6, 7]
        assert client.connection.publish_received == core.broker.outbound.counters.publish_received == 7
        assert not client.connection.blocked
        core.eager = True
        assert kept_payloads(core) == [b"%d" % n for n in range(1, 8)]


def test_a_long_message_above_the_maximum_waits(tmp_path: Path) -> None:
    with core_with(tmp_path, 1) as core:
        client = core.connect("p")
        core.eager = False
        long = message(2, payload=bytes(200_000)).encode(5)
        client.send(message(1).encode(5) + long[:100_000])
        client.send(long[100_000:] + message(3).encode(5))
        assert client.connection.acks.length == 1
        core.settle()
        assert ids(client, Puback) == [1, 2, 3]


def test_a_message_that_waits_sets_its_topic_alias_once(tmp_path: Path) -> None:
    alias = Properties()
    alias.topic_alias = 1
    with core_with(tmp_path, 1) as core:
        client = core.connect("p")
        core.eager = False
        used = Publish("", b"2", 1, False, False, 3, alias)
        client.send(message(1), message(2, payload=b"1", properties=alias), used)
        core.settle()
        assert ids(client, Puback) == [1, 2, 3]
        core.eager = True
        assert kept_payloads(core) == [b"x", b"1", b"2"]


def test_what_waits_behind_a_burst_is_handled_in_order(tmp_path: Path) -> None:
    with core_with(tmp_path, 1) as core:
        client = core.connect("p")
        core.eager = False
        client.send(message(1), message(2), Pingreq())
        assert client.arrived() == []
        core.settle()
        assert [type(packet) for packet in client.arrived()] == [Puback, Pingresp, Puback]  # a commit delays no PINGRESP


def test_a_client_that_waits_for_its_acknowledgements_is_not_silent(tmp_path: Path) -> None:
    with core_with(tmp_path, 1) as core:
        client = core.connect("p", keep_alive=10)
        core.eager = False
        client.send(message(1), message(2))
        core.advance(100)
        assert not client.closed
        core.settle()
        assert ids(client, Puback) == [1, 2]
        core.advance(16)
        assert client.closed


def test_a_client_that_leaves_while_its_burst_waits(tmp_path: Path) -> None:
    with core_with(tmp_path, 1) as core:
        client = core.connect("p")
        core.eager = False
        client.send(message(1), message(2))
        client.close()
        core.settle()
        assert core.broker.outbound.incomplete.size == 0 and client.connection.acks.length == 0


def test_a_failed_commit_makes_room_too(tmp_path: Path) -> None:
    with core_with(tmp_path, 1) as core:
        client = core.connect("p")
        core.eager = False
        client.send(message(1), message(2))
        core.fail()
        assert [(packet.packet_id, packet.reason_code) for packet in client.arrived()] == [(1, 0x97)]
        core.settle()
        assert ids(client, Puback) == [2]


def test_releases_that_wait_for_the_disk_do_not_count_against_the_client(tmp_path: Path) -> None:
    with core_with(tmp_path, 2) as core:
        client = core.connect("p", properties=session_expiry())
        client.send(message(1, 2), message(2, 2))
        assert ids(client, Pubrec) == [1, 2]
        core.eager = False
        client.send(Pubrel(1), Pubrel(2), message(3, 2), message(4, 2))
        core.settle()
        assert [(type(packet), packet.packet_id) for packet in client.arrived()] == [
            (Pubcomp, 1), (Pubcomp, 2), (Pubrec, 3), (Pubrec, 4),
        ]  # fmt: skip


@pytest.mark.parametrize("qos", [1, 2])
def test_only_ids_that_the_client_does_not_release_end_the_connection(tmp_path: Path, qos: int) -> None:
    with core_with(tmp_path, 2) as core:
        client = core.connect("p")
        core.eager = False
        client.send(message(1, 2), message(2, 2), message(3, qos))
        assert not client.closed  # PUBRECs wait for the disk
        core.settle()
        *answers, last = client.arrived()
        assert [packet.packet_id for packet in answers] == [1, 2]
        assert isinstance(last, Disconnect) and last.reason_code == 0x93


def test_a_client_is_read_until_so_many_acknowledgements_wait(tmp_path: Path) -> None:
    with core_with(tmp_path, 65535, max_pending_acks=3) as core:
        client = core.connect("p")
        assert client.connack.properties.receive_maximum == -1  # not announced
        core.eager = False
        for number in range(1, 5):
            assert not client.connection.blocked
            client.send(message(number))
        assert client.connection.blocked
        core.settle()
        assert ids(client, Puback) == [1, 2, 3, 4] and not client.connection.blocked


# --- after a reconnect ----------------------------------------------------------------------------------------------


def again(core: Core) -> CoreClient:
    return core.connect("p", clean_start=False, properties=session_expiry())


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("qos", [1, 2])
def test_ids_of_an_earlier_connection_do_not_count(tmp_path: Path, qos: int, restarted: bool) -> None:
    """§4.9: the send quota is not preserved across network connections."""
    with core_with(tmp_path, 3) as core:
        client = again(core)
        client.send(*(message(n, 2) for n in (1, 2, 3)))
        assert ids(client, Pubrec) == [1, 2, 3]
        client.close()
        if restarted:
            core.kill()
        client = again(core)
        client.send(message(4, qos))
        assert ids(client, Puback if qos == 1 else Pubrec) == [4]
        client.send(Pubrel(1), Pubrel(2), Pubrel(3))
        assert ids(client, Pubcomp) == [1, 2, 3]
        client.send(*(message(n, 2) for n in range(5, 8 if qos == 1 else 7)))
        assert len(ids(client, Pubrec)) == (3 if qos == 1 else 2)
        client.send(message(8, 2))
        assert client.expect(Disconnect).reason_code == 0x93


def test_ids_of_many_connections_are_bounded_by_the_memory_of_sessions(tmp_path: Path) -> None:
    with core_with(tmp_path, 20, max_total_session_bytes=8000) as core:
        codes = []
        for connection in range(6):
            client = again(core)
            client.send(*(message(20 * connection + n, 2) for n in range(1, 21)))
            codes += [packet.reason_code for packet in client.arrived()]
            client.close()
        assert codes[:16] == [0] * 16 and codes[-1] == 0x97
        session = core.broker.registry.get("p")
        assert session is not None and len(session.received) == codes.count(0)
        for packet_id in list(session.received):
            session.forget_received(packet_id)
        assert session.received_earlier == 0


def test_a_message_that_is_sent_again_counts_for_the_new_connection(tmp_path: Path) -> None:
    with core_with(tmp_path, 2) as core:
        client = again(core)
        client.send(message(1, 2), message(2, 2))
        client.close()
        client = again(core)
        client.send(message(1, 2), message(2, 2))
        assert ids(client, Pubrec) == [1, 2]
        client.send(message(3, 2))
        assert client.expect(Disconnect).reason_code == 0x93


def test_a_burst_before_connack_waits_likewise(tmp_path: Path) -> None:
    with core_with(tmp_path, 1) as core:
        client = core.client()
        core.eager = False
        client.send(Connect("early", 5), message(1), message(2))
        core.settle()
        assert [packet.packet_id for packet in client.arrived() if isinstance(packet, Puback)] == [1, 2]
