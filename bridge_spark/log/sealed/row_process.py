"""A process that reads sealed segments for the broker, which loads no Arrow.

A request is a line of JSON on stdin: location of the archive ("" = a file of this machine), path, length of the file,
offset, size, and how many bytes of decoded row groups the process may keep. The answer is a line of JSON on stdout,
{"bytes": n, "end": offset, "reason": text, "errno": code}, and n bytes: a record batch (`SealedRows.read`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bridge_spark.log.archive.files import ArchiveError
from bridge_spark.log.sealed.child_process import ChildProcess

_ARCHIVE_ERROR = -1  # in place of the `errno` of an answer


class ProcessEnded(OSError):
    """The process has ended without an answer."""


class SealedBatch(NamedTuple):
    """What `SealedRows.read` found."""

    data: bytes
    end: int
    reason: str


class RowProcess:
    """The process, started by the first read. `kill` may be called from any thread, the rest from one.

    ``nice`` is the priority, below this process's, of the next process that is started; each keeps up to ``cache_bytes`` of
    decoded row groups, at least one group.
    """

    def __init__(self, nice: int = 10, cache_bytes: int = 128 * 1024 * 1024) -> None:
        self.nice = nice
        self.cache_bytes = cache_bytes
        self._child = ChildProcess("bridge_spark.log.sealed.row_process", nice)

    @property
    def running(self) -> bool:
        return self._child.process is not None

    def read(self, path: Path | str, length: int, offset: int, size: int, location: str = "") -> SealedBatch:
        """A batch of about `size` bytes of a file, in the archive at `location` if that is not "".

        Raises `OSError`, `ProcessEnded` among them, and `ArchiveError`.
        """
        child = self._child
        child.nice = self.nice
        child.start()
        request = {
            "location": location,
            "path": str(path),
            "length": length,
            "offset": offset,
            "size": size,
            "cache_bytes": self.cache_bytes,
        }
        try:
            head = child.ask(request)
            answer: Any = json.loads(head) if head.endswith(b"\n") else {"bytes": -1}
            data = child.read(answer["bytes"]) if answer["bytes"] > 0 else b""
        except (OSError, ValueError, KeyError):
            answer, data = {"bytes": -1}, b""
        if answer["bytes"] != len(data):
            child.close()
            raise ProcessEnded("the process that reads sealed segments has ended")
        if answer["errno"] == _ARCHIVE_ERROR:
            raise ArchiveError(answer["reason"])
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

                rows = SealedRows(request["cache_bytes"])
            rows.cache_bytes = request["cache_bytes"]
            data, end, reason = rows.read(request["path"], request["length"], request["offset"], request["size"], request["location"])
        except ArchiveError as error:
            errno, reason = _ARCHIVE_ERROR, str(error)
        except OSError as error:
            errno, reason = error.errno or 5, error.strerror or str(error)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        head = {"bytes": len(data), "end": end, "reason": reason, "errno": errno}
        out.write(json.dumps(head).encode() + b"\n" + data)
        out.flush()
