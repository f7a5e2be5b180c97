"""Sparkplug payloads without Spark: a row per metric, one dead letter for the invalid ones, fields as Protobuf reads them."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from support.protobuf import descriptor_set, message_class

from bridge_spark.source.row_parser import RowParser
from bridge_spark.source.sparkplug import FIELDS, SparkplugParser

pytestmark = pytest.mark.one_build


def parsed(parser: RowParser, payload: bytes) -> list[tuple[Any, str | None]]:
    """The values and reasons of one payload."""
    found = parser.parse(pa.array([payload], pa.binary()))
    found.values.validate(full=True)
    return list(zip(found.values.to_pylist(), found.reasons.to_pylist(), strict=True))


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def proto(*fields: tuple[int, Any]) -> bytes:
    """A protobuf message: integers as varints, floats as fixed-width values, others with their length."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value & (1 << 64) - 1)
        elif isinstance(value, float):
            out += varint(number << 3 | (5 if number == 12 else 1)) + struct.pack("<f" if number == 12 else "<d", value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


METRICS: list[tuple[bytes, dict[str, Any]]] = [
    (
        proto((1, b"t"), (2, 7), (3, 1_700_000_000_123), (4, 10), (13, 1.5)),
        {"name": "t", "alias": 7, "timestamp": "2023-11-14 22:13:20.123000+00:00", "datatype": "Double", "double": 1.5},
    ),
    (proto((4, 9), (12, 0.5)), {"datatype": "Float", "double": 0.5}),
    (proto((4, 3), (10, -5 & 0xFFFFFFFF)), {"datatype": "Int32", "long": -5}),
    (proto((4, 1), (10, -5 & 0xFFFFFFFF)), {"datatype": "Int8", "long": -5}),
    (proto((4, 1), (10, 251)), {"datatype": "Int8", "long": -5}),
    (proto((4, 4), (11, -5)), {"datatype": "Int64", "long": -5}),
    (proto((4, 7), (10, 0xFFFFFFFF)), {"datatype": "UInt32", "long": 0xFFFFFFFF}),
    (proto((4, 7), (10, -12)), {"datatype": "UInt32", "long": 0xFFFFFFF4}),
    (proto((4, 3), (10, -12)), {"datatype": "Int32", "long": -12}),
    (proto((4, 2), (10, -12)), {"datatype": "Int16", "long": -12}),
    (proto((4, 1 << 32 | 3), (10, 1 << 32 | 5)), {"datatype": "Int32", "long": 5}),
    (proto((4, 11), (14, 1 << 63)), {"datatype": "Boolean", "boolean": True}),
    (proto((4, b"x"), (2, 1.5), (10, 1), (11, 2)), {"long": 2}),
    (b"\x0b\x08\x01\x0c" + proto((10, 3)), {"long": 3}),
    (proto((4, 13), (11, 5)), {"datatype": "DateTime", "long": 5}),
    (proto((4, 11), (14, 1)), {"datatype": "Boolean", "boolean": True}),
    (proto((4, 12), (15, "é".encode())), {"datatype": "String", "string": "é"}),
    (proto((4, 17), (16, b"\0")), {"datatype": "Bytes", "binary": b"\0"}),
    (proto((4, 10), (7, 1)), {"datatype": "Double", "is_null": True}),
    (proto((2, 3), (11, 9), (99, b"new")), {"alias": 3, "long": 9}),
    (proto((5, 1), (6, 1), (14, 0)), {"is_historical": True, "is_transient": True, "boolean": False}),
]
BAD_METRICS = [
    (proto((4, 99), (10, 1)), "unknown datatype"),
    (proto((4, 10)), "no value"),
    (proto((4, 1), (10, 300)), "does not fit its datatype"),
    (proto((4, 5), (10, 256)), "does not fit its datatype"),
    (proto((4, 7), (11, -12)), "does not fit its datatype"),
    (proto((4, 8), (11, 1 << 63)), "a number beyond 64 bits with sign"),
    (proto((3, 1 << 60), (10, 1)), "a timestamp after the year 9999"),
    (proto((13, b"12345678")), "no value"),
    (proto((15, b"\xff")), "not UTF-8"),
    (b"\x0a\x05ab", "not a Sparkplug metric"),
    (b"\xff" * 11, "not a Sparkplug metric"),
    (b"\x0b", "not a Sparkplug metric"),
]
SPARKPLUG = SparkplugParser(pa.struct(list(FIELDS.items())))
METRIC_READ = [
    (name, FIELDS[name]) for name in ("alias", "is_null", "is_historical", "is_transient", "long", "double", "boolean", "string", "binary")
]


def test_sparkplug_metrics_become_rows() -> None:
    payload = proto((1, 1_700_000_000_000), *((2, metric) for metric, _ in METRICS), (3, 4), (5, b"body"))
    found = SPARKPLUG.parse(pa.array([payload, b"", proto((3, 1)), payload[:-1]], pa.binary()))
    assert found.payloads.to_pylist() == [0] * len(METRICS) + [1, 2, 3]
    assert found.reasons.to_pylist()[len(METRICS) :] == ["empty payload", "a Sparkplug payload without metrics", "not a Sparkplug payload"]
    usual = {
        **dict.fromkeys(FIELDS),
        "is_null": False,
        "is_historical": False,
        "is_transient": False,
        "seq": 4,
        "payload_timestamp": "2023-11-14 22:13:20+00:00",
    }
    for row, (_, expected) in zip(found.values.to_pylist(), METRICS):
        assert {name: str(value) if name.endswith("timestamp") and value else value for name, value in row.items()} == usual | expected


@pytest.mark.parametrize(("metric", "reason"), BAD_METRICS)
def test_an_invalid_metric_is_a_dead_letter_beside_the_rows_of_the_others(metric: bytes, reason: str) -> None:
    good = METRICS[0][0]
    found = SPARKPLUG.parse(pa.array([proto((2, good), (2, metric), (2, good)), proto((2, metric))], pa.binary()))
    assert found.payloads.to_pylist() == [0, 0, 0, 1]
    assert [row and row["name"] for row in found.values.to_pylist()] == ["t", "t", None, None]
    assert found.reasons.to_pylist() == [None, None, f"metric 1: {reason}", f"metric 0: {reason}"]


def test_invalid_metrics_of_a_payload_make_one_dead_letter() -> None:
    payload = proto((2, METRICS[0][0]), *((2, BAD_METRICS[1][0]) for _ in range(12)))
    _, reason = SPARKPLUG.parse(pa.array([payload], pa.binary())).reasons.to_pylist()
    assert reason == "; ".join(f"metric {place}: no value" for place in range(1, 11)) + "; 2 more"


def test_fields_of_the_payload_that_no_column_asks_for_reject_nothing() -> None:
    parser = SparkplugParser(pa.struct([("long", pa.int64())]))
    payload = proto((1, 1 << 63), (2, proto((10, 1))), (3, 1 << 63))
    assert parsed(parser, payload) == [({"long": 1}, None)]
    assert parsed(SPARKPLUG, payload) == [(None, "a timestamp after the year 9999")]


SPARKPLUG_PROTO = """
syntax = "proto2";
message Metric {
  optional bytes name = 1; optional uint64 alias = 2; optional uint64 timestamp = 3; optional uint32 datatype = 4;
  optional bool is_historical = 5; optional bool is_transient = 6; optional bool is_null = 7;
  oneof value { uint32 int_value = 10; uint64 long_value = 11; float float_value = 12; double double_value = 13;
                bool boolean_value = 14; bytes string_value = 15; bytes bytes_value = 16; }
}
"""
FIELD_VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.sampled_from([-12, 2**32, 2**32 - 1, 0, 1]), st.floats(width=32), st.binary(max_size=3)
)


