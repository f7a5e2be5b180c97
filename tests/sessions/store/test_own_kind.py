"""A kind of rows is one line: one that the broker does not have goes through the store, the shards of a cluster and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_a_new_kind_is_committed_recovered_converted_and_merged(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    for step in ("write", "read"):
        command = [sys.executable, "-P", "-m", "support.own_kind", step, str(tmp_path)]
        subprocess.run(command, check=True, timeout=60, env=environment)
