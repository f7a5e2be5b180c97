"""The packets of one message, compared with the codec."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqttbroker.codec.packets import Publish, decode, encode_publish
from mqttbroker.core.client.outgoing import Outgoing, expiry_property
from sessions.message import Message

USER = b"\x26\x00\x01k\x00\x01v"
SECOND = 1_000_000


def outgoing(payload: bytes = b"payload", properties: bytes = USER, expires_at: int = 0, now: int = 0) -> Outgoing:
    return Outgoing("tö".encode(), Message("tö", payload, 2, True, properties, "p", 0, expires_at), now)


def read(data: bytes, version: int) -> Publish:
    packet, used = decode(data, version)
    assert isinstance(packet, Publish) and used == len(data)
    return packet


@given(st.binary(max_size=300), st.sampled_from([4, 5]), st.integers(1, 2), st.integers(1, 65535))
def test_header_packet_id_and_rest_make_the_packet(payload: bytes, version: int, qos: int, packet_id: int) -> None:
    one = outgoing(payload)
    whole = one.header(version, qos) + packet_id.to_bytes(2, "big") + one.rest(version)
    assert whole == one.encode(version, qos, False, False, packet_id, b"")
    packet = read(whole, version)
    assert (packet.topic, packet.payload, packet.qos, packet.packet_id) == ("tö", payload, qos, packet_id)
    assert (packet.retain, packet.dup) == (False, False)
    assert packet.properties.user_properties == ([("k", "v")] if version == 5 else [])


def test_each_variant_is_encoded_once() -> None:
    one = outgoing()
    for version in (4, 5):
        assert one.qos0_packet(version) is one.qos0_packet(version)
        one.header(version, 1)
        assert one.rest(version) is one.rest(version)


def test_the_parts_of_the_received_packet_are_reused() -> None:
    one = outgoing()
    came = encode_publish("tö".encode(), b"payload", 1, False, False, 77, 5, USER)
    one.set_parts(5, came[1:6], came[:6], came[8:])
    assert one.header(5, 2) + b"\0\x01" + one.rest(5) == b"\x34" + came[1:6] + b"\0\x01" + came[8:]
    assert b"k" not in one.header(4, 1) + one.rest(4)


def test_properties_of_one_delivery_come_last() -> None:
    data = outgoing(expires_at=10 * SECOND, now=3 * SECOND).encode(5, 1, True, True, 9, b"\x0b\x05")
    packet = read(data, 5)
    assert (packet.retain, packet.dup, packet.packet_id) == (True, True, 9)
    assert packet.properties.message_expiry_interval == 7
    assert packet.properties.subscription_identifiers == [5]
    assert data.index(USER) < data.index(b"\x02\0\0\0\x07") < data.index(b"\x0b\x05")


def test_message_expiry_is_the_remaining_time_rounded_up() -> None:
    assert expiry_property(0, 5) == b""
    for left, seconds in ((10 * SECOND, 10), (10 * SECOND - 1, 10), (1, 1), (0, 0), (-5 * SECOND, 0)):
        assert expiry_property(100 * SECOND + left, 100 * SECOND) == b"\x02" + seconds.to_bytes(4, "big")
    assert expiry_property(2**60, 1) == b"\x02\xff\xff\xff\xff"
