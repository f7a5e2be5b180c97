"""Reason codes: the tables agree with each other and with section 2.4."""

from __future__ import annotations

import pytest

from mqttbroker.codec import reason_codes as rc
from sessions.reason_names import REASON_NAMES


def test_every_code_has_a_name_and_a_packet() -> None:
    used = frozenset().union(*rc.CODES.values())
    assert used == set(REASON_NAMES)
    assert len(set(REASON_NAMES.values())) == len(REASON_NAMES)


def test_constants_have_the_names_of_the_standard() -> None:
    for code, name in REASON_NAMES.items():
        constant = name.upper().replace(" ", "_").replace("-", "_")
        assert vars(rc)[constant] == code, constant


@pytest.mark.parametrize(
    ("packet_type", "count"),
    [(rc.CONNACK, 22), (rc.PUBACK, 9), (rc.PUBREC, 9), (rc.PUBREL, 2), (rc.PUBCOMP, 2), (rc.SUBACK, 12)]
    + [(rc.UNSUBACK, 7), (rc.DISCONNECT, 30), (rc.AUTH, 3), (rc.PUBLISH, 0), (rc.PINGREQ, 0)],
)
def test_number_of_legal_codes(packet_type: int, count: int) -> None:
    assert sum(rc.is_legal(packet_type, code) for code in range(256)) == count


@pytest.mark.parametrize(
    ("code", "expected"),
    [(rc.SUCCESS, 0), (rc.UNSUPPORTED_PROTOCOL_VERSION, 1), (rc.CLIENT_IDENTIFIER_NOT_VALID, 2)]
    + [(rc.SERVER_UNAVAILABLE, 3), (rc.SERVER_BUSY, 3), (rc.BAD_USER_NAME_OR_PASSWORD, 5), (rc.NOT_AUTHORIZED, 5)]
    + [(rc.BANNED, 5), (rc.MALFORMED_PACKET, -1), (rc.PROTOCOL_ERROR, -1), (rc.TOPIC_NAME_INVALID, -1)],
)
def test_to_v3_connack(code: int, expected: int) -> None:
    assert rc.to_v3_connack(code) == expected


def test_to_v3_connack_returns_a_3_1_1_return_code_or_minus_one() -> None:
    """3.1.1 [MQTT-3.2.2-6]"""
    assert {rc.to_v3_connack(code) for code in rc.CODES[rc.CONNACK]} == {-1, 0, 1, 2, 3, 5}


def test_an_error_has_code_and_detail() -> None:
    error = rc.MQTTError(rc.PROTOCOL_ERROR, "second CONNECT")
    assert (error.reason_code, error.detail, error.protocol_level) == (0x82, "second CONNECT", -1)
    assert str(error) == "Protocol Error (0x82): second CONNECT"
    assert rc.name(0x7E) == "0x7E"
