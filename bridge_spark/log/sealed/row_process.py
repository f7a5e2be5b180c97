"""A process that reads sealed segments for the broker, which loads no Arrow.

A request is a line of JSON on stdin: path, length of the file, offset and size. The answer is a line of JSON on stdout,
{"bytes": n, "end": offset, "reason": text, "errno": code}, and n bytes: a record batch (`SealedRows.read`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bridge_spark.log.sealed.child_process import ChildProcess

LOW_PRIORITY = 10
CACHE_BYTES = 128 * 1024 * 1024  # of decoded row groups in the process


class SealedBatch(NamedTuple):
    """What `SealedRows.read` found."""

    data: bytes
    end: int
    reason: str


class RowProcess:
    """The process, started by the first read. `kill` may be called from any thread, the rest from one."""

    def __init__(self, nice: int = LOW_PRIORITY) -> None:
        self._child = ChildProcess("bridge_spark.log.sealed.row_process", nice)

    @property
    def running(self) -> bool:
        return self._child.process is not None

    def read(self, path: Path, length: int, offset: int, size: int) -> SealedBatch:
        """A batch of about `size` bytes. Raises `OSError`."""
        child = self._child
        child.start()
        try:
            head = child.ask({"path": str(path), "length": length, "offset": offset, "size": size})
            answer: Any = json.loads(head) if head.endswith(b"\n") else {"bytes": -1}
            data = child.read(answer["bytes"]) if answer["bytes"] > 0 else b""
        except (OSError, ValueError, KeyError):
            answer, data = {"bytes": -1}, b""
        if answer["bytes"] != len(data):
            child.close()
            raise OSError("the process that reads sealed segments has ended")
        if answer["errno"]:
            raise OSError(answer["errno"], answer["reason"])
        return SealedBatch(data, answer["end"], answer["reason"])

    def kill(self) -> None:
        """End the process, and with it the read that is under way."""
        self._child.kill()

    def close(self) -> None:
        """End the process. The next read starts a new one."""
        self._child.close()


def main(nice: int) -> None:
    """Answer the requests on stdin until it is closed."""
    os.nice(nice)
    rows: Any = None
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        data, end, reason, errno = b"", 0, "", 0
        try:
            if rows is None:
                # Imported here, so that without pyarrow each read fails with that reason.
                from bridge_spark.log.sealed.rows import SealedRows

                rows = SealedRows(CACHE_BYTES)
            data, end, reason = rows.read(request["path"], request["length"], request["offset"], request["size"])
        except OSError as error:
            errno, reason = error.errno or 5, error.strerror or str(error)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        head = {"bytes": len(data), "end": end, "reason": reason, "errno": errno}
        out.write(json.dumps(head).encode() + b"\n" + data)
        out.flush()
