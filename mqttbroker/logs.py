"""Logs: one event per line, ``event=NAME key=value …`` or the same as JSON.

The rule kept here: a line holds no line break, whatever a client put into its
id, and never a payload or a secret.  The stack of a defect follows its line, indented.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Optional

_NUMBER = re.compile(r"%d|%\.\d+f")


class _Formatter(logging.Formatter):
    """Times in UTC with milliseconds, as ISO 8601."""

    def formatTime(self, record: logging.LogRecord, datefmt: Optional[str] = None) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{seconds}.{int(record.msecs):03d}Z"


class _Text(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record)} {record.levelname.lower()} {_printable(record.getMessage())}"
        if record.exc_info:
            stack = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {_printable(part)}" for part in stack)
        return line


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
        }
        # The format string holds the keys, its arguments the values, whatever these contain.
        template = str(record.msg).split()
        values = list(record.args) if isinstance(record.args, tuple) else []
        if all("=" in part for part in template):
            for part in template:
                key, _, value = part.partition("=")
                fields[key] = _filled_in(value, values.pop(0)) if "%" in value else value
        else:
            fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _filled_in(template: str, value: object) -> object:
    """The text, or the number where nothing but one stands there."""
    if template == "%s" and type(value) is int:
        return value
    text = template % value
    return json.loads(text) if _NUMBER.fullmatch(template) and text[-1].isdigit() else text


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def set_level(level: str) -> None:
    """Log what is at least as grave: ``debug``, ``info``, ``warning`` or ``error``."""
    logging.getLogger().setLevel(level.upper())


def configure(level: str, style: str) -> None:
    """Send the broker's log to stderr; ``style`` is ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    root = logging.getLogger()
    root.handlers = [handler]
    set_level(level)
