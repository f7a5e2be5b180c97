"""Logs: one event per line on stderr, ``event=NAME key=value …`` or the same fields as JSON.

A thread writes the lines, so a stderr that is not read delays no client. Clients choose some of the values: a value has
no line break, is quoted if it could be mistaken for several fields, and is cut at `MAX_VALUE_CHARS`. Repeated refusals
are counted instead of logged one by one.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import select
import threading
import time
from collections import OrderedDict, deque
from functools import lru_cache
from typing import Optional

STDERR = 2
MAX_VALUE_CHARS = 256
QUEUE_LINES = 10_000  # lines queued for the writing thread; further ones are dropped and counted
GATHER_SECONDS = 0.005  # in which lines gather for one write
CLOSE_TIMEOUT = 1.0  # seconds that the process waits at its end for the last lines
REPEATS_LOGGED = 100  # refusals of one kind and address that are logged in REPEAT_SECONDS; further ones are counted
REPEAT_SECONDS = 10.0
MAX_REPEATED = 1000  # kinds and addresses of refusals that are counted

_NUMBER = re.compile(r"%d|%\.\d+f")
_PLAIN = re.compile(r"[^\s\"=\\]+")
_FOLDED = ("event=refused ", "event=denied ")


class _Formatter(logging.Formatter):
    """Times in UTC with milliseconds, as ISO 8601."""

    def formatTime(self, record: logging.LogRecord, datefmt: Optional[str] = None) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if fields is None:
            message = _cut(_printable(record.getMessage()))
        else:
            message = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
        line = f"{self.formatTime(record)} {record.levelname.lower()} {message}"
        if record.exc_info:
            stack = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {_printable(part)}" for part in stack)
        return line


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        fields = _fields(record)
        if fields is None:
            line["message"] = _cut(record.getMessage())
        else:
            line |= {key: _number_or_text(template, value) for key, (template, value) in fields.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@lru_cache(maxsize=500)
def _templates(message: str) -> Optional[list[tuple[str, str]]]:
    """The keys of an event, each with the template of its value; None for a message of a library, which has no keys."""
    parts = message.split()
    if not all("=" in part for part in parts):
        return None
    return [(key, template) for key, _, template in (part.partition("=") for part in parts)]


def _fields(record: logging.LogRecord) -> Optional[dict[str, tuple[str, object]]]:
    """The template and value of each key; None for a message without keys.

    The format string holds the keys and its arguments the values, so no value can add a key.
    """
    templates = _templates(str(record.msg))
    if templates is None:
        return None
    values = iter(record.args if isinstance(record.args, tuple) else ())
    return {key: (template, next(values)) if "%" in template else ("%s", template) for key, template in templates}


def _quoted(field: tuple[str, object]) -> str:
    template, value = field
    text = str(value) if template == "%s" or (template == "%d" and type(value) is int) else template % (value,)
    text = _cut(_printable(text))
    return text if _PLAIN.fullmatch(text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _number_or_text(template: str, value: object) -> object:
    if template == "%s" and type(value) is int:
        return value
    text = template % (value,)
    return json.loads(text) if _NUMBER.fullmatch(template) and text[-1].isdigit() else _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…({len(text)} characters)"


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _Repeats(logging.Filter):
    """Lets the first `REPEATS_LOGGED` refusals of one kind, host and reason through, and counts the others.

    The count is one line, ``event=refusals_repeated``, when a refusal comes after `REPEAT_SECONDS`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: OrderedDict[tuple[str, str, str], list[float]] = OrderedDict()  # [end, refusals], oldest first
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(_FOLDED):
            return True
        fields = _fields(record) or {}
        host = str(fields.get("address", ("", ""))[1]).rpartition(":")[0]
        reason = str(fields.get("reason", ("", ""))[1])[:MAX_VALUE_CHARS]
        with self._lock:
            over = self._close_windows(record.created)
            window = self._windows.setdefault((str(record.msg), host, reason), [record.created + REPEAT_SECONDS, 0])
            window[1] += 1
            wanted = window[1] <= REPEATS_LOGGED
        for (_, repeated_host, repeated_reason), (_, count) in over:
            logging.getLogger(record.name).log(record.levelno, "event=refusals_repeated address=%s reason=%s count=%d",
                                               repeated_host, repeated_reason, count - REPEATS_LOGGED)
        return wanted

    def _close_windows(self, now: float) -> list[tuple[tuple[str, str, str], list[float]]]:
        """Forget the windows that ended, or are too many; returns those with refusals that were not logged."""
        over = []
        while self._windows:
            key, window = next(iter(self._windows.items()))
            if now < window[0] and len(self._windows) < MAX_REPEATED:
                break
            del self._windows[key]
            if window[1] > REPEATS_LOGGED:
                over.append((key, window))
        return over


class _Handler(logging.Handler):
    """Hands formatted lines to the writing thread; drops and counts them while `QUEUE_LINES` wait."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque()
        self.waiting = threading.Event()  # there are lines
        self.dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) >= QUEUE_LINES:
            self.dropped += 1
            return
        try:
            self.lines.append(self.format(record))
        except Exception:
            self.handleError(record)
        if not self.waiting.is_set():
            self.waiting.set()


class _Writer(threading.Thread):
    """Writes the handler's lines to stderr, however long a write takes."""

    def __init__(self, handler: _Handler) -> None:
        super().__init__(name="log", daemon=True)
        self.handler = handler
        self._reported = 0  # of the lines that were dropped
        self._closing = threading.Event()

    def run(self) -> None:
        handler = self.handler
        while not (self._closing.is_set() and not handler.lines):
            handler.waiting.wait()
            # Wait for more lines, to write them together.
            self._closing.wait(GATHER_SECONDS)
            handler.waiting.clear()
            lines = [handler.lines.popleft() for _ in range(len(handler.lines))]
            dropped = handler.dropped
            if dropped > self._reported:
                lines.append(f"event=log_lines_dropped count={dropped - self._reported}")
                self._reported = dropped
            if lines:
                _write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))

    def close(self) -> None:
        """Write the lines that wait, for `CLOSE_TIMEOUT` at most."""
        self._closing.set()
        self.handler.waiting.set()
        self.join(CLOSE_TIMEOUT)


def _write(data: bytes) -> None:
    """Write to the file descriptor; a blocked write to `sys.stderr` would hold its lock, even at the exit of Python."""
    while data:
        try:
            data = data[os.write(STDERR, data) :]
        except BlockingIOError:
            select.select([], [STDERR], [])
        except OSError:
            return  # stderr is closed


_writer: Optional[_Writer] = None


def set_level(level: str) -> None:
    """Log events of this level and above: ``debug``, ``info``, ``warning`` or ``error``."""
    logging.getLogger().setLevel(level.upper())


def dropped_lines() -> int:
    """Lines that were not logged because stderr was not read."""
    return 0 if _writer is None else _writer.handler.dropped


def configure(level: str, style: str) -> None:
    """Send the log to stderr; ``style`` is ``text`` or ``json``."""
    global _writer
    close()
    handler = _Handler()
    handler.setFormatter(_Json() if style == "json" else _Text())
    handler.addFilter(_Repeats())
    _writer = _Writer(handler)
    _writer.start()
    logging.getLogger().handlers = [handler]
    set_level(level)


@atexit.register
def close() -> None:
    """Write the queued lines, and stop the writing thread."""
    global _writer
    if _writer is not None:
        _writer.close()
        _writer = None
