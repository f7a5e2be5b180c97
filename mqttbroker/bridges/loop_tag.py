"""The user property by which bridges recognize messages that they have passed on already; MQTT 5 only."""

from __future__ import annotations

from typing import Final

from mqttbroker.codec.data_types import encode_utf8, encode_varint
from mqttbroker.codec.properties import decode_properties
from mqttbroker.codec.reason_codes import PUBLISH

TAG: Final = "mqtt-bridge"
"""The name of the property; its value is the identity of a bridge, one property for each that passed the message on."""
MAX_BRIDGES: Final = 16  # that may pass on a message
_NAME: Final = encode_utf8(TAG)
_USER_PROPERTY: Final = b"\x26"


class LoopTag:
    """The property of one bridge; "" as the identity: messages are neither marked nor recognized.

    ``encoded`` is added to the properties of the messages that go out.
    """

    def __init__(self, identity: str, version: int) -> None:
        self._identity = identity
        self.encoded = b""
        if identity and version >= 5:
            self.encoded = _USER_PROPERTY + _NAME + encode_utf8(identity)

    def is_in(self, properties: bytes) -> bool:
        """Whether this bridge, or too many, have passed on a message with these properties, without their length."""
        if not self._identity or _NAME not in properties:
            return False
        whole = encode_varint(len(properties)) + properties
        found, _ = decode_properties(whole, 0, len(whole), PUBLISH)
        bridges = [value for key, value in found.user_properties if key == TAG]
        return self._identity in bridges or len(bridges) >= MAX_BRIDGES
