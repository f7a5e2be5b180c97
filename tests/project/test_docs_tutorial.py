"""The tutorial, docs/tutorial.md, run as printed, with the ports of a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from project.test_docs_examples import BLOCK, environment
from support.broker_process import BrokerProcess
from support.paths import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
SETUP = ("make demo", ".venv/bin/pip install", "export PATH", "mkdir ")  # `make test` has installed these
SERVE = "mqttbroker serve --config broker.toml"

pytestmark = [pytest.mark.one_build]


def test_the_tutorial_makes_the_table_and_the_chart_that_it_shows(tmp_path: Path) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    files = {code.partition("\n")[0].removeprefix("# "): code for kind, code in blocks if kind in ("toml", "python")}
    assert list(files) == ["broker.toml", "sensors.py", "ingest.toml", "chart.py"]
    commands = [
        re.sub(r"\s+# .*", "", line)
        for kind, code in blocks if kind == "sh"
        for line in code.splitlines() if not line.startswith(SETUP)
    ]  # fmt: skip
    assert commands.pop(0) == SERVE
    assert [command.split()[:2] for command in commands] == [
        ["python", "sensors.py"], ["mqttbroker", "sub"], ["mqttbroker", "ingest"], ["python", "chart.py"]]  # fmt: skip
    with BrokerProcess(config=files["broker.toml"]) as broker:
        for name, text in files.items():
            ported = text.replace("1883", str(broker.port)).replace("http://127.0.0.1:18083", broker.url)
            (tmp_path / name).write_text(ported if name != "ingest.toml" else text.replace("http://127.0.0.1:18083", broker.url))
        printed = [run(command, broker.port, tmp_path) for command in commands]
        size = (tmp_path / "temperature.png").stat().st_size
        broker.restart(kill=True)  # "Try to break it": the program measures the same minutes again
        again = [run(command, broker.port, tmp_path) for command in (commands[0], *commands[2:])]
    assert len(printed[1].splitlines()) == 3
    (table,) = [code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S) if not kind]
    assert [line.rstrip() for line in printed[3].splitlines()] == table.splitlines()
    assert size > 10_000
    assert re.findall(r"^machine-\d +(\d+)", again[-1], re.M) == ["2880"] * 3


def run(command: str, port: int, directory: Path) -> str:
    """What the command prints to stdout."""
    if command.startswith("mqttbroker sub"):
        command += f" -p {port} -W 20"
    command = re.sub(r"^mqttbroker", f"{sys.executable} -P -m mqttbroker", command)
    command = re.sub(r"^python", f"{sys.executable} -P", command)
    done = subprocess.run(
        command, shell=True, cwd=directory, env=environment(), text=True, capture_output=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
