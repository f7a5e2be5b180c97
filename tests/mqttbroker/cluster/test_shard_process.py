"""The core process of a shard: from its node's first line to its release, with clients over a link."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from support.cluster_nodes import port_ranges
from support.kafka import KafkaCluster

from mqttbroker.cluster.links.keys import key_of, new_key
from mqttbroker.cluster.links.server import WORKER, Hello, connect_link
from mqttbroker.cluster.nodes import core_control as control
from mqttbroker.cluster.nodes.core_control import CoreSetup, Status, core_command, decode_status, encode_line
from mqttbroker.config.load import load_settings
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.link_frames import DATA, JOINED, TAKEN, FrameHandler, FrameReader, FrameWriter
from mqttbroker.net.worker_setup import Joined

pytestmark = [pytest.mark.one_build]

CLUSTER = b"testtest"
KEY = new_key()


class CoreProcess:
    """A core process, and this one in the place of its node."""

    def __init__(self, kafka: KafkaCluster, cluster_id: str, directory: Path, shard: int = 0, shards: int = 1) -> None:
        self.shard = shard
        self.port = port_ranges(1, shards + 1)[0]
        config = directory.with_suffix(".toml")
        servers = ", ".join(f'"{one}"' for one in kafka.bootstrap)
        config.write_text(
            f'data_dir = "{directory}"\nallow_anonymous = true\n[http]\nport = 0\n[[listeners]]\nport = 0\n'
            f'[cluster]\nengine = "kafka"\nid = "{cluster_id}"\nbootstrap_servers = [{servers}]\nnode = "{directory.name}"\n'
            f"link_port = {self.port}\nshards = {shards}\n"
        )
        self._setup = CoreSetup(load_settings(config), CLUSTER, directory.name, "127.0.0.1", "d", KEY)
        mine, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(core_command(shard, its.fileno()), pass_fds=[its.fileno()])
        self._sock = mine
        self._sock.settimeout(60)
        self._lines = control.Lines()
        self._statuses: list[Status] = []
        self.tell(control.Start(self._setup.encode()))

    def __enter__(self) -> CoreProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        self._sock.close()

    def tell(self, command: Any) -> None:
        self._sock.sendall(encode_line(command))

    def status(self) -> Status:
        """The next one."""
        while not self._statuses:
            data = self._sock.recv(65536)
            assert data, "the core has ended"
            self._statuses += map(decode_status, self._lines.feed(data))
        return self._statuses.pop(0)

    def until(self, state: str) -> Status:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            status = self.status()
            if status.state == state:
                return status
            assert state == control.FENCED or status.state != control.FENCED, status.problem
        raise AssertionError(f"not {state}")

    async def client(self) -> WorkerEnd:
        end = WorkerEnd()
        hello = Hello(cluster=CLUSTER.hex(), kind=WORKER, node="w", shard=self.shard, version="", digest="d")
        address = LinkAddress("127.0.0.1", control.link_port(self.port, self.shard), key_of(KEY, WORKER))
        await connect_link(address, None, hello, end)
        return end


class WorkerEnd(FrameHandler):
    """A worker with one client, number 1."""

    def __init__(self) -> None:
        self._reader = FrameReader(self)
        self._more = asyncio.Event()
        self.received = b""
        self.closed = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send(JOINED, Joined("tcp-1", "192.0.2.1", False, False, None, None).encode())

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        self._reader.read(1000)
        self._more.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._more.set()

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def eof_received(self) -> bool:
        return False

    def handle(self, kind: int, number: int, data: bytes, start: int, end: int) -> None:
        if kind == DATA:
            self.received += data[start:end]
            self.send(TAKEN, (end - start).to_bytes(4, "big"))

    def send(self, kind: int, body: bytes) -> None:
        writer = FrameWriter()
        writer.add(kind, 1, body)
        writer.write_to(self.transport)

    async def exchange(self, packets: str, answers: str) -> None:
        """Send packets, and receive exactly these ones; all in hexadecimal."""
        self.send(DATA, bytes.fromhex(packets))
        wanted = bytes.fromhex(answers)
        async with asyncio.timeout(30):
            while len(self.received) < len(wanted):
                assert not self.closed, f"the link is closed; received {self.received.hex()}"
                self._more.clear()
                await self._more.wait()
        found, self.received = self.received, b""
        assert found.hex(" ") == wanted.hex(" ")

    async def until_closed(self) -> None:
        async with asyncio.timeout(30):
            while not self.closed:
                self._more.clear()
                await self._more.wait()


SUBSCRIBER = "10 10 0004 4d515454 04 00 0000 0004 61626364"  # MQTT 3.1.1, Clean Session 0
PUBLISHER = "10 10 0004 4d515454 04 00 0000 0004 65666768"
ANONYMOUS = "10 0c 0004 4d515454 04 02 0000 0000"
NEW, RESUMED = "20 02 00 00", "20 02 01 00"
SUBSCRIBE, SUBACK = "82 06 0001 0001 61 02", "90 03 0001 02"
QOS_1, PUBACK = "32 06 0001 61 0007 78", "40 02 0007"
QOS_2, PUBREC = "34 06 0001 61 0008 79", "50 02 0008"
AGAIN = "3c 06 0001 61 0008 79"
PUBREL, PUBCOMP = "62 02 0008", "70 02 0008"


def test_what_one_process_has_acknowledged_the_next_one_has(kafka: KafkaCluster, tmp_path: Path) -> None:
    cluster_id = uuid.uuid4().hex[:8]
    asyncio.run(kafka.create_topic(f"{cluster_id}.log", 1))

    async def before(core: CoreProcess) -> None:
        subscriber, publisher = await core.client(), await core.client()
        await subscriber.exchange(SUBSCRIBER, NEW)
        await subscriber.exchange(SUBSCRIBE, SUBACK)
        await subscriber.exchange("c0 00", "d0 00")
        subscriber.send(DATA, b"\xe0\x00")
        await publisher.exchange(PUBLISHER, NEW)
        await publisher.exchange(QOS_1, PUBACK)
        await publisher.exchange(QOS_2, PUBREC)
        core.tell(control.Release())
        await publisher.until_closed()

    async def after(core: CoreProcess) -> None:
        subscriber, publisher = await core.client(), await core.client()
        await publisher.exchange(PUBLISHER, RESUMED)
        await publisher.exchange(AGAIN, PUBREC)
        await publisher.exchange(PUBREL, PUBCOMP)
        await subscriber.exchange(SUBSCRIBER, RESUMED + "32 06 0001 61 0001 78" + "34 06 0001 61 0002 79")
        await subscriber.exchange("40 02 0001 50 02 0002", "62 02 0002")
        await subscriber.exchange("70 02 0002 c0 00", "d0 00")

    async def last(core: CoreProcess) -> None:
        subscriber = await core.client()
        await subscriber.exchange(SUBSCRIBER, RESUMED)
        await subscriber.exchange("c0 00", "d0 00")

    with CoreProcess(kafka, cluster_id, tmp_path / "one") as one, CoreProcess(kafka, cluster_id, tmp_path / "two") as two:
        one.until(control.STANDBY)
        one.tell(control.Own(0.0))
        one.until(control.OWNER)
        asyncio.run(before(one))
        one.until(control.RELEASED)
        assert one.process.wait(30) == 0
        two.until(control.STANDBY)
        two.tell(control.Own(60.0))
        two.until(control.OWNER)
        asyncio.run(after(two))
        with CoreProcess(kafka, cluster_id, tmp_path / "three") as three:
            three.until(control.STANDBY)
            three.tell(control.Own(0.0))
            assert two.until(control.FENCED).problem == "another node has taken the shard over"
            assert two.process.wait(30) == 3
            three.until(control.OWNER)
            asyncio.run(last(three))
