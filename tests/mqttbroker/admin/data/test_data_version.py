"""Directories of an older and of a newer program: each refusal is one line that names both."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.command_line import one_line, run
from support.raw_client import RawClient

from mqttbroker import __version__
from mqttbroker.admin.data.repair import DATABASE
from mqttbroker.admin.data.version import COMMIT_LOG, FILE, FORMATS, STORE, STREAM, last_program

NEWER = "99.0.0"
STREAMS = {"streams": {"s": {"filters": ["s/#"], "partitions": 1}}}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    with BrokerProcess(tmp_path / "data", STREAMS) as broker:
        client = RawClient(broker.port)
        client.connect("c")
        assert client.publish("s/1", b"x", 1, True) == 0
        client.close()
    return tmp_path / "data"


def newer_schema(data_dir: Path) -> None:
    with closing(sqlite3.connect(data_dir / DATABASE)) as database:
        database.execute(f"PRAGMA user_version = {FORMATS[STORE] + 1}")


def newer_stream(data_dir: Path) -> None:
    path = data_dir / "streams" / "s" / "stream.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": FORMATS[STREAM] + 1}))


CHANGES = {
    "schema": (newer_schema, STORE, rf"schema version {FORMATS[STORE] + 1} is newer than this program's {FORMATS[STORE]}"),
    "stream": (newer_stream, STREAM, rf"format {FORMATS[STREAM] + 1}, but this program reads up to format {FORMATS[STREAM]}"),
}


def test_a_start_records_the_program(data_dir: Path) -> None:
    assert last_program(data_dir) == __version__
    done = run("data-version", "data", cwd=data_dir.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"last used by mqttbroker {__version__}; this is mqttbroker {__version__}",
        f"{STORE}: {FORMATS[STORE]}; this program reads 1 to {FORMATS[STORE]}",
        f"{COMMIT_LOG}: none; this program reads 1 to {FORMATS[COMMIT_LOG]}",
        f"{STREAM}: 2; this program reads 1 to {FORMATS[STREAM]}",
        "this program opens it",
    ]


def test_the_formats_of_a_running_broker_are_read(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", STREAMS) as broker:
        client = RawClient(broker.port)
        client.connect("c")
        assert client.publish("s/1", b"x", 1, True) == 0
        done = run("data-version", "data", cwd=tmp_path)
        client.close()
    assert done.returncode == 0 and f"{COMMIT_LOG}: {FORMATS[COMMIT_LOG]};" in done.stdout


@pytest.mark.parametrize("change", CHANGES)
def test_a_newer_directory_is_refused_in_a_line_with_both_programs(data_dir: Path, change: str) -> None:
    apply: Callable[[Path], None]
    apply, name, reason = CHANGES[change]
    apply(data_dir)
    (data_dir / FILE).write_text(json.dumps({"program": NEWER}))
    done = run("serve", "--data-dir", "data", "--port", "0", "--http-port", "0", cwd=data_dir.parent)
    line = one_line(done.stderr)
    assert done.returncode == 1 and reason in line, line
    assert line.endswith(f"(data was last used by mqttbroker {NEWER}, this is {__version__}; see docs/upgrade.md)")
    assert last_program(data_dir) == NEWER  # the refused program has changed nothing
    done = run("data-version", "data", cwd=data_dir.parent)
    assert done.returncode == 1 and done.stdout.endswith(f"this program does not open it: {name}\n")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"program": null}', b"\xff"])
def test_a_damaged_record_of_the_program_prevents_nothing(data_dir: Path, content: bytes) -> None:
    (data_dir / FILE).write_bytes(content)
    with BrokerProcess(data_dir, STREAMS):
        pass
    assert last_program(data_dir) == __version__


def test_no_directory_is_one_line(tmp_path: Path) -> None:
    done = run("data-version", "none", cwd=tmp_path)
    assert (done.returncode, one_line(done.stderr)) == (1, "mqttbroker data-version: none: No such file or directory")
