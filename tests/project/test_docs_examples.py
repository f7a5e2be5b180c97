"""The examples of the documentation run.

A Python block runs as printed, with the addresses of `substituted` and without `awaitTermination`, which
would wait for ever. TOML blocks
pass the check of the program that reads them. A block whose first line is a comment with a path is that file for the blocks
that run. Each option of a command exists. `COMMANDS` says of each command of docs/spark.md by which test it runs, or why by none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import paho.mqtt.client as paho
import pytest
from chaos.log_reader import LogReader
from support.broker_process import BrokerProcess
from support.class_archive import QUICK_JVM
from support.paths import ROOT
from support.spark_session import python_path
from support.worker_fork_server import worker_python

from bridge_spark.source.protobuf_schemas import read_file
from bridge_spark.tables.ingest_config import parse_config
from mqttbroker.cli.main import main

pytestmark = pytest.mark.one_build

PAGES = ("README.md", "docs/spark.md")
ADDRESS = "http://127.0.0.1:18083"
ARCHIVE = "/mnt/history"
MQTT_ADDRESS = "mqtt://127.0.0.1:1883"
# Of blocks that need a cluster: test_kafka_storage.py reads with the options, test_kafka_source.py runs the one with Spark's own source.
KAFKA_ADDRESS = "kafka1:9092,kafka2:9092"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
VOLUMES, DATABASE, DRIVER = "/Volumes/main/iot/", "jdbc:postgresql://db.example/plant", "org.postgresql.Driver"
DERBY, DERBY_DRIVER = "jdbc:derby:memory:plant;create=true", "org.apache.derby.iapi.jdbc.AutoloadedDriver"
FILE = re.compile(r"(?:#|--) ([\w/.-]+/[\w.-]+)\n")
COMMANDS = {
    "pip install": "test_packaging.py checks the names of the extras; nothing is installed in a test",
    "pip wheel": "make build makes a wheel; test_docs_recipes.py uses the packages of this one",
    "cp dist/": "test_docs_recipes.py makes the archive",
    "protoc ": "the same arguments as those of grpc_tools.protoc, which runs in test_python_blocks_run",
    "python -m grpc_tools.protoc": "test_shell_blocks_run",
    "curl ": "there is no schema registry here; the file that it would write is read in test_avro_payloads.py",
    "mqttbroker serve": "test_commands_have_their_options; the broker of test_python_blocks_run has such a stream",
    "mqttbroker ingest": "test_commands_have_their_options; test_python_blocks_run reads its file once",
    "mqttbroker compact": "test_commands_have_their_options, test_ingest_commands.py",
    "duckdb ": "test_python_blocks_run, with DuckDB's Python package",
    "python -c ": "test_ingest_readers.py reads tables with Polars and pandas",
    "spark-submit --master k8s": "there is no Kubernetes here, nor an image",
    "PYTHONPATH=mqttbroker.zip spark-submit --master yarn": "test_docs_recipes.py, with the master local-cluster",
    "export PYSPARK_PYTHON": "test_docs_recipes.py",
    "dbt run": "test_docs_recipes.py; test_python_blocks_run runs the SQL",
    "spark-submit --class org.apache.spark.sql.hive.thriftserver": "test_docs_recipes.py",
    "beeline ": "test_docs_recipes.py",
}
FAST = f'--driver-java-options "{QUICK_JVM} -Dspark.ui.enabled=false" --conf spark.sql.shuffle.partitions=2 pyspark-shell'
RUN = """
import json, sys
class Secrets:
    @staticmethod
    def get(scope, key):
        return "secret"
class Databricks:
    secrets = Secrets
names = {"docs/spark.md": {"dbutils": Databricks}}
for page, line, code in json.load(sys.stdin):
    print(f"--- {page} {line}", flush=True)
    exec(compile("\\n" * line + code, page, "exec"), names.setdefault(page, {}))
"""


class Block(NamedTuple):
    """A fenced block; ``line`` is its first line."""

    line: int
    language: str
    code: str


def blocks(page: str, language: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [Block(text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in BLOCK.finditer(text)]
    return [block for block in found if block.language == language]


def publish_readings(port: int) -> int:
    """Publish readings of four machines and one malformed reading; gives their number."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    client.connect("127.0.0.1", port)
    client.loop_start()
    sent = []
    for number in range(40):
        topic = f"sensors/plant{number % 2}/machine{number % 4}/temperature"
        reading = {"ts": f"2026-01-31T12:{number:02d}:00Z", "device": f"d{number % 4}", "value": 20 + number / 10}
        sent.append(client.publish(topic, json.dumps(reading), qos=1))
    sent.append(client.publish("sensors/plant1/machine1/temperature", "broken", qos=1))
    for message in sent:
        message.wait_for_publish(10)
        assert message.is_published()
    client.disconnect()
    client.loop_stop()
    return len(sent)


