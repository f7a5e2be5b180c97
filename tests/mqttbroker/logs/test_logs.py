"""Log lines: text and JSON, quoting, repeats, and a stderr that is not read."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import PATIENCE

from mqttbroker.logs import output as logs
from mqttbroker.logs.targets import Stderr

LINES = [
    (("event=closed client=%s reason=%s", "a=b c", "said %d"), {"event": "closed", "client": "a=b c", "reason": "said %d"},
     'event=closed client="a=b c" reason="said %d"'),
    (("event=refused client=%s reason=%s", 'a client=b reason="x"', ""),
     {"event": "refused", "client": 'a client=b reason="x"', "reason": ""},
     'event=refused client="a client=b reason=\\"x\\"" reason=""'),
    (("event=listening host=%s port=%d", "::1", 1883), {"event": "listening", "host": "::1", "port": 1883},
     "event=listening host=::1 port=1883"),
    (("event=not_sealed retry_s=%.0f file=%s.idx", 59.6, 7), {"event": "not_sealed", "retry_s": 60, "file": "7.idx"},
     "event=not_sealed retry_s=60 file=7.idx"),
    (("event=rate value=%.2f text=%s", 0.5, "12"), {"event": "rate", "value": 0.5, "text": "12"},
     "event=rate value=0.50 text=12"),
    (("event=rate value=%.1f left=%s of=%s", float("inf"), 7, None), {"event": "rate", "value": "inf", "left": 7, "of": "None"},
     "event=rate value=inf left=7 of=None"),
    (("a library said %d things", 2), {"message": "a library said 2 things"}, "a library said 2 things"),
]  # fmt: skip


@pytest.fixture(params=["text", "json"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def own_root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """A root logger for the test alone."""
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging, "getLogger", lambda *_: root)
    return root


def record(message: str, *args: object, created: float = 0.0) -> logging.LogRecord:
    found = logging.LogRecord("x", logging.INFO, __file__, 1, message, args, None)
    found.created = created or found.created
    return found


@pytest.mark.parametrize(("given", "fields", "text"), LINES)
def test_line_has_all_fields(
    given: tuple[str, ...], fields: dict[str, object], text: str, style: str, own_root: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", style)
    own_root.handle(record(*given))
    logs.close()
    said = capfd.readouterr().err
    assert said.endswith("\n") and said.count("\n") == 1
    if style == "text":
        assert said.endswith(f"Z info {text}\n")
        return
    found = json.loads(said)
    assert found.pop("time").endswith("Z") and found.pop("level") == "info"
    assert found == fields


FIELD = re.compile(r'([a-z_]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s"=\\]+))(?: |$)')
TEXTS = st.text(max_size=30) | st.text(st.sampled_from('a= "\\\n\r\u2028\x1b'), max_size=12)


@given(st.lists(TEXTS, min_size=3, max_size=3))
def test_no_value_adds_a_field_or_a_line(values: list[str]) -> None:
    names = ["client", "user", "reason"]
    given_to_log = record("event=refused client=%s user=%s reason=%s", *values)
    _, _, rest = logs._Text().format(given_to_log).split(" ", 2)
    found, position = {}, 0
    while position < len(rest):
        match = FIELD.match(rest, position)
        assert match, rest
        found[match[1]] = match[3] if match[2] is None else re.sub(r"\\(.)", r"\1", match[2])
        position = match.end()
    assert rest.isprintable() and list(found) == ["event", *names]
    assert [found[name] for name in names] == [logs._printable(value) for value in values]
    fields = json.loads(logs._Json().format(given_to_log))
    assert list(fields) == ["time", "level", "event", *names] and [fields[name] for name in names] == values


def test_client_id_with_line_breaks_stays_on_one_line(style: str) -> None:
    formatter = logs._Json() if style == "json" else logs._Text()
    assert len(formatter.format(record("event=connected client=%s", "a\nb\u2028c")).splitlines()) == 1


def test_long_value_is_cut(style: str) -> None:
    formatter = logs._Json() if style == "json" else logs._Text()
    line = formatter.format(record("event=connected client=%s address=%s", "x" * 65_000, "here:1"))
    assert len(line) < 2 * logs.MAX_VALUE_CHARS and "65000 characters" in line and "here:1" in line


def test_stack_of_a_defect_is_indented_below_its_line(style: str) -> None:
    formatter = logs._Json() if style == "json" else logs._Text()
    try:
        raise ValueError("x\n2026-11-21T00:00:00.000Z error event=forged\x1b")
    except ValueError:
        defect = logging.LogRecord("x", logging.ERROR, __file__, 1, "event=defect in=test", (), sys.exc_info())
    first, *rest = formatter.format(defect).split("\n")
    assert "defect" in first and "\x1b" not in formatter.format(defect)
    assert all(line.startswith("    ") for line in rest) and bool(rest) is (style == "text")


def test_set_level(own_root: logging.Logger) -> None:
    logs.set_level("error")
    assert own_root.level == logging.ERROR


def test_repeated_refusals_of_one_address_are_counted(own_root: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "text")
    refusal = "event=refused client=%s address=%s reason=%s"
    for number in range(1000):
        own_root.handle(record(refusal, f"c{number}", f"192.0.2.1:{number}", "no", created=100.0))
        own_root.handle(record("event=connected client=%s address=%s", f"c{number}", f"192.0.2.1:{number}", created=100.0))
    own_root.handle(record(refusal, "other", "192.0.2.2:1", "no", created=100.0))
    own_root.handle(record(refusal, "later", "192.0.2.1:1", "no", created=100.0 + logs.REPEAT_SECONDS))
    logs.close()
    lines = capfd.readouterr().err.splitlines()
    assert sum("event=refused " in line and "192.0.2.1:" in line for line in lines) == logs.REPEATS_LOGGED + 1
    assert any("client=other" in line for line in lines) and any("client=later" in line for line in lines)
    assert any(f"event=refusals_repeated address=192.0.2.1 reason=no count={1000 - logs.REPEATS_LOGGED}" in line for line in lines)
    assert sum("event=connected " in line for line in lines) == 1000


def test_counted_refusals_are_bounded() -> None:
    repeats = logs._Repeats(lambda _: None)
    for number in range(3 * logs.MAX_REPEATED):
        assert repeats.filter(record("event=refused client=%s address=%s reason=%s", "c", f"host{number}:1", "no"))
    assert len(repeats._windows) <= logs.MAX_REPEATED


UNREAD = """
import logging, sys
from mqttbroker.logs import output as logs
from mqttbroker.logs.targets import Stderr
logs.configure("info", "text")
for number in range(50_000):
    logging.info("event=connected client=%d", number)
print(logs.dropped_lines() >= 30_000, flush=True)
"""


def test_unread_stderr_blocks_neither_the_program_nor_its_end() -> None:
    reader, writer = os.pipe()  # never read
    try:
        done = subprocess.run([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=writer, text=True, timeout=4 * PATIENCE)
    finally:
        os.close(reader)
        os.close(writer)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_dropped_lines_are_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    handler = logs._Handler()
    handler.setFormatter(logs._Text())
    for _ in range(logs.QUEUE_LINES + 7):
        handler.handle(record("event=x"))
    writer = logs._Writer(handler, Stderr())
    writer.start()
    writer.close()
    assert handler.dropped == 7 and "event=log_lines_dropped count=7" in capfd.readouterr().err
