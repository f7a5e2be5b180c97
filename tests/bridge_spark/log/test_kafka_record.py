"""Messages as records of Kafka: what a record says is what the message had."""

from __future__ import annotations

import pytest

from bridge_spark.log.columns import decode_properties
from bridge_spark.log.kafka_record import RecordError, fields_of, headers_of
from sessions.message import Message


def sized(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


ALL = (
    b"\x01\x01"
    + b"\x03" + sized("text/plain")
    + b"\x08" + sized("reply/é")
    + b"\x09\x00\x02\x00\xff"
    + b"\x26" + sized("site") + sized("1")
    + b"\x26" + sized("mqtt.topic") + sized("forged")
    + b"\x26" + sized("mqtt.user.x") + sized("y")
    + b"\x26" + sized("site") + sized("2")
)  # fmt: skip


def test_all_properties_survive() -> None:
    message = Message("a/é", b"payload", 2, True, ALL, "client é", 1_700_000_000_123_456, 1_700_000_001_000_000)
    headers = headers_of(message)
    assert fields_of(headers) == ("a/é", 2, True, "client é", 1_700_000_000_123_456, ALL)
    assert [name for name, _ in headers if not name.startswith("mqtt.")] == ["site", "site"]
    assert dict(headers)["mqtt.expires"] == b"1700000001000000"
    assert dict(headers)["mqtt.content_type"] == b"text/plain"
    decoded = decode_properties(fields_of(headers).properties)
    assert decoded.user_properties == [("site", "1"), ("mqtt.topic", "forged"), ("mqtt.user.x", "y"), ("site", "2")]


def test_a_message_without_properties_has_five_headers() -> None:
    headers = headers_of(Message("a", b"", 0, False, b"", "", 5, 0))
    assert len(headers) == 5
    assert fields_of(headers) == ("a", 0, False, "", 5, b"")


@pytest.mark.parametrize("data", [b"\x26\x00\x09a", b"\x26", b"\x7f", b"\x26\x00\x01\xff\x00\x00"])
def test_malformed_properties_are_an_error(data: bytes) -> None:
    with pytest.raises(RecordError):
        headers_of(Message("a", b"", 0, False, data, "", 5, 0))


@pytest.mark.parametrize("headers", [[], [("mqtt.topic", b"a")], [("mqtt.topic", None), ("mqtt.qos", b"x")]])
def test_a_record_of_another_producer_is_an_error(headers: list[tuple[str, bytes]]) -> None:
    with pytest.raises(RecordError):
        fields_of(headers)
