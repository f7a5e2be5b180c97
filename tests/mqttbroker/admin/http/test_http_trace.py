"""Traces over HTTP and by ``mqttbroker trace``: what is in them, what is masked, and when they end."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pytest
from support.broker_process import BrokerProcess
from support.raw_client import RawClient
from support.tools import program

from mqttbroker.codec.packets import Connack, Connect, Packet, Publish, Will, decode

Start = Callable[..., BrokerProcess]
TSHARK = program("tshark")
TOKEN = "t" * 32
HTTP = {"token": TOKEN, "access": [{"name": "o", "role": "operator", "token": "o" * 32}]}


@pytest.fixture
def broker(start_broker: Start) -> BrokerProcess:
    return start_broker(config={"sys_interval": "0s", "http": HTTP})


def begin(broker: BrokerProcess, token: str = TOKEN, **query: object) -> Any:
    """An answer that has begun: packets are traced from now on."""
    text = "&".join(f"{name}={str(value).replace('#', '%23')}" for name, value in query.items())
    request = urllib.request.Request(f"{broker.url}/api/v1/trace?{text}", headers={"Authorization": f"Bearer {token}"})
    answer = urllib.request.urlopen(request, timeout=30)
    broker.wait_for_log("event=admin action=trace ")
    return answer


class Record(NamedTuple):
    """One record of a capture file."""

    source: tuple[str, int]
    target: tuple[str, int]
    sequence: int
    acknowledged: int
    data: bytes
    length: int  # of the whole segment's data


def records(file: BinaryIO, count: int | None = None) -> list[Record]:
    """The next records of a file, behind its header, up to its end."""
    found: list[Record] = []
    while count is None or len(found) < count:
        header = file.read(16)
        if not header:
            break
        _, _, kept, whole = struct.unpack("<IIII", header)
        data = file.read(kept)
        assert data[0] == 0x45 and data[9] == 6 and sum(struct.unpack(">10H", data[:20])) % 0xFFFF == 0
        ports = struct.unpack(">HHII", data[20:32])
        source, target = (".".join(map(str, data[at : at + 4])) for at in (12, 16))
        assert int.from_bytes(data[2:4], "big") == whole
        found.append(Record((source, ports[0]), (target, ports[1]), *ports[2:], data[40:], whole - 40))
    return found


def header_of(file: BinaryIO) -> tuple[int, ...]:
    return struct.unpack("<IHHiIII", file.read(24))


def packet_of(record: Record, version: int = 5) -> Packet:
    packet = decode(record.data, version)[0]
    assert packet is not None
    return packet


@pytest.mark.parametrize("version", [4, 5])
def test_a_client_is_traced_from_connect_to_disconnect_without_secrets_and_payloads(broker: BrokerProcess, version: int) -> None:
    with begin(broker, client_id="dev", seconds=60, max_bytes=100_000) as answer:
        assert header_of(answer) == (0xA1B2C3D4, 2, 4, 0, 0, 262_144, 101)
        with RawClient(broker.port, version) as other, RawClient(broker.port, version) as client:
            other.connect("other")
            client.connect("dev", username="u", password=b"secret", will=Will("w", b"last words"), keep_alive=9)
            address = client.socket.getsockname()
            other.publish("t", b"not traced", 1)
            client.publish("t/1", b"hidden payload", 1)
            found = records(answer, 4)
    assert [record.source == address for record in found] == [True, False, True, False]
    assert all((record.target if record.source == address else record.source) == ("127.0.0.1", 1883) for record in found)
    connect = packet_of(found[0], version)
    assert isinstance(connect, Connect) and connect.client_id == "dev" and connect.keep_alive == 9
    assert connect.password == b"******" and connect.will is not None and connect.will.payload == b"*" * 10
    assert isinstance(packet_of(found[1], version), Connack)
    publish = found[2]
    assert b"t/1" in publish.data and b"hidden" not in publish.data and publish.length == len(publish.data) + 14
    assert publish.sequence == 1 + found[0].length and publish.acknowledged == 1 + found[1].length
    assert found[3].acknowledged == publish.sequence + publish.length
    assert found[3].data[0] == 0x40


def test_a_topic_is_traced_at_all_clients_and_with_payloads_if_they_are_asked_for(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as subscriber, RawClient(broker.port, 4) as publisher:
        subscriber.connect("s")
        subscriber.subscribe("#", options=0)
        publisher.connect("p", keep_alive=0)
        with begin(broker, topic="a/#", payload="true", max_bytes=100_000) as answer:
            header_of(answer)
            publisher.publish("b", b"other", 1)
            publisher.publish("a/1", b"\x00\xff" * 50_000, 1)
            assert len(subscriber.wait_for(Publish).payload) == 5
            assert len(subscriber.wait_for(Publish).payload) == 100_000
            found = records(answer, 4)
    assert {record.length for record in found} == {60_000, found[1].length, found[3].length}
    assert all(len(record.data) <= record.length for record in found)
    assert sum(len(record.data) for record in found[:2]) == 65_536 and b"a/1" + b"\x00" in found[0].data[:10]


def test_lines_name_the_packets(broker: BrokerProcess) -> None:
    with begin(broker, address="127.0.0.0/8", format="text", seconds=60) as answer:
        with RawClient(broker.port) as client:
            client.connect("dev 1")
            client.publish("t/ü", b"secret", 1)
            lines = [answer.readline().decode().split(" ", 1)[1] for _ in range(4)]
            address = "%s:%d" % client.socket.getsockname()
    begins = f"client='dev 1' address={address} type="
    assert [line.split(begins)[0] for line in lines] == ["received ", "sent ", "received ", "sent "]
    assert [line.split(" type=")[1].split()[0] for line in lines] == ["CONNECT", "CONNACK", "PUBLISH", "PUBACK"]
    assert "topic='t/ü' qos=1 retain=0 size=" in lines[2] and not any("secret" in line for line in lines)


def test_a_trace_ends_in_time_and_leaves_the_connections_as_they_were(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        client.connect("dev")
        with begin(broker, client_id="dev", seconds=1) as answer:
            client.ping()
            header_of(answer)
            assert [record.data for record in records(answer)] == [b"\xc0\x00", b"\xd0\x00"]
        broker.wait_for_log("event=trace_ended packets=2 left_out=0")
        client.publish("t", b"x", 1)
        with begin(broker, client_id="dev", max_bytes=1000) as answer:
            header_of(answer)
            for _ in range(100):
                client.publish("t", b"x", 1)
            assert len(records(answer)) < 200


def test_refusals(broker: BrokerProcess) -> None:
    def status(token: str = TOKEN, **query: object) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            begin(broker, token, **query)
        problem = json.load(caught.value)
        return caught.value.code, problem.get("field", "")

    assert status() == (400, "client_id") and status(address="x") == (400, "address")
    assert status(topic="a/#/b") == (400, "topic") and status(client_id="c", seconds=3601) == (400, "seconds")
    assert status("o" * 32, client_id="c", payload="true") == (403, "payload")
    with begin(broker, "o" * 32, client_id="c"):
        assert status(client_id="d")[0] == 409
    broker.wait_for_log("event=trace_ended")


def test_the_command_writes_a_file_and_prints_lines(broker: BrokerProcess, tmp_path: Path) -> None:
    file = tmp_path / "out.pcap"
    (tmp_path / "token").write_text(TOKEN)
    command = [sys.executable, "-P", "-m", "mqttbroker", "trace", "--url", broker.url, "--token-file",
               str(tmp_path / "token"), "--client", "dev", "--seconds"]  # fmt: skip
    for more in (["2", "--write", str(file)], ["2"]):
        after = len(broker.lines)
        process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
        broker.wait_for_log("event=admin action=trace ", after=after)
        with RawClient(broker.port) as client:
            client.connect("dev")
            client.publish("t", b"x")
            client.ping()
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
    assert [line.split(" type=")[1].split()[0] for line in out.splitlines()][:3] == ["CONNECT", "CONNACK", "PUBLISH"]
    with file.open("rb") as data:
        header_of(data)
        assert [packet_of(record).__class__ for record in records(data)[:2]] == [Connect, Connack]
    if TSHARK is not None:
        shown = subprocess.run([TSHARK, "-r", str(file)], capture_output=True, text=True, check=True).stdout
        assert "Connect Command" in shown and "Publish Message [t]" in shown
