"""Consumers: readers of a stream that say by a name of their own how far they have come.

The rule kept here: a report is a favour.  It never fails its reader nor holds
it up beyond a timeout, and it waits for no disk; one that is lost is made up
for by the next.

A report is ``<stream>/consumers/<name>.json``, replaced as a whole, whoever
writes it: the broker for readers over HTTP, a reader of the directory itself.
It stands beside the partitions because it means nothing without them, and the
time it was written is the time of the report.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Callable

DIRECTORY = "consumers"
SUFFIX = ".json"
MAX_REPORT_BYTES = 64 * 1024
MAX_OFFSET = 1 << 63
REPORT_TIMEOUT_S = 2.0
REPEAT_S = 60.0  # after which a report that says nothing new is sent again
SILENCE_S = 30.0  # after a report that failed, before another is tried

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]*")

logger = logging.getLogger(__name__)


class ReportError(ValueError):
    """A report that is none, said in one line."""


def check_name(name: str, max_length: int) -> None:
    """Refuse a name that is no file's; raises `ReportError`."""
    if len(name) > max_length:
        raise ReportError(f"a consumer's name has at most {max_length} characters")
    if _NAME.fullmatch(name) is None:
        raise ReportError("a consumer's name is of letters, digits, '_', '-', '.' and ':', with no leading '.' or ':'")


def encode_report(offsets: Mapping[int, int]) -> bytes:
    """``offsets``: per partition the offset after the last that the consumer is done with."""
    return json.dumps({"offsets": {str(number): offsets[number] for number in sorted(offsets)}}).encode()


def decode_report(data: bytes, partitions: int) -> dict[int, int]:
    """The offsets of a report on a stream with so many partitions; raises `ReportError`."""
    if len(data) > MAX_REPORT_BYTES:
        raise ReportError(f"a report has at most {MAX_REPORT_BYTES} bytes")
    try:
        given = json.loads(data)["offsets"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ReportError('a report is JSON like {"offsets": {"0": 123}}') from None
    offsets: dict[int, int] = {}
    for key, offset in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < partitions):
            raise ReportError(f"there is no partition {key[:20]!r}, only 0 to {partitions - 1}")
        if type(offset) is not int or not 0 <= offset < MAX_OFFSET:
            raise ReportError(f"partition {key}: the offset is no whole number from 0 on")
        offsets[int(key)] = offset
    return offsets


def write_report(directory: Path, name: str, data: bytes) -> None:
    """Put a report into a stream's ``consumers`` directory, which is made if missing; raises `OSError`."""
    directory.mkdir(exist_ok=True)
    temporary = directory / f".{secrets.token_hex(8)}"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, directory / f"{name}{SUFFIX}")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class Reporter:
    """Sends reports for a reader, where they say something new or the last is old; what goes wrong is one
    warning until it works again."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._silent_until = 0.0
        self._failed = False
        self._sent = b""
        self._repeat_at = 0.0

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        """Tell how far ``consumer`` has come; never raises, and after a failure is without effect for a while."""
        now = time.monotonic()
        report = encode_report(offsets)
        if now < self._silent_until or (report == self._sent and now < self._repeat_at):
            return
        try:
            self._send(consumer, report)
            self._failed = False
            self._sent, self._repeat_at = report, now + REPEAT_S
        except Exception as error:
            self._silent_until = time.monotonic() + SILENCE_S
            if not self._failed:
                self._failed = True
                logger.warning("mqtt source: consumer %r is not shown at the broker: %s", consumer, error)
