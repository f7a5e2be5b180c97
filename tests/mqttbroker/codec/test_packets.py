"""The packet codec: vectors in vectors/packets_*.json, and statements about all packets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import VECTORS
from support.property_strategies import TEXT, properties_of

from mqttbroker.codec.data_types import decode_varint
from mqttbroker.codec.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
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
    Will,
    decode,
    decode_body,
    encode_ack,
    encode_fixed_header,
    encode_publish,
)
from mqttbroker.codec.properties import PROPERTIES, WILL, Properties, encode_properties
from mqttbroker.codec.reason_codes import CODES, PUBLISH, MQTTError


def vectors(name: str) -> list[Any]:
    rows = json.loads((VECTORS / name).read_text(encoding="utf-8"))["vectors"]
    return [pytest.param(row, id=f"{row['name']} [{row['spec']}]") for row in rows]


GOOD = vectors("packets_good.json")
MALFORMED = vectors("packets_malformed.json")


def plain(value: Any) -> Any:
    """A decoded value as the vectors write it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def check(value: Any, expected: Any) -> None:
    """Compare an object with the fields that a vector names; properties that it does not name must be absent."""
    if isinstance(value, Properties):
        absent = plain_properties(Properties())
        assert plain_properties(value) == absent | expected
    elif isinstance(expected, dict):
        for name, wanted in expected.items():
            check(getattr(value, name), wanted)
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        assert len(value) == len(expected)
        for item, wanted in zip(value, expected):
            check(item, wanted)
    else:
        assert plain(value) == expected


def plain_properties(properties: Properties) -> dict[str, Any]:
    return {row.attribute: plain(getattr(properties, row.attribute)) for row in PROPERTIES}


