"""``make spark-versions``: Spark's tests on the built wheel, with each supported Python and PySpark.

For each Python that is installed the wheel is built, and for each PySpark installed into a virtual environment of its own,
with the extras of pyproject.toml.  Tests are those of the sources that the wheel was built from.  Exit status 1 if one
fails.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from support.interpreters import Failed, copy_tracked_files, interpreter, run

PYTHONS = ("3.11", "3.12", "3.13")
SPARKS = ("4.2", "4.3")
EXTRAS = "spark,spark-connect,jdk,delta,avro,test"
TESTS = (
    "source/test_datasource.py",  # batch and stream, by path and by url
    "source/test_spark_sql.py",
    "source/test_state.py",
    "source/test_payloads.py",
    "sink/test_sink_spark.py",
    "tables/test_ingest.py",
)
_SUMMARY = re.compile(r"^=* ?(\d+ (?:passed|failed|error).*?) ?=*$", re.MULTILINE)


def build(python: str, directory: Path, log: Path) -> Path:
    """Build the wheel for this Python in ``directory``, from a copy of the sources in its folder ``source``."""
    shutil.rmtree(directory, ignore_errors=True)
    source = directory / "source"
    copy_tracked_files(source)
    run([python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", directory, source], log)
    (wheel,) = directory.glob("mqttbroker-*.whl")
    return wheel


def install(python: str, wheel: Path, spark: str, environment: Path, log: Path) -> Path:
    """Make a virtual environment with the wheel; return its Python."""
    found = environment / "bin" / "python"
    if not found.exists():
        run([python, "-m", "venv", environment], log)
    run([found, "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]", f"pyspark=={spark}.*"], log)
    run([found, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel], log)
    return found


def version_of(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-P", "-c", code], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make spark-versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="for wheels, environments (1 GB each) and logs")
    parser.add_argument("--pythons", nargs="*", default=PYTHONS, metavar="VERSION")
    parser.add_argument("--sparks", nargs="*", default=SPARKS, metavar="VERSION")
    parser.add_argument("tests", nargs="*", default=[f"tests/bridge_spark/{name}" for name in TESTS])
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    lines, failed = [], False
    for version in options.pythons:
        python, wheel = interpreter(version), None
        for spark in options.sparks:
            name = f"python-{version}-spark-{spark}"
            log = directory / f"{name}.log"
            log.unlink(missing_ok=True)
            began = time.monotonic()
            try:
                if python is None:
                    raise Failed("this Python is not installed")
                wheel = wheel or build(python, directory / f"wheel-{version}", log)
                used = install(python, wheel, spark, directory / name, log)
                about = f"Python {version}, PySpark {version_of(used, 'pyspark')}, {wheel.name}"
                command = [used, "-P", "-m", "pytest", "-p", "no:cacheprovider", *options.tests]
                run(command, log, wheel.parent / "source", EXPECT_BUILD=kind(wheel))
                summary = _SUMMARY.findall(log.read_text(errors="replace"))[-1]
            except (Failed, subprocess.CalledProcessError) as error:
                failed = True
                about, summary = f"Python {version}, PySpark {spark}", f"FAILED: {error}"
            lines.append(f"{about}: {summary} ({time.monotonic() - began:.0f} s in all)")
            print(lines[-1], flush=True)
    return 1 if failed else 0


def kind(wheel: Path) -> str:
    """The build that the tests expect: a wheel for any platform has no compiled modules."""
    return "plain" if wheel.name.endswith("-any.whl") else "compiled"


if __name__ == "__main__":
    sys.exit(main())
