"""The sealer and its process, killed at each step; settings; a broker that seals."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from disk.fixtures import directory, layer  # noqa: F401 - fixtures
from disk.image import Disk
from disk.layer import RENAME, Layer, calls
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.damaged_log import END, EVERYTHING, KEY, make
from support.paths import TESTS
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.stream_reads import rows as rows_of

from bridge_spark.datasource import MqttDataSource
from bridge_spark.log.check import check_partition
from bridge_spark.log.sealed import sealer as sealer_module
from bridge_spark.log.sealed.footer import verify_file
from bridge_spark.log.sealed.job_process import JobFailed, JobProcess
from bridge_spark.log.sealed.sealer import Sealer
from bridge_spark.log.stream_log import StreamConfig, StreamLogs
from mqttbroker.config import settings as settings_module
from mqttbroker.config.load import ConfigError, load_settings

pytestmark = pytest.mark.one_build

SUPPORT = TESTS / "support"
StartBroker = Callable[..., BrokerProcess]

# Where a process is killed, and at the latest after how many such calls.
STEPS = {
    "jobs: while writing": "sealed.segment_jobs:pwrite:sealing$:4:kill",
    "jobs: before the sync": "sealed.segment_jobs:fsync:sealing$:1:kill",
    "jobs: while reading back": "sealed.segment_jobs:pread:sealing$:1:kill",
    "sealer: before the rename": "sealing_process:rename:sealing$:1:kill",
    "sealer: before the sync of the directory": "sealing_process:fsync:/0$:2:kill",
    "log: before the unsealed file is removed": "sealing_process:unlink:seg$:1:kill",
    "log: before the index is removed": "sealing_process:unlink:idx$:1:kill",
}


def seal_all(data: Path, failpoint: str = "", **more: str) -> int:
    """Seal the log in another process; return its exit status."""
    paths = [str(SUPPORT / "failpoints"), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}
    if failpoint:
        env["FAILPOINT"] = failpoint
    return subprocess.run([sys.executable, str(SUPPORT / "sealing_process.py"), str(data), str(END)], env=env, timeout=50).returncode


def payloads(data: Path) -> dict[int, bytes]:
    return {row["offset"]: row["payload"] for row in rows_of(data, stream="s")}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step(tmp_path: Path, step: str) -> None:
    directory = make(tmp_path)
    assert seal_all(tmp_path, STEPS[step]) == (3 if step.startswith("jobs") else -signal.SIGKILL)
    assert payloads(tmp_path) == EVERYTHING
    state = check_partition(directory, END, False)
    assert (state.start, state.end, state.problems) == (0, END, [])
    assert seal_all(tmp_path) == 0
    assert payloads(tmp_path) == EVERYTHING
    state = check_partition(directory, END, False)
    assert (state.start, state.end, state.lost, state.problems) == (0, END, [], [])
    left = {path.suffix for path in directory.iterdir()}
    assert left == {".seg", ".idx", ".parquet", ""} and len(list(directory.glob("*.seg"))) == 1


@pytest.mark.parametrize(
    "call, code",
    [
        ("sealed.segment_jobs:pwrite:sealing$:4", errno.ENOSPC),
        ("sealed.segment_jobs:fsync:sealing$:1", errno.EIO),
        ("sealing_process:rename:sealing$:1", errno.EIO),
    ],
)
def test_a_full_or_failing_disk_loses_nothing(tmp_path: Path, call: str, code: int) -> None:
    directory = make(tmp_path)
    before = {path.name for path in directory.iterdir()}
    assert seal_all(tmp_path, f"{call}:{code}") == 3
    assert {path.name for path in directory.iterdir()} == before
    assert payloads(tmp_path) == EVERYTHING


def test_power_loss_at_any_step(directory: Path, layer: Layer) -> None:
    """With the disk model of `disk.image`: unsynced writes are kept, lost or partial."""
    assert seal_all(layer.root / "data", **layer.env) == 0
    everything = list(calls(layer.log))
    begin = next(number for number, call in enumerate(everything) if "sealing" in call.path)
    renamed = [number for number, call in enumerate(everything) if call.kind == RENAME and call.other.endswith(".parquet")]
    assert len(renamed) == 2
    disk = Disk(layer.root)
    for number, call in enumerate(everything):
        # Few calls decide about names, so each is tried more often.
        for seed in range(0 if number < begin else 1 if number <= renamed[0] else 6):
            left = directory / "left"
            disk.leave(left, Random(f"{number}:{seed}"))
            opened(left / "data").close()
            state = check_partition(left / "data/streams/s/0", END, False)
            assert (state.start, state.end, state.lost, state.problems) == (0, END, [], []), f"before call {number}"
            assert seed or number % 5 or payloads(left / "data") == EVERYTHING, f"before call {number}"
            shutil.rmtree(left)
        disk.apply(call)
    disk.expect(layer.root)


# -- in this process -------------------------------------------------------------------------------------------------


def opened(data: Path) -> StreamLogs:
    config = StreamConfig("s", ["sensors/#"], segment_bytes=5000, seal=True)
    logs = StreamLogs(data / "streams", [config], lambda: 1e6)
    logs.recover({KEY: END})
    return logs


def test_a_failure_is_logged_once_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path)
    logs = opened(tmp_path)
    sealer = Sealer(logs)
    monkeypatch.setattr(sealer_module, "RESERVED_BYTES", 1 << 60)
    waiting = len(list(logs.unsealed()))
    with caplog.at_level(logging.INFO):
        while (job := sealer._next()) is not None:
            sealer._seal(*job)
    assert logs.sealing_failures == waiting == len(caplog.messages) == 2
    assert "event=not_sealed " in caplog.messages[0] and " retry_s=60 reason=less than" in caplog.messages[0]
    assert 0 < (sealer._pause() or 0) <= 60
    for name in sealer._not_before:
        sealer._not_before[name] = 0.0
    sealer._seal(*list(logs.unsealed())[0])
    assert " retry_s=120 " in caplog.messages[-1]
    monkeypatch.undo()
    for name in sealer._not_before:
        sealer._not_before[name] = 0.0
    while (job := sealer._next()) is not None:
        sealer._seal(*job)
    logs.committed()
    assert list(logs.unsealed()) == [] and logs.sealed_segments == waiting
    sealer._process.close()
    logs.close()


def test_a_full_disk_is_not_logged_for_each_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    logs = opened(tmp_path)
    sealer = Sealer(logs)
    monkeypatch.setattr(sealer_module, "RESERVED_BYTES", 1 << 60)
    monkeypatch.setattr(sealer_module, "MAX_FAILURES", 1)
    sealer._seal_all()
    assert logs.sealing_failures == 1 < len(list(logs.unsealed())) and 0 < (sealer._pause() or 0) <= 60
    logs.close()


def test_a_segment_removed_by_retention_is_not_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    logs = opened(tmp_path)
    sealer = Sealer(logs)
    job = sealer._next()
    assert job is not None
    with monkeypatch.context() as full:
        full.setattr(sealer_module, "RESERVED_BYTES", 1 << 60)
        sealer._seal(*job)
    assert logs.sealing_failures == 1 and sealer._pause() is not None
    logs._partitions[KEY].drop(1)
    sealer._seal(*job)
    assert logs.sealing_failures == 1 and sealer._pause() is None and not list(job[1].glob("*.sealing"))
    sealer._process.close()
    logs.close()


def test_a_defect_does_not_end_sealing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path)
    logs = opened(tmp_path)
    sealer = Sealer(logs)
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(sealer, "_next", lambda: 1 // 0)
        sealer.start()
        wait_until(lambda: caplog.messages == ["event=defect in=sealing"])
        monkeypatch.undo()
        logs.segment_closed.set()
        wait_until(lambda: sum("event=segment_sealed" in message for message in caplog.messages) == 2, 60)
    sealer.stop()
    logs.close()


def test_without_sealed_streams_there_is_no_thread(tmp_path: Path) -> None:
    sealer = Sealer(StreamLogs(tmp_path, [StreamConfig("s", ["#"])]))
    sealer.start()
    assert "sealing" not in {thread.name for thread in threading.enumerate()}
    sealer.stop()


def test_the_process_reports_errors_and_ends_with_its_pipe(tmp_path: Path) -> None:
    jobs = JobProcess()
    job = {
        "do": "seal",
        "source": str(tmp_path / "none"),
        "target": str(tmp_path / "t"),
        "stream": "s",
        "partition": 0,
        "first_offset": 0,
        "end_offset": 1,
        "size": 1,
    }
    with pytest.raises(JobFailed, match="none: No such file"):
        jobs.run(job)
    process = jobs._child.process
    assert process is not None and process.stdin is not None and os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    process.stdin.close()
    assert process.wait(10) == 0
    with pytest.raises(JobFailed, match="none: No such file"):
        jobs.run(job)
    jobs.kill()
    with pytest.raises(JobFailed):
        for _ in range(2):  # it may still be running at the first call
            jobs.run({**job, "do": "salvage", "source": "none", "target": "/nowhere/t"})
    jobs.close()


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, installed, seals",
    [('"auto"', True, True), ('"auto"', False, False), ("true", True, True), ("false", True, False)],
)
def test_the_setting_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, installed: bool, seals: bool) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(f'[streams.s]\nfilters = ["#"]\nseal = {value}\n')
    monkeypatch.setattr(settings_module, "can_seal", lambda: installed)
    (stream,) = load_settings(path).streams
    assert stream.seals is seals


def test_sealing_without_pyarrow_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broker.toml"
    path.write_text('[streams.s]\nfilters = ["#"]\nseal = true\n')
    monkeypatch.setattr(settings_module, "can_seal", lambda: False)
    with pytest.raises(ConfigError, match=r'streams\.s\.seal.*pip install "mqttbroker\[parquet\]"'):
        load_settings(path)


# -- a broker --------------------------------------------------------------------------------------------------------

CONFIG = {"streams": {"s": {"filters": ["sensors/#"], "partitions": 1, "segment_bytes": "4KiB", "seal": True}}}


def test_a_broker_seals_and_serves_sealed_segments(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker(config=CONFIG)
    with RawClient(broker.port) as client:
        client.connect("dev")
        for count in range(100):
            assert client.publish("sensors/1", b"%d" % count, 1) == 0
        broker.wait_for_log("event=segment_sealed ", 4 * PATIENCE)
        count = 100
        manifest = json.loads(broker.get("/streams/s"))
        while not manifest["partitions"][0]["segments"][0]["sealed"]:
            assert client.publish("sensors/1", b"%d" % count, 1) == 0
            count += 1
            manifest = json.loads(broker.get("/streams/s"))
    (first, *_) = manifest["partitions"][0]["segments"]
    assert first["file"].endswith(".parquet")
    data = broker.get(f"/streams/s/0/{first['file']}")
    path = tmp_path / first["file"]
    path.write_bytes(data)
    assert len(data) == first["bytes"] and verify_file(path).end_offset == first["end_offset"]
    found = MqttDataSource({"url": broker.url, "stream": "s"})
    reader = found.reader(found.schema())
    values = [row["payload"] for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert values == [b"%d" % number for number in range(count)]
    metrics = broker.get("/metrics").decode()
    assert "mqttbroker_stream_sealing_failures_total 0.0" in metrics
    assert 'mqttbroker_stream_sealed_segments{partition="0",stream="s"} 0.0' not in metrics
    offsets = json.loads(broker.get(f"/streams/s/offsets?timestamp={first['first_timestamp_us']}"))
    assert offsets["partitions"] == [{"partition": 0, "offset": 0}]
    broker.restart(kill=True)
    assert json.loads(broker.get("/streams/s"))["partitions"][0]["segments"][0] == first
    assert broker.terminate() == 0
    backup = tmp_path / "backup"
    run = [sys.executable, "-m", "mqttbroker"]
    subprocess.run([*run, "backup", str(backup), "--data-dir", str(broker.data_dir)], check=True, env=broker.env)
    subprocess.run([*run, "check-store", str(backup)], check=True, env=broker.env)
    shutil.rmtree(backup)