def substituted(code: str, broker: BrokerProcess, directory: Path) -> str:
    """A block for this machine: its broker, directories instead of volumes, and Derby instead of PostgreSQL."""
    for name, other in {
        ADDRESS: broker.url, "https://broker.example:18083": broker.url, MQTT_ADDRESS: f"mqtt://127.0.0.1:{broker.port}",
        VOLUMES: f"{directory}/volumes/", ARCHIVE: f"{directory}/history", "main.iot.": "default.", DATABASE: DERBY, DRIVER: DERBY_DRIVER,
    }.items():  # fmt: skip
        code = code.replace(name, other)
    if "availableNow" not in code:
        code = code.replace("query.awaitTermination()", "query.processAllAvailable(); query.stop()")
    return code


def databases(page: str) -> str:
    """Creates the tables of the SQL block `-- of the database` in Derby."""
    [block] = [block for block in blocks(page, "sql") if block.code.startswith("-- of the database\n")]
    return f"""
connection = spark._jvm.{DERBY_DRIVER}().connect("{DERBY};user=iot", spark._jvm.java.util.Properties())
for statement in {block.code.partition(chr(10))[2]!r}.split(";")[:-1]:
    connection.createStatement().executeUpdate(statement)
connection.close()
"""


REPEAT_A_BATCH = """
assert spark.read.jdbc(database, "counts", properties=login).count() > 1
import os, pathlib
commits = pathlib.Path("checkpoints/upserts/commits")
last = max(commits.glob("[0-9]*"), key=lambda file: int(file.name))
last.unlink()  # as if the driver had ended before Spark stored that the batch is done
(commits / f".{last.name}.crc").unlink(missing_ok=True)
"""
UPSERTED = """
rows = spark.read.jdbc(database, "counts", properties=login).collect()
assert sum(row.MESSAGES for row in rows) == published, rows
assert int(query.lastProgress["batchId"]) >= 0
upsert(spark.read.format("mqtt").options(url=broker, stream="sensors").load(), 1_000)  # a later batch counts
rows = spark.read.jdbc(database, "counts", properties=login).collect()
assert sum(row.MESSAGES for row in rows) == 2 * published, rows
assert spark.table("temperatures").where("reason IS NULL").count() == published - 1
"""


def dbt_models(page: str, broker: BrokerProcess) -> str:
    """Runs the SQL of the dbt project: a first run and an incremental one, which finds nothing new."""
    [project] = [block.code for block in blocks(page, "yaml") if "on-run-start" in block.code]
    [model] = [block.code for block in blocks(page, "sql") if "config(materialized" in block.code]
    create = " ".join(project.partition("on-run-start: >")[2].split()).replace(ADDRESS, broker.url)
    model = model.replace("{{ source('mqtt', 'readings') }}", "readings").replace("{{ this }}", "dbt_temperatures")
    query = re.sub(r"^--.*|\{\{.*\}\}", "", model, flags=re.M)
    first = re.sub(r"\{% if.*endif %\}", "", query, flags=re.S)
    assert "{" not in first
    return f"""
spark.sql("DROP TABLE readings")
spark.sql({create!r})
spark.sql("CREATE TABLE dbt_temperatures USING parquet AS " + {first!r})
assert spark.table("dbt_temperatures").count() == published - 1
spark.sql("INSERT INTO dbt_temperatures " + {re.sub("{%.*%}", "", query)!r})
assert spark.table("dbt_temperatures").count() == published - 1
"""


def ingest_and_query(page: str, broker: BrokerProcess, directory: Path) -> str:
    """Runs the ingest job's example once, and DuckDB on its tables; only reads the one with tables elsewhere."""
    config, elsewhere = [block.code for block in blocks(page, "toml") if "[source]" in block.code]
    (directory / "elsewhere.toml").write_text(elsewhere, encoding="utf-8")
    (directory / "ingest.toml").write_text(config.replace(ADDRESS, broker.url), encoding="utf-8")
    [query] = re.findall(r'^duckdb -c "(.*)"$', "".join(block.code for block in blocks(page, "sh")), re.M)
    return f"""
import duckdb
from pathlib import Path
from bridge_spark.ingest import run
from bridge_spark.tables.ingest_config import load_config
assert [table.name for table in load_config(Path("elsewhere.toml")).tables] == ["readings", "raw"]
tables = run(load_config(Path("ingest.toml")), once=True, session=spark)
assert [table.rows for table in tables][:1] == [published - 1] and tables[0].bad == 1, tables
assert len(duckdb.sql({query!r}).fetchall()) == 2
"""


