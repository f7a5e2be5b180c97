"""A client of the Paho library with the options of ``mqttbroker pub`` and ``sub``."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

from paho.mqtt import MQTTException
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from mqttbroker.cli.mqtt_options import VERSIONS, BrokerAddress, OptionError, password, tls_context

PACKETS = {
    "connect": PacketTypes.CONNECT, "publish": PacketTypes.PUBLISH, "subscribe": PacketTypes.SUBSCRIBE,
    "unsubscribe": PacketTypes.UNSUBSCRIBE, "disconnect": PacketTypes.DISCONNECT, "will": PacketTypes.WILLMESSAGE,
}  # fmt: skip
MQTT5 = VERSIONS["5"]
NEVER = 0xFFFFFFFF
MAX_RECONNECT_DELAY = 5  # seconds between two attempts to connect again
_BYTES = ("CorrelationData", "AuthenticationData")


def make_client(options: argparse.Namespace, where: BrokerAddress, reconnects: bool) -> Client:
    """A client of these options, not connected. Raises OptionError."""
    version = VERSIONS[options.protocol_version]
    client_id = options.id if options.id_prefix is None else f"{options.id_prefix}{os.getpid()}"
    if options.disable_clean_session and client_id is None:
        raise OptionError("-c needs -i or -I")
    client = Client(
        CallbackAPIVersion.VERSION2, client_id or "", None if version == MQTT5 else not options.disable_clean_session,
        protocol=MQTTProtocolVersion(version), transport=where.transport, reconnect_on_failure=reconnects,
    )  # fmt: skip
    if where.transport == "websockets":
        client.ws_set_options(where.path)
    secret = password(options)
    if options.username is not None or secret is not None:
        client.username_pw_set(options.username, secret)
    try:
        if options.will_topic is not None:
            will = properties(options, "will")
            client.will_set(options.will_topic, options.will_payload, options.will_qos, options.will_retain, will)
        if where.tls:
            client.tls_set_context(tls_context(options))
            client.tls_insecure_set(options.insecure)
    except ValueError as error:
        raise OptionError(str(error)) from None
    client.max_inflight_messages_set(100)
    client.reconnect_delay_set(1, MAX_RECONNECT_DELAY)
    return client


def connect(client: Client, options: argparse.Namespace, where: BrokerAddress) -> None:
    """Connect; the CONNACK comes later. Raises OSError and OptionError."""
    if VERSIONS[options.protocol_version] != MQTT5:
        client.connect(where.host, where.port, options.keepalive)
        return
    expiry = options.session_expiry_interval
    if expiry is None and options.disable_clean_session:
        expiry = NEVER
    given = properties(options, "connect") or Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    if expiry is not None:
        given.SessionExpiryInterval = expiry
    client.connect(where.host, where.port, options.keepalive, clean_start=not options.disable_clean_session, properties=given)


def properties(options: argparse.Namespace, packet: str) -> Properties | None:
    """The properties that ``-D`` gives to a packet; None if there are none. Raises OptionError."""
    given: Sequence[list[str]] = [words for words in options.property if words[0].lower() == packet]
    for words in options.property:
        if words[0].lower() not in PACKETS:
            raise OptionError(f"-D: {words[0]} must be one of {', '.join(PACKETS)}")
    if not given:
        return None
    if VERSIONS[options.protocol_version] != MQTT5:
        raise OptionError("-D needs -V mqttv5")
    found = Properties(PACKETS[packet])  # type: ignore[no-untyped-call]
    for _, *rest in given:
        text = " ".join(rest)
        name = re.sub(r"(?:^|-)(\w)", lambda match: match[1].upper(), rest[0].lower() if rest else "")
        if len(rest) != (3 if name == "UserProperty" else 2):
            raise OptionError(f"-D {packet} {text}: must be a name and a value, user-property a name and two")
        value: Any = (rest[1], rest[2]) if name == "UserProperty" else rest[1]
        if name in _BYTES:
            value = rest[1].encode()
        elif name != "UserProperty" and rest[1].isdecimal() and name not in ("ContentType", "ResponseTopic"):
            value = int(rest[1])
        try:
            setattr(found, name, value)
        except (MQTTException, AttributeError, TypeError, ValueError) as error:
            raise OptionError(f"-D {packet} {text}: {error}") from None
    return found
