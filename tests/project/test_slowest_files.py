"""support/slowest_files.py, which CONTRIBUTING names: it adds up the times that pytest prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT
from support.slowest_files import slowest_files

pytestmark = pytest.mark.one_build


def test_times_of_pytest_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import time, pytest\n@pytest.mark.parametrize('n', [0, 1])\ndef test(n): time.sleep(0.3)\n")
    (tmp_path / "test_b.py").write_text("import time\ndef test(): time.sleep(0.1)\n")
    (tmp_path / "test_c.py").write_text("def test(): pass\n")
    command = [sys.executable, "-m", "pytest", "--durations=0", "--durations-min=0.05", "-p", "no:schemathesis", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (first, most), (second, less) = slowest_files(done.stdout)
    assert (first, second) == ("test_a.py", "test_b.py") and most >= 0.6 and less >= 0.1
    (tmp_path / "run.txt").write_text(done.stdout)
    printed = subprocess.run(
        [sys.executable, ROOT / "tests/support/slowest_files.py", tmp_path / "run.txt"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == [f"{most:7.1f}  test_a.py", f"{less:7.1f}  test_b.py"]
