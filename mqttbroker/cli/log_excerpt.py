"""The last lines of a broker's log, without anything that is not an event of the broker.

A line of a library or a plugin, and the message of an exception, may hold anything, so they are left out. Of a traceback the
excerpt keeps files, lines, functions and the names of exceptions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which

_JOURNAL_SECONDS = 20.0
_EVENT = re.compile(r"(?:<\d>)?(?:\d{4}-\d\d-\d\dT[\d:.]+Z \w+ )?event=\w+( |$)")
_FRAME = re.compile(r'\s+(?:File "[^"]*", line \d+, in \S+|Traceback \(most recent call last\):)')
_EXCEPTION = re.compile(r"\s+((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Group|Warning))(?=:|$)")


class ExcerptError(Exception):
    """There are no lines; the reason in one line."""


def last_lines(path: Path, count: int, longest: int) -> list[str]:
    """Up to ``count`` lines at the end of a file, and up to ``longest`` bytes. Raises OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - longest))
        data = file.read(longest)
    lines = data.decode(errors="replace").splitlines()
    return lines[1 if size > longest else 0 :][-count:]


def journal_lines(count: int, longest: int) -> list[str]:
    """Up to ``count`` lines of the broker in the journal of systemd. Raises ExcerptError."""
    program = which("journalctl")
    if program is None:
        raise ExcerptError("there is no journalctl")
    command = [program, "--identifier", "mqttbroker", "--lines", str(count), "--output", "cat", "--no-pager", "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_JOURNAL_SECONDS, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ExcerptError(f"journalctl: {type(error).__name__}") from None
    if done.returncode or not done.stdout:
        raise ExcerptError("the journal has no line of mqttbroker that this user may read")
    return done.stdout[-longest:].decode(errors="replace").splitlines()


def events(lines: list[str]) -> Iterator[str]:
    """The events among the lines, what is safe of tracebacks, and how many other lines were left out."""
    omitted = 0
    for line in lines:
        kept = _as_json(line) if line.startswith("{") else _as_text(line)
        if kept is None:
            omitted += 1
        else:
            yield kept
    if omitted:
        yield f"({omitted} lines that are no events were left out)"


def _as_text(line: str) -> str | None:
    if _EVENT.match(line):
        return line
    match = _FRAME.match(line)
    if match:
        return match[0]
    match = _EXCEPTION.match(line)
    return f"    {match[1]}" if match else None


def _as_json(line: str) -> str | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or "event" not in fields:
        return None
    if "exception" in fields:
        kept = [_as_text(f"    {part}") for part in str(fields["exception"]).splitlines()]
        fields["exception"] = [part.strip() for part in kept if part is not None]
    return json.dumps(fields)
