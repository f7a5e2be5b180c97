"""Tables of the commands: aligned columns, safe on a terminal whatever names clients choose."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

LONGEST = 60  # characters of a value that `brief` cuts
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> None:
    """Print rows below headings; the columns in ``right`` are aligned to the right."""
    cells = [list(map(cell, row)) for row in [headings, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    for row in cells:
        padded = [text.rjust(width) if heading in right else text.ljust(width) for heading, text, width in zip(headings, row, widths)]
        print("  ".join(padded).rstrip())


def print_fields(fields: Sequence[tuple[str, Any]]) -> None:
    """Print one thing: a name and a value per line. A name may repeat."""
    width = max((len(name) for name, _ in fields), default=0)
    for name, value in fields:
        print(f"{name.ljust(width)}  {field_cell(name, value)}".rstrip())


def field_cell(name: str, value: object) -> str:
    """The value of a field; one whose name ends with ``_at`` is in Unix seconds, and is shown as local time."""
    if name.endswith("_at") and isinstance(value, (int, float)):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return cell(value)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def cell(value: object) -> str:
    """A value on one line without control characters: "" for None, yes, no, lists with commas, other things as JSON."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)) and all(isinstance(part, (str, int, float)) for part in value):
        return ", ".join(map(cell, value))
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, tuple)) else str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def brief(value: object) -> object:
    """A value, cut on a terminal, so that one of them does not make every line of its table too long."""
    if not sys.stdout.isatty():
        return value
    text = cell(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def duration(seconds: float | None) -> str:
    """A duration in the form of the configuration: "0s", "90s", "12m", "30h", "9d"."""
    value = float(seconds or 0)
    for size, unit in _UNITS:
        if value >= 2 * size:
            return f"{int(value // size)}{unit}"
    return f"{int(value)}s"
