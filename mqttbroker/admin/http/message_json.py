"""Messages as JSON: payloads in base64, and all properties of an MQTT 5.0 PUBLISH."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from mqttbroker.admin.control.views import RetainedMessage, TopicLevel
from mqttbroker.admin.http.parameters import MAX_TEXT, Base64, Field, Pairs, Topic, Word
from mqttbroker.admin.http.schemas import BOOLEAN, INTEGER, TEXT, array, described, nullable, record
from mqttbroker.codec.data_types import encode_varint
from mqttbroker.codec.properties import Properties, decode_properties, encode_properties
from mqttbroker.codec.reason_codes import PUBLISH
from mqttbroker.config.setting_kinds import Integer

MESSAGE = record(
    topic=TEXT,
    payload_base64=described(TEXT, "the payload (RFC 4648, section 4)"),
    qos=INTEGER,
    client_id=described(nullable(TEXT), "the publisher; null = the broker"),
    timestamp_us=described(INTEGER, "when the broker received it, in microseconds since 1970"),
    expires_at_us=described(nullable(INTEGER), "when it expires; null = never"),
    payload_format_indicator=nullable(INTEGER),
    content_type=nullable(TEXT),
    response_topic=nullable(TEXT),
    correlation_data_base64=nullable(TEXT),
    user_properties=described(array(array(TEXT)), "[name, value], in their order"),
)


PREVIEW = 256  # bytes of a payload in a list of levels
LEVEL = record(
    level=TEXT,
    topic=described(TEXT, "the levels up to this one"),
    below=described(BOOLEAN, "retained topics continue after it"),
    payload_base64=described(nullable(TEXT), f"the first {PREVIEW} bytes; null = this topic has no retained message"),
    payload_bytes=nullable(INTEGER),
    timestamp_us=described(nullable(INTEGER), "when the broker received it, in microseconds since 1970"),
)


def level_json(level: TopicLevel) -> dict[str, Any]:
    """A level as `LEVEL` describes it."""
    message = level.message
    return {
        "level": level.level,
        "topic": level.topic,
        "below": level.below,
        "payload_base64": None if message is None else base64.b64encode(message.payload[:PREVIEW]).decode(),
        "payload_bytes": None if message is None else len(message.payload),
        "timestamp_us": None if message is None else round(message.received_at * 1_000_000),
    }


def message_json(message: RetainedMessage) -> dict[str, Any]:
    """A message as `MESSAGE` describes it."""
    encoded = encode_varint(len(message.properties)) + message.properties
    properties, _ = decode_properties(encoded, 0, len(encoded), PUBLISH)
    correlation, indicator = properties.correlation_data, properties.payload_format_indicator
    return {
        "topic": message.topic,
        "payload_base64": base64.b64encode(message.payload).decode(),
        "qos": message.qos,
        "client_id": message.client_id or None,
        "timestamp_us": round(message.received_at * 1_000_000),
        "expires_at_us": round(message.expires_at * 1_000_000) or None,
        "payload_format_indicator": None if indicator < 0 else indicator,
        "content_type": properties.content_type,
        "response_topic": properties.response_topic,
        "correlation_data_base64": None if correlation is None else base64.b64encode(correlation).decode(),
        "user_properties": [list(pair) for pair in properties.user_properties],
    }


def message_fields(*more: Field, low: int = 0) -> list[Field]:
    """The keys of a message to publish, with a payload that is not empty if ``low`` is 1."""
    return [
        *more,
        Field("payload", Word(low, 1 << 24), "the payload as text, sent in UTF-8", None),
        Field("payload_base64", Base64(low), "the payload, instead of payload (RFC 4648, section 4)", None),
        Field("qos", Integer(0, 2), "the quality of service", 1),
        Field("payload_format_indicator", Integer(0, 1), "1 = the payload is UTF-8 text", None),
        Field("message_expiry_interval", Integer(1, 0xFFFFFFFF), "seconds after which the message expires", None),
        Field("content_type", Word(high=MAX_TEXT), "MQTT 5.0, section 3.3.2.3.9", None),
        Field("response_topic", Topic(MAX_TEXT), "MQTT 5.0, section 3.3.2.3.5", None),
        Field("correlation_data_base64", Base64(), "MQTT 5.0, section 3.3.2.3.6", None),
        Field("user_properties", Pairs(), "[name, value], in their order", None),
    ]


def payload_of(values: Mapping[str, Any]) -> bytes:
    """The payload in values of `message_fields`; ValueError if there are two."""
    text, data = values["payload"], values["payload_base64"]
    if text is not None and data is not None:
        raise ValueError("payload is set, too")
    return data if data is not None else (text or "").encode()


def properties_of(values: Mapping[str, Any]) -> bytes:
    """The properties in values of `message_fields`, encoded, without their length and the expiry interval."""
    properties = Properties()
    if values["payload_format_indicator"] is not None:
        properties.payload_format_indicator = values["payload_format_indicator"]
    properties.content_type = values["content_type"]
    properties.response_topic = values["response_topic"]
    properties.correlation_data = values["correlation_data_base64"]
    properties.user_properties = values["user_properties"] or []
    encoded = encode_properties(properties, PUBLISH)
    length = len(encoded)
    prefix = next(size for size in range(1, 5) if len(encode_varint(length - size)) == size)
    return encoded[prefix:]
