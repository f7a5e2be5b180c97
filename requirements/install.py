"""Installs packages of pyproject.toml into the virtual environment of this Python, for the Makefile.

    install.py STEP GROUP ...

GROUP is a name in ``optional-dependencies``, ``.`` for ``dependencies``, ``build-system`` for what builds, or ``all`` for
all extras that `make test` needs. Shows what is done and for how long; an error is one line that names STEP. What is
installed already is not installed again.

PySpark has no wheel: pip makes one of 450 MB from its sources. That is done at the same time as all else, and without
compressing what is compressed already.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_FOR_TESTS = ("fuzz", "lock", "dist", "jupyter")
PIP = ("install", "--no-compile", "--progress-bar", "off", "--retries", "2", "--disable-pip-version-check", "--no-input")
ADVICE = {
    r"No space left|Errno 28|Disk quota": "free some space, then repeat the command",
    r"hash|HASH|IncompleteRead|Connection broken|incomplete|Read timed out|BadZipFile|not a zip": "a download broke off: repeat the command",
    r"resolve|Network is unreachable|Connection refused|NewConnectionError|timed out|No matching distribution|ProxyError|SSL": "is there a network? pip reaches PyPI, or the index that `pip config set global.index-url` names; then repeat the command",
    r"Permission denied|Errno 13|Read-only": "make .venv writable, or remove it, then repeat the command",
    r"requires a different Python|Requires-Python": "use a newer Python: make PYTHON=python3.13, after make clean",
}


class InstallError(Exception):
    """A package could not be installed; the message is one line."""


def requirements(groups: list[str], project: Path = ROOT / "pyproject.toml") -> list[str]:
    settings = tomllib.loads(project.read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    known = {**extras, ".": settings["project"]["dependencies"], "build-system": settings["build-system"]["requires"]}
    if groups == ["all"]:
        groups = [name for name in extras if name not in NOT_FOR_TESTS]
    return list(dict.fromkeys(requirement for group in groups for requirement in known[group]))


class Pip:
    """One run of pip, in a thread."""

    def __init__(self, wanted: list[str], scratch: Path) -> None:
        self.packages: set[str] = set()
        self.doing = "looking for packages"
        self.error = ""
        self._size = 0.0  # MB of the file that is downloaded
        self._scratch = scratch
        self._command = [sys.executable, "-m", "pip", *PIP, *wanted]
        self.thread = threading.Thread(target=self._run, args=(wanted,))
        self.thread.start()

    def __str__(self) -> str:
        if self._size < 20:
            return self.doing
        return f"{self.doing}, {min(self._downloaded(), self._size):.0f} of {self._size:.0f} MB"

    def _downloaded(self) -> float:
        try:
            return max((path.stat().st_size for path in self._scratch.glob("pip-unpack-*/*")), default=0) / 1e6
        except OSError:  # pip has removed it meanwhile
            return self._size

    def _run(self, wanted: list[str]) -> None:
        if any(requirement.startswith("pyspark") for requirement in wanted):
            self._command += ["--config-settings", "--build-option=bdist_wheel --compression=stored"]
        environment = {**os.environ, "TMPDIR": str(self._scratch)}
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
            )
        except OSError as error:
            self.error = str(error)
            return
        said = []
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.strip())
            self._read(line.strip())
        if process.wait():
            errors = [line for line in said if line.startswith("ERROR")]
            errors += [line for line in said if re.search(r"[Ee]rror", line) and line not in errors] or said[-1:] or ["pip gave no reason"]
            known = next((line for line in errors for sign in ADVICE if re.search(sign, line)), errors[0])
            self.error = known.removeprefix("ERROR: ").removesuffix(":")

    def _read(self, line: str) -> None:
        if found := re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line):
            self.packages.add(found[1])
            self.doing, self._size = f"{found[1]}", 0.0
        elif found := re.match(r"(?:Downloading|Using cached) (\S+?)-\d\S* \(([\d.]+) (k?M?)B\)", line):
            self.doing, self._size = f"downloading {found[1].rpartition('/')[2]}", float(found[2]) / (1 if found[3] == "M" else 1000)
        elif found := re.match(r"Building wheel for ([\w.-]+)", line):
            self.doing, self._size = f"building {found[1]}", 0.0
        elif line.startswith("Installing collected packages"):
            self.doing, self._size = f"installing {line.count(',') + 1} packages", 0.0


def install(step: str, wanted: list[str], out: Progress) -> None:
    """Install these requirements; raises InstallError."""
    spark = [requirement for requirement in wanted if re.match(r"pyspark\b", requirement)]
    plain = [requirement for requirement in spark if "[" not in requirement]
    rest = [requirement for requirement in wanted if requirement not in spark]
    try:
        scratch = Path(tempfile.mkdtemp(prefix="downloads-", dir=sys.prefix))  # not in /tmp, which may be small
    except OSError as error:
        raise InstallError(f"{step}: {error}: make .venv writable and free some space, then repeat the command") from None
    try:
        for together in ((plain, rest), (sorted(set(spark) - set(plain)),)):
            runs = [Pip(packages, Path(tempfile.mkdtemp(dir=scratch))) for packages in together if packages]
            while any(run.thread.is_alive() for run in runs):
                count = len(set().union(*(run.packages for run in runs)))
                active = [str(run) for run in runs if run.thread.is_alive()]
                out.show(f"{count} packages; {'; '.join(active)}")
                next(run.thread for run in runs if run.thread.is_alive()).join(1)
            for run in runs:
                if run.error:
                    advice = next((what for sign, what in ADVICE.items() if re.search(sign, run.error)), "then repeat the command")
                    raise InstallError(f"{step}: {run.error}: {advice}; packages that are installed stay")
    finally:
        out.end()
        shutil.rmtree(scratch, ignore_errors=True)


class Progress:
    """One line that changes on a terminal, else a line every ten seconds."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._began = time.monotonic()
        self._last = -10.0
        self._lines = 0

    def show(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        line = f"{self._step}: {text}, {seconds:.0f} s"
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=sys.stderr, flush=True)
        elif seconds - self._last >= 10:
            self._last = seconds
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)


def main(arguments: list[str]) -> int:
    step, *groups = arguments
    try:
        install(step, requirements(groups), Progress(step))
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
