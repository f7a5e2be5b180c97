"""Hypothesis strategies for the properties of MQTT 5.0 packets."""

from __future__ import annotations

from hypothesis import strategies as st

from mqttbroker.codec.properties import (
    BINARY,
    BYTE,
    FOUR_BYTES,
    RESPONSE_TOPIC,
    STRING,
    STRING_PAIR,
    SUBSCRIPTION_IDENTIFIER,
    TABLE,
    TWO_BYTES,
    VARINT,
    Properties,
)
from mqttbroker.codec.reason_codes import PUBLISH

TEXT = st.text(st.characters(exclude_characters="+#", exclude_categories=["Cs", "Cc", "Cn"]), max_size=20)
NUMBERS = {
    BYTE: st.integers(0, 1),
    TWO_BYTES: st.integers(1, 65_535),
    FOUR_BYTES: st.integers(1, 2**32 - 1),
    VARINT: st.integers(1, 268_435_455),
}


def attribute(identifier: int) -> str:
    return TABLE[identifier][0].lower().replace(" ", "_")


@st.composite
def properties_of(draw: st.DrawFn, packet_type: int) -> Properties:
    """Any legal set of properties of that packet."""
    properties = Properties()
    for identifier, (_, kind, packets) in TABLE.items():
        if packet_type not in packets or not draw(st.booleans()):
            continue
        if identifier == SUBSCRIPTION_IDENTIFIER:
            most = 3 if packet_type == PUBLISH else 1
            properties.subscription_identifiers = draw(st.lists(NUMBERS[VARINT], min_size=1, max_size=most))
        elif kind == STRING_PAIR:
            properties.user_properties = draw(st.lists(st.tuples(TEXT, TEXT), max_size=4))
        elif kind == STRING:
            setattr(properties, attribute(identifier), draw(TEXT.filter(bool) if identifier == RESPONSE_TOPIC else TEXT))
        elif kind == BINARY:
            setattr(properties, attribute(identifier), draw(st.binary(max_size=20)))
        else:
            setattr(properties, attribute(identifier), draw(NUMBERS[kind]))
    if properties.authentication_data is not None and properties.authentication_method is None:
        properties.authentication_method = "M"
    return properties
