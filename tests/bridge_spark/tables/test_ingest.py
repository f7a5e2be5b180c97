"""The ingest job: settings, payloads, errors, progress, and kills between any two steps."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from support.ingest_jobs import QUICK_SPARK, document, parquet_rows
from support.killed_driver import KILLED_DRIVER, killed
from support.paths import ROOT
from support.spark_session import StreamWriter, message, spark

from bridge_spark.ingest import main, run
from bridge_spark.tables.config_section import ConfigError, Section
from bridge_spark.tables.ingest_config import load_config, parse_config
from bridge_spark.tables.ingest_progress import TableProgress, Terminal
from bridge_spark.tables.ingest_session import IngestError, one_line
from bridge_spark.tables.jobs.table_pipeline import table_job
from bridge_spark.tables.rows.message_rows import MessageRows

pytestmark = pytest.mark.one_build

__all__ = ["spark"]

SLOW = pytest.mark.slow(reason="starts a Spark of its own")


# --- settings -------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"tables": {}}, "tables: there is none"),
    ({"sorce": {}}, "sorce: unknown key"),
    ({"source": {"path": "d", "port": 1}}, "source.port: unknown key"),
    ({"source": {"path": "d", "retries": 3}}, "source.retries: is for 'url' and 'bootstrap_servers' only"),
    ({"source": {"path": "d", "ca_file": "x"}}, "tables.t: option 'caFile': is for 'url' only"),
    ({"tables": {"t": {"output": "o", "schema": "a int"}}}, "tables.t.stream: is missing"),
    ({"tables": {"t": {"stream": "s", "schema": "a int"}}}, "tables.t.output: is missing"),
    ({"tables": {"t": {"stream": "s", "output": "o"}}}, "tables.t.schema: is missing"),
    (
        {"tables": {"t": {"stream": "s", "output": "o", "schem": "a int"}}},
        "tables.t.schema: is missing, and 'schem' is unknown: did you mean schema?",
    ),
    (
        {"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", "format": "xml"}}},
        "tables.t.format: 'xml' is none of json, csv, number, sparkplug, avro, protobuf, topics, raw",
    ),
    ({"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", "filter": "a#"}}}, "tables.t: option 'filter': 'a#' is not"),
    ({"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", "columns": ["colour"]}}}, "tables.t.columns: 'colour' is not"),
    (
        {"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", "columns": ["qos as x", "topic as X"]}}},
        "tables.t.columns: two columns",
    ),
    ({"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", "checkpoint": "o/c"}}}, "tables.t.checkpoint: "),
    (
        {"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", "max_offsets_per_trigger": "5"}}},
        "tables.t.max_offsets_per_trigger: '5' is not a positive",
    ),
    ({"tables": {"t/u": {}}}, "tables.t/u: a table's name"),
    *(
        ({"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", **keys}}}, f"tables.t.{reason}")
        for keys, reason in (
            ({"topic": "a/+"}, "topic: 'a/+' names no level"),
            ({"topic": "a/{b}", "filter": "a/+"}, "topic: is a filter itself"),
            ({"timestamps": "h"}, "timestamps: 'h' is none of iso, s, ms, us"),
            ({"delimiter": ";"}, "delimiter: is for format csv only"),
            ({"explode": True, "format": "raw", "schema": ""}, 'explode: has no meaning with format "raw"'),
            ({"fields": []}, "fields: is empty"),
            ({"fields": ["a..b"]}, "fields: 'a..b' is not"),
            ({"extra_fields": "keep"}, "extra_fields: 'keep' is none of ignore, map, add"),
            ({"extra_fields": "map", "format": "csv"}, "extra_fields: is for format"),
            ({"options": {"a": "b"}}, "options: Spark's own parser is not used any more: leave [options] out, and write 'timestamps', "),
        )
    ),
    *[
        ({"tables": {"t": {"stream": "s", "output": "o", "schema": "a int", **table}}}, f"tables.t.{reason}")
        for table, reason in (
            ({"deduplicate_by": ["a"]}, "deduplicate_by: needs a 'watermark'"),
            ({"watermark": "soon"}, "watermark: 'soon' is not a time like"),
            ({"watermark": "0 minutes"}, "watermark: '0 minutes' is not a time like"),
            ({"aggregates": {"m": {"window": "1 minute"}}}, "aggregates: needs a 'watermark'"),
            ({"watermark": "1 minute", "aggregates": {"m": {}}}, "aggregates.m.window: is missing"),
            ({"watermark": "1 minute", "aggregates": {"m": {"window": "1 hour", "x": 1}}}, "aggregates.m.x: unknown"),
            ({"watermark": "1 minute", "aggregates": {"m": {"window": "1 hour", "output": "o/m"}}}, "aggregates.m.output: "),
            ({"table_format": "orc"}, "table_format: 'orc' is none of parquet, delta, iceberg"),
            ({"output": "s3://b/t"}, "output: 's3://b/t' is a URL: Parquet tables are published by renaming directories"),
            ({"dead_letters": "s3://b/t"}, "dead_letters: 's3://b/t' is a URL"),
            ({"output": "s3://k:hidden@b/t", "table_format": "delta"}, "output: must not have credentials"),
            ({"output": "s3://b/t", "table_format": "delta"}, "checkpoint: is missing: give a directory on the driver's disk"),
            ({"output": "s3://b/t", "table_format": "delta", "checkpoint": "s3://b/c"}, "checkpoint: 's3://b/c' is a URL"),
            ({"output": "tables/t", "table_format": "iceberg"}, "output: 'tables/t' is not the name of a table in the catalog"),
            ({"output": "n.t", "table_format": "iceberg"}, "checkpoint: is missing: give a directory on the driver's disk"),
            (
                {"output": "n.t", "table_format": "iceberg", "checkpoint": "c", "dead_letters": "n.t"},
                "dead_letters: n.t overlaps with tables.t.output",
            ),
            ({"expire_after": "9 days"}, 'expire_after: is for table_format "delta" and "iceberg"'),
            ({"expire_after": "9 minutes", "table_format": "delta"}, "expire_after: is less than 1 hour"),
            ({"expire_after": 9, "table_format": "delta"}, "expire_after: 9 is not a text"),
            (
                {"storage": {"AWS_SECRET_ACCESS_KEY": ["hidden"]}, "table_format": "delta"},
                "storage.AWS_SECRET_ACCESS_KEY: is neither a text, a number nor true or false",
            ),
            ({"storage": "s3"}, "storage: is not a table"),
        )
    ],
]


@pytest.mark.parametrize(("given", "reason"), REFUSED)
def test_invalid_settings_are_one_line(given: dict[str, Any], reason: str) -> None:
    whole = {"source": {"path": "d"}, "tables": {"t": {"stream": "s", "output": "o", "schema": "a int"}}} | given
    with pytest.raises(ConfigError) as caught:
        parse_config(whole, "ingest.toml")
    assert f"ingest.toml: {reason}" in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_tables_in_a_catalog_and_their_shared_settings() -> None:
    table = {
        "stream": "s",
        "output": "n.t",
        "checkpoint": "c",
        "schema": "a int",
        "table_format": "iceberg",
        "watermark": "1 minute",
        "aggregates": {"m": {"window": "1 hour"}},
        "expire_after": "2 hours",
    }
    catalog = {"name": "prod", "uri": "http://h", "s3": {"endpoint": "http://e", "path-style-access": True}}
    delta = {
        "stream": "s",
        "output": "s3://b/t/",
        "checkpoint": "d",
        "schema": "a int",
        "table_format": "delta",
        "storage": {"AWS_REGION": "here"},
    }
    parsed = parse_config(
        {
            "source": {"path": "d"},
            "catalog": catalog,
            "tables": {"t": table, "u": delta},
            "storage": {"AWS_REGION": "there", "AWS_ALLOW_HTTP": True},
        }
    ).tables
    found = parsed[0]
    assert (found.output, found.dead_letters, found.backfill) == ("n.t", "n.t_rejected", "n.t_backfill")
    [aggregate] = found.sink.aggregates
    assert (aggregate.output, aggregate.checkpoint) == ("n.t_m", Path("c.m").absolute())
    assert found.sink.expire_after == 7200 and found.sink.catalog.name == "prod"
    assert found.sink.catalog.properties == {"uri": "http://h", "s3.endpoint": "http://e", "s3.path-style-access": "true"}
    assert (parsed[1].output, parsed[1].dead_letters) == ("s3://b/t", "s3://b/t.rejected")
    assert parsed[1].sink.storage == {"AWS_REGION": "here", "AWS_ALLOW_HTTP": "true"}


@pytest.mark.parametrize(("given", "retries"), [({}, "14"), ({"retries": 2}, "2")])
def test_a_running_query_retries_while_the_broker_is_away(given: dict[str, int], retries: str) -> None:
    whole = {"source": {"url": "http://127.0.0.1:1", **given}, "tables": document(Path("."))["tables"]}
    assert parse_config(whole).tables[0].source["fetch.numRetries"] == retries


def test_an_unusable_source_is_reported_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("bridge_spark.ingest.make_session", started.append)
    monkeypatch.setattr("bridge_spark.ingest.require_spark", lambda: None)
    (tmp_path / "data").mkdir()
    with pytest.raises(IngestError, match="ingest: tables.t: mqtt source: option 'stream': no stream 'sensors'"):
        run(parse_config(document(tmp_path)))
    waits: list[float] = []
    monkeypatch.setattr("bridge_spark.source.http_client.time", SimpleNamespace(sleep=waits.append))
    with pytest.raises(IngestError, match="ingest: tables.t: mqtt source: .*127.0.0.1:1"):
        run(parse_config({**document(tmp_path), "source": {"url": "http://127.0.0.1:1"}}))
    assert started == [] and len(waits) == 5


def test_the_example_is_complete() -> None:
    table = load_config(ROOT / "conf" / "ingest.toml").tables[0]
    assert table.source["stream"] == "sensors" and ("timestamp", "received") in table.payload.columns


def test_the_example_names_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    class Asked(dict[str, Any]):
        def pop(self, key: str, *default: Any) -> Any:
            asked.add(key)
            return super().pop(key, *default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

    start = Section.__init__

    def recording(self: Section, where: str, name: str, values: Any) -> None:
        start(self, where, name, values)
        self.values = Asked(self.values)

    monkeypatch.setattr(Section, "__init__", recording)
    example = ROOT / "conf" / "ingest.toml"
    load_config(example)
    text = example.read_text()
    assert {"path", "master", "topic", "schema"} <= asked
    asked.remove("options")  # which is no more
    assert not {key for key in asked if not re.search(rf"^(# )?({key} = |\[(.*\.)?{key}[.\]])", text, re.MULTILINE)}


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert main([str(tmp_path / "none.toml")]) == 2
        for text in (b"[tables\n", b"a = '\xff'", b"a = " + b"[" * 1000, b"a = " + b"9" * 5000):
            (tmp_path / "bad.toml").write_bytes(text)
            assert main([str(tmp_path / "bad.toml")]) == 2
        example = str(ROOT / "conf" / "ingest.toml")
        assert main([example, "--trigger", "soon"]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert "none.toml: file: No such file" in lines[0]
    assert all("bad.toml: file: not TOML" in line for line in lines[1:5]) and "'soon' is not a time" in lines[5]


# --- payloads -------------------------------------------------------------------------------------------------------

PAYLOADS: list[tuple[str, bytes, object]] = [
    ("json", b'{"n": 1, "text": "a"}', 1),
    ("json", b'{"n": 2, "more": {"x": 1}}', 2),
    ("json", b"", "empty payload"),
    ("json", b"{", "not JSON"),
    ("json", b'{"n": "x"}', "field 'n' is not a number"),
    ("json", b'{"text": "no n"}', "field 'n' is missing"),
    ("json", b'{"n": 1, "value": 1e999}', "field 'value' is not a finite number"),
    ("raw", b"\x00\xff", b"\x00\xff"),
    ("raw", b"", b""),
]
SCHEMA = "n long not null, text string, value double"
FORMATS: dict[str, dict[str, Any]] = {
    "json": {"format": "json", "schema": SCHEMA},
    "raw": {"format": "raw"},
}


def test_each_payload_becomes_a_row_or_a_dead_letter(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(number, f"{kind}/x", payload) for number, (kind, payload, _) in enumerate(PAYLOADS)])
    settings = document(tmp_path)
    settings["tables"] = {
        kind: {"stream": "sensors", "filter": f"{kind}/#", "output": str(tmp_path / kind), **keys} for kind, keys in FORMATS.items()
    }
    progress = {table.name: table for table in run(parse_config(settings), once=True, session=spark)}
    value = {"json": "n", "raw": "payload"}
    found: dict[int, object] = {}
    for kind in value:
        good, bad = parquet_rows(tmp_path / kind), parquet_rows(tmp_path / f"{kind}.rejected")
        assert (progress[kind].rows, progress[kind].bad) == (len(good), len(bad))
        found.update({row["offset"]: row[value[kind]] for row in good})
        assert not {row["offset"] for row in bad} & found.keys()
        found.update({row["offset"]: row["reason"] for row in bad})
        assert all(row["payload"] == PAYLOADS[row["offset"]][1] for row in bad)
    assert found == {number: result for number, (_, _, result) in enumerate(PAYLOADS)}


class StopFirst(threading.Event):
    """Lets a batch begin as soon as `stop` holds the lock of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.begun = threading.Event()
        self.held = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return self.held.wait(timeout)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self.lock.acquire(blocking, timeout)
        self.held.set()
        return taken

    def release(self) -> None:
        self.lock.release()


