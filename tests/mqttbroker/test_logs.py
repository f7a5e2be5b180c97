"""The two shapes of a line of the log."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from mqttbroker import logs

LINES = [
    (("event=closed client=%s reason=%s", "a=b c", "said %d"), {"event": "closed", "client": "a=b c", "reason": "said %d"}),
    (("event=listening host=%s port=%d", "::1", 1883), {"event": "listening", "host": "::1", "port": 1883}),
    (("event=not_sealed retry_s=%.0f file=%s.idx", 59.6, 7), {"event": "not_sealed", "retry_s": 60, "file": "7.idx"}),
    (("event=rate value=%.2f text=%s", 0.5, "12"), {"event": "rate", "value": 0.5, "text": "12"}),
    (("event=rate value=%.1f left=%s of=%s", float("inf"), 7, None), {"event": "rate", "value": "inf", "left": 7, "of": "None"}),
    (("a library said %d things", 2), {"message": "a library said 2 things"}),
]


@pytest.fixture(params=["text", "json"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("given", "fields"), LINES)
def test_a_line(given: tuple[object, ...], fields: dict[str, object], style: str, monkeypatch: pytest.MonkeyPatch,
                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    logs.configure("info", style)
    record = logging.LogRecord("x", logging.INFO, __file__, 1, str(given[0]), given[1:], None)
    logging.root.handle(record)
    said = capsys.readouterr().err
    assert said.endswith("\n") and said.count("\n") == 1
    if style == "text":
        assert said.endswith(f"Z info {str(given[0]) % given[1:]}\n")
        return
    found = json.loads(said)
    assert found.pop("time").endswith("Z") and found.pop("level") == "info"
    assert found == fields


def test_what_a_client_puts_into_its_id_breaks_no_line(style: str) -> None:
    formatter = logs._Json() if style == "json" else logs._Text()
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "event=connected client=%s", ("a\nb\u2028c",), None)
    assert len(formatter.format(record).splitlines()) == 1


def test_a_defect_is_told_below_its_line_and_looks_like_none(style: str) -> None:
    formatter = logs._Json() if style == "json" else logs._Text()
    try:
        raise ValueError("x\n2026-11-21T00:00:00.000Z error event=forged\x1b")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "event=defect in=test", (), sys.exc_info())
    first, *rest = formatter.format(record).split("\n")
    assert "defect" in first and "\x1b" not in formatter.format(record)
    assert all(line.startswith("    ") for line in rest) and bool(rest) is (style == "text")


def test_a_level_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "getLogger", lambda *_: root)
    logs.set_level("error")
    assert root.level == logging.ERROR
