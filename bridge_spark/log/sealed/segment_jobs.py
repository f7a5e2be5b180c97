"""The process of `JobProcess`: it seals, compacts and salvages segments and fills archives.

It reads jobs from stdin, one line of JSON each: {"do": "seal" | "compact" | "salvage" | a job of `archive.jobs`, ...}.
The answer is one line: {"result": ...} or {"error": "...", "errno": 28}.  The process ends when stdin is closed, and
after a failed job of an archive.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> Any:
    """Run one job and return its result.  Raises `ValueError`, `OSError`, `ImportError` or `ArchiveError`."""
    # Imported here, so that without pyarrow the job fails with that reason instead of the process.
    if "location" in job:
        from bridge_spark.log.archive import jobs

        return jobs.run(job)
    if job["do"] == "compact":
        from bridge_spark.log.sealed.compact import compact

        files = [Path(file) for file in job["files"]]
        found = compact(files, job["key"], job["tombstones_before"], job["now"], job["most_keys"])
        return [written._asdict() for written in found]
    source, target = Path(job["source"]), Path(job["target"])
    if job["do"] == "salvage":
        from bridge_spark.log.sealed.salvage import salvage

        salvage(source, target, job["first_offset"], job["end_offset"])
    else:
        from bridge_spark.log.sealed.writer import ClosedSegment, seal

        offsets = job["first_offset"], job["end_offset"]
        seal(ClosedSegment(source, job["stream"], job["partition"], *offsets, job["size"]), target)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    from bridge_spark.log.archive.files import ArchiveError

    kind = "" if isinstance(error, ArchiveError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


def main(nice: int) -> None:
    """Run the jobs on stdin until it is closed."""
    os.nice(nice)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)  # the parent is gone, so the job that runs is not needed

    threading.Thread(target=listen, daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        try:
            answer = {"result": run(job)}
        except Exception as error:
            answer = {"error": _reason(error), "errno": getattr(error, "errno", None) or 0}
        print(json.dumps(answer), flush=True)
        if "error" in answer and "location" in job:
            # Without destructors: that of an unfinished upload to S3 would make an object of its part.
            os._exit(1)
