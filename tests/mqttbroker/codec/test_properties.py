"""Properties and the wire forms below them, decoded and encoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.property_strategies import TEXT, attribute, properties_of

from mqttbroker.codec.properties import (
    BYTE,
    FOUR_BYTES,
    STRING_PAIR,
    SUBSCRIPTION_IDENTIFIER,
    TABLE,
    TOPIC_ALIAS,
    TWO_BYTES,
    USER_PROPERTY,
    VARINT,
    WILL,
    Properties,
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
from mqttbroker.codec.reason_codes import AUTH, CONNECT, PUBLISH, SUBSCRIBE, MQTTError

PACKETS = sorted({packet_type for row in TABLE.values() for packet_type in row[2]})


def values(properties: Properties) -> dict[str, object]:
    names = {attribute(identifier) for identifier in TABLE} - {"user_property", "subscription_identifier"}
    return {name: getattr(properties, name) for name in names | {"user_properties", "subscription_identifiers"}}


def refused(data: bytes, packet_type: int) -> int:
    with pytest.raises(MQTTError) as caught:
        decode_properties(data, 0, len(data), packet_type)
    return caught.value.reason_code


@given(st.sampled_from(PACKETS).flatmap(lambda kind: st.tuples(st.just(kind), properties_of(kind))), st.binary())
def test_decode_undoes_encode(case: tuple[int, Properties], after: bytes) -> None:
    packet_type, properties = case
    encoded = encode_properties(properties)
    decoded, position = decode_properties(b"?" + encoded + after, 1, 1 + len(encoded), packet_type)
    assert position == 1 + len(encoded)
    assert values(decoded) == values(properties)
    assert encode_properties(decoded) == encoded


@pytest.mark.parametrize("identifier", TABLE)
@pytest.mark.parametrize("packet_type", range(16))
def test_each_property_is_legal_where_the_table_says(identifier: int, packet_type: int) -> None:
    _, kind, packets = TABLE[identifier]
    body = {BYTE: b"\1", TWO_BYTES: b"\0\1", FOUR_BYTES: b"\0\0\0\1", VARINT: b"\1"}.get(kind, b"\0\1x")
    one = bytes([identifier]) + (b"\0\0\0\0" if kind == STRING_PAIR else body)
    if identifier == 0x16 and packet_type in packets:
        one = b"\x15\0\1M" + one
    data = bytes([len(one)]) + one
    if packet_type not in packets:
        assert refused(data, packet_type) == 0x81
        return
    decode_properties(data, 0, len(data), packet_type)
    twice = bytes([2 * len(one)]) + one + one
    if identifier == USER_PROPERTY or (identifier == SUBSCRIPTION_IDENTIFIER and packet_type == PUBLISH):
        decode_properties(twice, 0, len(twice), packet_type)
    else:
        assert refused(twice, packet_type) == 0x82


def test_ids_outside_the_table_are_malformed() -> None:
    for identifier in set(range(256)) - set(TABLE):
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
def test_values_that_are_not_allowed(identifier: int, value: str, packet_type: int, code: int) -> None:
    body = bytes([identifier]) + bytes.fromhex(value)
    assert refused(bytes([len(body)]) + body, packet_type) == code


@pytest.mark.parametrize("name", ["session_expiry_interval", "topic_alias_maximum", "server_keep_alive"])
def test_zero_is_a_value(name: str) -> None:
    properties = Properties()
    setattr(properties, name, 0)
    data = encode_properties(properties)
    decoded, _ = decode_properties(data, 0, len(data), 2)
    assert getattr(decoded, name) == 0


@given(properties_of(PUBLISH))
def test_truncation_is_malformed(properties: Properties) -> None:
    encoded = encode_properties(properties)
    for end in range(len(encoded)):
        with pytest.raises(MQTTError) as caught:
            decode_properties(encoded, 0, end, PUBLISH)
        assert caught.value.reason_code == 0x81


@given(st.binary(max_size=40), st.sampled_from(range(16)))
def test_any_bytes_decode_or_are_refused(data: bytes, packet_type: int) -> None:
    try:
        properties, position = decode_properties(data, 0, len(data), packet_type)
    except MQTTError as error:
        assert error.reason_code in (0x81, 0x82, 0x94)
    else:
        assert position <= len(data)
        encoded = encode_properties(properties)
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
    encoded = encode_properties(properties)
    got = decode_publish_properties(b"!" + encoded + after, 1, 1 + len(encoded))
    assert got.next == 1 + len(encoded)
    assert got.topic_alias == max(properties.topic_alias, 0)
    assert got.message_expiry == properties.message_expiry_interval
    assert got.payload_format == max(properties.payload_format_indicator, 0)
    properties.topic_alias = properties.message_expiry_interval = -1
    assert encode_varint(len(got.forward)) + got.forward == encode_properties(properties)


def test_forwarding_keeps_the_publishers_order() -> None:
    body = bytes.fromhex("26 0001 62 0000 02 00000009 09 0001 ff 23 0007 26 0001 61 0000 01 01")
    got = decode_publish_properties(bytes([len(body)]) + body, 0, len(body) + 1)
    assert got.forward == bytes.fromhex("26 0001 62 0000 09 0001 ff 26 0001 61 0000 01 01")
    assert (got.topic_alias, got.message_expiry, got.payload_format) == (7, 9, 1)


def test_no_properties() -> None:
    """[MQTT-2.2.2-1]"""
    assert encode_properties(Properties()) == b"\0"
    got = decode_publish_properties(b"\0rest", 0, 5)
    assert (got.forward, got.topic_alias, got.message_expiry, got.payload_format, got.next) == (b"", 0, -1, 0, 1)


@pytest.mark.parametrize("identifier", [0x01, TOPIC_ALIAS, 0x02, 0x03, 0x08, 0x09])
def test_publish_properties_once_only(identifier: int) -> None:
    kind = TABLE[identifier][1]
    one = bytes([identifier]) + {BYTE: b"\1", TWO_BYTES: b"\0\1", FOUR_BYTES: b"\0\0\0\1"}.get(kind, b"\0\0")
    with pytest.raises(MQTTError) as caught:
        decode_publish_properties(bytes([2 * len(one)]) + one + one, 0, 2 * len(one) + 1)
    assert caught.value.reason_code == 0x82


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


def test_length_limit_of_fields() -> None:
    assert len(encode_utf8("a" * 65_535)) == 65_537
    with pytest.raises(ValueError):
        encode_utf8("ü" * 32_768)
    with pytest.raises(ValueError):
        encode_binary(b"a" * 65_536)


@pytest.mark.parametrize("raw", ["ff", "c080", "eda080", "edbfbf", "f4908080", "6100", "e282"])
def test_bad_strings(raw: str) -> None:
    """[MQTT-1.5.4-1] [MQTT-1.5.4-2]"""
    data = encode_binary(bytes.fromhex(raw))
    with pytest.raises(MQTTError) as caught:
        decode_utf8(data, 0, len(data))
    assert caught.value.reason_code == 0x81


@pytest.mark.parametrize(
    "text", ["\x01", "a\nb", "\x1f", "\x7f", "\x80", "\x9f", "\ufdd0", "\ufdef", "\ufffe", "\uffff", "\U0001fffe", "\U0010ffff"]
)
def test_control_characters_and_code_points_that_are_none(text: str) -> None:
    """What section 1.5.4 advises against and lets a server refuse."""
    data = encode_utf8(text)
    with pytest.raises(MQTTError) as caught:
        decode_utf8(data, 0, len(data))
    assert caught.value.reason_code == 0x81


@pytest.mark.parametrize("text", [" ", "\xa0", "\xad", "\u200d", "\u2028", "\ue000", "\ufdcf", "\ufffd", "\U0001fffd", "\U0010fffd"])
def test_other_characters_that_do_not_print_are_taken(text: str) -> None:
    data = encode_utf8(text)
    assert decode_utf8(data, 0, len(data)) == (text, len(data))


def test_byte_order_mark_stays() -> None:
    """[MQTT-1.5.4-3]"""
    assert decode_utf8(b"\0\4\xef\xbb\xbfa", 0, 6) == ("\ufeffa", 6)
