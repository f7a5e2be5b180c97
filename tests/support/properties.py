"""Properties of MQTT 5.0 packets."""

from __future__ import annotations

from typing import Any

from mqttbroker.codec.properties import Properties

NEVER = 0xFFFFFFFF


def properties_of(**fields: Any) -> Properties:
    properties = Properties()
    for name, value in fields.items():
        setattr(properties, name, value)
    return properties


def session_expiry(seconds: int = NEVER) -> Properties:
    return properties_of(session_expiry_interval=seconds)


def message_expiry(seconds: int) -> Properties:
    return properties_of(message_expiry_interval=seconds)
