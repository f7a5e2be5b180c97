"""Consumer reports: a named reader of a stream tells operators which offsets it has committed.

Reports are best effort: sending one never fails the reader, never blocks it longer than a timeout and never waits for
a disk.  A lost report is made up for by the next one.

A report is the file ``<stream>/consumers/<name>.json``, replaced atomically by the broker (readers over HTTP) or by the
reader (readers of the directory).  The file's modification time is the time of the report.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DIRECTORY = "consumers"
SUFFIX = ".json"
MAX_REPORT_BYTES = 64 * 1024
MAX_OFFSET = 1 << 63
REPORT_TIMEOUT_S = 2.0
REPEAT_S = 60.0  # an unchanged report is sent again after this time
SILENCE_S = 30.0  # pause after a failed report

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]*")

logger = logging.getLogger(__name__)


class ReportError(ValueError):
    """A malformed report or name; the message is one line."""


def check_name(name: str, max_length: int) -> None:
    """Raise `ReportError` if ``name`` is not a valid consumer name."""
    if len(name) > max_length:
        raise ReportError(f"a consumer's name has at most {max_length} characters")
    if _NAME.fullmatch(name) is None:
        raise ReportError("a consumer's name is of letters, digits, '_', '-', '.' and ':', with no leading '.' or ':'")


def encode_report(offsets: Mapping[int, int]) -> bytes:
    """``offsets``: per partition, the next offset that the consumer reads."""
    return json.dumps({"offsets": {str(number): offsets[number] for number in sorted(offsets)}}).encode()


def decode_report(data: bytes, partitions: int) -> dict[int, int]:
    """The offsets of a report on a stream with ``partitions`` partitions; raises `ReportError`."""
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
    """Replace a report in a stream's ``consumers`` directory, created if missing; raises `OSError`."""
    directory.mkdir(exist_ok=True)
    temporary = directory / f".{secrets.token_hex(8)}"
    try:
        temporary.write_bytes(data)
        os.replace(temporary, directory / f"{name}{SUFFIX}")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class Reporter:
    """Sends a reader's reports when the offsets changed or `REPEAT_S` passed.  A failure is logged once until a report
    succeeds."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send = send
        self._silent_until = 0.0
        self._failed = False
        self._sent = b""
        self._repeat_at = 0.0

    def report(self, consumer: str, offsets: Mapping[int, int]) -> None:
        """Report the offsets of ``consumer``.  Never raises; does nothing for `SILENCE_S` after a failure."""
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
