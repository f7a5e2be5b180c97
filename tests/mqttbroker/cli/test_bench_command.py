"""``mqttbroker bench`` against real brokers, and against one that loses, doubles and reorders messages."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.api_client import ACCESS, Api
from support.broker_process import BrokerProcess, worker_pids
from support.certificates import CertificateFiles
from support.mosquitto import NEEDS_MOSQUITTO, mosquitto
from support.patience import PATIENCE
from support.raw_client import RawClient
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from mqttbroker.auth.passwords import hash_password
from mqttbroker.cli.load_figures import Deliveries, Latencies
from mqttbroker.codec.packets import Connack, Connect, Packet, Puback, Publish, Suback, Subscribe, decode

pytestmark = pytest.mark.one_build

RESULT = re.compile(r"sent (\d+) .*, acknowledged (\d+), delivered (\d+) ")


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config={"http": {"access": ACCESS}}) as process:
        yield process


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, running; the first line of its progress, if it prints any, has been read."""
    command = [sys.executable, "-P", "-m", "mqttbroker", "bench", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            if "--quiet" not in words:
                assert running.stderr is not None
                running.stderr.readline()
            yield running
        finally:
            running.kill()


def run(*words: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    command = [sys.executable, "-P", "-m", "mqttbroker", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr


def no_session_is_left(broker: BrokerProcess) -> None:
    """The broker may still have to read the DISCONNECTs."""
    deadline = time.monotonic() + PATIENCE
    while (clients := Api(broker).get("/clients")["items"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert clients == []


def measured(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and result; a run that sends so few messages that it ends by their number."""
    status, out, err = run(*words, "--json", "--quiet", "--duration", "600", "--drain", str(PATIENCE))
    assert err == ""
    return status, json.loads(out)


@pytest.mark.parametrize("version", ["31", "311", "5"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_is_delivered_and_counted(broker: BrokerProcess, qos: int, version: str) -> None:
    words = ("-p", str(broker.port), "-q", str(qos), "-V", version, "--publishers", "4", "--subscribers", "6", "--fan-out", "3")
    status, found = measured(*words, "--count", "200", "--rate", "max", "--window", "7", "--size", "1000")
    assert status == 0 and found["ok"]
    assert (found["sent"], found["delivered"], found["acknowledged"]) == (200, 600, 200 if qos else 0)
    wrong = ("lost", "duplicated", "out_of_order", "refused", "unacknowledged", "unexpected", "unsent")
    assert [found[name] for name in wrong] == [0] * len(wrong)
    assert (found["acknowledgement_ms"] is None) == (qos == 0)
    latency = found["delivery_ms"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"]
    assert found["broker_cpu_us_per_message"] > 0 and str(broker.pid) in found["broker_process"]


@pytest.mark.parametrize(
    ("shape", "delivered", "fan_out"),
    [(("--publishers", "1", "--subscribers", "9"), 9, 9), (("--publishers", "9", "--subscribers", "1"), 1, 1),
     (("--publishers", "3", "--fan-out", "5"), 5, 5), (("--publishers", "2", "--subscribers", "0"), 0, 0),
     (("--publishers", "2", "--subscribers", "3"), 2, 2)],
)  # fmt: skip
def test_who_gets_the_messages(broker: BrokerProcess, shape: tuple[str, ...], delivered: int, fan_out: int) -> None:
    for rate in ("max", "5000"):
        for qos in ("0", "1"):
            status, found = measured("-p", str(broker.port), *shape, "--count", "90", "--rate", rate, "-q", qos)
            assert (status, found["sent"], found["delivered"]) == (0, 90, 90 * delivered)
            assert found["plan"]["fan_out"] == fan_out


def test_nothing_is_left_in_the_broker(broker: BrokerProcess) -> None:
    api = Api(broker)
    with RawClient(broker.port) as client:
        client.connect("watching")
        client.subscribe("#")
        for version in ("311", "5"):
            status, found = measured("-p", str(broker.port), "-V", version, "--count", "20", "--persistent", "-t", "mine/bench", "-I", "it")
            assert status == 0 and found["sessions_left"] == [] and found["plan"]["persistent"]
            topics = {client.take().topic for _ in range(20)}
            assert all(re.fullmatch(r"mine/bench/[0-9a-f]{8}/\d", topic) for topic in topics) and len(topics) == 10
    assert api.get("/retained", filter="#")["items"] == []
    no_session_is_left(broker)


def test_the_sessions_are_persistent_while_it_runs(broker: BrokerProcess) -> None:
    with started("-p", str(broker.port), "--persistent", "--duration", "600", "--interval", "0.1", "--publishers", "1") as running:
        items = Api(broker).get("/clients", prefix="bench-")["items"]
        subscriber = next(item for item in items if item["client_id"].endswith("-s0"))
        assert subscriber["persistent"] and subscriber["connected"]
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=PATIENCE)
    no_session_is_left(broker)


def test_progress_and_result_as_text(broker: BrokerProcess) -> None:
    status, out, err = run("-p", str(broker.port), "--rate", "400", "--count", "300", "--interval", "0.2")
    assert status == 0
    assert out.startswith("publishers 10, subscribers 10, fan-out 1; QoS 1, 64 bytes, MQTT 3.1.1; 400 messages/s for ")
    match = RESULT.search(out)
    assert match is not None and match.groups() == ("300", "300", "300")
    assert "lost 0, duplicated 0, out of order 0\nLATENCY, MS" in out and "µs per delivered message (" in out
    lines = err.splitlines()
    assert lines and all(re.match(r" +\d+\.\d s  sent \d+ \(\d+/s\)  acknowledged \d+ ", line) for line in lines)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_prints_the_result_so_far(broker: BrokerProcess, how: signal.Signals) -> None:
    with started("-p", str(broker.port), "--duration", "600", "--interval", "0.1", "--persistent") as running:
        running.send_signal(how)
        out, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0
    match = RESULT.search(out)
    assert "interrupted: the result so far\n" in out and match is not None and len(set(match.groups())) == 1 and int(match[1]) > 0
    no_session_is_left(broker)


def test_an_interruption_before_the_first_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, started("-p", str(server.getsockname()[1]), "--quiet") as running:
        server.accept()[0].close()
        assert running.wait(PATIENCE) == 2
    with socket.create_server(("127.0.0.1", 0)) as server, started("-p", str(server.getsockname()[1]), "--quiet") as running:
        with server.accept()[0] as connection:
            assert connection.recv(1) == b"\x10"
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=PATIENCE)
    assert (running.returncode, err) == (1, "mqttbroker bench: interrupted before the first message\n")


def test_latency_counts_from_the_time_at_which_a_message_was_due(broker: BrokerProcess) -> None:
    """A broker that stands still delays all that was due meanwhile, though its window lets only ten messages be sent."""
    words = ("--rate", "200", "--count", "1000", "--duration", "600", "--window", "1", "--interval", "0.1", "--json")
    with started("-p", str(broker.port), *words) as running:
        os.kill(broker.pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(broker.pid, signal.SIGCONT)
        out, _ = running.communicate(timeout=2 * PATIENCE)
    found = json.loads(out)
    assert running.returncode == 0 and found["sent"] == 1000
    assert found["sent_late"] >= 200 and found["sent_late_ms"]["max"] > 1000
    for latency in (found["delivery_ms"], found["acknowledgement_ms"]):
        assert latency["p95"] > 400 and latency["max"] > 1000


def test_messages_that_were_due_and_not_sent(broker: BrokerProcess) -> None:
    words = ("--publishers", "1", "--rate", "1000000", "--duration", "0.3", "--window", "1", "--json", "--quiet")
    status, out, _ = run("-p", str(broker.port), *words)
    found = json.loads(out)
    assert status == 0 and found["unsent"] > 0 and found["sent"] == found["delivered"]


def test_large_messages_wait_for_the_socket_and_not_in_memory(broker: BrokerProcess) -> None:
    """400 MB may be unacknowledged."""
    words = ("--publishers", "1", "--subscribers", "0", "--size", "4000000", "--window", "100", "--rate", "max", "--count", "100")
    with started("-p", str(broker.port), *words, "--duration", "600", "--json", "--quiet") as running:
        most = 0  # KiB; that of wait4 is of this process, if it was larger
        while running.poll() is None:
            if found := re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{running.pid}/status").read_text()):
                most = int(found[1])
            time.sleep(0.01)
        assert running.stdout is not None and json.loads(running.stdout.read())["acknowledged"] == 100
    assert running.returncode == 0 and 10_000 < most < 150_000


def test_each_transport(tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    path = tmp_path / "socket"
    listeners = [*files.config()["listeners"], {"type": "ws", "port": 0}, {"type": "unix", "path": str(path)}]
    users = tmp_path / "users"
    users.write_text(f"alice:{hash_password(b'pw')}\n")
    (tmp_path / "password").write_text("pw\n")
    config = {"listeners": listeners, "password_file": str(users), "allow_anonymous": False}
    with BrokerProcess(config=config) as broker:
        ports = {kind: broker.wait_for_log(rf"type={kind} .*port=(\d+)")[1] for kind in ("tls", "ws")}
        login = ("-u", "alice", "--pw-file", str(tmp_path / "password"), "--count", "50", "--size", "20000", "--rate", "max")
        for where in (
            ("-h", "localhost", "-p", ports["tls"], "--cafile", str(files.cafile)), ("-p", ports["ws"], "--ws"),
            ("-L", f"ws://localhost:{ports['ws']}"), ("--unix", str(path)),
        ):  # fmt: skip
            status, found = measured(*where, *login)
            assert (status, found["delivered"]) == (0, 50) and found["broker_cpu_us_per_message"] > 0, where
        status, _, err = run("-p", ports["ws"], "--ws", "-u", "alice", "-P", "wrong")
        assert (status, err) == (2, "mqttbroker bench: connection refused: not authorized\n")
        assert broker.log.count("event=refused ") == 1
        status, _, err = run("-h", "localhost", "-p", ports["tls"], "--tls-use-os-certs", *login)
        assert status == 2 and "certificate verify failed" in err and err.count("\n") == 1


def test_the_cpu_time_of_workers_is_the_brokers(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(config={"workers": 2})
    status, found = measured("-p", str(broker.port), "--count", "50")
    assert status == 0 and found["broker_process"].endswith(f", pid {broker.pid}")
    worker = worker_pids(broker.pid)[0]
    status, found = measured("-p", str(broker.port), "--count", "50", "--broker-pid", str(worker))
    assert status == 0 and found["broker_process"].endswith(f", pid {worker}")
    status, found = measured("-p", str(broker.port), "--count", "50", "--broker-pid", str(2**22 + 1))
    assert status == 0 and found["broker_cpu_us_per_message"] is None and found["broker_cpu_unknown"] == "a process of the broker has ended"


@NEEDS_MOSQUITTO
def test_another_broker(tmp_path: Path) -> None:
    with mosquitto(tmp_path) as other:
        status, found = measured("-p", str(other.port), "--count", "200", "--rate", "max", "-q", "2", "--persistent", "-V", "5")
        assert (status, found["delivered"]) == (0, 200) and found["sessions_left"] == []
        assert found["broker_process"].startswith("mosquitto, ")


def test_messages_that_the_rules_deny(start_broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic read bench/#\ntopic write bench/+/0\n")
    broker = start_broker(config={"acl_file": str(rules)})
    status, found = measured("-p", str(broker.port), "-V", "5", "--publishers", "2", "--count", "10")
    assert status == 1 and (found["refused"], found["acknowledged"], found["delivered"], found["lost"]) == (5, 5, 5, 0)


def test_a_broker_that_dies(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    with started("-p", str(broker.port), "--duration", "600", "--interval", "0.1", "--persistent") as running:
        broker.kill()
        out, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 1
    assert out.count("note: lost connection: bench-") == 5 and "and 15 more lost connections" in out
    assert "note: 10 sessions could not be removed" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["--ws"], r"bench-\w+-p0: the broker closed the connection"), (["--insecure"], r"localhost:\d+: \S.*"),
     (["--insecure", "--ws"], r"localhost:\d+: \S.*")],
)  # fmt: skip
def test_a_port_with_another_transport(broker: BrokerProcess, words: list[str], problem: str) -> None:
    status, out, err = run("-p", str(broker.port), *words)
    assert (status, out) == (2, "") and re.fullmatch(rf"mqttbroker bench: {problem}\n", err), err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--publishers", "0"], "--publishers must be 1 or more"),
        (["--size", "15"], "--size must be 16 or more"),
        (["--size", "99999999"], "--size must be 16777216 or less"),
        (["--rate", "0"], '--rate must be a number above 0, or "max"'),
        (["--rate", "nan"], '--rate must be a number above 0, or "max"'),
        (["--duration", "nan"], "--duration must be 0.1 or more"),
        (["--subscribers", "2", "--fan-out", "3"], "--subscribers must be 3 or more, as --fan-out is"),
        (["--subscribers", "11", "--fan-out", "1"], "--subscribers must be 10 or less: others would get nothing"),
        (["-t", "a/#"], "-t must be the beginning of a topic name, and not begin with $"),
        (["-t", "$SYS"], "-t must be the beginning of a topic name, and not begin with $"),
        (["-L", "http://localhost"], "-L must be mqtt://, mqtts://, ws:// or wss:// with a host"),
        (["--pw-file", "/nowhere"], "--pw-file: /nowhere: No such file or directory"),
        (["-p", "1"], "localhost:1: "),
        (["--bad"], "unrecognized arguments: --bad (see mqttbroker bench --help)"),
    ],
)
def test_a_wrong_call_is_one_line(words: list[str], problem: str) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "") and err.startswith(f"mqttbroker bench: {problem}") and err.count("\n") == 1


def test_more_connections_than_open_files() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))

    command = [sys.executable, "-P", "-m", "mqttbroker", "bench", "--publishers", "200"]
    done = subprocess.run(command, preexec_fn=few, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2 and "need 464 open files, and the hard limit (ulimit -Hn) is 256" in done.stderr


# --- faults -----------------------------------------------------------------------------------------------------------


class Faulty:
    """A broker of QoS 1 that passes each message on as ``fault(number)`` says: so many copies, 0 = none, -1 = after the next."""

    def __init__(self, fault: Callable[[int], int], granted: int = 1) -> None:
        self.fault = fault
        self.granted = granted
        self.subscribers: list[asyncio.StreamWriter] = []
        self.published = 0
        self.held: list[Packet] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        while more := await reader.read(65536):
            data += more
            while True:
                packet, used = decode(data, 4)
                if packet is None:
                    break
                data = data[used:]
                self.answer(packet, writer)
        writer.close()

    def answer(self, packet: Packet, writer: asyncio.StreamWriter) -> None:
        if isinstance(packet, Connect):
            writer.write(Connack(False, 0).encode(4))
        elif isinstance(packet, Subscribe):
            self.subscribers.append(writer)
            writer.write(Suback(packet.packet_id, [self.granted] * len(packet.subscriptions)).encode(4))
        elif isinstance(packet, Publish):
            copies = self.fault(self.published)
            self.published += 1
            message = Publish(packet.topic, packet.payload, 1, packet_id=self.published)
            passed = [*[message] * copies, *self.held] if copies >= 0 else []
            self.held = [message] if copies < 0 else []
            for subscriber in self.subscribers:
                subscriber.write(b"".join(each.encode(4) for each in passed))
            writer.write(Puback(packet.packet_id).encode(4))


async def faulty(fault: Callable[[int], int], granted: int = 1) -> tuple[int, str, str]:
    """Exit status, output and errors of 100 messages of one publisher to two subscribers."""
    server = await asyncio.start_server(Faulty(fault, granted).serve, "127.0.0.1", 0)
    async with server:
        words = ("--publishers", "1", "--fan-out", "2", "--count", "100", "--rate", "max", "--drain", "0.3", "--json", "--quiet")
        return await asyncio.to_thread(run, "-p", str(server.sockets[0].getsockname()[1]), *words)


async def test_lost_doubled_and_reordered_messages_are_counted() -> None:
    faults = {"lost": 0, "duplicated": 2, "out_of_order": -1}
    for name, copies in faults.items():
        status, out, _ = await faulty(lambda number: copies if number % 10 == 5 else 1)
        found = json.loads(out)
        assert {each: found[each] for each in faults} == {each: 20 if each == name else 0 for each in faults}
        assert status == (0 if name == "duplicated" else 1) and found["acknowledged"] == 100  # QoS 1 allows duplicates


async def test_a_subscription_that_is_refused() -> None:
    for granted, reason in ((0x80, r"Unspecified error \(0x80\)"), (0, "QoS 0 granted instead of 1")):
        status, out, err = await faulty(lambda number: 1, granted)
        assert (status, out) == (2, "")
        assert re.fullmatch(rf"mqttbroker bench: subscription to bench/\w+/0 refused: {reason}\n", err), err


async def test_a_websocket_that_is_closed_with_the_refusal() -> None:
    """The CONNACK and the close frame come in one read, and the socket stays open."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = ServerProtocol(subprotocols=[Subprotocol("mqtt")])
        while data := await reader.read(65536):
            protocol.receive_data(data)
            for event in protocol.events_received():
                if isinstance(event, Request):
                    protocol.send_response(protocol.accept(event))
                elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                    protocol.send_binary(Connack(False, 5).encode(4))
                    protocol.send_close(1000)
            writer.write(b"".join(protocol.data_to_send()))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        found = await asyncio.to_thread(run, "-p", str(server.sockets[0].getsockname()[1]), "--ws")
    assert found == (2, "", "mqttbroker bench: connection refused: not authorized\n")


def test_deliveries_in_any_order() -> None:
    seen = Deliveries()
    assert [seen.add(number) for number in (0, 1, 5, 3, 3, 1, 6, 1000, 500)] == [1, 1, 4, 0, 0, 0, 1, 994, 0]
    assert (seen.next, seen.received, seen.duplicated, seen.out_of_order) == (1001, 7, 2, 2)
    assert [seen.add(number) for number in range(1001)] == [0] * 1001
    assert seen.received == 1001


def test_percentiles_are_close_to_the_durations() -> None:
    latencies = Latencies()
    assert latencies.summary() is None
    for microseconds in range(1, 100_001):
        latencies.add(microseconds * 1000)
    found = latencies.summary()
    assert found is not None and found["max"] == 100.0
    for name, exact in (("p50", 50.0), ("p95", 95.0), ("p99", 99.0)):
        assert abs(found[name] - exact) <= 0.008 * exact
    one = Latencies()
    one.add(-5)
    assert one.summary() == {"p50": 0, "p95": 0, "p99": 0, "max": 0}
