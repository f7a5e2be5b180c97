"""SPARK_HOME for tests: the installed PySpark without its `pyspark.zip`.

Spark puts `SPARK_HOME/python/lib/pyspark.zip` first on the path of each Python process that it starts.  A zip file has no
bytecode, so each of them would compile PySpark again: 0.8 s of CPU for each streaming query and five times that for a session.
Without the file they import the same modules from site-packages.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

HOME = Path(sys.prefix) / "spark-home"
PARTS = ("bin", "jars", "sbin", "python/pyspark")


def use_spark_home() -> None:
    """Set SPARK_HOME for this process and those it starts, unless it is set, PySpark is not installed or nothing can be written
    beside it, where tests only take longer."""
    found = importlib.util.find_spec("pyspark")
    if "SPARK_HOME" in os.environ or found is None or found.origin is None:
        return
    if not HOME.exists():
        if not os.access(HOME.parent, os.W_OK):
            return
        _link(Path(found.origin).parent)
    os.environ["SPARK_HOME"] = str(HOME)


def _link(pyspark: Path) -> None:
    unfinished = HOME.with_suffix(f".{os.getpid()}")
    for part in PARTS:
        (unfinished / part).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / part).symlink_to(pyspark / part)
    try:
        unfinished.rename(HOME)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
