"""Workarounds for Spark's behaviour with Python data sources."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from typing import NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from bridge_spark.source.errors import SourceError


def is_writing() -> bool:
    """Whether Spark has created this process for `writer` or `streamWriter`."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return any("write_into_data_source" in name for name in (*sys.argv, getattr(main, "name", "")))


def is_worker() -> bool:
    """Whether this process is one that Spark's Python daemon has forked."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return main is not None and main.name == "pyspark.daemon"


def acknowledge_at_once() -> None:
    """Call this in a worker while it unpickles its task, to have the input of the task 40 ms earlier.

    Spark's JVM sends a task in two writes and does not set TCP_NODELAY, so Nagle's algorithm holds the second back until
    the kernel of the worker acknowledges the first, which it delays.  Linux ends this delay for data that has come when
    TCP_QUICKACK is set.  Unix domain sockets (`spark.python.unix.domain.socket.enabled`) have no such delay.
    """
    if not hasattr(socket, "TCP_QUICKACK") or not is_worker():
        return
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                _acknowledge(int(name))


def _acknowledge(descriptor: int) -> None:
    found = socket.socket(fileno=descriptor)
    try:
        if found.family != socket.AF_UNIX:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    finally:
        found.detach()


_frozen = False


def freeze_worker() -> None:
    """Call this at the end of a worker's task: it exempts the modules imported by now from garbage collection.

    Spark's worker runs `gc.collect` after each task, which visits every object of pandas, PyArrow and PySpark: most of
    the cost of a small task.
    """
    global _frozen
    if not _frozen and is_worker():
        gc.collect()
        gc.freeze()
        _frozen = True


class FailedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Raises an error at its first call: an error of `streamReader` is hidden by an UnboundLocalError of Spark's."""

    def __init__(self, error: SourceError) -> None:
        self._error = error

    def initialOffset(self) -> NoReturn:
        raise self._error

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> NoReturn:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> NoReturn:
        raise self._error

    def read(self, partition: InputPartition) -> NoReturn:
        raise self._error
