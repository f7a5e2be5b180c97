"""Python interpreters of this machine, and commands that run without this checkout on their path."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """A command failed; the text names its log."""


def interpreter(version: str) -> str | None:
    """A Python of this version, such as "3.13", that can make virtual environments: on the PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))]
    for candidate in filter(None, candidates):
        check = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
        if subprocess.run([candidate, "-c", check], stderr=subprocess.DEVNULL).returncode == 0:
            return str(candidate)
    return None


def run(command: Sequence[str | Path], log: Path, directory: Path = ROOT, **more: str) -> None:
    """Run a command without the checkout on Python's path; its output goes to ``log``.  Raises `Failed`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    with open(log, "ab") as output:
        done = subprocess.run(
            list(map(str, command)), cwd=directory, env=environment | more, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output)  # fmt: skip
    if done.returncode:
        raise Failed(f"exit status {done.returncode}: {log}")


def copy_tracked_files(target: Path) -> None:
    """Copy the files that git tracks, as they are in the work tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
