"""Properties as paho and aiomqtt take them."""

from __future__ import annotations

from typing import Any

from client import Message
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties


def publish_properties(message: Message) -> Properties:
    """The properties of ``message`` as paho and aiomqtt accept them."""
    properties = Properties(PacketTypes.PUBLISH)
    if message.user:
        properties.UserProperty = list(message.user)
    if message.response_topic:
        properties.ResponseTopic = message.response_topic
    if message.correlation:
        properties.CorrelationData = message.correlation
    if message.content_type:
        properties.ContentType = message.content_type
    if message.expiry:
        properties.MessageExpiryInterval = message.expiry
    return properties


def subscribe_properties(identifier: int) -> Properties | None:
    if not identifier:
        return None
    properties = Properties(PacketTypes.SUBSCRIBE)
    properties.SubscriptionIdentifier = identifier
    return properties


def connect_properties(kept: bool) -> Properties:
    properties = Properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = 60 if kept else 0
    return properties


def message_of(topic: str, payload: bytes, qos: int, retain: bool, properties: Properties | None) -> Message:
    def field(name: str, empty: Any) -> Any:
        return getattr(properties, name, empty)

    return Message(
        topic,
        payload,
        qos,
        retain,
        tuple(field("UserProperty", ())),
        field("ResponseTopic", ""),
        field("CorrelationData", b""),
        field("ContentType", ""),
        field("MessageExpiryInterval", 0),
        tuple(field("SubscriptionIdentifier", ())),
    )
