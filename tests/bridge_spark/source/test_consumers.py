"""Consumer reports: their format, and that a failing report does not fail the reader."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from bridge_spark.source import consumers
from bridge_spark.source.consumers import Reporter, ReportError, check_name, decode_report, encode_report, write_report

pytestmark = pytest.mark.one_build


def test_a_report_survives_a_round_trip(tmp_path: Path) -> None:
    offsets = {3: 0, 0: 17, 1023: (1 << 63) - 1}
    directory = tmp_path / "consumers"
    for given in ({0: 1}, offsets):
        write_report(directory, "job", encode_report(given))
    assert os.listdir(directory) == ["job.json"]
    assert decode_report((directory / "job.json").read_bytes(), 1024) == offsets


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "JSON like"),
        (b"\xff", "JSON like"),
        (b"[" * 60_000, "JSON like"),
        (b"[]", "JSON like"),
        (b'{"offsets": [1]}', "JSON like"),
        (b'{"offsets": {"0": 1}}' + b" " * 70_000, "at most 65536 bytes"),
        (b'{"offsets": {"2": 1}}', "no partition '2', only 0 to 1"),
        (b'{"offsets": {"-1": 1}}', "no partition '-1'"),
        (b'{"offsets": {"0": -1}}', "partition 0: the offset"),
        (b'{"offsets": {"0": 1.5}}', "partition 0: the offset"),
        (b'{"offsets": {"0": true}}', "partition 0: the offset"),
        (b'{"offsets": {"0": 9223372036854775808}}', "partition 0: the offset"),
    ],
)
def test_malformed_reports_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ReportError, match=reason):
        decode_report(data, 2)


def test_consumer_names() -> None:
    for name in ("a", "daily-job", "A_1.v2:x", "x" * 128):
        check_name(name, 128)
    for name in ("", ".", "..", ".x", "a/b", "a b", "ä", "a\n", "x" * 129):
        with pytest.raises(ReportError):
            check_name(name, 128)


def test_a_failing_report_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(consumers.time, "monotonic", lambda: now[0])
    sent: list[bytes] = []
    failing = [True]

    def send(name: str, data: bytes) -> None:
        sent.append(data)
        if failing[0]:
            raise RuntimeError("no one there")

    reporter = Reporter(send)

    def report(offsets: Mapping[int, int]) -> int:
        reporter.report("job", offsets)
        return len(sent)

    with caplog.at_level(logging.WARNING):
        assert [report({0: n}) for n in range(3)] == [1, 1, 1]
        now[0] += consumers.SILENCE_S
        assert report({0: 3}) == 2
        assert [record.getMessage() for record in caplog.records] == [
            "mqtt source: consumer 'job' is not shown at the broker: no one there"
        ]
        failing[0] = False
        now[0] += consumers.SILENCE_S
        assert [report({0: n}) for n in (4, 5)] == [3, 4] and sent[-1] == encode_report({0: 5})
        assert report({0: 5}) == 4
        now[0] += consumers.REPEAT_S
        assert report({0: 5}) == 5
        failing[0] = True
        report({0: 6})
        assert len(caplog.records) == 2
