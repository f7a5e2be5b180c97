"""Records of a shard's log: what is encoded is decoded, and other bytes are refused with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqttbroker.cluster.log.records import (
    CHANGES,
    HEADER_BYTES,
    NO_EPOCH,
    RELEASE,
    TAKEOVER,
    BadRecord,
    ForeignRecord,
    Header,
    Takeover,
    decode_header,
    decode_takeover,
    encode_record,
    encode_takeover,
)

pytestmark = pytest.mark.one_build

HEADERS = st.builds(
    Header,
    kind=st.sampled_from([TAKEOVER, CHANGES, RELEASE]),
    shard=st.integers(0, 65535),
    cluster=st.binary(min_size=8, max_size=8),
    owner=st.binary(min_size=8, max_size=8),
    epoch=st.integers(NO_EPOCH, 2**63 - 1),
    sequence=st.integers(0, 2**64 - 1),
    flags=st.sampled_from((0, 1, 2, 3)),
)
HEADER = Header(CHANGES, 3, b"cluster1", b"node-one", 7, 2)


@given(HEADERS, st.binary(max_size=40))
def test_a_record_has_its_header_and_its_body(header: Header, body: bytes) -> None:
    record = encode_record(header, body)
    assert decode_header(record) == header
    assert record[HEADER_BYTES:] == body


@pytest.mark.parametrize(
    "record, reason",
    [
        (b"", "a record of 0 bytes"),
        (encode_record(HEADER, b"")[:-1], f"a record of {HEADER_BYTES - 1} bytes"),
        (b"{}" + bytes(HEADER_BYTES), "begins with"),
        (encode_record(HEADER._replace(kind=9), b""), "unknown kind 9"),
        (b"MQK2" + bytes(HEADER_BYTES), "a record of version '2', this program reads 1"),
    ],
)
def test_other_bytes_are_no_record(record: bytes, reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        decode_header(record)


def test_a_record_of_a_newer_version_is_not_passed_over() -> None:
    """A record of another program is void; one of a newer version has messages."""
    with pytest.raises(ForeignRecord):
        decode_header(b"XQK1" + bytes(HEADER_BYTES))
    with pytest.raises(BadRecord) as raised:
        decode_header(b"MQK2" + bytes(HEADER_BYTES))
    assert not isinstance(raised.value, ForeignRecord)


def test_a_takeover_names_its_node() -> None:
    takeover = Takeover("node-a", "10.0.0.1:1884", "0.1")
    header = HEADER._replace(kind=TAKEOVER)
    assert decode_takeover(encode_record(header, encode_takeover(takeover))) == takeover
    with pytest.raises(BadRecord, match="not a takeover"):
        decode_takeover(encode_record(header, b"\xc1"))
