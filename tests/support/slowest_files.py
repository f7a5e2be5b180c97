"""Prints the slowest test files of a run, in seconds of setup, call and teardown together.

``make test PYTEST_ARGS="-n 3 --dist loadfile --no-loadscope-reorder --durations=0 --durations-min=0.02" | tee run.txt``, then
``python tests/support/slowest_files.py run.txt``. Of a test that ran twice, on the plain sources and on the build, both runs count.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

DURATION = re.compile(r"\s*([\d.]+)s (?:setup|call|teardown)\s+([^:]+)::")
FILES = 30


def slowest_files(output: str, count: int = FILES) -> list[tuple[str, float]]:
    """The files with the most seconds in the table of durations that pytest printed, the slowest first."""
    seconds: Counter[str] = Counter()
    for line in output.splitlines():
        if found := DURATION.match(line):
            seconds[found[2]] += float(found[1])
    return seconds.most_common(count)


if __name__ == "__main__":
    for path, total in slowest_files(Path(sys.argv[1]).read_text()):
        print(f"{total:7.1f}  {path}")
