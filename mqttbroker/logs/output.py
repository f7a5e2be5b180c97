"""Logs: one event per line, ``event=NAME key=value …`` or the same fields as JSON, to each of some targets.

The lines of the logger ``mqttbroker.audit`` may go to a file, too. A thread for each target writes the lines, so a stderr
that is not read, or a slow disk, delays no client. Clients choose some of the values: a value has
no line break, is quoted if it could be mistaken for several fields, and is cut at `MAX_VALUE_CHARS`. Repeated refusals
are counted instead of logged one by one.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mqttbroker.config.settings import Log
from mqttbroker.logs.levels import AREAS, set_level
from mqttbroker.logs.targets import LogFile, Stderr, Target, stderr_is_journal

AUDIT = "mqttbroker.audit"  # the logger of administrative acts and denials
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

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if fields is None:
            message = _cut(_printable(record.getMessage()))
        else:
            message = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
        if record.exc_info:
            stack = self.formatException(record.exc_info).split("\n")
            message += "".join(f"\n    {_printable(part)}" for part in stack)
        return f"{self.formatTime(record)} {record.levelname.lower()} {message}"


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


_SEVERITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}  # RFC 5424, section 6.2.1


def _severity(record: logging.LogRecord) -> int:
    return _SEVERITIES.get(record.levelno, 2)


class _WithPriority(logging.Formatter):
    """The lines of another format with ``<N>`` in front of each, for a stderr that is the journal."""

    def __init__(self, style: logging.Formatter) -> None:
        super().__init__()
        self._lines = style

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(f"<{_severity(record)}>{line}" for line in self._lines.format(record).split("\n"))


@lru_cache(maxsize=500)
def _templates(message: str) -> list[tuple[str, str]] | None:
    """The keys of an event, each with the template of its value; None for a message of a library, which has no keys."""
    parts = message.split()
    if not all("=" in part for part in parts):
        return None
    return [(key, template) for key, _, template in (part.partition("=") for part in parts)]


def _fields(record: logging.LogRecord) -> dict[str, tuple[str, object]] | None:
    """The template and value of each key; None for a message without keys.

    The format string holds the keys and its arguments the values, so no value can add a key.
    """
    templates = _templates(str(record.msg))
    if templates is None:
        return None
    values = iter(record.args if isinstance(record.args, tuple) else ())
    return {key: (template, next(values)) if "%" in template else ("%s", template) for key, template in templates}


def _text_of(field: tuple[str, object]) -> str:
    template, value = field
    return str(value) if template == "%s" or (template == "%d" and type(value) is int) else template % (value,)


def _quoted(field: tuple[str, object]) -> str:
    text = _cut(_printable(_text_of(field)))
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

    The count is one line, ``event=refusals_repeated``, when a refusal comes after `REPEAT_SECONDS`; ``emit`` takes it.
    """

    def __init__(self, emit: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._emit = emit
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
            line = "event=refusals_repeated address=%s reason=%s count=%d"
            values = (repeated_host, repeated_reason, count - REPEATS_LOGGED)
            self._emit(logging.LogRecord(record.name, record.levelno, __file__, 0, line, values, None))
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
    """Hands formatted lines to the writing thread; drops and counts them while `QUEUE_LINES` wait.

    ``start_writing`` starts that thread at the first line: a connection worker, which seldom has one, stays a process
    with one thread, whose system calls cost less.
    """

    def __init__(self, start_writing: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.start_writing = start_writing
        self.lines: deque[bytes] = deque()
        self.waiting = threading.Event()  # there are lines
        self.dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) >= QUEUE_LINES:
            self.dropped += 1
            return
        try:
            self.lines.append(self.format(record).encode(errors="backslashreplace"))
        except Exception:
            self.handleError(record)
        if not self.waiting.is_set():
            self.waiting.set()
            start, self.start_writing = self.start_writing, None
            if start is not None:
                start()


class _Writer(threading.Thread):
    """Writes the handler's lines to a target, however long a write takes."""

    def __init__(self, handler: _Handler, target: Target) -> None:
        super().__init__(name="log", daemon=True)
        self.handler = handler
        self._target = target
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
            if lines:
                handler.dropped += self._target.write(lines)
            if dropped > self._reported and not self._target.write([self._report(dropped - self._reported)]):
                self._reported = dropped

    def _report(self, dropped: int) -> bytes:
        line = "event=log_lines_dropped count=%d"
        return self.handler.format(logging.LogRecord("mqttbroker", logging.WARNING, __file__, 0, line, (dropped,), None)).encode()

    def close(self) -> None:
        """Write the lines that wait, for `CLOSE_TIMEOUT` at most."""
        self._closing.set()
        self.handler.waiting.set()
        self.join(CLOSE_TIMEOUT)


class _Log:
    """One log: a handler, the thread that writes its lines, and their target."""

    def __init__(self, formatter: logging.Formatter, target: Target) -> None:
        self.target = target
        self.handler = _Handler(self._start_writing)
        self.handler.setFormatter(formatter)
        self.handler.addFilter(_Repeats(self.handler.handle))
        self._writer: _Writer | None = None

    def _start_writing(self) -> None:
        self._writer = _Writer(self.handler, self.target)
        self._writer.start()

    def close(self) -> None:
        self.handler.start_writing = None
        if self._writer is not None:
            self._writer.close()


class Destinations(NamedTuple):
    """Where the log goes: ``to`` has ``stderr``, ``file`` or both."""

    to: tuple[str, ...] = ("stderr",)
    file: Path | None = None


_logs: list[_Log] = []  # those of the destinations, and then that of the audit file if there is one


def dropped_lines() -> int:
    """Lines that were not logged because stderr was not read, or a file could not be written."""
    return sum(each.handler.dropped for each in _logs)


def configure(
    level: str,
    style: str,
    audit_file: Path | None = None,
    destinations: Destinations = Destinations(),
    levels: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Send the log to its destinations, and the audit log to a file, too; ``style`` is ``text`` or ``json``, ``levels``
    those of areas.

    Raises OSError with the name of the file if one cannot be opened.
    """
    close()
    formatter = _Json() if style == "json" else _Text()
    for kind in destinations.to:
        _logs.append(_log_to(kind, formatter, destinations))
    logging.getLogger().handlers = [each.handler for each in _logs]
    logging.getLogger("asyncio").setLevel(logging.INFO)  # its debug lines are no events
    for area in AREAS:
        set_level(levels.get(area, ""), area)
    set_level(level)
    audit = logging.getLogger(AUDIT)
    if audit_file is not None:
        in_file = _Log(formatter, LogFile(audit_file))
        audit.handlers = [in_file.handler]
        audit.setLevel(logging.INFO)
        for each in _logs:
            each.handler.addFilter(lambda record: record.name != AUDIT or record.levelno >= logging.getLogger().level)
        _logs.append(in_file)


def configure_log(settings: Log) -> None:
    """`configure` by the settings."""
    destinations = Destinations(settings.to, settings.file)
    configure(settings.level, settings.format, settings.audit_file, destinations, dict(settings.levels))


def set_levels(settings: Log) -> None:
    """Use the levels of the settings alone."""
    levels = dict(settings.levels)
    for area in AREAS:
        set_level(levels.get(area, ""), area)
    set_level(settings.level)


def file_problem(error: OSError, settings: Log) -> str:
    """One line for a file of the log that cannot be opened, with its key."""
    key = "audit_file" if str(error.filename) == str(settings.audit_file) else "file"
    return f"log.{key}: {error.filename}: {error.strerror}"


def _log_to(kind: str, style: _Text | _Json, destinations: Destinations) -> _Log:
    if kind == "file":
        assert destinations.file is not None
        return _Log(style, LogFile(destinations.file))
    return _Log(_WithPriority(style) if stderr_is_journal() else style, Stderr())


def _files() -> Iterator[LogFile]:
    return (each.target for each in _logs if isinstance(each.target, LogFile))


def reopen(settings: Log) -> list[str]:
    """Write to the files that have the paths of the logs now, for logrotate; returns a problem for each that stays."""
    problems = []
    for file in _files():
        try:
            file.reopen()
        except OSError as error:
            problems.append(file_problem(error, settings))
    return problems


def append_audit(file: Path, style: str, message: str, *args: object) -> None:
    """Add one line to an audit file that a broker may have open, too. Raises OSError."""
    formatter = _Json() if style == "json" else _Text()
    line = formatter.format(logging.LogRecord(AUDIT, logging.INFO, __file__, 0, message, args, None))
    if LogFile(file).write([line.encode(errors="backslashreplace")]):
        raise OSError("cannot be written")


@atexit.register
def close() -> None:
    """Write the queued lines, and stop the writing threads."""
    while _logs:
        _logs.pop().close()
