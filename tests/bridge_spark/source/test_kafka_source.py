"""Spark's own Kafka source on a cluster's streams: by the code of docs/spark.md its rows are those of format("mqtt")."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.class_archive import QUICK_JVM
from support.documented_kafka_source import kafka_source_code, kafka_source_options
from support.kafka import KafkaCluster
from support.paths import ROOT
from support.spark_kafka_jars import spark_kafka_jars
from support.spark_session import message, python_path
from support.stream_topic import Topic

pytestmark = [pytest.mark.slow("needs Kafka and a session of Spark: 1 minute"), pytest.mark.one_build]

PROGRAM = ROOT / "tests" / "support" / "kafka_source_reads.py"
PROPERTIES = (
    b"\x01\x01"
    b"\x03\x00\x10application/json"
    b"\x08\x00\x05reply"
    b"\x09\x00\x03\x00\xff\x01"
    b"\x26\x00\x01a\x00\x011"
    b"\x26\x00\x02\xc3\xa9\x00\x00"
    b"\x26\x00\x01a\x00\x012"
    b"\x26\x00\x0amqtt.topic\x00\x01x"
)


class Reads:
    """The process that reads; a context manager."""

    def __init__(self, topic: Topic, directory: Path) -> None:
        self._directory = directory
        self._job = directory / "job.json"
        servers = ",".join(topic.kafka.bootstrap)
        code = kafka_source_code(servers, topic.name)
        job = {"code": code, "kafka": kafka_source_options(code), "mqtt": topic.options()}
        self._job.write_text(json.dumps(job), encoding="utf-8")

    def __enter__(self) -> Reads:
        jars = ",".join(spark_kafka_jars())
        path = os.pathsep.join(filter(None, [python_path(), str(ROOT / "tests")]))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYSPARK_SUBMIT_ARGS": f'--jars {jars} --driver-java-options "{QUICK_JVM}" pyspark-shell',
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(self._directory), str(self._job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self._directory,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def read(self, number: int) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def rows(self, table: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self._directory / table).to_pylist()
        for row in rows:
            row["user_properties"] = dict(row["user_properties"])
        return sorted(rows, key=lambda row: (row["partition"], row["offset"]))

    def types(self, table: str) -> dict[str, str]:
        schema = pq.read_table(self._directory / table).schema
        return {name: str(kind).replace(" not null", "") for name, kind in zip(schema.names, schema.types)}


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), 1) as cluster:
        yield cluster


def test_the_rows_of_both_sources_are_the_same(kafka: KafkaCluster, tmp_path: Path) -> None:
    topic = Topic(kafka, compact=True)
    topic.append(0, [message(0, "sensors/a", b"", 0), message(1, "sensors/\u00fc", b"\x00\xff", 2, True, PROPERTIES)])
    topic.append(0, [message(2, "b", b"aborted")], commit=False)
    topic.append(1, [message(3, "b", b"x" * 1000, 1, False, b"\x26\x00\x01k\x00\x01v")])
    topic.append(0, [message(4, "b", b"second")])
    with Reads(topic, tmp_path) as reads:
        reads.read(1)
        topic.append(1, [message(5, "b", b"aborted, the last")], commit=False)
        topic.append(0, [message(number, "b", b"%d" % number) for number in range(6, 20)])
        reads.read(2)
    for number, payloads in enumerate([[b"", b"\x00\xff", b"second"], [b"%d" % number for number in range(6, 20)]], 1):
        found = reads.rows(f"mqtt-{number}")
        assert [row["payload"] for row in found if row["partition"] == 0][-len(payloads) :] == payloads
        assert reads.rows(f"kafka-{number}") == found
    assert found[1]["user_properties"] == {"a": "2", "\u00e9": "", "mqtt.topic": "x"}
    assert len(found) == 18
    assert reads.rows("mqtt-stream") == found
    assert reads.rows("kafka-stream") == found
    assert reads.types("kafka-2") == reads.types("mqtt-2")
