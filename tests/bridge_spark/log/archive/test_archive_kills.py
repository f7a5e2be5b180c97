"""The archiver and its process killed at each step; random sequences of all steps, with readers in between."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import polars as pl
import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest
from disk.fixtures import directory, layer  # noqa: F401 - fixtures
from disk.image import Disk
from disk.layer import Layer, calls
from support.damaged_log import BATCH, END, EVERYTHING, KEY, commit, make
from support.paths import TESTS
from support.s3 import S3Server, s3
from support.sealed_log import seal_segment
from support.stream_reads import rows as rows_of
from support.stream_reads import source

from bridge_spark.log import stream_log
from bridge_spark.log.archive import jobs
from bridge_spark.log.archive.archiver import Archiver
from bridge_spark.log.check import check_partition
from bridge_spark.log.sealed.job_process import JobFailed
from bridge_spark.log.segment import read_sealed_segment
from bridge_spark.log.stream_log import StreamConfig, StreamLogs

pytestmark = pytest.mark.one_build

__all__ = ["s3"]

SUPPORT = TESTS / "support"

SLOW = pytest.mark.slow("further steps at which a process is killed")
USUAL = ("jobs: before the rename", "archiver: before the index is written", "log: before a local file is removed")

# Where a process is killed.
STEPS = {
    "jobs: while copying": "sealed.segment_jobs:pwrite:parquet.*unfinished$:1:kill",
    "jobs: before the sync of the copy": "sealed.segment_jobs:fsync:parquet.*unfinished$:1:kill",
    "jobs: before the rename": "sealed.segment_jobs:rename:parquet.*unfinished$:1:kill",
    "jobs: before the sync of the archive's directory": "sealed.segment_jobs:fsync:archive/s/0$:1:kill",
    "jobs: before the copy is confirmed": "sealed.segment_jobs:pread:archive/s/0/.*parquet$:1:kill",
    "archiver: before the index is written": "archiving_process:pwrite:archive_index$:1:kill",
    "archiver: before the index is synced": "archiving_process:fsync:archive_index$:1:kill",
    "archiver: before the second segment is entered": "archiving_process:pwrite:archive_index$:2:kill",
    "log: before the new start is synced": "archiving_process:fdatasync:high_watermark$:1:kill",
    "log: before a local file is removed": "archiving_process:unlink:parquet$:1:kill",
}
RETENTION_STEPS = {
    "archiver: before segments are taken out of the index": "archiving_process:pwrite:archive_index$:3:kill",
    "archiver: before that is synced": "archiving_process:fsync:archive_index$:3:kill",
    "jobs: before a file is removed": "sealed.segment_jobs:unlink:archive/s/0/.*parquet$:1:kill",
}


def archive_all(data: Path, archive: Path | str, failpoint: str = "", *more: str, **variables: str) -> int:
    """Archive the log in another process; return its exit status."""
    paths = [str(SUPPORT / "failpoints"), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables, **({"FAILPOINT": failpoint} if failpoint else {})}
    command = [sys.executable, str(SUPPORT / "archiving_process.py"), str(data), str(archive), *more]
    return subprocess.run(command, env=env, timeout=50).returncode


def payloads(data: Path, **options: str) -> dict[int, bytes]:
    found = rows_of(data, stream="s", **options)
    assert len(found) == len({row["offset"] for row in found}), "an offset was read twice"
    return {row["offset"]: row["payload"] for row in found}


def archived_offsets(archive: Path) -> list[int]:
    """The offsets in the files that a glob finds."""
    return [
        offset
        for file in sorted(archive.glob("s/*/*.parquet"))
        for offset in pq.read_table(file, columns=["offset"], partitioning=None).column("offset").to_pylist()
    ]


@pytest.mark.parametrize("step", [pytest.param(step, marks=[] if step in USUAL else SLOW) for step in STEPS])
def test_a_kill_at_any_step(tmp_path: Path, step: str) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    assert archive_all(data, archive, STEPS[step]) == (3 if step.startswith("jobs") else -signal.SIGKILL)
    assert payloads(data) == EVERYTHING
    assert archive_all(data, archive) == 0
    assert payloads(data) == EVERYTHING
    assert archived_offsets(archive) == list(range(200))
    directory = data / "streams/s/0"
    state = check_partition(directory, END, False)
    assert (state.start, state.end, state.lost, state.problems) == (200, END, [], [])
    assert {path.suffix for path in directory.iterdir()} == {".seg", ".idx", ""}
    assert not list(archive.rglob(".*"))


@pytest.mark.parametrize("step", [pytest.param(step, marks=[] if step.startswith("jobs") else SLOW) for step in RETENTION_STEPS])
def test_a_kill_while_the_archive_s_retention_removes(tmp_path: Path, step: str) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    killed = archive_all(data, archive, RETENTION_STEPS[step], "4000")
    assert killed == (3 if step.startswith("jobs") else -signal.SIGKILL)
    kept = payloads(data)
    first = min(kept)
    assert first in (0, 100) and kept == {offset: EVERYTHING[offset] for offset in range(first, END)}
    assert archive_all(data, archive, "", "4000") == 0
    assert payloads(data) == {offset: EVERYTHING[offset] for offset in range(100, END)}
    assert archived_offsets(archive) == list(range(100, 200))


@pytest.mark.parametrize(
    "call",
    [
        "sealed.segment_jobs:pwrite:parquet.*unfinished$:1",
        *(
            pytest.param(call, marks=SLOW)
            for call in (
                "sealed.segment_jobs:rename:unfinished$:2",
                "sealed.worker:fsync:parquet.*unfinished$:1",
                "archiving_process:fsync:archive_index$:1",
            )
        ),
    ],
)
def test_a_full_or_failing_disk_loses_nothing(tmp_path: Path, call: str) -> None:
    data, archive = tmp_path / "data", tmp_path / "archive"
    assert archive_all(data, archive, f"{call}:{errno.ENOSPC}") == 3
    assert payloads(data) == EVERYTHING
    assert archive_all(data, archive) == 0
    assert payloads(data) == EVERYTHING and archived_offsets(archive) == list(range(200))


@pytest.mark.slow("about 250 states of the disk")
def test_power_loss_at_any_step(directory: Path, layer: Layer) -> None:
    """With the disk model of `disk.image`: unsynced writes are kept, lost or partial, in data directory and archive."""
    assert archive_all(layer.root / "data", layer.root / "archive", "", "4000", **layer.env) == 0
    everything = list(calls(layer.log))
    begin = next(number for number, call in enumerate(everything) if "_archive.json" in call.path)
    disk = Disk(layer.root)
    starts = set()
    for number, call in enumerate(everything):
        for seed in range(0 if number < begin else 3):
            left = directory / "left"
            disk.leave(left, Random(f"{number}:{seed}"))
            config = StreamConfig("s", ["sensors/#"], segment_bytes=5000, seal=True, archive=str(left / "archive"))
            logs = StreamLogs(left / "data/streams", [config], lambda: 1e6)
            logs.recover({KEY: END})
            found = payloads(left / "data")
            start = logs.manifest("s")["partitions"][0]["log_start_offset"]
            logs.close()
            # Retention of the archive removes the first of two segments.
            assert found == {offset: EVERYTHING[offset] for offset in range(start, END)}, f"before call {number}"
            starts.add(start)
            shutil.rmtree(left)
        disk.apply(call)
    assert starts == {0, 100}
    disk.expect(layer.root)


def test_a_kill_while_a_segment_is_sent_to_s3(tmp_path: Path, s3: S3Server) -> None:
    data, archive = tmp_path / "data", "s3://bucket/plant one"
    assert archive_all(data, archive, "sealed.segment_jobs:read:s/0/.*parquet$:2:kill") == 3
    files = fs.S3FileSystem(endpoint_override=s3.endpoint, scheme="http")
    names = [each.base_name for each in files.get_file_info(fs.FileSelector("bucket/plant one", recursive=True))]
    assert "_archive.json" in names and not [name for name in names if name.endswith(".parquet")]
    assert payloads(data) == EVERYTHING
    assert archive_all(data, archive, "archiving_process:pwrite:archive_index$:2:kill") == -signal.SIGKILL
    assert payloads(data) == EVERYTHING
    assert archive_all(data, archive) == 0
    assert payloads(data) == EVERYTHING
    assert [path.suffix for path in (data / "streams/s/0").glob("*.[ps]*")] == [".seg"]
    lying = pl.scan_parquet(
        "s3://bucket/plant one/s/*/*.parquet",
        storage_options={"aws_endpoint_url": s3.url, "aws_allow_http": "true", "aws_region": "us-east-1"},
    )
    assert sorted(lying.select("offset").collect()["offset"].to_list()) == list(range(200))
    found = pd.read_parquet("bucket/plant one/s", filesystem=files, columns=["offset"])
    assert sorted(found["offset"]) == list(range(200))


class InlineJobs:
    """Runs jobs in this process; fails before or after every third one, as a killed process does."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def run_within(self, job: dict[str, Any], seconds: float) -> Any:
        how = self._random.randrange(6)
        if how == 0:
            raise JobFailed("killed before the job")
        try:
            result = json.loads(json.dumps(jobs.run(job)))
        except Exception as error:
            raise JobFailed(str(error)) from None
        if how == 1:
            raise JobFailed("killed after the job")
        return result

    def close(self) -> None:
        """There is no process."""


