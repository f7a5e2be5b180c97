"""docs/examples/alerts in one command: the actuator is sent the alerts, and the stream has each of them once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from chaos.log_reader import LogReader
from support.class_archive import QUICK_JVM
from support.paths import ROOT
from support.spark_session import python_path
from support.worker_fork_server import worker_python

ALERTS = 3


@pytest.mark.one_build
def test_the_actuator_is_sent_alerts(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": python_path(), "PYSPARK_PYTHON": worker_python(python_path()),
        "PYSPARK_SUBMIT_ARGS": f'--driver-java-options "{QUICK_JVM}" pyspark-shell',
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "docs/examples/alerts/run.py"), "--alerts", str(ALERTS)]
    done = subprocess.run([*command, "--keep", str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    log = tmp_path / "spark.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    lines = re.findall(r"^alerts/oven: mean (\S+) °C is above 80 °C, \S+ s after the last reading$", done.stdout, re.M)
    assert len(lines) == ALERTS and all(float(mean) > 80 for mean in lines)
    records = LogReader(tmp_path / "data", "alerts").records()
    assert len(records) >= ALERTS and {record.topic for record in records} == {"alerts/oven"}
    assert max(Counter(record.payload for record in records).values()) == 1
    means = {json.loads(record.payload)["mean"] for record in records}
    assert {float(mean) for mean in lines} <= means
