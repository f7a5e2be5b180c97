"""Spark Connect: a server from the PySpark package, a client without a JVM, and the pipeline of docs/examples."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest
from support.broker_process import BrokerProcess
from support.class_archive import QUICK_JVM
from support.paths import ROOT
from support.raw_client import RawClient
from support.spark_process import (
    READINGS,
    SENSORS,
    TOKEN,
    SparkProcess,
    broker_with_readings,
    publish,
    reading,
    run_program,
    spark_environment,
)

pytest.importorskip("grpc", reason="pip install 'mqttbroker[spark-connect]'")
pytestmark = pytest.mark.one_build

EXAMPLE = ROOT / "docs" / "examples" / "pipeline"
MORE = 20
SERVER = {
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    "spark.ui.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "1",
}
CLIENT = """
import json, sys
from pyspark.sql import SparkSession

session = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
source = json.loads(sys.argv[2])

def told(messages):
    return sorted(row.payload.decode() for row in messages.select("payload").collect())

batch = told(session.read.format("mqtt").options(**source).load())
query = session.readStream.format("mqtt").options(**source, maxOffsetsPerTrigger="150").load() \\
    .writeStream.format("memory").queryName("streamed").option("checkpointLocation", sys.argv[3]) \\
    .trigger(availableNow=True).start()
query.awaitTermination()
try:
    session.read.format("mqtt").options(**source | {"stream": "meters"}).load().schema
    refusal = ""
except Exception as error:
    refusal = str(error)
print(json.dumps([batch, told(session.table("streamed")), len(query.recentProgress), refusal]))
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with broker_with_readings() as process:
        yield process


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warehouse")


@pytest.fixture(scope="module")
def server(warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Spark Connect server."""
    command = [
        "org.apache.spark.deploy.SparkSubmit",
        "--master",
        "local[2]",
        "--driver-java-options",
        QUICK_JVM,
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    for key, value in (SERVER | {"spark.sql.warehouse.dir": str(warehouse)}).items():
        command += ["--conf", f"{key}={value}"]
    with SparkProcess(tmp_path_factory.mktemp("server"), command, {"SPARK_DAEMON_MEMORY": "1g"}) as process:
        port = process.wait_for(r"Spark Connect server started at: \S+:(\d+)")[1]
        yield f"sc://127.0.0.1:{port}"


def test_batch_and_stream_from_a_connect_client(server: str, broker: BrokerProcess, tmp_path: Path) -> None:
    source = {"url": broker.url, "token": TOKEN, "stream": "sensors", "startingOffsets": "earliest"}
    arguments = [server, json.dumps(source), (tmp_path / "checkpoint").as_uri()]
    client = run_program([sys.executable, "-c", CLIENT, *arguments], spark_environment(), tmp_path)
    assert client.returncode == 0, client.stderr
    batch, streamed, triggers, refusal = json.loads(client.stdout)
    assert batch == streamed == sorted(reading(number).decode() for number in range(READINGS))
    assert triggers == 2
    assert f"mqtt source: option 'stream': {broker.url} has no stream 'meters' (there are: sensors)" in refusal.splitlines()[0]


def pipeline(directory: Path, broker: BrokerProcess, *arguments: str) -> None:
    """Run the example in ``directory``, where it has been copied to."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    environment = spark_environment() | {"MQTT_URL": broker.url, "MQTT_TOKEN": TOKEN, "SPARK_CONF_DIR": "conf"}
    run = run_program([program, "run", *arguments], environment, directory)
    assert run.returncode == 0 and "Run is COMPLETED" in run.stdout, run.stdout + run.stderr


def example(directory: Path) -> Path:
    """A copy of the example that keeps its files in ``directory``."""
    copy = directory / "pipeline"
    shutil.copytree(EXAMPLE, copy)
    for path in (copy / "spark-pipeline.yml", copy / "conf" / "spark-defaults.conf"):
        text = path.read_text()
        assert "/var/lib/sensors" in text
        path.write_text(text.replace("/var/lib/sensors", str(directory)))
    return copy


def publish_more(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect("later")
        publish(client, range(READINGS, READINGS + MORE))


def check_tables(directory: Path, numbers: Sequence[int]) -> None:
    """The example's tables hold each reading once, and the aggregates of each sensor and minute."""
    readings = pq.read_table(directory / "readings").to_pylist()
    assert sorted(row["value"] for row in readings) == [float(number) for number in numbers]
    minutes = pq.read_table(directory / "minutes").to_pylist()
    expected = Counter((f"s{number % SENSORS}", number // SENSORS // 12) for number in numbers)
    assert {(row["sensor"], row["minute"].minute): row["readings"] for row in minutes} == dict(expected)
    first = min(row["low"] for row in minutes if row["sensor"] == "s1" and row["minute"].minute == 0)
    assert first == 1.0


@pytest.mark.slow(reason="two more pipelines on the server")
def test_the_pipeline_resumes_from_its_checkpoint(server: str, broker: BrokerProcess, warehouse: Path, tmp_path: Path) -> None:
    directory = example(tmp_path)
    pipeline(directory, broker, "--remote", server)
    check_tables(warehouse, range(READINGS))
    publish_more(broker)
    pipeline(directory, broker, "--remote", server)
    check_tables(warehouse, range(READINGS + MORE))


@pytest.mark.slow(reason="two starts of Spark")
def test_the_pipeline_without_a_server(tmp_path: Path) -> None:
    directory = example(tmp_path)
    with broker_with_readings() as own:
        pipeline(directory, own)
        check_tables(tmp_path / "tables", range(READINGS))
        publish_more(own)
        pipeline(directory, own)
    check_tables(tmp_path / "tables", range(READINGS + MORE))
