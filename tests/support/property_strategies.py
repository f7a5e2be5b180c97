"""Hypothesis strategies for the properties of MQTT 5.0 packets."""

from __future__ import annotations

from hypothesis import strategies as st

from mqttbroker.codec.properties import (
    BINARY,
    BYTE,
    FOUR_BYTES,
    PROPERTIES,
    STRING,
    STRING_PAIR,
    TOPIC_NAME,
    TWO_BYTES,
    VARINT,
    Properties,
)

TEXT = st.text(st.characters(exclude_characters="+#", exclude_categories=["Cs", "Cc", "Cn"]), max_size=20)
VALUES: dict[int, st.SearchStrategy[object]] = {
    BYTE: st.integers(0, 1),
    TWO_BYTES: st.integers(1, 65_535),
    FOUR_BYTES: st.integers(1, 2**32 - 1),
    VARINT: st.integers(1, 268_435_455),
    STRING: TEXT,
    TOPIC_NAME: TEXT.filter(bool),
    BINARY: st.binary(max_size=20),
    STRING_PAIR: st.tuples(TEXT, TEXT),
}


@st.composite
def properties_of(draw: st.DrawFn, packet_type: int) -> Properties:
    """Any legal properties of a packet type."""
    properties = Properties()
    for row in PROPERTIES:
        if packet_type not in row.packets or not draw(st.booleans()):
            continue
        if row.is_list:
            size = 4 if packet_type in row.repeatable else 1
            setattr(properties, row.attribute, draw(st.lists(VALUES[row.kind], max_size=size)))
        else:
            setattr(properties, row.attribute, draw(VALUES[row.kind]))
    if properties.authentication_data is not None and properties.authentication_method is None:
        properties.authentication_method = "M"
    return properties
