"""Parses the values of the Spark source's options.

A value has one meaning or is refused with the reason.  No value is guessed or rounded.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from bridge_spark.source.errors import SourceError

EARLIEST = -2
"""In offset JSON: the oldest offset that is kept."""
LATEST = -1
"""In offset JSON: the end of the partition, exclusive."""

SELECTIONS = ("filter", "where")
"""Options that select rows.  Offsets in a checkpoint have an entry ``<option>=<value>`` for each that is set."""

STREAM = "stream"
INCARNATION = "incarnation"
"""Further entries ``<name>=<value>`` of offsets in a checkpoint: the stream that they are of, and its incarnation."""

OffsetSpec = int | dict[int, int]
"""EARLIEST or LATEST for all partitions, or an offset per partition."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS = (1 << 63) // 1000
_CONSUMER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,127}")
_DURATION = re.compile(r"(\d+)\s*([a-z]*)")
_UNIT_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


class OptionError(SourceError, ValueError):
    """An unknown option or an unusable value."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"mqtt source: option '{name}': {reason}")


class OptionNames:
    """The names of the options of a source or a sink; users may write them in any case.

    ``internal``: names that Spark adds, in lower case. ``foreign``: names of other programs' options, in lower case, by
    each the closest option here. ``closest`` and ``all_names`` are the words of the errors for these and for all.
    """

    def __init__(self, names: Sequence[str], internal: Collection[str], foreign: Mapping[str, str], closest: str, all_names: str) -> None:
        self._by_lower_name = {name.lower(): name for name in names}
        self._internal = internal
        self._foreign = foreign
        self._closest = closest
        self._all_names = all_names

    def given(self, options: Mapping[str, str]) -> dict[str, str]:
        """The options without those of Spark, by their names as documented; OptionError for an unknown one."""
        given: dict[str, str] = {}
        for key, value in options.items():
            lower = key.lower()
            if lower in self._internal or lower.startswith("spark."):
                continue
            name = self._by_lower_name.get(lower)
            if name is None:
                raise OptionError(key, self._unknown(lower))
            given[name] = value
        return given

    def _unknown(self, lower: str) -> str:
        if lower in self._foreign:
            return f"unknown: {self._closest} is '{self._foreign[lower]}'"
        similar = difflib.get_close_matches(lower, self._by_lower_name, 1, 0.75)
        if similar:
            return f"unknown, did you mean '{self._by_lower_name[similar[0]]}'?"
        return f"unknown; {self._all_names} are {', '.join(self._by_lower_name.values())}"


def offsets(given: Mapping[str, str], name: str, starting: bool) -> OffsetSpec | None:
    """`earliest`, `latest` or offset JSON; EARLIEST only if ``starting``."""
    text = given.get(name)
    if text is None:
        return None
    word = text.strip().lower()
    if word == "latest":
        return LATEST
    if word == "earliest" and starting:
        return EARLIEST
    if word == "earliest":
        raise OptionError(name, "'earliest' is where a read may start, not where it ends")
    example = f'{"earliest, latest" if starting else "latest"} nor JSON like {{"0": 123}}'
    return _per_partition(name, text, f"neither {example}", EARLIEST if starting else LATEST, 1 << 63, "an offset")


def timestamps(given: Mapping[str, str], name: str) -> dict[int, int] | None:
    """Microseconds since the epoch by partition, from JSON in milliseconds."""
    text = given.get(name)
    if text is None:
        return None
    found = _per_partition(name, text, 'not JSON like {"0": 1700000000000}', 0, _LAST_MS, "milliseconds since the epoch")
    return {partition: milliseconds * 1000 for partition, milliseconds in found.items()}


def stream_entries(given: Mapping[str, str], name: str) -> Mapping[str, int] | None:
    """The offset JSON of the option if it says of which stream it is, as that of a checkpoint; else None."""
    text = given.get(name, "")
    if f"{STREAM}=" not in text:
        return None
    document: Mapping[str, int] = json.loads(text)
    return document


def _per_partition(name: str, text: str, otherwise: str, lowest: int, limit: int, meaning: str) -> dict[int, int]:
    try:
        document: Any = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict) or not document:
        raise OptionError(name, f"{text!r} is {otherwise}")
    found: dict[int, int] = {}
    for key, value in document.items():
        if key.partition("=")[0] in (*SELECTIONS, STREAM, INCARNATION) and "=" in key:
            continue
        if not (key.isascii() and key.isdigit()):
            shorter = ': write {"0": 123}, without a name around it' if isinstance(value, dict) else ""
            raise OptionError(name, f"{text!r}: {key!r} is not a partition number{shorter}")
        if type(value) is not int or not lowest <= value < limit:
            raise OptionError(name, f"{value!r} is not {meaning} (partition {key})")
        found[int(key)] = value
    return found


def timestamp(given: Mapping[str, str], name: str) -> int | None:
    """Microseconds since the epoch, from milliseconds or an ISO 8601 time with a zone.

    A Python source does not know the session's time zone, so a time without zone is refused.
    """
    text = given.get(name)
    if text is None:
        return None
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and int(digits) < _LAST_MS:
        return int(digits) * 1000
    moment = parse_instant(digits)
    if moment is None:
        raise OptionError(name, f"{text!r} is neither milliseconds since the epoch nor a time with a zone like 2026-01-31T12:00:00Z")
    return (moment - _EPOCH) // timedelta(microseconds=1)


def parse_instant(text: str) -> datetime | None:
    """An ISO 8601 time with a zone; None for other text."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment


