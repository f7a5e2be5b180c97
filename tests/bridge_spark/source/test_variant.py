"""Variants of JSON payloads: the bytes are those of Spark's own parser, and each way to read them gives them to Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from support.spark_session import StreamWriter, message, spark

from bridge_spark.payloads import parse_payloads
from bridge_spark.source import variant
from bridge_spark.source.json_payloads import JsonParser, VariantParser
from bridge_spark.source.json_text import decode
from bridge_spark.source.row_parser import RowParser

pytestmark = pytest.mark.one_build

__all__ = ["spark"]

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from([str(sign * 2**bits + step) for bits in (7, 15, 31, 63) for sign in (1, -1) for step in (-1, 0, 1)]),
    st.from_regex(r"-?(0|[1-9][0-9]{0,40})\.[0-9]{1,42}", fullmatch=True),
    st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?[eE][+-]?[0-9]{1,2}", fullmatch=True),
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=8), st.sampled_from(["", "x" * 63, "x" * 64, "é" * 32, "\U0001f600", "￿"])
)
KEYS = st.one_of(TEXTS, st.sampled_from("ab"))


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def member_texts(members: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{quoted(name)}:{value}" for name, value in members) + "}"


VALUES = st.recursive(
    st.one_of(NUMBERS, TEXTS.map(quoted), st.sampled_from(["true", "false", "null"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: "[" + ",".join(items) + "]"),
        st.lists(st.tuples(KEYS, inner), max_size=4, unique_by=lambda item: item[0]).map(member_texts),
    ),
    max_leaves=12,
)
SPECIAL = [
    "{}",
    "[]",
    "-0",
    "-0.0",
    "0.00",
    "1e-400",
    "1.7976931348623157e308",
    '{"￿":1,"\U0001f600":2,"a":3}',
    member_texts([(f"k{number}", "1") for number in range(300)]),
    "[" + ",".join("1" for _ in range(300)) + "]",
    member_texts([(f"k{number:0100d}", quoted("x" * 300)) for number in range(700)]),
    "[" * 100 + "]" * 100,
    quoted("x" * 70_000),
    member_texts([("a" * 300, "[" + quoted("y" * 70_000) + "]")]),
    "9" * 38,
    "9" * 39,
    "0." + "0" * 37 + "1",
    "0." + "0" * 38 + "1",
    "9" * 37 + ".9",
    "1" + "0" * 37 + ".0",
]
BAD = [
    ('{"a":1,"a":2}', "has a key that stands twice"),
    ('[{"b":{"a":1,"a":2}}]', "has a key that stands twice"),
    ("1e999", "is not a finite number"),
    ("[-1e400]", "is not a finite number"),
    (quoted("x" * (1 << 24)), "is larger than 16 MiB as a variant"),
    (member_texts([("x" * (1 << 24), "1")]), "is larger than 16 MiB as a variant"),
]


def encoded(text: str) -> tuple[bytes, bytes]:
    found = variant.encode(decode(text.encode()))
    return found["value"], found["metadata"]


def test_the_bytes_are_those_of_sparks_parser(spark: SparkSession) -> None:
    """Also with what Spark makes of them: `to_json` and `schema_of_variant`."""

    @settings(max_examples=20, deadline=None)
    @given(st.lists(VALUES, min_size=1, max_size=100))
    def check(texts: list[str]) -> None:
        rows = (
            spark.createDataFrame([(text,) for text in texts], "text string")
            .select(F.parse_json("text").alias("v"))
            .select(F.to_json("v").alias("json"), F.schema_of_variant("v").alias("kind"), "v")
            .collect()
        )
        assert [(bytes(row.v.value), bytes(row.v.metadata)) for row in rows] == list(map(encoded, texts))
        given = pa.table({"v": pa.array([variant.encode(decode(text.encode())) for text in texts], variant.TYPE)})
        read = spark.createDataFrame(given).select(F.to_json("v"), F.schema_of_variant("v")).collect()
        assert [tuple(row) for row in read] == [(row.json, row.kind) for row in rows]

    check()
    check.hypothesis.inner_test(SPECIAL)


@pytest.mark.parametrize("text, reason", BAD, ids=range(len(BAD)))
def test_what_no_variant_can_hold_is_a_dead_letter(text: str, reason: str) -> None:
    for parser, payload, where in (
        (JsonParser(pa.struct([("v", variant.TYPE)])), f'{{"v":{text}}}', "field 'v'"),
        (JsonParser(pa.struct([("v", pa.list_(variant.TYPE))])), f'{{"v":[1,{text}]}}', "field 'v[]'"),
        (VariantParser(), text, "the JSON value"),
    ):
        found = parser.parse(pa.array([payload.encode(), b"{}"], pa.binary()))
        assert found.reasons.to_pylist() == [f"{where} {reason}", None]


def reasons(parser: RowParser, *payloads: bytes) -> list[str | None]:
    found: list[str | None] = parser.parse(pa.array(payloads, pa.binary())).reasons.to_pylist()
    return found


def test_a_null_is_a_variant_and_a_missing_field_is_none() -> None:
    kind = pa.struct([pa.field("v", variant.TYPE, False)])
    assert reasons(JsonParser(kind), b'{"v":null}', b"{}", b"null") == [None, "field 'v' is missing", "not a JSON object"]
    assert reasons(VariantParser(), b"null", b"", b"[1", b"[] 1") == [None, "empty payload", "not JSON", "text after the JSON value"]


PAYLOADS = [
    b'{"v":{"b":1,"a":[1.5,null]},"l":[true,{"x":"y"}],"o":{"v":"t"},"m":{"k":{"z":1}}}',
    b'{"v":null,"u":1}',
    b"{}",
    b'{"v":{"a":1,"a":2}}',
    b"[1,2]",
]
FIELDS = "v variant, l array<variant>, o struct<v variant>, m map<string,variant>"
READ = ["to_json(value.v)", "value.v is null", "to_json(value.l[1])", "to_json(value.o.v)", "to_json(value.m['k'])", "reason"]
EXPECTED: list[tuple[Any, ...]] = [
    ('{"a":[1.5,null],"b":1}', False, '{"x":"y"}', '"t"', '{"z":1}', None),
    ("null", False, None, None, None, None),
    (None, True, None, None, None, None),
    (None, True, None, None, None, "field 'v' has a key that stands twice"),
    (None, True, None, None, None, "not a JSON object"),
]


def test_spark_reads_variants_of_the_source(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(number, "t", payload) for number, payload in enumerate(PAYLOADS)])
    options = {"path": str(tmp_path / "data"), "stream": "sensors", "payloadFormat": "json"}
    schema = f"value struct<{FIELDS}>, reason string, extra map<string,string>, offset long, payload binary"
    found = spark.read.format("mqtt").options(**options).schema(schema).load().orderBy("offset")
    assert [tuple(row) for row in found.selectExpr(*READ).collect()] == EXPECTED
    assert [row.extra for row in found.select("extra").collect()][:2] == [{}, {"u": "1"}]
    messages = found.select("payload")
    parsed = parse_payloads(messages, f"value struct<{FIELDS}>, reason string", payloadFormat="json")
    assert [tuple(row) for row in parsed.selectExpr(*READ).collect()] == EXPECTED
    by_spark = messages.select(F.from_json(F.col("payload").cast("string"), FIELDS).alias("value"))
    assert [tuple(row) for row in by_spark.selectExpr(*READ[:-1]).collect()][:3] == [row[:-1] for row in EXPECTED[:3]]
    query = (
        spark.readStream.format("mqtt")
        .options(**options, startingOffsets="earliest")
        .schema(schema)
        .load()
        .writeStream.format("memory")
        .queryName("variants")
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert [tuple(row) for row in spark.table("variants").orderBy("offset").selectExpr(*READ).collect()] == EXPECTED


def test_a_whole_payload_may_be_a_variant(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(
        0, [message(number, "t", payload) for number, payload in enumerate([b'{"a":1.5}', b"[1,2]", b"7", b"{"])]
    )
    read = spark.read.format("mqtt").options(path=str(tmp_path / "data"), stream="sensors", payloadFormat="json")
    schema = "value variant, reason string, item int, offset long"
    columns = ["offset", "item", "to_json(value)", "reason"]
    found = read.schema(schema).load().orderBy("offset").selectExpr(*columns).collect()
    assert found == [Row(0, 0, '{"a":1.5}', None), Row(1, 0, "[1,2]", None), Row(2, 0, "7", None), Row(3, 0, None, "not JSON")]
    found = read.option("payloadExplode", "true").schema(schema).load().orderBy("offset", "item").selectExpr(*columns)
    assert found.collect()[1:3] == [Row(1, 0, "1", None), Row(1, 1, "2", None)]