@pytest.fixture(scope="module")
def metric_class() -> Any:
    return message_class(descriptor_set(SPARKPLUG_PROTO), "Metric")


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 14, 16, 30]), FIELD_VALUES), max_size=5).map(
            lambda fields: proto(*fields)
        ),
        st.binary(max_size=12),
    )
)
def test_metrics_are_read_as_protobuf_reads_them(metric_class: Any, metric: bytes) -> None:
    try:
        expected = metric_class.FromString(metric)
    except DecodeError:
        expected = None
    [(read, reason)] = parsed(SparkplugParser(pa.struct(METRIC_READ)), proto((2, metric)))
    if expected is None:
        assert reason == "metric 0: not a Sparkplug metric"
        return
    given = expected.WhichOneof("value")
    if reason is not None:
        assert reason != "metric 0: not a Sparkplug metric"
        assert reason != "metric 0: no value" or given is None and not expected.is_null
        return
    assert (read["is_null"], read["is_historical"], read["is_transient"], read["alias"] or 0) == (
        expected.is_null,
        expected.is_historical,
        expected.is_transient,
        expected.alias,
    )
    if not read["is_null"]:
        found = [read[name] for name in ("long", "double", "boolean", "string", "binary") if read[name] is not None]
        assert repr(found) == repr([getattr(expected, given)])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_give_rows_or_a_dead_letter(payload: bytes) -> None:
    for data in (payload, proto((2, payload))):
        assert parsed(SPARKPLUG, data)
