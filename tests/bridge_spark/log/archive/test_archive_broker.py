"""A broker with an archive in a directory and in S3: readers by URL, path and other programs; kills; settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import duckdb
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pytest
from pyspark.sql import SparkSession
from support.broker_process import BrokerProcess
from support.patience import PATIENCE
from support.processes import children, command_line
from support.raw_client import RawClient
from support.s3 import S3Server, s3
from support.spark_session import spark

from bridge_spark.datasource import MqttDataSource, explain
from bridge_spark.source.option_values import OptionError
from bridge_spark.source.table_options import GivenOptions
from mqttbroker.codec.properties import Properties
from mqttbroker.config.load import ConfigError, load_settings

pytestmark = pytest.mark.one_build
__all__ = ["s3", "spark"]

StartBroker = Callable[..., BrokerProcess]
HISTORY = "s/*/*.parquet"


def config(archive: str, **more: Any) -> dict[str, Any]:
    return {
        "streams": {
            "s": {
                "filters": ["sensors/#"],
                "partitions": 2,
                "segment_bytes": "4KiB",
                "seal": True,
                "archive": archive,
                "retention_bytes": "6KiB",
                **more,
            }
        }
    }


def rows(**options: str) -> list[dict[str, Any]]:
    found = MqttDataSource({"stream": "s", "startingOffsets": "earliest", **options})
    reader = found.reader(found.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def places(found: list[dict[str, Any]]) -> list[tuple[int, int, bytes]]:
    """Partition, offset and payload of each row; each partition's offsets have no gap and no copy."""
    for number in {row["partition"] for row in found}:
        offsets = [row["offset"] for row in found if row["partition"] == number]
        assert offsets == list(range(len(offsets)))
    return sorted((row["partition"], row["offset"], row["payload"]) for row in found)


def manifest(broker: BrokerProcess) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(broker.get("/streams/s"))
    return found


