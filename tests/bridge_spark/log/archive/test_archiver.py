"""The archiver in this process: retries, partitions that fail, retention by age, a backup in between."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.sealed_log import seal_segment

from bridge_spark.log import stream_log
from bridge_spark.log.archive import jobs
from bridge_spark.log.archive.archiver import Archiver
from bridge_spark.log.backup import backup_lock
from bridge_spark.log.sealed.job_process import JobFailed
from bridge_spark.log.segment import read_sealed_segment
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from sessions.message import Message

pytestmark = pytest.mark.one_build

TIME = 10**15  # microseconds, of the first record


class FakeJobs:
    """Runs jobs in this process; those of ``failing`` partitions fail."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.uploads = 0

    def run_within(self, job: dict[str, Any], seconds: float) -> Any:
        if job["do"] == "upload":
            self.uploads += 1
            if job["partition"] in self.failing:
                raise JobFailed("wrong checksum")
        try:
            return json.loads(json.dumps(jobs.run(job)))
        except Exception as error:
            raise JobFailed(str(error)) from None

    def close(self) -> None:
        """There is no process."""


class Archive:
    """A stream with two partitions of five closed and sealed segments each, one record per second."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.directory = root / "archive"
        self.directory.mkdir()
        (root / "data").mkdir()
        self.now = TIME / 1e6 + 100
        config = StreamConfig("s", ["a"], 2, segment_bytes=100, seal=True, archive=str(self.directory), **settings)
        self.logs = StreamLogs(root / "data/streams", [config], lambda: self.now)
        self.logs.recover({})
        for number in range(6):
            records = [Message("a", b"%d" % number, 1, False, b"", "c", TIME + number * 1_000_000, 0)]
            self.logs.append({("s", 0): records, ("s", 1): records})
            self.logs.sync()
            self.logs.committed()
        for key, directory, segment in list(self.logs.unsealed()):
            path = seal_segment(directory / segment.file, segment.end_offset, keep=True)
            self.logs.add_sealed(key, read_sealed_segment(path))
        self.commit()
        self.archiver = Archiver(self.logs, lambda: self.now)
        self.jobs = self.archiver._process = FakeJobs()  # type: ignore[assignment]

    def commit(self) -> None:
        self.now += 2
        self.logs.committed()

    def work(self) -> None:
        self.archiver._archives[0].not_before = 0.0
        self.archiver.work()

    def archived(self) -> list[tuple[int, int]]:
        """The range of offsets that each partition has in the archive."""
        return [self.logs.partition("s", number).archive.current[:2] for number in (0, 1)]

    def local_starts(self) -> list[int]:
        return [self.logs.partition("s", number).view.log_start_offset for number in (0, 1)]


@pytest.fixture(autouse=True)
def removed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_log, "UNSEALED_STAYS", 0.0)


def test_a_failure_is_logged_once_and_retried_later_and_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = Archive(tmp_path, retention_bytes=1)
    archive.directory.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            archive.work()
        archive.archiver.work()  # too early
    waits = [line.split("retry_s=")[1].split()[0] for line in caplog.messages]
    assert waits == ["5", "10", "20", "40", "80", "160", "300", "300"] and archive.logs.archive_failures == 8
    assert caplog.messages[0].endswith(f"stream=s waiting=10 retry_s=5 reason={archive.directory} is not a directory")
    assert archive.archiver.problems() == [f"archive of stream s: 10 segments wait: {archive.directory} is not a directory"]
    assert 200 < archive.archiver._pause() <= 360 and not archive.directory.exists()
    archive.commit()
    assert archive.local_starts() == [0, 0]  # retention removes nothing that is not archived
    (tmp_path / "away").rename(archive.directory)
    archive.work()
    assert archive.archiver.problems() == [] and archive.archived() == [(0, 5), (0, 5)]
    archive.commit()
    assert archive.local_starts() == [5, 5]
    archive.logs.close()


def test_a_segment_that_cannot_be_copied_holds_up_its_partition_only(tmp_path: Path) -> None:
    archive = Archive(tmp_path, retention_bytes=1)
    archive.jobs.failing.add(0)
    archive.work()
    assert archive.archived() == [(0, 0), (0, 5)] and "5 segments wait: wrong checksum" in archive.archiver.problems()[0]
    assert archive.jobs.uploads == 6
    archive.commit()
    assert archive.local_starts() == [0, 5]
    assert archive.logs.archive_totals()[::2] == (5, 5)
    archive.jobs.failing.clear()
    archive.work()
    assert archive.archived() == [(0, 5), (0, 5)]
    archive.logs.close()


def test_a_changed_file_is_not_archived(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    path = archive.logs.partition("s", 1).directory / f"{2:020d}.parquet"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    archive.work()
    assert archive.archived() == [(0, 5), (0, 2)] and f"{path}: wrong checksum" in archive.archiver.problems()[0]
    assert len(list((archive.directory / "s/1").iterdir())) == 2
    archive.logs.close()


def test_retention_of_the_archive_by_age(tmp_path: Path) -> None:
    archive = Archive(tmp_path, retention_age=50.0, archive_retention_age=200.0)
    archive.work()
    archive.commit()
    assert archive.archived() == [(0, 5), (0, 5)] and archive.local_starts() == [5, 5]
    archive.now = TIME / 1e6 + 202.5
    archive.work()
    assert archive.archived() == [(3, 5), (3, 5)]
    assert sorted(path.name[18:20] for path in (archive.directory / "s/0").iterdir()) == ["03", "04"]
    assert archive.logs.manifest("s")["partitions"][0]["log_start_offset"] == 3
    archive.now += 1000
    archive.work()
    assert archive.archived() == [(5, 5), (5, 5)] and not list(archive.directory.glob("s/*/*"))
    assert archive.logs.manifest("s")["partitions"][0]["log_start_offset"] == 5
    archive.logs.close()


def test_retention_of_the_archive_by_size_removes_the_oldest_of_all_partitions(tmp_path: Path) -> None:
    archive = Archive(tmp_path, archive_retention_bytes=1 << 40)
    archive.work()
    sizes = [path.stat().st_size for path in sorted(archive.directory.glob("s/*/*.parquet"))]
    archive.archiver._archives[0].config.archive_retention_bytes = sum(sizes) - sizes[0] - 1
    archive.work()
    assert archive.archived() == [(1, 5), (1, 5)] and len(list(archive.directory.glob("s/*/*.parquet"))) == 8
    archive.logs.close()


def test_a_backup_keeps_local_segments(tmp_path: Path) -> None:
    archive = Archive(tmp_path, retention_bytes=1)
    archive.work()
    with backup_lock(archive.logs.directory):
        archive.commit()
        assert archive.local_starts() == [0, 0]
    archive.commit()
    assert archive.local_starts() == [5, 5]
    archive.logs.close()


def test_times_are_found_in_the_archive(tmp_path: Path) -> None:
    archive = Archive(tmp_path, retention_bytes=1)
    archive.work()
    archive.commit()
    for second, half in itertools.product(range(5), (0, -500_000)):
        assert archive.logs.offset_for_timestamp("s", 1, TIME + second * 1_000_000 + half) == second
    assert archive.logs.offset_for_timestamp("s", 1, TIME + 5_000_000) == 5  # not archived
    archive.logs.close()