def duration_ms(given: Mapping[str, str], name: str, default: int) -> int:
    """Milliseconds, from a number with one of Spark's units (default: ms)."""
    text = given.get(name)
    if text is None:
        return default
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNIT_MS:
        raise OptionError(name, f"{text!r} is not a duration like 500ms, 30s, 15m or 1h")
    return int(found[1]) * _UNIT_MS[found[2]]


def positive(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    value = _whole(text)
    if value is None or value == 0:
        raise OptionError(name, f"{text!r} is not a positive whole number")
    return value


def count(given: Mapping[str, str], name: str, default: int) -> int:
    """A whole number, 0 or more."""
    text = given.get(name)
    if text is None:
        return default
    value = _whole(text)
    if value is None:
        raise OptionError(name, f"{text!r} is not a whole number from 0 on")
    return value


def _whole(text: str) -> int | None:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) >= 1 << 63:
        return None
    return int(digits)


def boolean(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise OptionError(name, f"{text!r} is neither true nor false")
    return word == "true"


def one_of(given: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    """One of ``words``; the first if the option is absent."""
    text = given.get(name)
    if text is None:
        return words[0]
    word = text.strip().lower()
    if word not in words:
        raise OptionError(name, f"{text!r} is not {' or '.join(words)}")
    return word


def consumer(given: Mapping[str, str], name: str) -> str | None:
    text = given.get(name)
    if text is not None and _CONSUMER.fullmatch(text) is None:
        raise OptionError(name, f"{text!r} is not a name of up to 128 letters, digits, '_', '-', '.' and ':'")
    return text


def url(given: Mapping[str, str], name: str) -> str | None:
    """An HTTP address without a trailing slash."""
    text = given.get(name)
    if text is None:
        return None
    if "@" in text:  # before any message shows the text
        raise OptionError(name, "must not carry a name or password: give 'token'")
    try:
        parts = urlsplit(text)
        parts.port
    except ValueError as error:
        raise OptionError(name, f"{text!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError(name, f"{text!r} is not an address like http://HOST:PORT")
    return text.rstrip("/")


def token(given: Mapping[str, str], name: str) -> str | None:
    text = given.get(name)
    if text is not None and (not text or not text.isascii() or not text.isprintable() or " " in text):
        raise OptionError(name, "is not a bearer token of printable ASCII characters")
    return text
