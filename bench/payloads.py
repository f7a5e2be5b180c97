#!/usr/bin/env python3
"""How fast the Spark source reads typed columns from payloads of each format.

    payloads.py [--rows N] [--rounds N] [FORMAT ...]

The same readings are written to a stream once per format. They are read by `path`, in one session, to `noop`, with all
fields as typed columns; formats alternate. Prints one line of JSON per run, and at the end a table of medians:

    cpu_s_per_m      CPU of the JVM and of Python per million rows; jvm_s_per_m, python_s_per_m
    rows_per_s_2     rows per second for which two cores have CPU: 2 / cpu_s_per_m
    rows_per_s       of the whole run, as measured
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc
from spark import START_US, STREAM, Meter, fill

from bridge_spark.tables.ingest_config import IngestConfig
from bridge_spark.tables.ingest_session import make_session
from sessions.message import Message

FIELDS = "n long not null, time timestamp not null, value double not null, pressure double, unit string"
AVRO = {"type": "record", "name": "Reading", "fields": [
    {"name": "n", "type": "long"}, {"name": "time", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    {"name": "value", "type": "double"}, {"name": "pressure", "type": ["null", "double"]}, {"name": "unit", "type": "string"},
]}  # fmt: skip
PROTO = """syntax = "proto3"; import "google/protobuf/timestamp.proto";
message Reading { int64 n = 1; google.protobuf.Timestamp time = 2; double value = 3; optional double pressure = 4; string unit = 5; }
"""
METRIC = b"\x0a\x05value\x18%b\x20\x0a\x69%b"  # name, timestamp, datatype Double, double_value


@dataclass
class Format:
    """How to encode reading ``number``, and the options and type of `value` to read it."""

    name: str
    encode: Callable[[int], bytes]
    value: str = f"struct<{FIELDS}>"
    options: dict[str, str] = field(default_factory=dict)


def values(number: int) -> tuple[int, int, float, float]:
    """Number, time in microseconds, value and pressure."""
    noise = number * 2654435761 % 4294967296
    return number, START_US + number * 1_000_000, round(20 + noise / 1e9, 4), round(1000 + noise % 9973 / 100, 2)


def text_time(microseconds: int) -> str:
    seconds = microseconds // 1_000_000
    return f"2026-01-31T{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}Z"


def as_json(number: int) -> bytes:
    n, time, value, pressure = values(number)
    return f'{{"n": {n}, "time": "{text_time(time)}", "value": {value}, "pressure": {pressure}, "unit": "C"}}'.encode()


def as_csv(number: int) -> bytes:
    n, time, value, pressure = values(number)
    return f"{n},{text_time(time)},{value},{pressure},C".encode()


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def as_sparkplug(number: int) -> bytes:
    """One metric per payload, so that a payload is a row here, too."""
    n, time, value, _ = values(number)
    metric = METRIC % (varint(time // 1000), struct.pack("<d", value))
    return b"\x08" + varint(time // 1000) + b"\x12" + varint(len(metric)) + metric + b"\x18" + varint(n % 256)


def formats(directory: Path) -> list[Format]:
    schema = fastavro.parse_schema(AVRO)
    (directory / "reading.avsc").write_text(json.dumps(AVRO), encoding="utf-8")
    (directory / "reading.proto").write_text(PROTO, encoding="utf-8")
    descriptors = directory / "reading.desc"
    well_known = Path(protoc.__file__).with_name("_proto")
    assert protoc.main(["protoc", f"-I{directory}", f"-I{well_known}", "--include_imports",
                        f"--descriptor_set_out={descriptors}", "reading.proto"]) == 0  # fmt: skip
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file:
        pool.Add(file)
    reading = GetMessageClass(pool.FindMessageTypeByName("Reading"))

    def as_avro(number: int) -> bytes:
        n, time, value, pressure = values(number)
        file = io.BytesIO()
        fastavro.schemaless_writer(file, schema, {"n": n, "time": time, "value": value, "pressure": pressure, "unit": "C"})
        return file.getvalue()

    def as_protobuf(number: int) -> bytes:
        n, time, value, pressure = values(number)
        found = reading(n=n, value=value, pressure=pressure, unit="C")
        found.time.FromMicroseconds(time)
        return bytes(found.SerializeToString())

    return [
        Format("json", as_json), Format("csv", as_csv),
        Format("number", lambda number: str(values(number)[2]).encode(), "double"),
        Format("sparkplug", as_sparkplug, "struct<name string, timestamp timestamp, double double, seq long>"),
        Format("avro", as_avro, options={"payloadSchemaFile": str(directory / "reading.avsc")}),
        Format("protobuf", as_protobuf, options={"payloadSchemaFile": str(descriptors), "payloadMessage": "Reading"}),
    ]  # fmt: skip


def message(each: Format, number: int) -> Message:
    topic = f"bench/plant-{number % 4}/machine-{number % 100}/temperature"
    return Message(topic, each.encode(number), 1, False, b"", f"device-{number % 100}", START_US + number * 10, 0)


class NoBroker:
    """In the place of a broker in `Meter`; its process has no CPU time."""

    class process:
        pid = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each format (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="the first is not in the table (%(default)s)")
    parser.add_argument("formats", nargs="*", metavar="FORMAT")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mqttbroker-payloads-") as name:
        directory = Path(name)
        known = formats(directory)
        if unknown := set(options.formats) - {each.name for each in known}:
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in known)}")
        chosen = [each for each in known if each.name in options.formats or not options.formats]
        for each in chosen:
            fill(directory / each.name, options.rows, partial(message, each))
        spark = make_session(IngestConfig(()))
        meter = Meter(spark, NoBroker())  # type: ignore[arg-type]
        runs: dict[str, list[dict[str, Any]]] = {}
        for number in range(options.rounds):
            for each in chosen:
                rows = spark.read.format("mqtt").options(
                    path=str(directory / each.name), stream=STREAM, payloadFormat=each.name, **each.options
                ).schema(f"topic string, timestamp timestamp, value {each.value}, reason string").load()  # fmt: skip
                if not number and (bad := rows.where("reason IS NOT NULL").count()):
                    raise SystemExit(f"payloads: {each.name} has {bad} dead letters")
                run = meter.measure(options.rows, lambda: rows.write.format("noop").mode("overwrite").save())
                run = {"format": each.name, "round": number, **run, "rows_per_s_2": round(2e6 / run["cpu_s_per_m"])}
                print(json.dumps(run), flush=True)
                if number or options.rounds == 1:
                    runs.setdefault(each.name, []).append(run)
        spark.stop()
    figures = ("rows_per_s_2", "cpu_s_per_m", "jvm_s_per_m", "python_s_per_m", "rows_per_s")
    print(f"\n{'format':10}", *(f"{figure:>15}" for figure in figures))
    for format_name, found in runs.items():
        print(f"{format_name:10}", *(f"{round(statistics.median(run[figure] for run in found), 2):15,}" for figure in figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
