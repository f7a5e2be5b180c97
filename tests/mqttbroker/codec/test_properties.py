"""Decoding and encoding of properties, and of the data types that they are made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.property_strategies import properties_of

from mqttbroker.codec.data_types import (
    encode_varint,
)
from mqttbroker.codec.properties import (
    BYTE,
    FOUR_BYTES,
    PROPERTIES,
    STRING_PAIR,
    TWO_BYTES,
    VARINT,
    WILL,
    Properties,
    Property,
    decode_properties,
    decode_publish_properties,
    encode_properties,
)
from mqttbroker.codec.reason_codes import AUTH, CONNACK, CONNECT, PUBLISH, SUBSCRIBE, MQTTError

PACKETS = sorted({packet_type for row in PROPERTIES for packet_type in row.packets})
SHORTEST = {
    BYTE: b"\1",
    TWO_BYTES: b"\0\1",
    FOUR_BYTES: b"\0\0\0\1",
    VARINT: b"\1",
    STRING_PAIR: b"\0\0\0\0",
}  # other types: b"\0\1x"
each_property = pytest.mark.parametrize("row", PROPERTIES, ids=lambda row: row.attribute)


def values(properties: Properties) -> dict[str, object]:
    return {row.attribute: getattr(properties, row.attribute) for row in PROPERTIES}


def encoded(row: Property) -> bytes:
    """The property with a value that is legal in every packet it may stand in."""
    return row.id_byte + SHORTEST.get(row.kind, b"\0\1x")


def refused(data: bytes, packet_type: int) -> int:
    with pytest.raises(MQTTError) as caught:
        decode_properties(data, 0, len(data), packet_type)
    return caught.value.reason_code


@given(st.sampled_from(PACKETS).flatmap(lambda kind: st.tuples(st.just(kind), properties_of(kind))), st.binary())
def test_decode_undoes_encode(case: tuple[int, Properties], after: bytes) -> None:
    packet_type, properties = case
    data = encode_properties(properties, packet_type)
    decoded, position = decode_properties(b"?" + data + after, 1, 1 + len(data), packet_type)
    assert position == 1 + len(data)
    assert values(decoded) == values(properties)
    assert encode_properties(decoded, packet_type) == data


def test_the_table_lists_the_attributes_of_properties() -> None:
    names = {name for name in dir(Properties()) if not name.startswith("_")}
    assert names == {row.attribute for row in PROPERTIES}
    identifiers = [row.identifier for row in PROPERTIES]
    assert identifiers == sorted(set(identifiers))


@each_property
@pytest.mark.parametrize("packet_type", PACKETS)
def test_each_property_is_legal_where_the_table_says(row: Property, packet_type: int) -> None:
    one = encoded(row)
    if row.attribute == "authentication_data" and packet_type in row.packets:
        one = b"\x15\0\1M" + one
    data = bytes([len(one)]) + one
    if packet_type not in row.packets:
        assert refused(data, packet_type) == 0x81
        return
    decode_properties(data, 0, len(data), packet_type)
    twice = bytes([2 * len(one)]) + one + one
    if packet_type in row.repeatable:
        decode_properties(twice, 0, len(twice), packet_type)
    else:
        assert refused(twice, packet_type) == 0x82


@each_property
def test_the_decoder_of_publish_follows_the_table(row: Property) -> None:
    one = encoded(row)
    data = bytes([len(one)]) + one
    if PUBLISH not in row.packets or row.attribute == "subscription_identifiers":
        with pytest.raises(MQTTError) as caught:
            decode_publish_properties(data, 0, len(data))
        assert caught.value.reason_code == (0x82 if PUBLISH in row.packets else 0x81)  # [MQTT-3.3.4-6]
        return
    got = decode_publish_properties(data, 0, len(data))
    rest = {"topic_alias": got.topic_alias, "message_expiry_interval": got.message_expiry}
    assert got.end == len(data) and got.forward == (b"" if row.attribute in rest else one)
    assert rest.get(row.attribute, 1) == 1
    if PUBLISH not in row.repeatable:
        with pytest.raises(MQTTError) as caught:
            decode_publish_properties(bytes([2 * len(one)]) + one + one, 0, 2 * len(one) + 1)
        assert caught.value.reason_code == 0x82


def test_other_identifiers_are_malformed() -> None:
    for identifier in set(range(256)) - {row.identifier for row in PROPERTIES}:
        assert refused(bytes([2, identifier, 0]), PUBLISH) == 0x81


@pytest.mark.parametrize(
    ("identifier", "value", "packet_type", "code"),
    [
        (0x01, "02", PUBLISH, 0x82),
        (0x08, "0001 23", PUBLISH, 0x82),
        (0x08, "0003 61 2f 2b", WILL, 0x82),
        (0x0B, "00", SUBSCRIBE, 0x82),
        (0x16, "0000", AUTH, 0x82),
        (0x17, "02", CONNECT, 0x82),
        (0x19, "ff", CONNECT, 0x82),
        (0x21, "0000", CONNECT, 0x82),
        (0x23, "0000", PUBLISH, 0x94),
        (0x26, "0001 00 0000", PUBLISH, 0x81),
        (0x26, "0000 0002 c328", PUBLISH, 0x81),
        (0x27, "00000000", CONNECT, 0x82),
        (0x03, "0003 eda080", PUBLISH, 0x81),
        (0x0B, "8000", SUBSCRIBE, 0x81),
        (0x0B, "ffffffff01", SUBSCRIBE, 0x81),
    ],
)
def test_forbidden_values(identifier: int, value: str, packet_type: int, code: int) -> None:
    body = bytes([identifier]) + bytes.fromhex(value)
    assert refused(bytes([len(body)]) + body, packet_type) == code


@pytest.mark.parametrize("name", ["session_expiry_interval", "topic_alias_maximum", "server_keep_alive"])
def test_zero_is_encoded(name: str) -> None:
    properties = Properties()
    setattr(properties, name, 0)
    data = encode_properties(properties, CONNACK)
    decoded, _ = decode_properties(data, 0, len(data), CONNACK)
    assert getattr(decoded, name) == 0


@given(properties_of(PUBLISH))
def test_truncation_is_malformed(properties: Properties) -> None:
    encoded = encode_properties(properties, PUBLISH)
    for end in range(len(encoded)):
        with pytest.raises(MQTTError) as caught:
            decode_properties(encoded, 0, end, PUBLISH)
        assert caught.value.reason_code == 0x81


@given(st.binary(max_size=40), st.sampled_from(range(16)))
def test_any_bytes_are_decoded_or_refused(data: bytes, packet_type: int) -> None:
    try:
        properties, position = decode_properties(data, 0, len(data), packet_type)
    except MQTTError as error:
        assert error.reason_code in (0x81, 0x82, 0x94)
    else:
        assert position <= len(data)
        encoded = encode_properties(properties, packet_type)
        assert values(decode_properties(encoded, 0, len(encoded), packet_type)[0]) == values(properties)


@given(st.binary(max_size=40))
def test_both_decoders_of_publish_agree(data: bytes) -> None:
    try:
        full, position = decode_properties(data, 0, len(data), PUBLISH)
    except MQTTError as error:
        with pytest.raises(MQTTError) as caught:
            decode_publish_properties(data, 0, len(data))
        assert caught.value.reason_code in (error.reason_code, 0x82)
        return
    if full.subscription_identifiers:
        with pytest.raises(MQTTError) as caught:
            decode_publish_properties(data, 0, len(data))
        assert caught.value.reason_code == 0x82  # [MQTT-3.3.4-6]
    else:
        assert decode_publish_properties(data, 0, len(data)).end == position


@given(properties_of(PUBLISH), st.binary(max_size=5))
def test_forwarded_properties(properties: Properties, after: bytes) -> None:
    """[MQTT-3.3.2-4] [MQTT-3.3.2-15] [MQTT-3.3.2-16] [MQTT-3.3.2-17] [MQTT-3.3.2-18] [MQTT-3.3.2-20]"""
    properties.subscription_identifiers = []
    encoded = encode_properties(properties, PUBLISH)
    got = decode_publish_properties(b"!" + encoded + after, 1, 1 + len(encoded))
    assert got.end == 1 + len(encoded)
    assert got.topic_alias == max(properties.topic_alias, 0)
    assert got.message_expiry == properties.message_expiry_interval
    assert got.payload_format == max(properties.payload_format_indicator, 0)
    properties.topic_alias = properties.message_expiry_interval = -1
    assert encode_varint(len(got.forward)) + got.forward == encode_properties(properties, PUBLISH)


def test_forwarded_properties_keep_the_publishers_order() -> None:
    body = bytes.fromhex("26 0001 62 0000 02 00000009 09 0001 ff 23 0007 26 0001 61 0000 01 01")
    got = decode_publish_properties(bytes([len(body)]) + body, 0, len(body) + 1)
    assert got.forward == bytes.fromhex("26 0001 62 0000 09 0001 ff 26 0001 61 0000 01 01")
    assert (got.topic_alias, got.message_expiry, got.payload_format) == (7, 9, 1)


def test_no_properties() -> None:
    """[MQTT-2.2.2-1]"""
    assert encode_properties(Properties(), PUBLISH) == b"\0"
    got = decode_publish_properties(b"\0rest", 0, 5)
    assert (got.forward, got.topic_alias, got.message_expiry, got.payload_format, got.end) == (b"", 0, -1, 0, 1)
