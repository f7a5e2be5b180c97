"""Kafka for the demo and for tests, as Maven downloads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import local_kafka

pytestmark = pytest.mark.one_build


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """And the output of Maven is not shown."""
    for name, script in (("java", "exit 0"), ("mvn", "echo '[ERROR] no network'; echo more; exit 1")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(local_kafka, "LIBRARIES", tmp_path / "kafka")
    with pytest.raises(local_kafka.DownloadFailed, match=r"^Maven has not downloaded Kafka: \[ERROR\] no network$"):
        local_kafka.kafka_class_path()
    assert capfd.readouterr() == ("", "")