def test_a_batch_that_begins_during_stop_is_left_for_the_next_run(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(n) for n in range(5)])
    settings = parse_config(document(tmp_path))
    job = table_job(settings.tables[0], spark, "here")
    gate = StopFirst()
    monkeypatched: Any = job
    monkeypatched._started = monkeypatched._in_batch = gate
    job.start(None)
    assert gate.begun.wait(120)
    job.stop()
    job.check()
    job.close()
    assert parquet_rows(tmp_path / "out") == []
    run(settings, once=True, session=spark)
    assert len(parquet_rows(tmp_path / "out")) == 5


# --- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "published"), [pytest.param("written", 0, marks=SLOW), ("published", 1)])
def test_a_kill_between_two_steps_loses_and_repeats_no_rows(spark: SparkSession, tmp_path: Path, where: str, published: int) -> None:
    writer = StreamWriter(tmp_path / "data", partitions=2)
    for partition in (0, 1):
        writer.append(partition, [message(n, payload=b"bad" if n % 50 == 7 else None) for n in range(300)])
    settings = document(tmp_path, max_offsets_per_trigger=200)
    output, rejected = tmp_path / "out", tmp_path / "out.rejected"
    killed(KILLED_DRIVER, where, json.dumps(settings))
    assert bool(parquet_rows(output)) == published and parquet_rows(rejected)
    known, kept = parquet_rows(output), {path.stat().st_ino for path in output.rglob("*.parquet")}
    (told,) = run(parse_config(settings), once=True, session=spark)
    assert (told.rows, told.bad, told.batches) == ((588, 12, 3), (392, 8, 2))[published]
    after = parquet_rows(output)
    assert [row for row in known if row not in after] == []
    assert kept <= {path.stat().st_ino for path in output.rglob("*.parquet")}
    everything = {(partition, offset) for partition in (0, 1) for offset in range(300)}
    bad = {place for place in everything if place[1] % 50 == 7}
    for directory, places in ((output, everything - bad), (rejected, bad)):
        found = [(row["partition"], row["offset"]) for row in parquet_rows(directory)]
        assert len(found) == len(places) and set(found) == places
        by_spark = [(row["partition"], row["offset"]) for row in spark.read.parquet(str(directory)).collect()]
        assert len(by_spark) == len(places) and set(by_spark) == places