def environment() -> dict[str, str]:
    """The environment of the examples with Spark."""
    python = {"PYTHONPATH": python_path(), "PYSPARK_PYTHON": worker_python(python_path())}
    return {**os.environ, **python, "PYSPARK_SUBMIT_ARGS": FAST}


def test_python_blocks_run(tmp_path: Path, start_broker: Callable[..., BrokerProcess]) -> None:
    history = tmp_path / "history"
    history.mkdir()
    streams = {
        "sensors": {"filters": ["sensors/#"], "partitions": 2, "segment_bytes": "1KiB", "archive": str(history)},
        "written": {"filters": ["alerts/#", "counts/#", "copy/#"], "dedup": True},
    }
    broker = start_broker(config={"streams": streams})
    published = publish_readings(broker.port)
    broker.wait_for_log("event=segment_archived ", 40)
    program = []
    for page in PAGES:
        examples = [block for block in blocks(page, "python") if KAFKA_ADDRESS not in block.code]
        assert examples
        for file in (*blocks(page, "toml"), *examples):
            if named := FILE.match(file.code):
                (tmp_path / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / named[1]).write_text(file.code, encoding="utf-8")
        for block in examples:
            code = substituted(block.code, broker, tmp_path)
            if f"_jvm.{DERBY_DRIVER}" in code:
                program += [(page, block.line, databases(page)), (page, block.line, code), (page, block.line, REPEAT_A_BATCH)]
            program.append((page, block.line, code))
        if page == "docs/spark.md":
            program += [
                (page, 0, f"published = {published}"),
                (page, 0, dbt_models(page, broker)),
                (page, 0, UPSERTED),
                (page, 0, ingest_and_query(page, broker, tmp_path)),
            ]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(program),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    written = Counter(record.topic.partition("/")[0] for record in LogReader(broker.data_dir, "written").records())
    assert written["copy"] == published and written["alerts"] and written["counts"]
    for page in PAGES:
        assert "sensors/plant" in "".join(re.findall(rf"^--- {re.escape(page)} .*?(?=^--- |\Z)", done.stdout, re.M | re.S))


@pytest.mark.parametrize("page", PAGES)
def test_toml_blocks_are_valid(page: str, tmp_path: Path) -> None:
    examples = blocks(page, "toml")
    assert examples
    for block in examples:
        document = tomllib.loads(block.code)
        if FILE.match(block.code):
            continue  # a file of the Python blocks
        if "tables" in document:
            parse_config({"source": {"path": "data"}, **document}, f"{page}:{block.line}")
        else:
            file = tmp_path / f"{block.line}.toml"
            file.write_text(block.code, encoding="utf-8")
            assert main(["check-config", str(file)]) == 0, f"{page}:{block.line}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_their_options(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page, "sh"):
        for line in block.code.splitlines():
            found = re.match(r"(?:\.venv/bin/)?mqttbroker ([a-z-]+)(.*)", line.split("#")[0])
            if found is None:
                continue
            with pytest.raises(SystemExit):
                main([found[1], "--help"])
            help_text = capsys.readouterr().out
            for option in re.findall(r"(--[a-z-]+)", found[2]):
                assert option in help_text, f"{page}:{block.line}: {found[1]} has no {option}"


def test_each_command_runs_or_has_a_reason() -> None:
    page = "docs/spark.md"
    known = {"python", "toml", "sh", "sql", "yaml", "dockerfile", "text"}
    assert set(re.findall(r"^```(\w+)$", (ROOT / page).read_text(encoding="utf-8"), re.M)) <= known
    lines = [line for block in blocks(page, "sh") for line in block.code.replace("\\\n", " ").splitlines()]
    assert lines
    for line in lines:
        line = re.sub(r"^MQTTBROKER_COMPILE=0 ", "", line)
        assert any(line.startswith(command) for command in COMMANDS), f"{page}: {line}"
    for command in COMMANDS:
        assert any(command in line for line in lines), f"{page} has no command {command!r} any more"


def test_shell_blocks_run(tmp_path: Path) -> None:
    [line] = [line for block in blocks("docs/spark.md", "sh") for line in block.code.splitlines() if "grpc_tools" in line]
    (tmp_path / "plant.proto").write_text('syntax = "proto3"; package plant; message Reading { double value = 1; }')
    command = line.split()
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True)
    assert read_file(str(tmp_path / "plant.desc"), "plant.Reading").message == "plant.Reading"