def until(condition: Callable[[], bool], timeout: float = 50.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


class Publisher:
    """Publishes numbers to 8 topics."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.count = 0

    def publish(self, count: int) -> None:
        with RawClient(self.broker.port) as client:
            client.connect("dev")
            for _ in range(count):
                assert client.publish(f"sensors/{self.count % 8}", b"%d" % self.count, 1) == 0
                self.count += 1

    def publish_until_history_is_in_the_archive_only(self) -> None:
        def moved() -> bool:
            self.publish(40)
            parts = manifest(self.broker)["partitions"]
            return all(
                part.get("archive", {}).get("segments", 0) > 1 and part["segments"] and part["segments"][0]["first_offset"] > 0
                for part in parts
            )

        until(moved)

    def check(self, found: list[dict[str, Any]]) -> None:
        assert len(places(found)) == self.count
        assert sorted(int(row["payload"]) for row in found) == list(range(self.count))


def by_mqtt(broker: BrokerProcess, start: str, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
    """The payloads of the records from a start on, until all wanted ones are there, by partition and offset."""
    found: dict[tuple[int, int], bytes] = {}
    with RawClient(broker.port) as client:
        client.connect()
        properties = Properties()
        properties.user_properties = [("stream-offset", start)]
        suback = client.subscribe("$stream/s", options=0, properties=properties)
        assert suback.reason_codes == [0] and not suback.properties.user_properties
        last = {0: -1, 1: -1}
        while not wanted <= found.keys():
            message = client.take(20)
            place = dict(message.properties.user_properties)
            number, offset = int(place["partition"]), int(place["offset"])
            assert offset == last[number] + 1 or last[number] < 0, f"offset {offset} after {last[number]}"
            last[number] = offset
            found[number, offset] = message.payload
    return found


def forget_decoded_rows(broker: BrokerProcess) -> None:
    """End the processes that decode segments, and keep rows of some in memory."""
    for child in children(broker.pid):
        if b"row_process" in command_line(child):
            os.kill(child, signal.SIGKILL)


def read_everywhere(broker: BrokerProcess, publisher: Publisher, **options: str) -> None:
    by_url, by_path = rows(url=broker.url, **options), rows(path=str(broker.data_dir), **options)
    publisher.check(by_url)
    assert by_path == by_url
    stored = {(number, offset): payload for number, offset, payload in places(by_url)}
    assert by_mqtt(broker, "earliest", set(stored)) == stored
    behind = {place: payload for place, payload in stored.items() if place[1] >= 20}
    assert by_mqtt(broker, "offset:20", set(behind)) == behind
    parts = manifest(broker)["partitions"]
    oldest = min(row["timestamp"] for row in by_url if row["partition"] == 0 and row["offset"] == 30)
    micros = int(oldest.timestamp()) * 1_000_000 + oldest.microsecond
    expected = {
        number: next(row["offset"] for row in by_url if row["partition"] == number and row["timestamp"] >= oldest) for number in (0, 1)
    }
    assert all(expected[part["partition"]] < part["segments"][0]["first_offset"] for part in parts)
    answer = json.loads(broker.get(f"/streams/s/offsets?timestamp={micros}"))["partitions"]
    assert {part["partition"]: part["offset"] for part in answer} == expected
    behind = {place: payload for place, payload in stored.items() if place[1] >= expected[place[0]]}
    assert by_mqtt(broker, str(micros), set(behind)) == behind
    since = oldest.isoformat()
    for where in ({"url": broker.url}, {"path": str(broker.data_dir)}):
        found = rows(**where, **options, startingTimestamp=since)
        assert {number: min(row["offset"] for row in found if row["partition"] == number) for number in (0, 1)} == expected
        some = rows(**where, **options, where="offset BETWEEN 20 AND 22 AND partition = 1")
        assert [row["offset"] for row in some] == [20, 21, 22]
        plan = explain(**where, **options, stream="s", where=f"timestamp < '{since}'")
        assert " of " in plan and "partition 0: offsets 0 to " in plan


def test_history_in_a_directory(start_broker: StartBroker, tmp_path: Path, spark: SparkSession) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    broker = start_broker(config=config(str(archive)))
    publisher = Publisher(broker)
    # A query that begins at the first offset, and goes on while segments move to the archive and leave the data directory.
    stream = (
        spark.readStream.format("mqtt").options(url=broker.url, stream="s", startingOffsets="earliest", maxOffsetsPerTrigger="150").load()
    )
    query = stream.writeStream.format("memory").queryName("followed").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    publisher.publish_until_history_is_in_the_archive_only()
    read_everywhere(broker, publisher)
    broker.restart(kill=True)
    publisher.publish(50)
    read_everywhere(broker, publisher)
    query.processAllAvailable()
    assert spark.table("followed").count() == publisher.count == spark.table("followed").dropDuplicates(["partition", "offset"]).count()
    query.stop()
    loaded = spark.read.format("mqtt").options(url=broker.url, stream="s").load()
    assert loaded.selectExpr("count(DISTINCT partition, offset)", "count(*)").first() == (publisher.count, publisher.count)

    # A consumer whose next offset is in the archive has lost nothing, and local retention is no risk to it.
    report = Request(f"{broker.url}/streams/s/consumers/slow", b'{"offsets": {"0": 5, "1": 0}}', method="PUT")
    urlopen(report, timeout=30).close()
    (slow,) = json.loads(broker.get("/streams/s/consumers"))["consumers"]
    assert not slow["at_risk"] and [part["lost"] for part in slow["partitions"]] == [0, 0]
    assert slow["lag"] == publisher.count - 5 and 0 < slow["lag_seconds"] < 200

    # The archive as it lies
    until(lambda: all(part["segments"][0]["first_offset"] <= part["archive"]["end_offset"] for part in manifest(broker)["partitions"]))
    parts = manifest(broker)["partitions"]
    archived = [(part["partition"], offset) for part in parts for offset in range(part["archive"]["end_offset"])]
    query_text = f"SELECT partition, \"offset\" FROM read_parquet('{archive}/{HISTORY}') ORDER BY ALL"
    by_duckdb = duckdb.sql(query_text).fetchall()
    assert by_duckdb[: len(archived)] and set(archived) <= set(by_duckdb) and len(by_duckdb) == len(set(by_duckdb))
    by_polars = pl.scan_parquet(f"{archive}/{HISTORY}").select("partition", "offset").sort("partition", "offset").collect()
    assert by_polars.rows() == by_duckdb
    by_pandas = pd.read_parquet(archive / "s", columns=["partition", "offset"]).sort_values(["partition", "offset"])
    assert list(by_pandas.itertuples(index=False, name=None)) == by_duckdb

    # The archive is away
    archive.rename(tmp_path / "elsewhere")
    publisher.publish(600)
    broker.wait_for_log("event=not_archived stream=s waiting=[0-9]+ .* is not a directory", 4 * PATIENCE)
    assert b"archive of stream s: " in broker.get("/readyz")
    with pytest.raises(Exception, match="the archive .* cannot be read: .*archive is not a directory"):
        rows(url=broker.url)
    forget_decoded_rows(broker)
    with pytest.raises(ConnectionError):
        by_mqtt(broker, "earliest", {(0, 0)})
    broker.wait_for_log("event=stream_failed .* reason=.archive of stream s: .*archive is not a directory")
    publisher.check(rows(url=broker.url, **{"archive.location": str(tmp_path / "elsewhere")}))
    waiting = [line for line in broker.get("/metrics").decode().splitlines() if "archive_waiting_segments{" in line]
    assert sum(float(line.split()[-1]) for line in waiting) > 0
    assert b"mqttbroker_stream_archive_failures_total 0.0" not in broker.get("/metrics")
    (tmp_path / "elsewhere").rename(archive)
    until(lambda: b"archive of stream s" not in broker.get("/readyz"))
    read_everywhere(broker, publisher)

    # Backup, check, restore
    assert broker.terminate() == 0
    run = [sys.executable, "-m", "mqttbroker"]
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    subprocess.run([*run, "backup", str(backup), "--data-dir", str(broker.data_dir)], check=True, env=broker.env)
    checked = subprocess.run([*run, "check-store", str(backup)], check=True, env=broker.env, capture_output=True, text=True)
    assert "archived are the offsets 0 to " in checked.stdout
    subprocess.run([*run, "restore", str(backup), "--data-dir", str(restored)], check=True, env=broker.env)
    publisher.check(rows(path=str(restored)))


@pytest.mark.slow("the test above, with S3")
def test_history_in_s3(start_broker: StartBroker, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = start_broker(config=config("s3://bucket/plant one"), env=s3.environment)
    for name in s3.environment:
        monkeypatch.delenv(name)
    publisher = Publisher(broker)
    publisher.publish_until_history_is_in_the_archive_only()
    assert manifest(broker)["archive"] == "s3://bucket/plant%20one"
    # Readers with options of their own, then with the environment
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    read_everywhere(
        broker,
        publisher,
        **{
            "archive.accessKey": "test",
            "archive.secretKey": "testing",
            "archive.endpoint": s3.url,
            "archive.region": "us-east-1",
        },
    )
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    broker.restart(kill=True)
    publisher.publish(50)
    read_everywhere(broker, publisher)
    assert "testing" not in broker.log

    files = fs.S3FileSystem(endpoint_override=s3.endpoint, scheme="http")
    found = ds.dataset("bucket/plant one/s", filesystem=files, format="parquet").to_table(columns=["partition", "offset"])
    pairs = sorted(zip(*(found.column(name).to_pylist() for name in ("partition", "offset"))))
    assert len(pairs) == len(set(pairs))
    parts = manifest(broker)["partitions"]
    archived = {(part["partition"], offset) for part in parts for offset in range(part["archive"]["end_offset"])}
    assert archived <= set(pairs)
    by_pandas = pd.read_parquet("bucket/plant one/s", filesystem=files, columns=["partition", "offset"])
    assert len(by_pandas) == len(pairs)
    by_polars = (
        pl.scan_parquet(
            "s3://bucket/plant one/s/*/*.parquet",
            storage_options={
                "aws_access_key_id": "test",
                "aws_secret_access_key": "testing",
                "aws_region": "us-east-1",
                "aws_endpoint_url": s3.url,
                "aws_allow_http": "true",
            },
        )
        .select("partition", "offset")
        .collect()
    )
    assert sorted(by_polars.rows()) == pairs

    s3.stop()
    publisher.publish(600)
    broker.wait_for_log("event=not_archived stream=s ", 4 * PATIENCE)
    with pytest.raises(Exception, match="mqtt source: the archive s3://bucket/plant%20one cannot be read: "):
        rows(url=broker.url)


@pytest.mark.parametrize(
    "lines, problem",
    [
        ('archive = "s3://"', "streams.s.archive: must name a bucket"),
        ('archive = "s3://a&b/x"', "streams.s.archive: must name a bucket"),
        ('archive = "s3://bucket/a%0Ab"', "streams.s.archive: must not have control characters"),
        ('archive = "s3://key:secret@bucket/x"', "streams.s.archive: must not have credentials"),
        ('archive = "s3://bucket/x?endpoint_override=key:secret@host"', "must not have credentials in endpoint_override"),
        ('archive = "s3://bucket/x?acl=private"', "streams.s.archive: has the parameter 'acl'"),
        ('archive = "gs://bucket/x"', 'streams.s.archive: must be "s3://BUCKET/PREFIX" or the absolute path'),
        ('archive = "history"', 'streams.s.archive: must be "s3://BUCKET/PREFIX" or the absolute path'),
        ('archive = "/srv/data/streams"', "streams.s.archive: must not be in data_dir"),
        ('archive = "/srv/../etc"', "streams.s.archive: must not have . or .."),
        ('archive = "/srv/a"\nseal = false', "streams.s.archive: needs sealed segments, and seal is false"),
        ('archive_retention_age = "1d"', "streams.s.archive_retention_age: needs archive"),
        (
            'archive = "/srv/a"\nretention_age = "2d"\narchive_retention_age = "1d"',
            "streams.s.archive_retention_age: must not be less than retention_age",
        ),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, lines: str, problem: str) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(f'data_dir = "/srv/data"\n[streams.s]\nfilters = ["#"]\n{lines}\n')
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    (found,) = caught.value.problems
    assert problem in found and "secret" not in found and "\n" not in found


@pytest.mark.parametrize("name", ["archive.accessKey", "archive.secretKey", "archive.sessionToken"])
def test_a_table_of_the_catalog_refuses_secrets(name: str) -> None:
    options = {f"option.{key}": value for key, value in {"url": "http://h", "stream": "s", name: "hidden"}.items()}
    with pytest.raises(OptionError, match=f"'{name}': cannot be kept in a table") as caught:
        GivenOptions(options)
    assert "hidden" not in str(caught.value)


def test_check_config_names_a_missing_directory(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(f'[streams.s]\nfilters = ["#"]\narchive = "{tmp_path}/none"\n')
    run = subprocess.run([sys.executable, "-m", "mqttbroker", "check-config", str(path)], capture_output=True, text=True)
    assert run.returncode == 2 and f"streams.s.archive: {tmp_path}/none is not a directory" in run.stderr
