"""sessions.store.commit_log.file_log: records stay readable after failures of the calls that make and drop segments."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sessions.store.commit_log import file_log
from sessions.store.commit_log.file_log import FileCommitLog
from sessions.store.commit_log.segment import HEADER_BYTES
from sessions.store.commit_log.survey import survey

IDENTITY = b"identity of us.."
SEGMENT_BYTES = 8192


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "log"


def opened(directory: Path) -> FileCommitLog:
    log = FileCommitLog(directory, SEGMENT_BYTES)
    log.open(IDENTITY, 0, True)
    return log


def fails_once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, after: bool) -> None:
    """The next call of a function raises, ``after`` its work or instead of it."""
    works: Callable[..., Any] = getattr(where, name)
    failures = [OSError(errno.EIO, "fails")]

    def call(*args: Any) -> Any:
        if failures and not after:
            raise failures.pop()
        result = works(*args)
        if failures:
            raise failures.pop()
        return result

    monkeypatch.setattr(where, name, call)


@pytest.mark.parametrize("call", ["fdatasync", "rename", "sync_directory", "open", "close", "pwrite"])
@pytest.mark.parametrize("after", [True, False])
def test_a_smaller_record_after_a_segment_that_could_not_be_begun_is_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: bool
) -> None:
    """The record that needed the segment is refused, the next one would fit into the segment before."""
    log = opened(directory)
    log.append(b"first")
    log.make_ready()
    with monkeypatch.context() as patch:
        fails_once(patch, file_log if call == "sync_directory" else os, call, after)
        with pytest.raises(OSError):
            log.append(bytes(SEGMENT_BYTES - HEADER_BYTES - 64))
    wanted = [b"first"]
    for body in (b"small", b"large" * 1500, b"small again"):
        log.append(body)
        wanted.append(body)
    log.close()
    found = survey(directory, IDENTITY)
    assert found.damage == []
    assert [record.body for record in found.records(0)] == wanted


@pytest.mark.parametrize("call", ["fdatasync", "pwrite"])
def test_a_failure_names_the_file(directory: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    log = opened(directory)
    log.append(b"first")
    with monkeypatch.context() as patch:
        fails_once(patch, os, call, False)
        with pytest.raises(OSError, match=str(directory)):
            log.append(b"second")
    log.append(b"third")
    log.close()
    assert [record.body for record in survey(directory, IDENTITY).records(0)] == [b"first", b"third"]
