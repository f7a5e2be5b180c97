"""The syntax of subscriptions that read streams: their filters, and where reading starts.

``$stream/<name>[/<filter>]`` reads a stream, ``$replay/<from>/<filter or stream>`` does the same for clients without
user properties, and ``$queue/<name>[/<filter>]`` is a work queue. With ``$share/<group>/`` before it, the members of a
group divide a stream.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from topic_matcher.filters import is_valid_filter

STREAM: Final = 0
REPLAY: Final = 1
QUEUE: Final = 2

_STREAM: Final = "$stream/"
_REPLAY: Final = "$replay/"
_QUEUE: Final = "$queue/"
_SHARE: Final = "$share/"

# Kinds of `Start`.
LATEST: Final = 0
EARLIEST: Final = 1
TIME: Final = 2
OFFSETS: Final = 3

_UNITS: Final[dict[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_OFFSET: Final = (1 << 62) - 1
_MAX_TIME: Final = 253_402_300_800_000_000  # the year 10000, in µs


class StreamFilter:
    """A subscription's filter in its parts; ``topic_filter`` is "" for all topics of the stream, ``group`` is "" outside
    of ``$share``. Of a replay, ``name`` is "" and ``topic_filter`` a filter or the name of a stream."""

    def __init__(self, kind: int, group: str, name: str, topic_filter: str, start: str) -> None:
        self.kind = kind
        self.group = group
        self.name = name
        self.topic_filter = topic_filter
        self.start = start


class Start:
    """Where reading starts: at an offset of each partition or of all (key -1), or at a time in µs since the epoch."""

    def __init__(self, kind: int, time: int = 0, offsets: dict[int, int] | None = None) -> None:
        self.kind = kind
        self.time = time
        self.offsets: dict[int, int] = {} if offsets is None else offsets


def reads_stream(full_filter: str) -> bool:
    """Whether a valid filter, with or without ``$share``, is one of this module's."""
    if not full_filter.startswith("$"):
        return False
    inner = full_filter
    if inner.startswith(_SHARE):
        inner = inner[inner.index("/", len(_SHARE)) + 1 :]
    return inner.startswith(_STREAM) or inner.startswith(_REPLAY) or inner.startswith(_QUEUE)


def parse_stream_filter(full_filter: str) -> StreamFilter:
    """The parts of a filter for which `reads_stream` holds. Raises ValueError with the reason."""
    group = ""
    inner = full_filter
    if inner.startswith(_SHARE):
        end = inner.index("/", len(_SHARE))
        group = inner[len(_SHARE) : end]
        inner = inner[end + 1 :]
    root, _, rest = inner.partition("/")
    name, slash, topic_filter = rest.partition("/")
    if not name or "+" in name or "#" in name:
        raise ValueError(f"{root}/ needs a name, not a wildcard" if root != "$replay" else "$replay/ needs a start")
    if slash and not topic_filter:
        raise ValueError(f"nothing follows {inner}")
    if slash and not is_valid_filter(topic_filter):
        raise ValueError(f"{topic_filter} is not a topic filter")
    if root == "$replay":
        if group:
            raise ValueError("$replay cannot be shared: use $share/<group>/$stream/<name>")
        if not slash:
            raise ValueError("$replay/<from>/ needs a filter or the name of a stream")
        if topic_filter.startswith(_STREAM):
            named = parse_stream_filter(topic_filter)
            return StreamFilter(REPLAY, "", named.name, named.topic_filter, name)
        return StreamFilter(REPLAY, "", "", topic_filter, name)
    if root == "$queue" and group:
        raise ValueError("a work queue cannot be shared: its consumers divide its messages anyway")
    return StreamFilter(QUEUE if root == "$queue" else STREAM, group, name, topic_filter, "")


def parse_offset(text: str) -> Start:
    """The value of the user property ``stream-offset``. Raises ValueError with the reason."""
    if text == "latest":
        return Start(LATEST)
    if text == "earliest":
        return Start(EARLIEST)
    if text.startswith("offset:"):
        return Start(OFFSETS, 0, _offsets(text[len("offset:") :]))
    if _is_number(text):
        return Start(TIME, _time(int(text)))
    raise ValueError("stream-offset is earliest, latest, a Unix time in microseconds, offset:N or offset:P=N,...")


def parse_from(text: str, now: int) -> Start:
    """The ``<from>`` of a replay; ``now`` is in µs since the epoch. Raises ValueError with the reason.

    A Unix time of up to 11 digits is in seconds, up to 14 in milliseconds, and else in microseconds. An ISO 8601 time
    without an offset from UTC is in UTC.
    """
    if text == "latest":
        return Start(LATEST)
    if text == "earliest":
        return Start(EARLIEST)
    if _is_number(text):
        digits = len(text)
        return Start(TIME, _time(int(text) * (1_000_000 if digits <= 11 else 1000 if digits <= 14 else 1)))
    seconds = _duration(text)
    if seconds > 0:
        return Start(TIME, max(0, now - seconds * 1_000_000))
    try:
        moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        raise ValueError(f"{text} is not earliest, latest, a Unix time, an ISO 8601 time or a duration such as 1h") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return Start(TIME, _time(max(0, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def _time(microseconds: int) -> int:
    if microseconds > _MAX_TIME:
        raise ValueError("the time is beyond the year 9999")
    return microseconds


def _offsets(text: str) -> dict[int, int]:
    offsets: dict[int, int] = {}
    parts: list[str] = text.split(",")
    for part in parts:
        partition, equals, offset = part.partition("=")
        if not equals:
            partition, offset = "-1", partition
            if len(parts) > 1:
                raise ValueError("of several offsets each needs its partition: offset:0=N,1=M")
        elif not _is_number(partition):
            raise ValueError(f"offset:{text}: {partition} is not a partition")
        if not _is_number(offset) or int(offset) > _MAX_OFFSET:
            raise ValueError(f"offset:{text}: {offset or 'nothing'} is not an offset")
        if int(partition) in offsets:
            raise ValueError(f"offset:{text}: partition {partition} stands there twice")
        offsets[int(partition)] = int(offset)
    return offsets


def _duration(text: str) -> int:
    """The seconds of a duration such as 90s, 1h or 1d12h; 0 if it is none."""
    total: int = 0
    number = ""
    for character in text:
        if character.isascii() and character.isdigit():
            number += character
        elif character in _UNITS and number and len(number) <= 9:
            total += int(number) * _UNITS[character]
            number = ""
        else:
            return 0
    return 0 if number else total