SPARKS_OWN_SINK = """
import os, signal, sys
from pyspark.sql import SparkSession
from bridge_spark.datasource import MqttDataSource

data, out, settings = sys.argv[1], sys.argv[2], dict(pair.split("=", 1) for pair in sys.argv[3:])
builder = SparkSession.builder.master("local[1]")
for key, value in settings.items():
    builder = builder.config(key, value)
session = builder.getOrCreate()
session.sparkContext.setLogLevel("OFF")
if not os.environ.get("MQTT_AUTOLOAD"):
    session.dataSource.register(MqttDataSource)
pids = [session._jvm.java.lang.ProcessHandle.current().pid(), os.getpid()]

def kill_in_second_task(batches):
    for batch in batches:
        if batch.column("partition")[0].as_py() == 1:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        yield batch

messages = session.readStream.format("mqtt").options(
    path=data, stream="sensors", startingOffsets="earliest", minPartitions="2").load()
messages = messages.select("partition", "offset").mapInArrow(kill_in_second_task, "partition int, offset long")
messages.writeStream.format("parquet").option("path", out + "/table").option(
    "checkpointLocation", out + "/checkpoint").trigger(availableNow=True).start().awaitTermination()
"""


@SLOW
def test_sparks_own_sink_repeats_rows_for_other_readers(spark: SparkSession, tmp_path: Path) -> None:
    """The reason for the job's own tables: files of tasks that ended before the kill stay in the directory."""
    writer = StreamWriter(tmp_path / "data", partitions=2)
    for partition in (0, 1):
        writer.append(partition, [message(n) for n in range(100)])
    arguments = [f"{key}={value}" for key, value in (QUICK_SPARK | {"spark.ui.enabled": "false"}).items()]
    os.environ["MQTT_AUTOLOAD"] = "1"
    killed(SPARKS_OWN_SINK, str(tmp_path / "data"), str(tmp_path), *arguments)
    messages = (
        spark.readStream.format("mqtt")
        .options(path=str(tmp_path / "data"), stream="sensors", startingOffsets="earliest", minPartitions="2")
        .load()
    )
    query = (
        messages.select("partition", "offset")
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "table"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert spark.read.parquet(str(tmp_path / "table")).count() == 200
    places = [(row["partition"], row["offset"]) for row in parquet_rows(tmp_path / "table")]
    assert len(places) == 300 and len(set(places)) == 200


# --- running --------------------------------------------------------------------------------------------------------


def test_the_job_runs_until_stopped_and_reports(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(n) for n in range(10)])
    stop = threading.Event()
    seen: list[int] = []

    def report(tables: list[TableProgress]) -> None:
        seen.append(tables[0].rows)
        if tables[0].rows == 10 and writer.manifest()["partitions"][0]["high_watermark"] == 10:
            writer.append(0, [message(n) for n in range(10, 15)])
        if tables[0].rows == 15:
            stop.set()

    [progress] = run(parse_config(document(tmp_path)), trigger="100ms", stop=stop, report=report, session=spark)
    assert progress.rows == 15 and [row["n"] for row in parquet_rows(tmp_path / "out")] == list(range(15))
    assert not spark.streams.active

    writer.append(0, [message(15)])
    [progress] = run(parse_config(document(tmp_path)), once=True, session=spark)
    assert progress.rows == 1 and [row["n"] for row in parquet_rows(tmp_path / "out")] == list(range(16))


