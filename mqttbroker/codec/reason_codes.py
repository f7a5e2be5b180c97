"""Packet types, reason codes, and `MQTTError`, which carries a reason code.

``CODES`` is the table of MQTT 5.0 section 2.4; packets with other codes are neither sent nor accepted.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import mypyc_attr

from sessions.reason_names import REASON_NAMES

# Control packet types (MQTT 5.0 section 2.1.2): the high half of the first byte.
CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15

# Reason codes (MQTT 5.0 section 2.4).
SUCCESS: Final = 0x00
NORMAL_DISCONNECTION: Final = 0x00
GRANTED_QOS_0: Final = 0x00
GRANTED_QOS_1: Final = 0x01
GRANTED_QOS_2: Final = 0x02
DISCONNECT_WITH_WILL_MESSAGE: Final = 0x04
NO_MATCHING_SUBSCRIBERS: Final = 0x10
NO_SUBSCRIPTION_EXISTED: Final = 0x11
CONTINUE_AUTHENTICATION: Final = 0x18
RE_AUTHENTICATE: Final = 0x19
UNSPECIFIED_ERROR: Final = 0x80
MALFORMED_PACKET: Final = 0x81
PROTOCOL_ERROR: Final = 0x82
IMPLEMENTATION_SPECIFIC_ERROR: Final = 0x83
UNSUPPORTED_PROTOCOL_VERSION: Final = 0x84
CLIENT_IDENTIFIER_NOT_VALID: Final = 0x85
BAD_USER_NAME_OR_PASSWORD: Final = 0x86
NOT_AUTHORIZED: Final = 0x87
SERVER_UNAVAILABLE: Final = 0x88
SERVER_BUSY: Final = 0x89
BANNED: Final = 0x8A
SERVER_SHUTTING_DOWN: Final = 0x8B
BAD_AUTHENTICATION_METHOD: Final = 0x8C
KEEP_ALIVE_TIMEOUT: Final = 0x8D
SESSION_TAKEN_OVER: Final = 0x8E
TOPIC_FILTER_INVALID: Final = 0x8F
TOPIC_NAME_INVALID: Final = 0x90
PACKET_IDENTIFIER_IN_USE: Final = 0x91
PACKET_IDENTIFIER_NOT_FOUND: Final = 0x92
RECEIVE_MAXIMUM_EXCEEDED: Final = 0x93
TOPIC_ALIAS_INVALID: Final = 0x94
PACKET_TOO_LARGE: Final = 0x95
MESSAGE_RATE_TOO_HIGH: Final = 0x96
QUOTA_EXCEEDED: Final = 0x97
ADMINISTRATIVE_ACTION: Final = 0x98
PAYLOAD_FORMAT_INVALID: Final = 0x99
RETAIN_NOT_SUPPORTED: Final = 0x9A
QOS_NOT_SUPPORTED: Final = 0x9B
USE_ANOTHER_SERVER: Final = 0x9C
SERVER_MOVED: Final = 0x9D
SHARED_SUBSCRIPTIONS_NOT_SUPPORTED: Final = 0x9E
CONNECTION_RATE_EXCEEDED: Final = 0x9F
MAXIMUM_CONNECT_TIME: Final = 0xA0
SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED: Final = 0xA1
WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED: Final = 0xA2

_ACCEPTANCE: Final = frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99))
_RELEASE: Final = frozenset((0x00, 0x92))

# The codes that a packet type may carry; types without a row carry none.
CODES: Final[dict[int, frozenset[int]]] = {
    # [MQTT-3.2.2-8]
    CONNACK: frozenset(
        (0x00, 0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88, 0x89)
        + (0x8A, 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F)
    ),
    PUBACK: _ACCEPTANCE,  # [MQTT-3.4.2-1]
    PUBREC: _ACCEPTANCE,  # [MQTT-3.5.2-1]
    PUBREL: _RELEASE,  # [MQTT-3.6.2-1]
    PUBCOMP: _RELEASE,  # [MQTT-3.7.2-1]
    # [MQTT-3.9.3-2]
    SUBACK: frozenset((0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2)),
    UNSUBACK: frozenset((0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91)),  # [MQTT-3.11.3-2]
    # [MQTT-3.14.2-1]; 0x8C is listed in section 2.4 though not in 3.14.2.1.
    DISCONNECT: frozenset(
        (0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x87, 0x89, 0x8B, 0x8C, 0x8D, 0x8E, 0x8F)
        + (0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99, 0x9A, 0x9B, 0x9C, 0x9D)
        + (0x9E, 0x9F, 0xA0, 0xA1, 0xA2)
    ),
    AUTH: frozenset((0x00, 0x18, 0x19)),  # [MQTT-3.15.2-1]
}

# Temporary conditions: 3.1.1 has one return code for all of them.
_V3_UNAVAILABLE: Final = frozenset((0x80, 0x83, 0x88, 0x89, 0x97, 0x9C, 0x9D, 0x9F))


# mypyc frees the weak references to an exception of a native class once too often.
@mypyc_attr(native_class=False)
class MQTTError(Exception):
    """A packet that cannot be accepted; the connection ends with ``reason_code``.

    ``detail`` is for logs and Reason Strings. ``protocol_level`` is the level of a failed CONNECT with a known protocol
    name, else -1: below 5 it is answered by a 3.1.1 CONNACK or none, from 5 by a 5.0 CONNACK, and -1 by none.
    """

    def __init__(self, reason_code: int, detail: str, protocol_level: int = -1) -> None:
        super().__init__(detail)
        self.reason_code = reason_code
        self.detail = detail
        self.protocol_level = protocol_level

    def __str__(self) -> str:
        return f"{name(self.reason_code)}: {self.detail}"


def name(code: int) -> str:
    """The standard's name of a code and its number, for logs; only the number of an unknown code."""
    known = REASON_NAMES.get(code)
    return f"0x{code:02X}" if known is None else f"{known} (0x{code:02X})"


def is_legal(packet_type: int, code: int) -> bool:
    """Whether a 5.0 packet of this type may carry the code (section 2.4)."""
    codes = CODES.get(packet_type)
    return codes is not None and code in codes


def to_v3_connack(code: int) -> int:
    """The 3.1.1 CONNACK return code for a 5.0 reason code.

    -1 if there is none: the connection is then closed without CONNACK (3.1.1 [MQTT-3.2.2-6]).
    """
    if code == SUCCESS:
        return 0
    if code == UNSUPPORTED_PROTOCOL_VERSION:
        return 1
    if code == CLIENT_IDENTIFIER_NOT_VALID:
        return 2
    # Return code 4 means malformed user names and passwords, not wrong ones.
    if code == BAD_USER_NAME_OR_PASSWORD or code == NOT_AUTHORIZED or code == BANNED:
        return 5
    if code in _V3_UNAVAILABLE:
        return 3
    return -1
