"""docs/upgrade.md: both ways back run as printed, after a newer program was killed; and the table has the formats of this program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.command_line import one_line, run
from support.paths import ROOT
from support.raw_client import RawClient
from support.spark_session import python_path

from mqttbroker import __version__
from mqttbroker.admin.data.repair import DATABASE
from mqttbroker.admin.data.version import FORMATS, STORE

PAGE = (ROOT / "docs" / "upgrade.md").read_text(encoding="utf-8")
STREAMS = {"streams": {"s": {"filters": ["s/#"], "partitions": 1}}}
RETAINED = 10
NEWER = FORMATS[STORE] + 1
# The process ends without closing the database, so the newer schema stays in the write-ahead log.
MIGRATION = f"""
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA user_version = {NEWER}")
os._exit(0)
"""
PRELUDE = """
set -eu
mqttbroker() { "$PYTHON" -P -m mqttbroker "$@"; }
systemctl() { :; }
chown() { :; }
"""

pytestmark = pytest.mark.one_build


def section(title: str) -> str:
    """The shell blocks below a heading."""
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return "".join(code for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if language == "sh")


def shell(script: str, directory: Path) -> None:
    (directory / "mqttbroker.toml").touch()
    for found, here in (("/var/lib/mqttbroker", "data"), ("/backup", "backup"), ("/etc/mqttbroker", ".")):
        script = script.replace(found, f"{directory}/{here}")
    done = subprocess.run(
        ["bash", "-c", PRELUDE + script], cwd=directory, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def upgraded(tmp_path: Path) -> Path:
    """The data of a newer program that was killed; beside it a backup from before, made as the page says."""
    data = tmp_path / "data"
    with BrokerProcess(data, STREAMS) as broker:
        publish(broker, [f"r/{number}" for number in range(RETAINED)] + ["s/1"])
        shell(section("Upgrade"), tmp_path)
    shutil.copy(data / DATABASE, data / f"{DATABASE}.v{FORMATS[STORE]}.backup")
    with BrokerProcess(data, STREAMS) as broker:
        publish(broker, ["r/later", "s/2"])
        broker.kill()
    subprocess.run([sys.executable, "-c", MIGRATION, data / DATABASE], check=True)
    assert (data / f"{DATABASE}-wal").stat().st_size and list((data / "log").iterdir())
    done = run("serve", "--data-dir", "data", "--port", "0", "--http-port", "off", cwd=tmp_path)
    assert done.returncode == 1 and f"schema version {NEWER} is newer" in one_line(done.stderr)
    return tmp_path


def publish(broker: BrokerProcess, topics: list[str]) -> None:
    with RawClient(broker.port) as client:
        client.connect("publisher")
        for topic in topics:
            assert client.publish(topic, b"x", 1, retain=topic.startswith("r/")) in (0x00, 0x10)


def found(broker: BrokerProcess) -> tuple[int, list[str]]:
    """The number of retained messages and the topics of the stream's records."""
    records = run("streams", "tail", "s", "-n", "9", "--json", "--url", broker.url, cwd=broker.directory)
    retained = run("retained", "list", "r/#", "--json", "--url", broker.url, cwd=broker.directory)
    assert (records.returncode, retained.returncode) == (0, 0), records.stderr + retained.stderr
    return len(re.findall(r'"topic"', retained.stdout)), re.findall(r'"topic": "([^"]*)"', records.stdout)


def test_back_with_the_backup(upgraded: Path) -> None:
    shell(section("Back, with the backup"), upgraded)
    with BrokerProcess(upgraded / "data", STREAMS) as broker:
        assert found(broker) == (RETAINED, ["s/1"])


def test_back_without_a_backup(upgraded: Path) -> None:
    shell(section("Back, without a backup"), upgraded)
    with BrokerProcess(upgraded / "data", STREAMS) as broker:
        assert found(broker) == (RETAINED, ["s/1", "s/2"])


def test_the_table_has_the_formats_of_this_program() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {__version__} |"))
    newest = [int(cell.split()[-1]) for cell in row.strip("| ").split("|")[1:]]
    head = next(line for line in PAGE.splitlines() if line.startswith("| program |"))
    names = [cell.strip() for cell in head.strip("| ").split("|")[1:]]
    assert dict(zip(names, newest, strict=True)) == FORMATS
