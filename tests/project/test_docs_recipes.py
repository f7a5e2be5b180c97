"""The commands of the recipes in docs/spark.md, with the programs that they name: dbt, `spark-submit`, `beeline`.

Other than printed: addresses and ports, the options of `submit_options`, and `local-cluster` for YARN.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import duckdb
import pytest
from project.test_docs_examples import ADDRESS, FILE, blocks
from support.broker_process import BrokerProcess
from support.class_archive import QUICK_JVM
from support.raw_client import RawClient
from support.spark_process import SparkProcess, install_into, run_program, spark_environment, spark_program

from mqttbroker.codec.packets import Puback, Publish

pytestmark = [pytest.mark.one_build, pytest.mark.slow(reason="several JVMs, and packages from PyPI")]

PAGE = "docs/spark.md"
STREAM = {"streams": {"sensors": {"filters": ["sensors/#"], "partitions": 2}}}


def commands() -> list[str]:
    """The commands of the recipes, without comments."""
    lines = [line for block in blocks(PAGE, "sh") for line in block.code.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines]


def command(*words: str) -> list[str]:
    """The words of the only command with these."""
    [found] = [line for line in commands() if all(word in line for word in words)]
    return shlex.split(found)


def submit_options(directory: Path) -> list[str]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={directory}/metastore;create=true",
    }
    return ["--driver-java-options", QUICK_JVM, *(word for key, value in settings.items() for word in ("--conf", f"{key}={value}"))]


def publish(broker: BrokerProcess, numbers: range) -> None:
    with RawClient(broker.port) as client:
        client.connect("publisher")
        for number in numbers:
            topic = f"sensors/p{number % 2}/m{number % 4}/temperature"
            payload = b'{"ts": "2026-01-31T12:00:00Z", "value": %d}' % number
            client.send(Publish(topic, payload, 1, False, False, client.next_packet_id(), None))
            client.expect(Puback)
        client.disconnect()


def write_files(directory: Path, broker: BrokerProcess) -> None:
    """Write the blocks that are files."""
    for language in ("python", "yaml", "sql"):
        for block in blocks(PAGE, language):
            if named := FILE.match(block.code):
                (directory / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (directory / named[1]).write_text(block.code.replace(ADDRESS, broker.url), encoding="utf-8")


def test_dbt_adds_new_rows(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    install = command("pip install", "dbt-core")
    assert install[0] == "pip"
    subprocess.run([tmp_path / "venv/bin/pip", "install", "-q", *install[2:]], check=True)
    [site] = (tmp_path / "venv/lib").glob("python3*/site-packages")
    (site / "tests.pth").write_text(sysconfig.get_path("purelib"))  # PySpark and this package
    environment = {**spark_environment(), "PYSPARK_PYTHON": str(tmp_path / "venv/bin/python"), "DBT_SEND_ANONYMOUS_USAGE_STATS": "false"}
    with BrokerProcess(config=STREAM) as broker:
        write_files(tmp_path, broker)
        for last in (10, 10, 15):
            publish(broker, range(10) if not (tmp_path / "dbt/spark-warehouse").exists() else range(10, last))
            done = run_program([tmp_path / "venv/bin/dbt", *command("dbt run")[1:]], environment, tmp_path / "dbt")
            assert done.returncode == 0, done.stdout + done.stderr
            rows = duckdb.sql(f"SELECT value, plant FROM '{tmp_path}/dbt/spark-warehouse/temperatures/*.parquet' ORDER BY value").fetchall()
            assert rows == [(float(number), f"p{number % 2}") for number in range(last)]


def test_executors_get_the_package_by_py_files(tmp_path: Path) -> None:
    install_into(tmp_path / "packages")
    shutil.make_archive(str(tmp_path / "mqttbroker"), "zip", tmp_path / "packages")
    path, program, *words = command("spark-submit --master yarn")
    assert path == "PYTHONPATH=mqttbroker.zip" and program == "spark-submit"
    words[words.index("yarn")] = "local-cluster[2,1,1024]"
    with BrokerProcess(config=STREAM) as broker:
        publish(broker, range(40))
        write_files(tmp_path, broker)
        environment = {**spark_environment(), "PYTHONPATH": "mqttbroker.zip"}
        done = run_program([spark_program(program), *submit_options(tmp_path), *words], environment, tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert duckdb.sql(f"SELECT count, topic FROM '{tmp_path}/counts/*.parquet' ORDER BY topic").fetchall() == [
        (10, f"sensors/p{number % 2}/m{number}/temperature") for number in (0, 2, 1, 3)
    ]
    assert (tmp_path / "packages/used").exists()


def test_the_thrift_server_and_beeline(tmp_path: Path) -> None:
    program, *words = command("HiveThriftServer2")
    assert program == "spark-submit" and words[-1] == "&"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = [word.replace("10000", str(port)) for word in words[:-1]]
    environment = {"SPARK_DAEMON_MEMORY": "1g"}
    with BrokerProcess(config=STREAM) as broker:
        publish(broker, range(10))
        server = SparkProcess(tmp_path / "server", [*submit_options(tmp_path), *given], environment, program)
        with server as process:
            process.wait_for("ThriftBinaryCLIService on port|Started ThriftBinaryCLIService|HiveThriftServer2 started")
            output = ""
            for line in [line for line in commands() if line.startswith("beeline")]:
                _, *query = shlex.split(line.replace(ADDRESS, broker.url).replace("10000", str(port)))
                done = run_program([spark_program("beeline"), "--outputformat=csv2", *query], spark_environment(), tmp_path)
                assert done.returncode == 0, done.stdout + done.stderr
                output = done.stdout
    assert sorted(re.findall(r"^sensors/.*$", output, re.M)) == [
        f"sensors/p{number % 2}/m{number}/temperature,{count}" for number, count in ((0, 3), (2, 2), (1, 3), (3, 2))
    ]
