"""The options of the Spark data source `mqtt`.

The rule kept here: every option is checked when the source is loaded, before a
byte of a stream is read, and a refusal is one line that names the option, the
value and the reason.  Names are case-insensitive, as everywhere in Spark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Optional, Union
from urllib.parse import urlsplit

from topic_matcher.filters import is_valid_filter

EARLIEST = -2
"""Per partition, in offset JSON: the oldest offset that is still kept."""
LATEST = -1
"""Per partition, in offset JSON: the end of the partition, exclusive."""

OPTION_NAMES = (
    "path",
    "url",
    "stream",
    "filter",
    "token",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "includeUserProperties",
)
_BY_LOWER_NAME = {name.lower(): name for name in OPTION_NAMES}
_SPARK_INTERNAL = frozenset({"paths", "__paths__", "serialization.format", "provider"})

OffsetSpec = Union[int, dict[int, int]]
"""One of EARLIEST and LATEST for all partitions, or an offset per partition."""


class OptionError(ValueError):
    """An option that does not exist or whose value cannot be used."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"mqtt source: option '{name}': {reason}")


@dataclass(frozen=True)
class SourceOptions:
    """Checked options.

    Exactly one of ``path`` and ``url`` is set.  ``starting_offsets`` is None
    where the default of the kind of read applies (earliest for a batch, latest
    for a stream), ``starting_timestamp`` is in microseconds since the epoch.
    """

    path: Optional[str]
    url: Optional[str]
    stream: str
    topic_filter: Optional[str]
    token: Optional[str]
    starting_offsets: Optional[OffsetSpec]
    ending_offsets: Optional[OffsetSpec]
    starting_timestamp: Optional[int]
    max_offsets_per_trigger: Optional[int]
    min_partitions: Optional[int]
    fail_on_data_loss: bool
    include_user_properties: bool


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Check Spark's option map; raises `OptionError`."""
    given = _known_options(options)
    path, url = given.get("path"), given.get("url")
    if path is not None and url is not None:
        raise OptionError("url", "cannot be given together with 'path'")
    if path is None and url is None:
        raise OptionError("path", "missing: give 'path' (data directory) or 'url' (the broker's HTTP address)")
    if url is not None:
        _check_url(url)
    stream = given.get("stream", "")
    if not stream:
        raise OptionError("stream", "missing: give the name of a stream")
    if "/" in stream or stream in (".", ".."):
        raise OptionError("stream", f"{stream!r} is not a stream name")
    topic_filter = given.get("filter")
    if topic_filter is not None and not is_valid_filter(topic_filter):
        raise OptionError("filter", f"{topic_filter!r} is not an MQTT topic filter")
    if topic_filter is not None and topic_filter.startswith("$share/"):
        raise OptionError("filter", "a shared subscription means nothing here: give the filter alone")
    return SourceOptions(
        path=path,
        url=url.rstrip("/") if url is not None else None,
        stream=stream,
        topic_filter=topic_filter,
        token=_token(given.get("token"), url),
        starting_offsets=_offsets(given, "startingOffsets"),
        ending_offsets=_offsets(given, "endingOffsets"),
        starting_timestamp=_timestamp(given, "startingTimestamp"),
        max_offsets_per_trigger=_positive(given, "maxOffsetsPerTrigger"),
        min_partitions=_positive(given, "minPartitions"),
        fail_on_data_loss=_boolean(given, "failOnDataLoss", True),
        include_user_properties=_boolean(given, "includeUserProperties", False),
    )


def check_for_batch(options: SourceOptions) -> None:
    """Refuse what has no meaning in a batch read; raises `OptionError`."""
    if _mentions(options.starting_offsets, LATEST):
        raise OptionError("startingOffsets", "'latest' (-1) reads nothing in a batch: it is for streams")


def check_for_stream(options: SourceOptions) -> None:
    """Refuse what has no meaning in a streaming read; raises `OptionError`."""
    if options.ending_offsets is not None:
        raise OptionError("endingOffsets", "is for batch reads: a stream has no end")


def _known_options(options: Mapping[str, str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for key, value in options.items():
        lower = key.lower()
        if lower in _SPARK_INTERNAL or lower.startswith("spark."):
            continue
        name = _BY_LOWER_NAME.get(lower)
        if name is None:
            raise OptionError(key, f"unknown; the options are {', '.join(OPTION_NAMES)}")
        given[name] = value
    return given


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        parts.port
    except ValueError as error:
        raise OptionError("url", f"{url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError("url", f"{url!r} is not an address like http://HOST:PORT")
    if parts.username is not None:
        raise OptionError("url", "must not carry a name or password: give 'token'")


def _token(token: Optional[str], url: Optional[str]) -> Optional[str]:
    if token is None:
        return None
    if url is None:
        raise OptionError("token", "is for 'url' only")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise OptionError("token", "is not a bearer token of printable ASCII characters")
    return token


def _offsets(given: dict[str, str], name: str) -> Optional[OffsetSpec]:
    text = given.get(name)
    if text is None:
        return None
    starting = name == "startingOffsets"
    word = text.strip().lower()
    if word == "latest":
        return LATEST
    if word == "earliest" and starting:
        return EARLIEST
    if word == "earliest":
        raise OptionError(name, "'earliest' is where a read may start, not where it ends")
    try:
        value = json.loads(text)
    except ValueError:
        words = "earliest, latest" if starting else "latest"
        raise OptionError(name, f"{text!r} is neither {words} nor JSON like {{\"0\": 123}}") from None
    if not isinstance(value, dict) or not value:
        raise OptionError(name, f"{text!r} is not JSON like {{\"0\": 123}}")
    offsets: dict[int, int] = {}
    lowest = EARLIEST if starting else LATEST
    for key, offset in value.items():
        if not (key.isascii() and key.isdigit()):
            raise OptionError(name, f"{key!r} is not a partition number")
        if type(offset) is not int or offset < lowest or offset >= 1 << 63:
            raise OptionError(name, f"{offset!r} is not an offset (partition {key})")
        offsets[int(key)] = offset
    return offsets


def _timestamp(given: dict[str, str], name: str) -> Optional[int]:
    text = given.get(name)
    if text is None:
        return None
    if text.strip().isdigit():
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise OptionError(
            name, f"{text!r} is neither milliseconds since the epoch nor a time like 2026-01-31T12:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _positive(given: dict[str, str], name: str) -> Optional[int]:
    text = given.get(name)
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits) < 1 << 63:
        raise OptionError(name, f"{text!r} is not a positive whole number")
    return int(digits)


def _boolean(given: dict[str, str], name: str, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise OptionError(name, f"{text!r} is neither true nor false")
    return word == "true"


def _mentions(spec: Optional[OffsetSpec], value: int) -> bool:
    return value in spec.values() if isinstance(spec, dict) else spec == value
