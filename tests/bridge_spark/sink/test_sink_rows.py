"""bridge_spark.sink.rows: rows as packets that the broker's decoder reads, and the line for each bad value."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from bridge_spark.sink.errors import SinkError
from bridge_spark.sink.options import SinkOptions, parse_options
from bridge_spark.sink.rows import PacketEncoder, RowReader, check_schema
from mqttbroker.codec.packets import Publish, decode

pytestmark = pytest.mark.one_build


def options(**given: str) -> SinkOptions:
    return parse_options({"url": "mqtt://broker", **given})


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch({name: value if isinstance(value, pa.Array) else pa.array(value) for name, value in columns.items()})


def packets(found: pa.RecordBatch, chosen: SinkOptions, producer: str | None = None) -> list[Publish]:
    """The packets of a batch, with packet identifier 7, as the broker reads them."""
    decoded: list[Publish] = []
    for packet in PacketEncoder(chosen.version, producer).encode(RowReader(chosen, 3).read(found), 0):
        data = packet.head + (b"\x00\x07" if packet.qos else b"") + packet.tail
        assert len(data) == packet.size
        one, used = decode(data, chosen.version)
        assert isinstance(one, Publish) and used == len(data)
        decoded.append(one)
    return decoded


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_topic_and_payload(kind: pa.DataType, version: str) -> None:
    payloads = pa.array(["ä", None, "", "x" * 20_000], pa.string()).cast(kind)
    found = packets(batch(topic=["a/ü", "b", "a/ü", "c"], payload=payloads), options(protocolVersion=version))
    assert [(one.topic, one.payload) for one in found] == [("a/ü", "ä".encode()), ("b", b""), ("a/ü", b""), ("c", b"x" * 20_000)]
    assert {(one.qos, one.retain, one.dup, one.packet_id) for one in found} == {(1, False, False, 7)}


def test_a_slice_of_a_batch() -> None:
    whole = batch(topic=["a", "b", "c"], payload=pa.array(["1", "2", "3"]))
    assert [one.payload for one in packets(whole.slice(1, 2), options())] == [b"2", b"3"]


def test_qos_and_retain_fall_back_to_the_options() -> None:
    found = batch(topic=["a"] * 4, payload=["x"] * 4, qos=pa.array([0, 1, 2, None], pa.int8()), retain=[True, False, None, None])
    assert [(one.qos, one.retain) for one in packets(found, options(qos="2", retain="true"))] == [
        (0, True),
        (1, False),
        (2, True),
        (2, True),
    ]


def test_the_option_topic_overrides_the_column() -> None:
    assert [one.topic for one in packets(batch(topic=[None], payload=["x"]), options(topic="t"))] == ["t"]


def test_properties() -> None:
    pairs = pa.array([[{"key": "a", "value": "1"}, {"key": "a", "value": "2"}], None])
    found = packets(
        batch(
            topic=["a", "b"],
            payload=["x", "y"],
            user_properties=pairs,
            content_type=["text/plain", None],
            response_topic=["answers", None],
            correlation_data=pa.array([b"\x00\x01", None]),
            message_expiry=pa.array([60, None]),
        ),
        options(),
        "q/0/3",
    )
    first, second = (one.properties for one in found)
    assert first is not None and second is not None
    assert first.user_properties == [("producer-id", "q/0/3"), ("seq", "0"), ("a", "1"), ("a", "2")]
    assert (first.content_type, first.response_topic, first.correlation_data, first.message_expiry_interval) == (
        "text/plain",
        "answers",
        b"\x00\x01",
        60,
    )
    assert second.user_properties == [("producer-id", "q/0/3"), ("seq", "1")]
    assert second.content_type is None and second.message_expiry_interval == -1


def test_a_map_of_user_properties_and_long_properties() -> None:
    pairs = pa.array([[("k", "v" * 5000)]], pa.map_(pa.string(), pa.string()))
    (found,) = packets(batch(topic=["a"], payload=["x"], user_properties=pairs), options())
    assert found.properties is not None and found.properties.user_properties == [("k", "v" * 5000)]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"topic": ["a", None]}, "column 'topic': NULL (partition 3, row 11)"),
    ({"topic": ["a", "a/+"]},
     "column 'topic': 'a/+' has a wildcard: '+' and '#' are for subscriptions (partition 3, row 11)"),
    ({"topic": ["", "a"]}, "column 'topic': '' is empty (partition 3, row 10)"),
    ({"topic": ["a", "x" * 65536]}, f"column 'topic': '{'x' * 100}' has 65536 bytes, more than 65535 (partition 3, row 11)"),
    ({"topic": ["a", "b\0"]}, r"column 'topic': 'b\x00' has the control character U+0000 (partition 3, row 11)"),
    ({"qos": [1, 3]}, "column 'qos': 3 is not 0, 1 or 2 (partition 3, row 11)"),
    ({"message_expiry": [-1, 3]},
     "column 'message_expiry': -1 is not a number of seconds from 0 to 4294967295 (partition 3, row 10)"),
    ({"response_topic": ["a/#", None]},
     "column 'response_topic': 'a/#' has a wildcard: '+' and '#' are for subscriptions (partition 3, row 10)"),
    ({"content_type": [None, "x" * 70000]},
     "column 'content_type': 70000 bytes are more than 65535 (partition 3, row 11)"),
    ({"user_properties": pa.array([[("k", None)], None], pa.map_(pa.string(), pa.string()))},
     "column 'user_properties': a name or value is NULL (partition 3, row 10)"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_value_is_one_line_with_its_row(number: int) -> None:
    columns, line = BAD[number]
    reader = RowReader(options(), 3)
    good = {"topic": ["a"] * 10, "payload": ["x"] * 10}
    reader.read(batch(**good))
    with pytest.raises(SinkError) as caught:
        reader.read(batch(**{"topic": ["a", "b"], "payload": ["x", "y"], **columns}))
    assert str(caught.value) == f"mqtt sink: {line}"


SCHEMAS = [
    ("topic string", {}, "column 'payload': missing"),
    ("payload string", {}, "column 'topic': missing, and there is no option 'topic'"),
    ("topic string, payload int", {},
     "column 'payload': int, not string or binary: convert it, for example with to_json or CAST"),
    ("topic int, payload string", {}, "column 'topic': int, not string"),
    ("topic string, payload string, qos double", {}, "column 'qos': double, not a whole number"),
    ("topic string, payload string, retian boolean", {}, "column 'retian': unknown, did you mean 'retain'?"),
    ("topic string, payload string, offset long", {},
     "column 'offset': unknown, the columns of the sink are topic, payload, qos, "),
    ("topic string, payload string, user_properties map<string,int>", {},
     "column 'user_properties': map<string,int>, not map<string,string> or array<struct<key:string,value:string>>"),
    ("topic string, payload string, content_type string", {"protocolVersion": "3.1.1"},
     "column 'content_type': MQTT 3.1.1 has no properties: set 'protocolVersion' to 5"),
]  # fmt: skip


@pytest.mark.parametrize("ddl, given, line", SCHEMAS)
def test_a_schema_that_cannot_be_written_is_one_line(ddl: str, given: dict[str, str], line: str) -> None:
    with pytest.raises(SinkError) as caught:
        check_schema(schema_of(ddl), options(**given))
    assert str(caught.value).startswith(f"mqtt sink: {line}")


def test_a_schema_with_all_columns_and_one_without_topic() -> None:
    check_schema(
        schema_of(
            "topic string, payload binary, qos tinyint, retain boolean, user_properties "
            "array<struct<key:string,value:string>>, content_type string, response_topic string, "
            "correlation_data binary, message_expiry int"
        ),
        options(),
    )
    check_schema(schema_of("payload string"), options(topic="t"))


def schema_of(ddl: str) -> StructType:
    """A schema without a Spark session, which `StructType.fromDDL` would need."""
    names: dict[str, Any] = {
        "string": "string", "binary": "binary", "int": "integer", "long": "long", "double": "double",
        "tinyint": "byte", "boolean": "boolean",
        "map<string,int>": {"type": "map", "keyType": "string", "valueType": "integer", "valueContainsNull": True},
        "array<struct<key:string,value:string>>": {"type": "array", "containsNull": True, "elementType": {
            "type": "struct", "fields": [{"name": name, "type": "string", "nullable": True, "metadata": {}}
                                         for name in ("key", "value")]}},
    }  # fmt: skip
    columns = [column.split() for column in ddl.split(", ")]
    return StructType.fromJson(
        {"type": "struct", "fields": [{"name": name, "type": names[kind], "nullable": True, "metadata": {}} for name, kind in columns]}
    )