class RandomLog:
    """A stream with an archive, to which random steps are done."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = Random(seed)
        self.data, self.archive = root / "data", root / "archive"
        self.archive.mkdir()
        self.now = 1e6
        self.end = END
        self.removed = 0  # offsets before it may be gone
        make(self.data)
        self.open()

    def open(self) -> None:
        self.config = StreamConfig(
            "s",
            ["sensors/#"],
            segment_bytes=1000,
            seal=True,
            archive=str(self.archive),
            retention_bytes=2000,
            archive_retention_bytes=30_000,
        )
        self.logs = StreamLogs(self.data / "streams", [self.config], lambda: self.now)
        self.logs.recover({KEY: self.end})
        self.archiver = Archiver(self.logs)
        self.archiver._process = InlineJobs(self.random)  # type: ignore[assignment]

    def step(self) -> None:
        self.now += 2
        what = self.random.randrange(8)
        if what < 2:
            commit(self.logs, self.end)
            self.end += BATCH
        elif what < 4:
            for key, directory, segment in list(self.logs.unsealed())[: self.random.randrange(3)]:
                sealed = seal_segment(directory / segment.file, segment.end_offset, keep=True)
                self.logs.add_sealed(key, read_sealed_segment(sealed))
        elif what < 6:
            for archive in self.archiver._archives:
                archive.not_before = 0.0
            self.archiver.work()
        elif what == 6:
            self.logs.committed()
        else:  # a kill of the broker: nothing is closed in order
            self.logs.close()
            self.open()

    def check(self, plan: list[Any], start: int, end: int) -> None:
        """Read a range that was planned some steps ago."""
        reader = source(self.data, stream="s", failOnDataLoss="false")
        found = [row for part in plan for batch in reader.reader(reader.schema()).read(part) for row in batch.to_pylist()]
        offsets = [row["offset"] for row in found]
        assert offsets == sorted(set(offsets)), "an offset was read twice, or out of order"
        kept = self.logs.manifest("s")["partitions"][0]["log_start_offset"]
        assert set(range(max(start, kept), end)) <= set(offsets), "an offset is missing"
        assert all(row["payload"] == b"%d" % row["offset"] for row in found)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=SLOW) for seed in range(2, 12))])
def test_random_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """At each moment a reader finds each offset once, also one that planned before segments moved to the archive."""
    monkeypatch.setattr(stream_log, "UNSEALED_STAYS", 0.0)
    log = RandomLog(tmp_path, seed)
    for _ in range(60):
        partition = log.logs.manifest("s")["partitions"][0]
        start, end = partition["log_start_offset"], partition["high_watermark"]
        assert end == log.end
        found = source(log.data, stream="s", failOnDataLoss="false")
        plan = list(found.reader(found.schema()).partitions())
        for _ in range(log.random.randrange(4)):
            log.step()
        log.check(plan, start, end)
    state = log.logs.manifest("s")["partitions"][0]
    assert state["archive"]["segments"] > 3 and state["segments"][0]["first_offset"] > state["log_start_offset"]
    log.logs.close()
    shutil.rmtree(tmp_path)