def test_a_table_that_fails_ends_the_job(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0)])
    other = StreamWriter(tmp_path / "data", "other")
    other.append(0, [message(0)])
    settings = document(tmp_path)
    settings["tables"]["u"] = {"stream": "other", "schema": "n long not null", "output": str(tmp_path / "u")}
    lost: list[int] = []

    def report(tables: list[TableProgress]) -> None:
        if tables[1].rows and not lost:
            lost.append(other.lose(0, 5))

    with pytest.raises(IngestError, match=r"tables\.u: mqtt source: partition 0: offsets 1 to 5 were lost to damage"):
        run(parse_config(settings), trigger="200ms", report=report, session=spark)


def test_failures_are_one_line(spark: SparkSession, tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data")
    writer.append(0, [message(n) for n in range(10)])
    for table, reason in (
        ({"stream": "meters"}, "ingest: tables.t: mqtt source: option 'stream': no stream 'meters'"),
        ({"schema": "n lng"}, "ingest: tables.t.schema: 'n lng' is not a DDL schema"),
        (
            {"schema": "Range double"},
            "ingest: tables.t.schema: no column can be named 'range', as directories of tables are",
        ),
        ({"schema": "topic string"}, "ingest: tables.t.schema: two columns are named 'topic'"),
    ):
        with pytest.raises(IngestError) as caught:
            run(parse_config(document(tmp_path, **table)), once=True, session=spark)
        assert str(caught.value).startswith(reason) and "\n" not in str(caught.value)
    damaged = bytearray(writer.segments(0)[0].read_bytes())
    damaged[-1] ^= 1
    writer.segments(0)[0].write_bytes(damaged)
    with pytest.raises(IngestError, match=r"tables\.t: mqtt source: .*\.seg is corrupt at offset 0") as caught:
        run(parse_config(document(tmp_path, checkpoint=str(tmp_path / "c2"))), once=True, session=spark)
    assert "\n" not in str(caught.value)


class SparkError(Exception):
    """An error of PySpark: a text, and the cause in Java."""

    def __init__(self, text: str, cause: Exception | None = None) -> None:
        super().__init__(text)
        self._cause = cause


STACK = "\n\tat org.apache.spark.A.b(A.scala:1)\n\t... 12 more\n"
AWAITED = "Exception thrown in awaitResult: "
CALLED = "An error occurred while calling o63.parquet.\n: org.apache.spark.SparkException: "
PROXY = 'An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):\n  File "a.py"\n'
PLAN = "\n\n=== Streaming Query ===\nIdentifier: [id = 1]\n"


@pytest.mark.parametrize(("error", "line"), [
    (SparkError(AWAITED + PLAN, SparkError("org.apache.spark.SparkException: " + AWAITED,
                                           SparkError("org.apache.spark.E: [STATE] failed for batch 1.\nMore."))),
     "[STATE] failed for batch 1."),
    (SparkError(CALLED + "Job aborted: Lost task 0.0: java.io.IOException: Mkdirs failed" + STACK),
     "Job aborted: Lost task 0.0: java.io.IOException: Mkdirs failed"),
    (SparkError(CALLED + AWAITED + STACK + "Caused by: java.net.SocketException: reset" + STACK), "java.net.SocketException: reset"),
    (SparkError(PROXY + "py4j.protocol.Py4JJavaError: " + CALLED + "no room" + STACK + PLAN), "no room"),
    (SparkError("Job aborted" + STACK + PLAN), "Job aborted"),
    (SparkError(AWAITED + PLAN), AWAITED.strip()),
    (SparkError(PROXY + "ValueError: mqtt source: wrong token" + PLAN), "mqtt source: wrong token"),
    (KeyError(), "KeyError"),
], ids=range(8))  # fmt: skip
def test_the_line_of_an_error_is_its_cause(error: Exception, line: str) -> None:
    assert one_line(error) == line


def test_an_output_and_its_checkpoint_belong_together(spark: SparkSession, tmp_path: Path) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(0)])
    run(parse_config(document(tmp_path)), once=True, session=spark)
    with pytest.raises(IngestError, match="has batches but .* is new"):
        run(parse_config(document(tmp_path, checkpoint=str(tmp_path / "other"))), once=True, session=spark)


