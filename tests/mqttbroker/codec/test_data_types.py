"""Decoding and encoding of the data types of section 1.5."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.property_strategies import TEXT

from mqttbroker.codec.data_types import (
    decode_binary,
    decode_utf8,
    decode_varint,
    encode_binary,
    encode_utf8,
    encode_varint,
)
from mqttbroker.codec.reason_codes import MQTTError


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
    "text",
    [
        "\x01",
        "a\nb",
        "\x1f",
        "\x7f",
        "\x80",
        "\x9f",
        "\ufdd0",
        "\ufdef",
        "\ufffe",
        "\uffff",
        "\U0001fffe",
        "\U0010ffff",
    ],
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
