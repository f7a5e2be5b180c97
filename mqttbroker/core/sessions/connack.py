"""CONNACK packets: what the broker grants a client, or why it refuses it."""

from __future__ import annotations

from typing import Final

from mqttbroker.codec.packets import Connack
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import SUCCESS, to_v3_connack
from mqttbroker.core.client.connection import Connection
from mqttbroker.core.sessions.pending_connect import PendingConnect
from mqttbroker.core.terms.terms import BrokerTerms
from sessions.session import Session

# The name of the user property, of any value, by which a CONNECT asks for the broker's durability setting.
DURABILITY: Final = "mqttbroker-durability"


def acceptance(pending: PendingConnect, session: Session, broker_terms: BrokerTerms) -> bytes:
    """The CONNACK of an accepted CONNECT."""
    connection = pending.connection
    packet = pending.packet
    properties = Properties()
    terms = connection.terms
    if packet.version >= 5:
        if max(0, packet.properties.session_expiry_interval) != session.expiry_interval:
            properties.session_expiry_interval = session.expiry_interval
        if terms.receive_maximum < 65535:  # the value without the property
            properties.receive_maximum = terms.receive_maximum
        properties.maximum_packet_size = terms.max_packet_size
        if not broker_terms.retain_available:
            properties.retain_available = 0
        if terms.topic_alias_maximum:
            properties.topic_alias_maximum = terms.topic_alias_maximum
        if packet.client_id == "":
            properties.assigned_client_identifier = session.client_id  # [MQTT-3.1.3-7]
        if pending.keep_alive != packet.keep_alive:
            properties.server_keep_alive = pending.keep_alive  # [MQTT-3.1.2-21]
        if packet.properties.request_response_information == 1:  # [MQTT-3.1.2-28]
            properties.response_information = broker_terms.response_topic_root(session.client_id, session.username)
        properties.authentication_method = connection.method  # [MQTT-4.12.0-5]
        properties.authentication_data = pending.authentication_data
        if any(key == DURABILITY for key, _ in packet.properties.user_properties):
            properties.user_properties.append((DURABILITY, broker_terms.durability))
    present = pending.session_present and packet.version > 3  # in MQTT 3.1 that byte is reserved
    connack = Connack(present, SUCCESS, properties)
    encoded = connack.encode(packet.version)
    if properties.user_properties and len(encoded) > connection.maximum_packet_size:
        properties.user_properties.clear()  # [MQTT-3.2.2-20]
        encoded = connack.encode(packet.version)
    return encoded


def refusal(connection: Connection, reason_code: int, detail: str, server_reference: str | None) -> bytes:
    """The CONNACK of a refused CONNECT; empty if the client is sent none."""
    if connection.version < 5:
        code = to_v3_connack(reason_code)
        return Connack(False, code).encode(4) if code > 0 else b""
    properties = Properties()
    properties.server_reference = server_reference
    if connection.problem_information and server_reference is None:
        properties.reason_string = detail
    connack = Connack(False, reason_code, properties).encode(5)
    if len(connack) > connection.maximum_packet_size:  # [MQTT-3.2.2-19]
        connack = Connack(False, reason_code).encode(5)
    return connack if len(connack) <= connection.maximum_packet_size else b""
