"""Catalog tables from outside of Python: `spark-sql` creates them, and a JDBC client reads them from Spark's Thrift
server."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.class_archive import QUICK_JVM
from support.spark_process import SparkProcess, run_program, spark_environment, spark_program
from support.spark_session import StreamWriter, message

pytestmark = [pytest.mark.one_build, pytest.mark.slow(reason="three JVMs")]

SETTINGS = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "1"}


def submit_arguments(directory: Path) -> list[str]:
    """Options of spark-submit; the metastore, a Derby database, is in ``directory``."""
    settings = SETTINGS | {
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={directory / 'metastore'};create=true",
    }
    return [
        "--master",
        "local[2]",
        "--driver-java-options",
        QUICK_JVM,
        *(argument for key, value in settings.items() for argument in ("--conf", f"{key}={value}")),
    ]


def results(text: str) -> list[list[str]]:
    """The rows that begin with `row`, of either program's output."""
    return [re.split(r"[\t,|]", line.strip("|").replace(" ", "")) for line in text.splitlines() if "row" in line.strip("| ")[:3]]


def run(command: Sequence[object], directory: Path) -> str:
    done = run_program(command, spark_environment(), directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_table_of_spark_sql_is_read_over_jdbc(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "data", partitions=2)
    writer.append(0, [message(n, f"sensors/{n % 2}") for n in range(10)])
    options = f"path '{tmp_path / 'data'}', stream 'sensors'"
    script = tmp_path / "tables.sql"
    script.write_text(
        f"CREATE TABLE sensors USING mqtt OPTIONS ({options});\n"
        f"CREATE TABLE typed USING mqtt OPTIONS ({options}, payloadFormat 'json', topicPattern 'sensors/{{sensor}}',\n"
        "  schema 'sensor string, `offset` long, value struct<n long>, reason string');\n"
        "CREATE VIEW latest AS SELECT sensor, max(value.n) AS n FROM typed GROUP BY sensor;\n"
        "SELECT 'row' AS kind, count(*), max(offset) FROM sensors WHERE topic LIKE 'sensors/%';\n"
        "SELECT 'row' AS kind, sensor, n FROM latest ORDER BY sensor;\n",
        encoding="utf-8",
    )
    found = run([spark_program("spark-sql"), *submit_arguments(tmp_path), "-f", script], tmp_path)
    assert results(found) == [["row", "10", "9"], ["row", "0", "8"], ["row", "1", "9"]]
    writer.append(1, [message(n, "sensors/1") for n in range(10, 15)])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = [
        "org.apache.spark.deploy.SparkSubmit",
        *submit_arguments(tmp_path),
        "--class",
        "org.apache.spark.sql.hive.thriftserver.HiveThriftServer2",
        "spark-internal",
        "--hiveconf",
        f"hive.server2.thrift.port={port}",
        "--hiveconf",
        "hive.server2.thrift.bind.host=127.0.0.1",
    ]
    with SparkProcess(tmp_path / "server", server, {"SPARK_DAEMON_MEMORY": "1g"}) as process:
        process.wait_for(rf"ThriftBinaryCLIService on port {port}|Started ThriftBinaryCLIService|HiveThriftServer2 started")
        query = "SELECT 'row' AS kind, count(*), max(offset) FROM sensors; SELECT 'row' AS kind, sensor, n FROM latest ORDER BY sensor;"
        found = run(
            [spark_program("beeline"), "-u", f"jdbc:hive2://127.0.0.1:{port}", "--silent=true", "--outputformat=csv2", "-e", query],
            tmp_path,
        )
    assert results(found) == [["row", "15", "9"], ["row", "0", "8"], ["row", "1", "14"]]