@pytest.mark.parametrize("reason", ["[CANNOT_OPEN_SOCKET] Cannot open socket: timed out.", "Python worker failed to connect back."])
@pytest.mark.parametrize("failures", [2, 99])
def test_a_query_whose_workers_start_too_slowly_is_tried_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, failures: int
) -> None:
    StreamWriter(tmp_path / "data").append(0, [message(n) for n in range(5)])
    attempts = 0

    def too_slow(rows: MessageRows, *given: Any, call: Any = MessageRows.stream) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= failures:
            raise SparkError(reason)
        return call(rows, *given)

    monkeypatch.setattr(MessageRows, "stream", too_slow)
    if failures == 2:
        run(parse_config(document(tmp_path)), once=True, session=spark)
        assert len(parquet_rows(tmp_path / "out")) == 5
        return
    with pytest.raises(IngestError, match=r"^ingest: tables.t: the machine is too busy: .* in 6 attempts; .*") as caught:
        run(parse_config(document(tmp_path)), once=True, session=spark)
    assert "\n" not in str(caught.value) and attempts == 6


def test_another_stream_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """By the job before its queries start, and by Spark's own query with the same checkpoint."""
    for name, count in (("flow", 100), ("ev", 150)):
        StreamWriter(tmp_path / "data", name).append(0, [message(number) for number in range(count)])
    aggregates = {"aggregates": {"m": {"window": "1 minute", "values": ["n"]}}, "watermark": "1 minute"}
    run(parse_config(document(tmp_path, stream="flow", **aggregates)), once=True, session=spark)
    with pytest.raises(IngestError, match="^ingest: tables.t: mqtt source: option 'stream': .* of stream 'flow', not of 'ev'"):
        run(parse_config(document(tmp_path, stream="ev", **aggregates)), once=True, session=spark)
    source = spark.readStream.format("mqtt").options(path=str(tmp_path / "data"), stream="ev").load()
    checkpoint = str(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "out.checkpoint", checkpoint)
    query = source.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    with pytest.raises(Exception) as refused:
        query.awaitTermination()
    assert one_line(refused.value).startswith("mqtt source: option 'stream': the checkpoint is of stream 'flow', not of 'ev'")
    assert [row["n"] for row in parquet_rows(tmp_path / "out")] == [*range(100)]


def test_progress_as_text() -> None:
    out = io.StringIO()
    terminal = Terminal(out, every_s=0)
    table = TableProgress("readings")
    table.rows, table.bad, table.late, table.batches, table.lag = 1_234_567, 3, 2, 2, 4_000
    terminal([table])
    terminal.finish([table])
    first, last = out.getvalue().splitlines()
    assert first.startswith("readings: 1,234,567 rows, ") and first.endswith("lag 4,000 offsets, 3 bad, 2 late")
    assert last.startswith("readings: 1,234,567 rows, 3 bad, 2 late, 2 batches in ")
