"""A broker whose disk is full, fails or is read-only: its answers to clients and operators, and no message lost."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest
from disk.fixtures import directory, layer  # noqa: F401 - fixtures
from disk.layer import SYNC, Layer, calls
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import drops, samples
from support.raw_client import RawClient

from mqttbroker.admin.data.repair import DATABASE
from mqttbroker.codec.packets import Puback, Publish, Pubrec
from mqttbroker.codec.properties import Properties
from sessions.store.interface import StoreError
from sessions.store.writer import SqliteStore

CONFIG = {
    "streams": {"s": {"filters": ["kept/#"], "partitions": 1}},
    "sys_interval": "1s",
    "commit_log_bytes": "1MiB",
    "apply_interval": "10ms",
}
READ_ONLY = [(kind, errno.EROFS, "*") for kind in ("write", "open", "truncate", "unlink")]
# The calls that fail, the reason code that a publisher gets, and a word of the logged reason.
FAULTS = {
    "disk full": ([("write", errno.ENOSPC, "*")], 0x97, "full|No space"),
    "log full": ([("write", errno.ENOSPC, "*/log/*")], 0x97, "No space"),
    "quota": ([("write", errno.EDQUOT, "*/streams/*")], 0x97, "quota"),
    "stream full": ([("write", errno.ENOSPC, "*/streams/*")], 0x97, "No space"),
    "database full": ([("write", errno.ENOSPC, "*-wal")], 0x97, "full"),
    "sync fails": ([("sync", errno.EIO, "*")], 0x80, "I/O|Input/output"),
    "sync of the log fails": ([("sync", errno.EIO, "*/log/*")], 0x80, "I/O|Input/output"),
    "sync of the database fails": ([("sync", errno.EIO, "*-wal")], 0x80, "I/O|Input/output"),
    "sync of the stream fails": ([("sync", errno.EIO, "*/streams/*")], 0x80, "Input/output"),
    "write fails": ([("write", errno.EIO, "*")], 0x80, "I/O|Input/output"),
    "read-only": (READ_ONLY, 0x80, "[Rr]ead-only|I/O"),
}
# What follows the commit log: messages are accepted until it fails.
BEHIND = {"quota", "stream full", "database full", "sync of the database fails", "sync of the stream fails"}


class Clients:
    """A disconnected subscriber with a session, a connected one at QoS 0, and publishers of both versions."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.accepted: list[bytes] = []
        away = self.open("away", 4)
        away.subscribe("kept/#", options=2)
        away.close()
        self.listen()

    def listen(self) -> None:
        self.live = RawClient(self.broker.port)
        self.live.connect("live")
        self.live.subscribe("kept/#", options=0)

    def open(self, client_id: str, version: int) -> RawClient:
        client = RawClient(self.broker.port, version)
        properties = Properties()
        if version == 5:
            properties.session_expiry_interval = 0xFFFFFFFF
        assert client.connect(client_id, clean_start=False, properties=properties).reason_code == 0
        return client

    def publish(self, version: int, qos: int, payload: bytes) -> int:
        """The reason code, or -1 if the broker closes without an answer; the QoS 0 subscriber gets the message."""
        with RawClient(self.broker.port, version) as client:
            client.connect()
            client.send(Publish("kept/t", payload, qos, False, False, 1))
            assert self.live.take().payload == payload
            try:
                answer = client.receive()
            except ConnectionError:
                return -1
            assert isinstance(answer, (Puback, Pubrec))
            if answer.reason_code < 0x80:
                self.accepted.append(payload)
            return answer.reason_code

    def publish_all(self, phase: str) -> list[int]:
        """Publish at QoS 1 and 2, with 5.0 and 3.1.1."""
        cases = [(version, qos) for version in (5, 4) for qos in (1, 2)]
        return [self.publish(version, qos, f"{phase} {version} {qos}".encode()) for version, qos in cases]

    def publish_until_refused(self, code: int) -> None:
        """Publish large messages until one is refused with this code."""
        for number in range(200):
            found = self.publish(5, 1, b"until refused %d " % number + bytes(20_000))
            if found != 0:
                assert found == code
                return
        raise AssertionError("nothing was refused")

    def expect_kept(self) -> None:
        """The session and the stream have each accepted message once, and nothing else."""
        away = self.open("away", 4)
        # Sorted, as QoS 2 messages are sent after the commit of their packet id and QoS 1 messages before.
        assert sorted(away.take().payload for _ in self.accepted) == sorted(self.accepted)
        away.expect_nothing()
        away.close()
        manifest = self.broker.get("/streams/s").decode()
        assert f'"high_watermark": {len(self.accepted)},' in manifest


def unready(broker: BrokerProcess) -> str:
    """The reasons that /readyz gives; empty if the broker is ready."""
    try:
        broker.get("/readyz")
    except HTTPError as error:
        assert error.code == 503
        with error:
            return error.read().decode()
    return ""


def sample(broker: BrokerProcess, name: str) -> float:
    lines = broker.get("/metrics").decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))


def lines(broker: BrokerProcess, event: str) -> list[str]:
    return [line for line in broker.log.splitlines() if f"event={event}" in line]


