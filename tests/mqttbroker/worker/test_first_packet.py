"""The first packet of a client, however its bytes are split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.paths import VECTORS

from mqttbroker.codec.packets import Connect, Pingreq, Publish, decode
from mqttbroker.codec.reason_codes import MQTTError
from mqttbroker.worker.first_packet import FirstPacket

LARGEST = 1000


def packets(name: str) -> list[Any]:
    rows = json.loads((VECTORS / name).read_text(encoding="utf-8"))["vectors"]
    return [pytest.param(bytes.fromhex(row["hex"]), id=row["name"]) for row in rows]


def received(*parts: bytes) -> FirstPacket:
    """A first packet that needed all of these parts."""
    first = FirstPacket(LARGEST)
    assert [first.add(part) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert first.data == b"".join(parts) and first.size == len(first.data)
    return first


@pytest.mark.parametrize("data", packets("packets_good.json"))
def test_a_connect_is_decoded_when_it_is_whole_and_any_other_packet_is_passed_on(data: bytes) -> None:
    if data[0] != 0x10:
        assert received(data).connect is None
        return
    packet, end = decode(data, 5)
    assert isinstance(packet, Connect)
    connect = received(data).connect
    assert connect is not None and connect.client_id == packet.client_id
    assert connect.encode() == data[:end]
    for split in range(1, len(data)):
        connect = received(data[:split], data[split:]).connect
        assert connect is not None and connect.encode() == data[:end]
    received(*(data[index : index + 1] for index in range(len(data))))


@pytest.mark.parametrize("data", packets("packets_malformed.json"))
def test_no_malformed_packet_is_a_connect(data: bytes) -> None:
    try:
        packet, _ = decode(data, 5)
    except MQTTError:
        packet = None
    if packet is None:
        for split in range(len(data)):
            first = FirstPacket(LARGEST)
            done = first.add(data[:split]) or first.add(data[split:])
            assert first.connect is None
            assert done or len(data) < 2 or data[0] == 0x10  # an incomplete CONNECT


def test_what_follows_the_connect_is_passed_on_with_it() -> None:
    connect = Connect("c", 5).encode(5)
    more = Publish("t", b"x" * 5000, 0, False, False, 0).encode(5)
    assert received(connect + more).data == connect + more
    assert received(connect[:5], connect[5:] + more).data == connect + more


def test_a_packet_that_is_no_connect_is_passed_on_with_its_second_byte() -> None:
    first = FirstPacket(LARGEST)
    assert not first.add(Pingreq().encode(5)[:1])
    assert first.add(Pingreq().encode(5)[1:]) and first.connect is None


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x80\x80\x80\x80", b"\x80\x00", b"\x90\x80\x00"])
def test_an_impossible_remaining_length_is_passed_on_at_once(length: bytes) -> None:
    first = FirstPacket(LARGEST)
    data = b"\x10" + length
    assert [first.add(data[index : index + 1]) for index in range(len(data))] == [False] * len(length) + [True]
    assert first.connect is None


def test_a_connect_larger_than_allowed_is_passed_on_at_once() -> None:
    largest = Connect("c" * (LARGEST - 16), 5).encode(5)
    assert len(largest) == LARGEST and received(largest).connect is not None
    larger = Connect("c" * (LARGEST - 15), 5).encode(5)
    first = FirstPacket(LARGEST)
    assert first.add(larger[:4]) and first.connect is None and first.data == larger[:4]