@pytest.mark.parametrize("vector", GOOD)
def test_good_vectors(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    version = vector["version"]
    packet, position = decode(data, version)
    assert packet is not None and position == len(data)
    assert type(packet).__name__ == vector["packet"] and packet.packet_type == data[0] >> 4
    check(packet, vector["fields"])
    encoded = packet.encode(version)
    assert (encoded == data) is vector.get("canonical", True)
    again, _ = decode(encoded, version)
    assert again is not None
    check(again, vector["fields"])


@pytest.mark.parametrize("vector", GOOD)
def test_good_vectors_between_other_bytes(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    packet, position = decode(b"\xff\xff" + data + b"\x30\xff", vector["version"], 2)
    assert packet is not None and position == 2 + len(data)
    check(packet, vector["fields"])


@pytest.mark.parametrize("vector", GOOD)
def test_a_packet_is_incomplete_until_its_last_byte(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    for end in range(len(data)):
        assert decode(data[:end], vector["version"]) == (None, 0)


def outcome(first: int, data: bytes, end: int, version: int) -> Any:
    """The decoded fields of a body, or the reason code that refuses it."""
    try:
        return fields(decode_body(first >> 4, first & 15, data, 0, end, version))
    except MQTTError as error:
        return error.reason_code


@pytest.mark.parametrize("vector", GOOD)
def test_nothing_beyond_the_end_is_read(vector: dict[str, Any]) -> None:
    """The bytes after a truncated body do not matter, and bytes left over are refused."""
    data = bytes.fromhex(vector["hex"])
    version = vector["version"]
    _, start = decode_varint(data, 1, len(data))
    body = data[start:]
    for end in range(len(body)):
        alone = outcome(data[0], body[:end], end, version)
        assert alone == outcome(data[0], body, end, version) == outcome(data[0], body[:end] + b"\xff" * 9, end, version)
    takes_the_rest = ("Publish", "Suback", "Unsuback") if version == 5 else ("Publish", "Suback")
    short_form = version == 5 and len(body) < 4
    if vector["packet"] not in takes_the_rest and not short_form:
        assert outcome(data[0], body + b"\0", len(body) + 1, version) in (0x81, 0x82)


@pytest.mark.parametrize("vector", MALFORMED)
def test_malformed_vectors(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    for whole in (data, data + b"\xc0\x00"):
        with pytest.raises(MQTTError) as caught:
            decode(whole, vector["version"])
        assert f"0x{caught.value.reason_code:02X}" == vector["code"]
        assert caught.value.protocol_level == vector.get("level", -1)


@pytest.mark.parametrize("vector", MALFORMED)
def test_a_malformed_packet_is_incomplete_until_its_last_byte(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    for end in range(len(data)):
        try:
            assert decode(data[:end], vector["version"]) == (None, 0)
        except MQTTError:
            assert data[1:4] == b"\x80\x80\x80"  # no legal Remaining Length begins so


PACKET_IDS = st.integers(1, 65_535)
TOPICS = TEXT.filter(bool)
BYTES = st.binary(max_size=200)


def code(packet_type: int) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(CODES[packet_type]))


def codes(packet_type: int) -> st.SearchStrategy[list[int]]:
    return st.lists(code(packet_type), min_size=1, max_size=5)


def publish(qos: int) -> st.SearchStrategy[Publish]:
    ids = PACKET_IDS if qos else st.just(0)
    dups = st.booleans() if qos else st.just(False)
    return st.builds(Publish, TOPICS, BYTES, st.just(qos), st.booleans(), dups, ids, properties_of(3))


def subscription(topic_filter: str, qos: int, rest: int, handling: int) -> Subscription:
    return Subscription("f" + topic_filter, qos | rest << 2 | handling << 4)


def auth(reason_code: int, properties: Properties) -> Auth:
    if properties.authentication_method is None:
        properties.authentication_method = "M"
    return Auth(reason_code, properties)


WILLS = st.none() | st.builds(Will, TOPICS, BYTES, st.integers(0, 2), st.booleans(), properties_of(WILL))
PACKETS: st.SearchStrategy[Packet] = st.one_of(
    st.builds(
        Connect,
        TEXT,
        st.just(5),
        st.booleans(),
        st.integers(0, 65_535),
        WILLS,
        st.none() | TEXT,
        st.none() | BYTES,
        properties_of(1),
    ),
    st.builds(Connack, st.just(False), code(2), properties_of(2)),
    st.integers(0, 2).flatmap(publish),
    st.builds(Puback, PACKET_IDS, code(4), properties_of(4)),
    st.builds(Pubrec, PACKET_IDS, code(5), properties_of(5)),
    st.builds(Pubrel, PACKET_IDS, code(6), properties_of(6)),
    st.builds(Pubcomp, PACKET_IDS, code(7), properties_of(7)),
    st.builds(
        Subscribe,
        PACKET_IDS,
        st.lists(
            st.builds(subscription, TEXT, st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)),
            min_size=1,
            max_size=4,
        ),
        properties_of(8),
    ),
    st.builds(Suback, PACKET_IDS, codes(9), properties_of(9)),
    st.builds(Unsubscribe, PACKET_IDS, st.lists(TEXT, min_size=1, max_size=4), properties_of(10)),
    st.builds(Unsuback, PACKET_IDS, codes(11), properties_of(11)),
    st.builds(Pingreq),
    st.builds(Pingresp),
    st.builds(Disconnect, code(14), properties_of(14)),
    st.builds(auth, code(15), properties_of(15)),
)


def fields(value: object) -> Any:
    """All fields of a packet, for comparison."""
    if isinstance(value, (Packet, Will, Subscription)):
        names = [name for name in dir(value) if not name.startswith("_") and name not in ("encode", "forward")]
        return {name: fields(getattr(value, name)) for name in names}
    if isinstance(value, Properties):
        return plain_properties(value)
    if isinstance(value, list):
        return [fields(item) for item in value]
    return value


@given(PACKETS)
def test_decode_undoes_encode(packet: Packet) -> None:
    data = packet.encode(5)
    got, position = decode(data, 5)
    assert position == len(data) and type(got) is type(packet)
    assert fields(got) == fields(packet)


@given(st.lists(PACKETS, max_size=6), st.data())
def test_any_chunks(sent: list[Packet], data: st.DataObject) -> None:
    """The same packets are decoded from any chunks. [MQTT-6.0.0-2]"""
    stream = b"".join(packet.encode(5) for packet in sent)
    buffer = b""
    got: list[Packet] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        buffer, stream = buffer + stream[:size], stream[size:]
        position = 0
        while True:
            packet: Packet | None
            packet, position = decode(buffer, 5, position)
            if packet is None:
                break
            got.append(packet)
        buffer = buffer[position:]
    assert buffer == b"" and [fields(packet) for packet in got] == [fields(packet) for packet in sent]


@given(st.integers(0, 15), st.integers(0, 15), st.binary(max_size=60), st.sampled_from([3, 4, 5]))
def test_any_bytes_are_decoded_or_refused(packet_type: int, flags: int, body: bytes, version: int) -> None:
    try:
        packet = decode_body(packet_type, flags, body, 0, len(body), version)
    except MQTTError as error:
        assert error.reason_code in (0x81, 0x82, 0x84, 0x90, 0x94)
    else:
        assert packet.packet_type == packet_type
        spoken = packet.version if isinstance(packet, Connect) else version
        again, _ = decode(packet.encode(spoken), spoken)
        assert fields(again) == fields(packet)


@given(PACKETS, st.data())
def test_damaged_packets_are_decoded_or_refused(packet: Packet, data: st.DataObject) -> None:
    raw = bytearray(packet.encode(5))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, position = decode(bytes(raw), 5)
    except MQTTError as error:
        assert error.reason_code >= 0x80
    else:
        assert position <= len(raw)


@given(st.integers(0, 2).flatmap(publish), st.sampled_from([4, 5]))
def test_encode_publish_equals_the_packet_class(packet: Publish, version: int) -> None:
    encoded = encode_properties(packet.properties, PUBLISH)
    properties = encoded[decode_varint(encoded, 0, len(encoded))[1] :]
    topic = packet.topic.encode()
    made = encode_publish(topic, packet.payload, packet.qos, packet.retain, packet.dup, packet.packet_id, version, properties)
    assert made == packet.encode(version)


@pytest.mark.parametrize("packet_class", [Puback, Pubrec, Pubrel, Pubcomp])
@pytest.mark.parametrize("version", [3, 4, 5])
def test_encode_ack_equals_the_packet_classes(packet_class: Any, version: int) -> None:
    for reason_code in CODES[packet_class.packet_type]:
        packet = packet_class(515, reason_code)
        made = encode_ack(packet_class.packet_type, 515, reason_code, version)
        assert made == packet.encode(version)
        assert len(made) == (5 if version == 5 and reason_code else 4)


@pytest.mark.parametrize(
    ("remaining", "expected"),
    [(0, "3000"), (127, "307f"), (128, "308001"), (16_384, "30808001"), (268_435_455, "30ffffff7f")],
)
def test_fixed_header(remaining: int, expected: str) -> None:
    assert encode_fixed_header(0x30, remaining).hex() == expected


def test_a_packet_that_is_too_long_for_a_fixed_header() -> None:
    with pytest.raises(ValueError):
        encode_fixed_header(0x30, 268_435_456)


def test_v3_packets_have_no_properties_and_no_reason_codes() -> None:
    properties = Properties()
    properties.reason_string = "why"
    assert Puback(1, 0x87, properties).encode(4) == b"\x40\x02\x00\x01"
    assert Suback(1, [1, 0x87, 0x8F], properties).encode(4) == b"\x90\x05\x00\x01\x01\x80\x80"
    assert Unsuback(1, [0x11], properties).encode(4) == b"\xb0\x02\x00\x01"
    assert Disconnect(0x8E, properties).encode(4) == b"\xe0\x00"
    assert Connack(True, 0, properties).encode(4) == b"\x20\x02\x01\x00"
