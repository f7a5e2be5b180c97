"""``make cluster-demo``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT, TESTS
from support.spark_session import python_path

pytestmark = [pytest.mark.slow("three Kafka brokers, three nodes and Spark: 2 minutes"), pytest.mark.one_build]


def test_the_demo_finds_everything_in_the_table(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/examples/demo/cluster_demo.py"), "--keep", str(tmp_path / "demo")]
    path = f"{TESTS}:{python_path()}"
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "kill -9 node-1" in done.stdout and "kill -9 Kafka broker 2" in done.stdout
    assert "everything is there" in done.stdout
