"""Decoding and encoding of properties, and of the data types that they are made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.property_strategies import TEXT, properties_of

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
    decode_binary,
    decode_properties,
    decode_publish_properties,
    decode_utf8,
    decode_varint,
    encode_binary,
    encode_properties,
    encode_utf8,
    encode_varint,
)
from mqttbroker.codec.reason_codes import AUTH, CONNACK, CONNECT, PUBLISH, SUBSCRIBE, MQTTError

PACKETS = sorted({packet_type for row in PROPERTIES for packet_type in row.packets})
SHORTEST = {BYTE: b"\1", TWO_BYTES: b"\0\1", FOUR_BYTES: b"\0\0\0\1", VARINT: b"\1", STRING_PAIR: b"\0\0\0\0"}  # other types: b"\0\1x"
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
    assert got.next == len(data) and got.forward == (b"" if row.attribute in rest else one)
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
        assert decode_publish_properties(data, 0, len(data)).next == position


@given(properties_of(PUBLISH), st.binary(max_size=5))
def test_forwarded_properties(properties: Properties, after: bytes) -> None:
    """[MQTT-3.3.2-4] [MQTT-3.3.2-15] [MQTT-3.3.2-16] [MQTT-3.3.2-17] [MQTT-3.3.2-18] [MQTT-3.3.2-20]"""
    properties.subscription_identifiers = []
    encoded = encode_properties(properties, PUBLISH)
    got = decode_publish_properties(b"!" + encoded + after, 1, 1 + len(encoded))
    assert got.next == 1 + len(encoded)
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
    assert (got.forward, got.topic_alias, got.message_expiry, got.payload_format, got.next) == (b"", 0, -1, 0, 1)


@given(st.integers(0, 268_435_455), st.binary(max_size=3))
def test_varint(value: int, after: bytes) -> None:
    encoded = encode_varint(value)
    assert decode_varint(encoded + after, 0, len(encoded + after)) == (value, len(encoded))
    for end in range(len(encoded)):
        with pytest.raises(MQTTError):
            decode_varint(encoded, 0, end)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (16_383, "ff7f"), (16_384, "808001"), (2_097_151, "ffff7f")]
    + [(2_097_152, "80808001"), (268_435_455, "ffffff7f")],
)
def test_varint_borders(value: int, encoded: str) -> None:
    """[MQTT-1.5.5-1]"""
    assert encode_varint(value).hex() == encoded


@pytest.mark.parametrize("value", [-1, 268_435_456])
def test_varint_out_of_range(value: int) -> None:
    with pytest.raises(ValueError):
        encode_varint(value)


@pytest.mark.parametrize("overlong", ["8000", "808000", "ff00", "80808000", "8080808001", "ffffffff7f"])
def test_varint_overlong(overlong: str) -> None:
    """[MQTT-1.5.5-1]"""
    data = bytes.fromhex(overlong)
    with pytest.raises(MQTTError) as caught:
        decode_varint(data, 0, len(data))
    assert caught.value.reason_code == 0x81


@given(TEXT, st.binary(max_size=30))
def test_strings_and_binaries(text: str, binary: bytes) -> None:
    data = encode_utf8(text) + encode_binary(binary)
    got, position = decode_utf8(data, 0, len(data))
    assert got == text
    assert decode_binary(data, position, len(data)) == (binary, len(data))


def test_strings_and_binary_data_of_65_535_bytes_at_most() -> None:
    assert len(encode_utf8("a" * 65_535)) == 65_537
    with pytest.raises(ValueError):
        encode_utf8("ü" * 32_768)
    with pytest.raises(ValueError):
        encode_binary(b"a" * 65_536)


@pytest.mark.parametrize("raw", ["ff", "c080", "eda080", "edbfbf", "f4908080", "6100", "e282"])
def test_invalid_utf8(raw: str) -> None:
    """[MQTT-1.5.4-1] [MQTT-1.5.4-2]"""
    data = encode_binary(bytes.fromhex(raw))
    with pytest.raises(MQTTError) as caught:
        decode_utf8(data, 0, len(data))
    assert caught.value.reason_code == 0x81


@pytest.mark.parametrize(
    "text", ["\x01", "a\nb", "\x1f", "\x7f", "\x80", "\x9f", "\ufdd0", "\ufdef", "\ufffe", "\uffff", "\U0001fffe", "\U0010ffff"]
)
def test_control_characters_and_noncharacters_are_refused(text: str) -> None:
    """Section 1.5.4 lets a server refuse them."""
    data = encode_utf8(text)
    with pytest.raises(MQTTError) as caught:
        decode_utf8(data, 0, len(data))
    assert caught.value.reason_code == 0x81


@pytest.mark.parametrize("text", [" ", "\xa0", "\xad", "\u200d", "\u2028", "\ue000", "\ufdcf", "\ufffd", "\U0001fffd", "\U0010fffd"])
def test_other_unprintable_characters_are_accepted(text: str) -> None:
    data = encode_utf8(text)
    assert decode_utf8(data, 0, len(data)) == (text, len(data))


def test_byte_order_mark_is_kept() -> None:
    """[MQTT-1.5.4-3]"""
    assert decode_utf8(b"\0\4\xef\xbb\xbfa", 0, 6) == ("\ufeffa", 6)