@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_disk(layer: Layer, name: str) -> None:
    faults, code, words = FAULTS[name]
    with BrokerProcess(layer.root / "data", CONFIG, env=layer.env) as broker:
        clients = Clients(broker)
        assert clients.publish_all("before") == [0, 0, 0, 0]
        for fault in faults:
            layer.fail(*fault)
        if name in BEHIND:
            clients.publish_until_refused(code)
        assert clients.publish_all("during") == [code, code, -1, -1]
        # QoS 0 and messages without subscribers need no disk.
        with RawClient(broker.port) as client:
            client.connect()
            client.publish("kept/t", b"at QoS 0", 0)
            assert clients.live.take().payload == b"at QoS 0"
            assert client.publish("elsewhere", b"for nobody", 2) == 0x10
            client.subscribe("$SYS/broker/publish/messages/dropped/store_failed", options=0)
            while int(client.take().payload) < 4:
                pass
        broker.wait_for_log(f"event=store_failed reason=.*({words})")
        wait_until(lambda: unready(broker))
        assert "store: " in unready(broker)
        assert sample(broker, "mqttbroker_store_failures_total") >= 4
        assert drops(samples(broker.get("/metrics")), "store_failed") >= 4
        failures = sample(broker, "mqttbroker_store_failures_total")
        wait_until(lambda: sample(broker, "mqttbroker_store_failures_total") >= failures + 4)
        assert len(lines(broker, "store_failed")) == 1 and not lines(broker, "store_recovered")
        layer.end_failures()
        broker.wait_for_log("event=store_recovered")
        wait_until(lambda: not unready(broker))
        assert clients.publish_all("after") == [0, 0, 0, 0]
        assert len(lines(broker, "store_failed")) == len(lines(broker, "store_recovered")) == 1
        broker.restart(kill=True)
        clients.listen()
        assert clients.publish_all("after the kill") == [0, 0, 0, 0]
        clients.expect_kept()
        assert not list(layer.root.rglob("room"))


@pytest.mark.parametrize("name", ["disk full", "log full", "sync of the log fails", "stream full", "database full"])
def test_refused_messages_do_not_return_after_a_kill(layer: Layer, name: str) -> None:
    with BrokerProcess(layer.root / "data", CONFIG, env=layer.env) as broker:
        clients = Clients(broker)
        assert clients.publish_all("before") == [0, 0, 0, 0]
        for fault in FAULTS[name][0]:
            layer.fail(*fault)
        clients.publish_until_refused(FAULTS[name][1])
        assert clients.publish(5, 1, b"refused") == FAULTS[name][1]
        broker.kill()
        layer.end_failures()
        broker.start()
        clients.listen()
        assert clients.publish_all("after the kill") == [0, 0, 0, 0]
        clients.expect_kept()


def test_a_start_syncs_the_log_that_a_kill_left_in_memory(layer: Layer) -> None:
    with BrokerProcess(layer.root / "data", CONFIG, env=layer.env) as broker:
        Clients(broker).publish_all("before")
        broker.kill()
        before = len(list(calls(layer.log)))
        broker.start()
        synced = [Path(call.path).name for call in list(calls(layer.log))[before:] if call.kind == SYNC]
        assert f"{1:020d}.log" in synced


def test_a_broker_starts_on_a_full_disk(layer: Layer) -> None:
    """It refuses only messages that it cannot store."""
    with BrokerProcess(layer.root / "data", CONFIG, env=layer.env) as broker:
        clients = Clients(broker)
        assert clients.publish_all("before") == [0, 0, 0, 0]
        for name in (DATABASE, f"{DATABASE}-wal", "*.seg", "room", "log/*"):
            layer.fail("write", errno.ENOSPC, f"*/{name}")
        broker.restart(kill=True)
        clients.listen()
        assert clients.publish_all("during") == [0x97, 0x97, -1, -1]
        layer.end_failures()
        broker.wait_for_log("event=store_recovered")
        assert clients.publish_all("after") == [0, 0, 0, 0]
        clients.expect_kept()


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[None]:
    """Mount a file system of this size at ``directory``; skips without the permission."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"cannot mount: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill_up(directory: Path) -> Path:
    """Create a file that fills the file system."""
    path = directory / "filler"
    with open(path, "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_file_system(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "12m"), BrokerProcess(disk / "data", CONFIG) as broker:
        clients = Clients(broker)
        assert clients.publish_all("before") == [0, 0, 0, 0]
        filler = fill_up(disk)
        big = "x" * 100_000
        while clients.publish(5, 1, f"{len(clients.accepted)} {big}".encode()) == 0:
            pass
        assert clients.publish_all(f"during {big}") == [0x97, 0x97, -1, -1]
        reason = unready(broker)  # that of the last commit, which varies
        assert "full" in reason or "No space" in reason
        broker.restart(kill=True)
        clients.listen()
        assert clients.publish(4, 2, f"still {big}".encode()) == -1
        filler.unlink()
        broker.wait_for_log("event=store_recovered")
        wait_until(lambda: not unready(broker))
        assert clients.publish_all(f"after {big}") == [0, 0, 0, 0]
        broker.restart(kill=True)
        clients.expect_kept()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_start_without_any_room_names_the_reason(tmp_path: Path) -> None:
    """SQLite reports only an I/O error."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "1m"):
        store = SqliteStore(disk / DATABASE, "commit", None)
        store.recover()
        store.stop()
        fill_up(disk)
        with pytest.raises(StoreError, match=f"{DATABASE}: .*No space left on device"):
            store.recover()
