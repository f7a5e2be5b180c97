"""The worker process: seals and salvages segments with Arrow, at the lowest priority.

It reads jobs from stdin, one line of JSON each: {"do": "seal" | "salvage", ...}.  The answer is one line: {} or
{"error": "...", "errno": 28}.  It ends when stdin is closed, so it never outlives its parent.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

LOWEST_PRIORITY = 19


def run(job: dict[str, Any]) -> None:
    """Run one job.  Raises `ValueError`, `OSError` or `ImportError`."""
    # Imported here, so that without pyarrow the job fails with that reason instead of the process.
    source, target = Path(job["source"]), Path(job["target"])
    if job["do"] == "salvage":
        from bridge_spark.log.sealed.salvage import salvage

        salvage(source, target, job["first_offset"], job["end_offset"])
    else:
        from bridge_spark.log.sealed.writer import ClosedSegment, seal

        offsets = job["first_offset"], job["end_offset"]
        seal(ClosedSegment(source, job["stream"], job["partition"], *offsets, job["size"]), target)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())


def main() -> None:
    """Run the jobs on stdin until it is closed."""
    os.nice(LOWEST_PRIORITY)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)  # the parent is gone, so the job that runs is not needed

    threading.Thread(target=listen, daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        try:
            run(job)
            answer = {}
        except Exception as error:
            answer = {"error": _reason(error), "errno": getattr(error, "errno", None) or 0}
        print(json.dumps(answer), flush=True)
