"""Which types a schema may have in each payload format; the others are refused in one line with Spark's name of the type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CalendarIntervalType,
    CharType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    GeographyType,
    GeometryType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)
from support.protobuf import descriptor_set

from bridge_spark.source.payload_options import payload_options
from bridge_spark.source.payload_reader import PayloadReader, PayloadSchemaError
from bridge_spark.source.spark_types import UnusableType, arrow_schema

pytestmark = pytest.mark.one_build

PLAIN = [
    BooleanType(),
    ByteType(),
    ShortType(),
    IntegerType(),
    LongType(),
    FloatType(),
    DoubleType(),
    DecimalType(10, 2),
    StringType(),
    BinaryType(),
    DateType(),
    TimestampType(),
    TimestampNTZType(),
]
NESTED = [ArrayType(LongType()), StructType([StructField("a", LongType())]), MapType(StringType(), LongType())]
IN_NO_FORMAT = [
    GeometryType(4326),
    GeometryType("ANY"),
    GeographyType(4326),
    YearMonthIntervalType(),
    CalendarIntervalType(),
    TimeType(),
    NullType(),
    CharType(3),
    VarcharType(3),
]
READ: dict[str, list[DataType]] = {"json": [*PLAIN, *NESTED, VariantType()], "csv": [*PLAIN]}
ALL: list[DataType] = [*PLAIN, *NESTED, VariantType(), DayTimeIntervalType(), *IN_NO_FORMAT]
NAMES = {"json": "JSON", "csv": "CSV", "avro": "Avro", "protobuf": "Protobuf"}


def refusal(kind: DataType, **options: str) -> str | None:
    """Why ``kind`` cannot be a field, None if it can."""
    schema = StructType([StructField("value", StructType([StructField("v", kind)])), StructField("reason", StringType())])
    try:
        PayloadReader(arrow_schema(schema), payload_options(options), None)
    except (PayloadSchemaError, UnusableType) as error:
        return str(error)
    return None


@pytest.mark.parametrize("format", READ)
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.simpleString())
def test_types_of_json_and_csv(kind: DataType, format: str) -> None:
    found = refusal(kind, payloadFormat=format)
    if kind in READ[format]:
        assert found is None
        return
    assert found in (
        f"field 'v' of 'value' cannot be {kind.simpleString()} in {NAMES[format]}",
        f"field 'v' of 'value' cannot be {kind.simpleString()}, which no payload format is read to",
    )


@pytest.mark.parametrize("kind", [VariantType(), *IN_NO_FORMAT], ids=lambda kind: kind.simpleString())
def test_no_record_or_message_fills_a_type_of_its_own(kind: DataType, tmp_path: Path) -> None:
    """Also not one with the fields by which Arrow has such a type."""
    fields = {"value": "bytes", "metadata": "bytes", "srid": "int", "wkb": "bytes"}
    inner = {"type": "record", "name": "I", "fields": [{"name": name, "type": type} for name, type in fields.items()]}
    (tmp_path / "r.avsc").write_text(json.dumps({"type": "record", "name": "R", "fields": [{"name": "v", "type": inner}]}))
    (tmp_path / "r.desc").write_bytes(
        descriptor_set(
            'syntax = "proto3"; message I { bytes value = 1; bytes metadata = 2; int32 srid = 3; bytes wkb = 4; } message R { I v = 1; }'
        )
    )
    formats: dict[str, dict[str, Any]] = {
        "avro": {"payloadSchemaFile": str(tmp_path / "r.avsc")},
        "protobuf": {"payloadSchemaFile": str(tmp_path / "r.desc"), "payloadMessage": "R"},
    }
    for format, options in formats.items():
        for whole in (kind, ArrayType(kind)):
            found = refusal(whole, payloadFormat=format, **options)
            assert found is not None and "\n" not in found and kind.simpleString() in found


def test_json_maps_have_string_keys() -> None:
    assert refusal(MapType(LongType(), LongType()), payloadFormat="json") == "field 'v' of 'value' cannot be map<bigint,bigint> in JSON"
    nested = ArrayType(StructType([StructField("g", MapType(StringType(), GeometryType(4326)))]))
    assert refusal(nested, payloadFormat="json") == "field 'v[].g{}' of 'value' cannot be geometry(4326) in JSON"
