"""The remote broker of a relay, as far as its CONNACK describes it."""

from __future__ import annotations

from typing import Final

from mqttbroker.bridges.relay_terms import RelayError, RelayTerms
from mqttbroker.codec.packets import Connack
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import PROTOCOL_ERROR, UNSUPPORTED_PROTOCOL_VERSION, MQTTError, name
from mqttbroker.core.client.topic_aliases import TopicAliases

MAX_ALIASES: Final = 1000
LONGEST_ALIASED: Final = 1000  # bytes of a topic

# Return codes of version 3.1.1.
_REFUSED_VERSION: Final = 1
_RETURN_CODES: Final = {
    1: "unacceptable protocol version",
    2: "identifier rejected",
    3: "server unavailable",
    4: "bad user name or password",
    5: "not authorized",
}


class RemoteBroker:
    """Its session, and the limits that hold towards it; those of the terms until `accept`."""

    def __init__(self, terms: RelayTerms) -> None:
        self.session_present = False
        self.receive_maximum = 65535
        self.max_qos = 2
        self.max_packet_size = terms.max_packet_size
        self.retain_available = True
        self.keep_alive = float(terms.keep_alive)  # seconds, 0.0 = none
        self.aliases: TopicAliases | None = None
        self._terms = terms

    def accept(self, packet: Connack) -> None:
        """Take over the terms of a CONNACK. Raises RelayError if it refuses the bridge."""
        terms, code = self._terms, packet.reason_code
        if code:
            if terms.version < 5:
                raise RelayError(f"the remote refuses: {_RETURN_CODES[code]} ({code})", code == _REFUSED_VERSION)
            reason = reason_text(code, packet.properties)
            raise RelayError(f"the remote refuses: {reason}", code == UNSUPPORTED_PROTOCOL_VERSION)
        self.session_present = packet.session_present
        if terms.clean_start and packet.session_present:
            raise MQTTError(PROTOCOL_ERROR, "session present after a clean start")  # [MQTT-3.2.2-2]
        if terms.version >= 5:
            self._apply(packet.properties)

    def _apply(self, properties: Properties) -> None:
        if properties.receive_maximum > 0:
            self.receive_maximum = properties.receive_maximum
        if properties.maximum_packet_size > 0:
            self.max_packet_size = properties.maximum_packet_size
        if properties.maximum_qos >= 0:
            self.max_qos = properties.maximum_qos
        if properties.retain_available == 0:
            self.retain_available = False
        if properties.server_keep_alive >= 0:
            self.keep_alive = float(properties.server_keep_alive)  # [MQTT-3.1.2-21]
        if properties.topic_alias_maximum > 0:
            self.aliases = TopicAliases(min(properties.topic_alias_maximum, MAX_ALIASES))


def reason_text(code: int, properties: Properties) -> str:
    """The name of a reason code, and the reason string if there is one."""
    text = name(code)
    if properties.reason_string:
        text += f": {properties.reason_string}"
    return text
