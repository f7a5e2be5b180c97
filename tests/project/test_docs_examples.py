"""The examples of the documentation run.

A Python block runs as printed, except for the broker's address and for `awaitTermination`, which would wait for ever.
TOML blocks pass the check of the program that reads them. A block whose first line is a comment with a path is that file
for the blocks that run. Each option of a command exists.
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

from bridge_spark.tables.ingest_config import parse_config
from mqttbroker.cli.main import main

pytestmark = pytest.mark.one_build

PAGES = ("README.md", "docs/spark.md")
ADDRESS = "http://127.0.0.1:18083"
ARCHIVE = "/mnt/history"
MQTT_ADDRESS = "mqtt://127.0.0.1:1883"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w/.-]+/[\w.-]+)\n")
FAST = (
    f'--driver-java-options "{QUICK_JVM} -Dspark.ui.enabled=false" --conf spark.sql.shuffle.partitions=2 pyspark-shell'
)
RUN = """
import json, sys
names = {}
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


@pytest.mark.timeout(400)
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
        examples = blocks(page, "python")
        assert examples
        for file in blocks(page, "toml"):
            if named := FILE.match(file.code):
                (tmp_path / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / named[1]).write_text(file.code, encoding="utf-8")
        for block in examples:
            code = block.code.replace(ADDRESS, broker.url).replace(MQTT_ADDRESS, f"mqtt://127.0.0.1:{broker.port}")
            code = code.replace(ARCHIVE, str(history))
            code = code.replace("query.awaitTermination()", "query.processAllAvailable(); query.stop()")
            program.append((page, block.line, code))
    environment = {
        **os.environ, "PYTHONPATH": python_path(), "PYSPARK_PYTHON": sys.executable, "PYSPARK_SUBMIT_ARGS": FAST,
    }
    done = subprocess.run([sys.executable, "-c", RUN], input=json.dumps(program), cwd=tmp_path, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    written = Counter(
        record.topic.partition("/")[0] for record in LogReader(broker.data_dir, "written").records()
    )
    assert written["copy"] == published and written["alerts"] and written["counts"]
    for page in PAGES:
        assert "sensors/plant" in "".join(
            re.findall(rf"^--- {re.escape(page)} .*?(?=^--- |\Z)", done.stdout, re.M | re.S)
        )


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
def test_commands_have_their_options(page: str) -> None:
    for block in blocks(page, "sh"):
        for line in block.code.splitlines():
            found = re.match(r"(?:\.venv/bin/)?mqttbroker ([a-z-]+)(.*)", line.split("#")[0])
            if found is None:
                continue
            help_text = subprocess.run([sys.executable, "-m", "mqttbroker", found[1], "--help"], capture_output=True,
                                       text=True, check=False).stdout
            for option in re.findall(r"(--[a-z-]+)", found[2]):
                assert option in help_text, f"{page}:{block.line}: {found[1]} has no {option}"
