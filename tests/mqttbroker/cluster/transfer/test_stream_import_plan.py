"""Streams that cannot be imported are refused with one line before anything is written; no Kafka broker runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bridge_spark.log.stream_config import StreamConfig
from bridge_spark.log.stream_log import StreamLogs
from mqttbroker.cluster.transfer.store_import import ImportFailure
from mqttbroker.cluster.transfer.stream_copy import UnfitRecord
from mqttbroker.cluster.transfer.stream_import import KafkaPartition, Producers, StreamImport
from mqttbroker.config.settings import Cluster, Stream
from sessions.message import Message
from sessions.store.database import Database
from sessions.store.salvage import set_stream_ends

pytestmark = pytest.mark.one_build

LAB = Stream(name="lab", filters=("lab/#",), partitions=2)


def message(number: int, **changed: Any) -> Message:
    fields = {"topic": f"lab/{number}", "payload": b"%d" % number, "properties": b"", **changed}
    return Message(fields["topic"], fields["payload"], 1, False, fields["properties"], "dev", 10**15 + number, 0)


def store(data: Path, count: int = 40) -> Path:
    """A data directory with the stream ``lab``; returns its database."""
    database = Database(data / "mqttbroker.db", durable=True)
    database.open(may_be_new=True)
    database.close()
    logs = StreamLogs(data / "streams", [StreamConfig("lab", ["lab/#"], 2, segment_bytes=500)], lambda: 1e9)
    logs.recover({})
    for first in range(0, count, 4):
        for partition in (0, 1):
            logs.append({("lab", partition): [message(number) for number in range(first, first + 4)]})
            logs.committed()
    logs.close()
    set_stream_ends(data / "mqttbroker.db", {("lab", 0): count, ("lab", 1): count})
    return data / "mqttbroker.db"


def plan(data: Path, streams: Sequence[Stream] = (LAB,), left_out: Sequence[str] = ()) -> StreamImport:
    found = StreamImport({}, Cluster(), streams, 1_000_000, data, left_out)
    found.plan(data / "mqttbroker.db")
    return found


def test_a_stream_needs_its_configuration(tmp_path: Path) -> None:
    store(tmp_path)
    plan(tmp_path)
    with pytest.raises(
        ImportFailure, match=r"stream 'lab': .*/streams/lab has records, .* no \[streams.lab\]: add it, or .* --leave-out lab"
    ):
        plan(tmp_path, [])
    plan(tmp_path, [], ["lab"])
    with pytest.raises(ImportFailure, match="has no stream 'other' that could be left out"):
        plan(tmp_path, [LAB], ["other"])
    with pytest.raises(ImportFailure, match="stream 'lab': has 2 partitions in .*/streams/lab and 3 in .*: set partitions = 2"):
        plan(tmp_path, [Stream(name="lab", filters=("lab/#",), partitions=3)])


def test_a_stream_without_records_needs_none(tmp_path: Path) -> None:
    store(tmp_path, 0)
    plan(tmp_path, [])


def test_all_files_must_be_there(tmp_path: Path) -> None:
    store(tmp_path)
    files = sorted((tmp_path / "streams" / "lab" / "1").glob("*.seg"))
    content = files[-1].read_bytes()
    files[-1].write_bytes(content[:-1])
    with pytest.raises(ImportFailure, match=rf"stream 'lab': .*/lab/1/{files[-1].name}: is cut off"):
        plan(tmp_path)
    for each in files:
        each.unlink()
    watermark = (tmp_path / "streams" / "lab" / "1" / "high_watermark").read_bytes()
    with pytest.raises(ImportFailure, match="stream 'lab': .*/lab/1: offsets 0 to 39 are missing"):
        plan(tmp_path)
    (tmp_path / "streams" / "lab" / "1" / "high_watermark").write_bytes(watermark[:-1])
    with pytest.raises(ImportFailure, match="stream 'lab': .*/1/high_watermark: a high watermark has"):
        plan(tmp_path)
    (tmp_path / "streams" / "lab" / "stream.json").write_text("{")
    with pytest.raises(ImportFailure, match="stream 'lab': .*stream.json is damaged"):
        plan(tmp_path)


def test_the_log_must_end_where_the_database_says(tmp_path: Path) -> None:
    database = store(tmp_path)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE stream_ends SET end_offset = 43 WHERE partition = 1")
        connection.commit()
    with pytest.raises(
        ImportFailure, match="stream 'lab', partition 1: ends at offset 40, but at 43 in .*: start the broker once and stop it"
    ):
        plan(tmp_path)


@pytest.mark.parametrize(
    ("compact", "changed", "reason"),
    [
        (
            False,
            {"payload": bytes(2000)},
            r"a record of 2\d\d\d bytes, more than max.message.bytes of the topic, 1500: raise limits.max_packet_size",
        ),
        (True, {}, "has no key, and a topic with compaction takes none without one: set compact = false"),
        (False, {"properties": b"\x99"}, "malformed properties"),
    ],
)
async def test_a_record_that_kafka_cannot_have(compact: bool, changed: dict[str, Any], reason: str) -> None:
    stream = Stream(name="lab", filters=("#",), partitions=1, compact=compact, key="user-property:machine")
    target = KafkaPartition(Producers({}, "c", 1500), None, stream)
    with pytest.raises(UnfitRecord, match=reason) as error:
        await target.append([message(0, properties=b"\x26\x00\x07machine\x00\x011"), message(1, **changed)])
    assert error.value.index == 1
