"""Turns errors of the packages that write tables into one line, without a secret."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bridge_spark.tables.output.batch_table import ForeignBatch, TableError

MAX_CHARACTERS = 400
_SECRETS = re.compile(
    r"(?i)((?:[\w.-]*(?:secret|token|password|credential|signature|(?:access|account|private|shared)[_-]?key)[\w.-]*"
    r"|\bsig|[\w.-]*authorization)[\"']?\s*[=:]\s*)(?:\"[^\"]*|'[^']*|(?:(?:bearer|basic)\s+)?[^\s\"'&,;)]+)"
    r"|(://[^/\s:@]+:)[^/\s@]+(?=@)"
)


@contextmanager
def library_errors(place: str) -> Iterator[None]:
    """Raise any error of a package as `TableError` that names the table at ``place``."""
    try:
        yield
    except (TableError, ForeignBatch):
        raise
    except Exception as error:
        raise TableError(f"{place}: {text_of(error)}") from None


def text_of(error: BaseException) -> str:
    """The text of an error in one line, without the values of credentials."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = _SECRETS.sub(lambda found: f"{found[1] or found[2]}…", text)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"


def warn(text: str) -> None:
    """Print a line about something that the job goes on without."""
    print(f"mqttbroker ingest: {text}", file=sys.stderr, flush=True)
