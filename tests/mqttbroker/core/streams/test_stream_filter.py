"""The filters of subscriptions that read streams, and where reading starts."""

from __future__ import annotations

import pytest

from mqttbroker.core.streams.filter import (
    EARLIEST,
    LATEST,
    OFFSETS,
    QUEUE,
    REPLAY,
    STREAM,
    TIME,
    parse_from,
    parse_offset,
    parse_stream_filter,
    reads_stream,
)

NOW = 1_700_000_000_000_000


@pytest.mark.parametrize(
    "text, kind, group, name, topic_filter, start",
    [
        ("$stream/s", STREAM, "", "s", "", ""),
        ("$stream/s/a/+/#", STREAM, "", "s", "a/+/#", ""),
        ("$share/g/$stream/s/a", STREAM, "g", "s", "a", ""),
        ("$queue/q/#", QUEUE, "", "q", "#", ""),
        ("$replay/1h/a/#", REPLAY, "", "", "a/#", "1h"),
        ("$replay/earliest/$stream/s/a", REPLAY, "", "s", "a", "earliest"),
    ],
)
def test_the_parts_of_a_filter(text: str, kind: int, group: str, name: str, topic_filter: str, start: str) -> None:
    assert reads_stream(text)
    found = parse_stream_filter(text)
    assert (found.kind, found.group, found.name) == (kind, group, name)
    assert (found.topic_filter, found.start) == (topic_filter, start)


@pytest.mark.parametrize("text", ["a", "$stream", "$SYS/a", "$share/g/a", "$streams/a", "stream/a"])
def test_other_filters(text: str) -> None:
    assert not reads_stream(text)


@pytest.mark.parametrize(
    "text", ["$stream/", "$stream/+", "$stream/#", "$stream/s/", "$replay/1h", "$replay/1h/", "$share/g/$replay/1h/a",
             "$share/g/$queue/q", "$replay/1h/$stream/#"]
)  # fmt: skip
def test_filters_without_meaning(text: str) -> None:
    assert reads_stream(text)
    with pytest.raises(ValueError, match=r"\w"):
        parse_stream_filter(text)


@pytest.mark.parametrize(
    "text, kind, time, offsets",
    [
        ("latest", LATEST, 0, {}),
        ("earliest", EARLIEST, 0, {}),
        ("1700000000000000", TIME, NOW, {}),
        ("offset:7", OFFSETS, 0, {-1: 7}),
        ("offset:0=7,2=0", OFFSETS, 0, {0: 7, 2: 0}),
        ("", None, 0, {}),
        ("-1", None, 0, {}),
        ("1.5", None, 0, {}),
        ("offset:", None, 0, {}),
        ("offset:-1", None, 0, {}),
        ("offset:1,2", None, 0, {}),
        ("offset:0=1,0=2", None, 0, {}),
        ("offset:x=1", None, 0, {}),
        ("offset:99999999999999999999", None, 0, {}),
        ("99999999999999999999", None, 0, {}),
        ("\u0661", None, 0, {}),
    ],
)
def test_stream_offset(text: str, kind: int | None, time: int, offsets: dict[int, int]) -> None:
    if kind is None:
        with pytest.raises(ValueError, match=r"\w"):
            parse_offset(text)
        return
    found = parse_offset(text)
    assert (found.kind, found.time, found.offsets) == (kind, time, offsets)


@pytest.mark.parametrize(
    "text, time",
    [
        ("1700000000", NOW),
        ("1700000000000", NOW),
        ("1700000000000000", NOW),
        ("2023-11-14T22:13:20Z", NOW),
        ("2023-11-14T22:13:20", NOW),
        ("2023-11-14T17:13:20-05:00", NOW),
        ("2023-11-14", NOW - 80_000_000_000),
        ("90s", NOW - 90_000_000),
        ("1h30m", NOW - 5_400_000_000),
        ("1w", NOW - 604_800_000_000),
        ("999999999w", 0),
        ("1y", None),
        ("h", None),
        ("1h5", None),
        ("2023-13-01", None),
        ("yesterday", None),
    ],
)
def test_the_start_of_a_replay(text: str, time: int | None) -> None:
    if time is None:
        with pytest.raises(ValueError, match=text):
            parse_from(text, NOW)
    else:
        found = parse_from(text, NOW)
        assert (found.kind, found.time) == (TIME, time)
