"""Backups of running and stopped brokers: each is the state of one moment, and is restored as it was."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.damaged_log import records
from support.properties import session_expiry
from support.raw_client import RawClient

from mqttbroker.admin.data import backup as backup_module
from mqttbroker.admin.data.backup import BackupError, back_up, restore
from mqttbroker.admin.data.repair import DATABASE, check
from mqttbroker.codec.packets import Puback, Publish
from sessions.store.interface import StoreError

STREAM = {"streams": {"s": {"filters": ["s/#"], "partitions": 1, "segment_bytes": "64KiB", "seal": False}}}
WINDOW = 100

Start = Callable[..., BrokerProcess]


class Load:
    """Publishes the numbers 1, 2, ... at QoS 1; `acknowledged` is the last one with a PUBACK."""

    def __init__(self, broker: BrokerProcess) -> None:
        away = RawClient(broker.port)
        away.connect("away", clean_start=False, properties=session_expiry())
        away.subscribe("s/#", options=1)
        away.close()
        self.client = RawClient(broker.port)
        self.client.connect("publisher")
        self.acknowledged = 0
        self._sent = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _send(self) -> None:
        self._sent += 1
        payload = b"%d " % self._sent + b"x" * (self._sent % 200)
        packet_id = self._sent % 60_000 + 1
        self.client.send(Publish("s/1", payload, 1, True, False, packet_id))

    def _acknowledge(self) -> None:
        assert self.client.expect(Puback).reason_code == 0
        self.acknowledged += 1

    def _run(self) -> None:
        for _ in range(WINDOW):
            self._send()
        while not self._stopping.is_set():
            self._acknowledge()
            self._send()
        for _ in range(WINDOW):
            self._acknowledge()

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self.client.close()


def queued(database: Path) -> list[int]:
    connection = sqlite3.connect(database)
    rows = connection.execute("SELECT payload FROM queue JOIN messages ON messages.id = message_id ORDER BY seq").fetchall()
    connection.close()
    return [int(payload.split()[0]) for (payload,) in rows]


def retained(database: Path) -> int:
    connection = sqlite3.connect(database)
    (payload,) = connection.execute("SELECT payload FROM retained").fetchone()
    connection.close()
    return int(payload.split()[0])


def test_a_backup_under_load_is_consistent(tmp_path: Path, start_broker: Start) -> None:
    broker = start_broker(data_dir=tmp_path / "data", config=STREAM)
    with Load(broker) as load:
        for number in range(4):
            wait_until(lambda: load.acknowledged >= 1000 * number + 200)
            acknowledged = load.acknowledged
            summary = back_up(tmp_path / "data", tmp_path / f"backup-{number}")
            assert summary.startswith(f"{tmp_path}/backup-{number}: 1 sessions, 1 subscriptions, ")
            target = tmp_path / f"restored-{number}"
            restore(tmp_path / f"backup-{number}", target)
            assert check(target).problems == []
            kept = queued(target / DATABASE)
            # Database and log agree, and have all messages acknowledged before.
            assert len(kept) >= acknowledged
            assert kept == list(range(1, len(kept) + 1)) and retained(target / DATABASE) == len(kept)
            found = records(target / "streams" / "s" / "0")
            assert [int(payload.split()[0]) for payload in found.values()] == kept
            assert sorted(found) == list(range(len(kept)))
    assert check(tmp_path / "data").problems == []
    restored = start_broker(data_dir=tmp_path / "restored-3", config=STREAM)
    away = RawClient(restored.port)
    assert away.connect("away", clean_start=False, properties=session_expiry()).session_present
    assert [int(away.take().payload.split()[0]) for _ in kept] == kept
    away.close()
    manifest = json.loads(restored.get("/streams/s"))
    assert manifest["partitions"][0]["high_watermark"] == len(kept)


def test_retention_during_a_backup(tmp_path: Path, start_broker: Start) -> None:
    config = {"streams": {"s": {**STREAM["streams"]["s"], "retention_bytes": "200KiB"}}}
    broker = start_broker(data_dir=tmp_path / "data", config=config)
    with Load(broker) as load:
        for number in range(3):
            wait_until(lambda: load.acknowledged >= 3000 * (number + 1))
            back_up(tmp_path / "data", tmp_path / f"backup-{number}")
            restore(tmp_path / f"backup-{number}", tmp_path / f"restored-{number}")
            assert check(tmp_path / f"restored-{number}").problems == []
    start_broker(data_dir=tmp_path / "restored-2", config=config)


# -- without load -------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data_dir = tmp_path_factory.mktemp("sound") / "data"
    with BrokerProcess(data_dir, STREAM) as broker, Load(broker) as load:
        wait_until(lambda: load.acknowledged >= 500)
    return data_dir


@pytest.fixture
def data_dir(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "data")
    return tmp_path / "data"


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "lock" and path.suffix != ".idx"
    }


def test_the_backup_of_a_stopped_broker(data_dir: Path, tmp_path: Path) -> None:
    before = files(data_dir)
    back_up(data_dir, tmp_path / "backup")
    assert files(data_dir) == before
    manifest = json.loads((tmp_path / "backup" / "backup.json").read_bytes())
    assert manifest["format"] == 1 and manifest["counts"]["sessions"] == 1
    assert set(manifest["files"]) == set(before)
    restore(tmp_path / "backup", tmp_path / "again")
    changed = (DATABASE, "streams/s/incarnation.json")
    assert {name: data for name, data in files(tmp_path / "again").items() if name not in changed} == {
        name: data for name, data in before.items() if name not in changed
    }
    assert queued(tmp_path / "again" / DATABASE) == queued(data_dir / DATABASE)
    assert sorted(os.listdir(tmp_path)) == ["again", "backup", "data"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_backup_has_what_only_the_commit_log_has(tmp_path: Path, start_broker: Start, killed: bool) -> None:
    """A running broker's backup waits for the database; a killed one's takes the commit log."""
    broker = start_broker(config={**STREAM, "apply_interval": "2s"})
    with Load(broker) as load:
        wait_until(lambda: load.acknowledged > 500)
    assert len(queued(broker.data_dir / DATABASE)) < load.acknowledged
    if killed:
        broker.kill()
    back_up(broker.data_dir, tmp_path / "backup")
    if not killed:
        broker.kill()
    restore(tmp_path / "backup", tmp_path / "again")
    assert check(tmp_path / "again").problems == []
    restored = start_broker(config=STREAM, data_dir=tmp_path / "again")
    restored.terminate()
    wanted = list(range(1, load.acknowledged + 1))
    assert queued(tmp_path / "again" / DATABASE) == wanted
    assert retained(tmp_path / "again" / DATABASE) == load.acknowledged
    streamed = records(tmp_path / "again" / "streams" / "s" / "0")
    assert [int(payload.split()[0]) for _, payload in sorted(streamed.items())] == wanted


def test_targets_may_be_empty_directories(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    back_up(data_dir, tmp_path / "backup")
    (tmp_path / "again").mkdir()
    restore(tmp_path / "backup", tmp_path / "again")
    assert check(tmp_path / "again").problems == []


def test_targets_and_sources_that_are_refused(data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for target in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(BackupError, match="is not an empty directory"):
            back_up(data_dir, target)
    with pytest.raises(BackupError, match="durability off keeps none"):
        back_up(tmp_path / "full", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_damage_is_not_backed_up(data_dir: Path, tmp_path: Path) -> None:
    for path in (data_dir / DATABASE, max(data_dir.glob("streams/s/0/*.seg"))):
        whole = path.read_bytes()
        for start in (0, 4096):
            path.write_bytes(whole[:start] + bytes(4096) + whole[start + 4096 :])
            with pytest.raises(BackupError, match=f"{path}: .*mqttbroker check-store"):
                back_up(data_dir, tmp_path / "backup")
        path.write_bytes(whole)
    assert sorted(os.listdir(tmp_path)) == ["data"]


def test_a_failed_backup_leaves_nothing(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup_module, "copy_partition", full)
    with pytest.raises(OSError, match="No space"):
        back_up(data_dir, tmp_path / "backup")
    assert sorted(os.listdir(tmp_path)) == ["data"]


def test_a_backup_is_restored_into_an_empty_directory_only(data_dir: Path, tmp_path: Path, start_broker: Start) -> None:
    back_up(data_dir, tmp_path / "backup")
    with pytest.raises(BackupError, match="is not empty"):
        restore(tmp_path / "backup", data_dir)
    start_broker(data_dir=tmp_path / "used", config=STREAM)
    with pytest.raises(StoreError, match="in use by another process"):
        restore(tmp_path / "backup", tmp_path / "used")


@pytest.mark.parametrize("name", [DATABASE, "streams/s/stream.json", "streams/s/0/high_watermark"])
def test_a_damaged_backup_is_not_restored(data_dir: Path, tmp_path: Path, name: str) -> None:
    backup = tmp_path / "backup"
    back_up(data_dir, backup)
    whole = (backup / name).read_bytes()
    (backup / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BackupError, match=f"{name}: is damaged"):
        restore(backup, tmp_path / "again")
    (backup / name).unlink()
    with pytest.raises(BackupError, match=f"{name}: is missing"):
        restore(backup, tmp_path / "again")


def test_directories_that_are_no_backups(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="no backup, it has no backup.json"):
        restore(data_dir, tmp_path / "again")
    back_up(data_dir, tmp_path / "backup")
    manifest = tmp_path / "backup" / "backup.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(BackupError, match="format 2; this program's is 1"):
        restore(tmp_path / "backup", tmp_path / "again")
    manifest.write_text("{")
    with pytest.raises(BackupError, match="damaged"):
        restore(tmp_path / "backup", tmp_path / "again")
    assert not (tmp_path / "again").exists()
