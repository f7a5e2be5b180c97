"""How ``mqttbroker sub`` prints a message: the formats of mosquitto_sub."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from paho.mqtt.client import MQTTMessage

_TOKEN = re.compile(r"(%|@|\\)(.)", re.DOTALL)
_ESCAPES = {"\\": "\\", "0": "\0", "a": "\a", "e": "\033", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_PROPERTIES = {
    "A": "TopicAlias",
    "C": "ContentType",
    "D": "CorrelationData",
    "E": "MessageExpiryInterval",
    "F": "PayloadFormatIndicator",
    "R": "ResponseTopic",
    "S": "SubscriptionIdentifier",
}

# Properties of a PUBLISH in JSON, as mosquitto_sub names them, and the attribute of Paho.
_JSON_PROPERTIES = {
    "payload-format-indicator": "PayloadFormatIndicator", "message-expiry-interval": "MessageExpiryInterval",
    "content-type": "ContentType", "response-topic": "ResponseTopic", "correlation-data": "CorrelationData",
    "subscription-identifier": "SubscriptionIdentifier", "topic-alias": "TopicAlias", "user-properties": "UserProperty",
}  # fmt: skip


def check_format(text: str) -> None:
    """Raise ValueError for a format with an unknown ``%`` or with an incomplete sequence."""
    for sign, letter in _TOKEN.findall(text):
        if sign == "%" and letter not in "%AcCDEFIjJlmPpqRrStUuxX":
            raise ValueError(f"%{letter} is unknown")
    if re.search(r"(?:^|[^%@\\])(?:(?:%%|@@|\\\\)*)[%@]$", text):
        raise ValueError("ends with an incomplete sequence")


def formatted(text: str, message: MQTTMessage, now: datetime) -> bytes:
    """A message in a format that `check_format` has accepted; payloads are bytes as they are."""
    found, last = b"", 0
    for match in _TOKEN.finditer(text):
        found += text[last : match.start()].encode() + _value(match[1], match[2], message, now)
        last = match.end()
    return found + text[last:].encode()


def _value(sign: str, letter: str, message: MQTTMessage, now: datetime) -> bytes:
    if sign == "\\":
        return _ESCAPES.get(letter, f"\\{letter}").encode()
    if sign == "@":
        return (
            b"@"
            if letter == "@"
            else str(now.microsecond * 1000).zfill(9).encode()
            if letter == "N"
            else now.strftime(f"%{letter}").encode()
        )
    payload = bytes(message.payload)
    values: dict[str, Any] = {
        "%": "%", "t": message.topic, "q": message.qos, "r": int(message.retain), "m": message.mid, "l": len(payload),
        "x": payload.hex(), "X": payload.hex().upper(), "I": now.isoformat(timespec="seconds"),
        "U": f"{now.timestamp():.6f}", "u": int(now.timestamp()), "c": "",
    }  # fmt: skip
    if letter == "p":
        return payload
    if letter in ("j", "J"):
        return _as_json(message, now, letter == "J").encode()
    if letter == "P":
        return " ".join(f"{name}:{value}" for name, value in getattr(message.properties, "UserProperty", [])).encode()
    if letter in _PROPERTIES:
        value = getattr(message.properties, _PROPERTIES[letter], "")
        if letter == "S" and isinstance(value, list):
            value = value[0] if value else ""
        return value if isinstance(value, bytes) else str(value).encode()
    return str(values[letter]).encode()


def _as_json(message: MQTTMessage, now: datetime, payload_is_json: bool) -> str:
    payload: Any = message.payload.decode(errors="replace") or None
    if payload_is_json:
        try:
            payload = json.loads(message.payload)
        except ValueError:
            payload = None
    shown = {
        "tst": now.astimezone().isoformat(timespec="microseconds"),
        "topic": message.topic,
        "qos": message.qos,
        "retain": int(message.retain),
        "payloadlen": len(message.payload),
    }
    if message.qos:
        shown["mid"] = message.mid
    return _json(_Members([*shown.items(), *_json_properties(message.properties), ("payload", payload)]))


def _json_properties(properties: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, attribute in _JSON_PROPERTIES.items():
        value = getattr(properties, attribute, None)
        if attribute == "UserProperty":
            found += [(name, _Members(value))] if value else []
        elif value is not None:
            found += [(name, each) for each in (value if isinstance(value, list) else [value])]
    return [("properties", _Members(found))] if found else []


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object. As in mosquitto_sub, those of one name are all there; most readers take the last."""


def _json(value: Any) -> str:
    if isinstance(value, _Members):
        return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {_json(each)}" for name, each in value) + "}"
    return json.dumps(value.decode(errors="replace") if isinstance(value, bytes) else value, ensure_ascii=False)
