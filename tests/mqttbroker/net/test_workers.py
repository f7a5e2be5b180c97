"""Connection workers: clients of several processes are those of one broker, and the end of a worker is that of its
clients only."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess, worker_pids
from support.certificates import CertificateFiles
from support.command_line import one_line, run
from support.core import wait_until
from support.metric_samples import samples
from support.raw_client import RawClient
from support.stream_client import StreamClient, tcp_socket

from mqttbroker.codec import packets
from mqttbroker.codec.packets import Connack, Disconnect, Publish, Will
from mqttbroker.codec.reason_codes import CONNECTION_RATE_EXCEEDED, QUOTA_EXCEEDED, SERVER_BUSY
from mqttbroker.net.flush import LARGE_WRITE
from mqttbroker.net.link import LINK_BUFFER, SEND_WINDOW, WINDOW
from mqttbroker.worker import clients as worker_clients

MIB = 1 << 20
KILLS = 50

Start = Callable[..., BrokerProcess]
Connect = Callable[..., RawClient]


@pytest.fixture
def start(start_broker: Start) -> Start:
    """Start a broker with two workers, and wait until both listen."""

    def started(config: object = None, workers: int = 2) -> BrokerProcess:
        broker = start_broker(config=config, arguments=["--workers", str(workers)])
        broker.wait_for_log("event=started", timeout=30)
        return broker

    return started


@pytest.fixture
def broker(start: Start) -> BrokerProcess:
    return start({"worker_timeout": "1h"})  # some tests stop a worker


@pytest.fixture
def connect(broker: BrokerProcess) -> Iterator[Connect]:
    with ExitStack() as stack:

        def connected(name: str, **fields: object) -> RawClient:
            client = stack.enter_context(RawClient(broker.port))
            assert client.connect(name, **fields).reason_code == 0
            return client

        yield connected


def worker_of(broker: BrokerProcess, name: str) -> int:
    number: int = json.loads(broker.get(f"/api/v1/clients/{name}"))["worker"]
    return number


def of_workers(broker: BrokerProcess, name: str) -> dict[str, float]:
    """A metric of each worker."""
    prefix = f"mqttbroker_worker_{name}/"
    found = samples(broker.get("/metrics"))
    return {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}


def pid_of(broker: BrokerProcess, worker: int) -> int:
    started = [line for line in broker.lines if f"event=worker_started worker={worker} " in line]
    return int(started[-1].rpartition("pid=")[2])


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def on_each_worker(broker: BrokerProcess, connect: Connect, prefix: str) -> dict[int, tuple[str, RawClient]]:
    """A client of each worker; the kernel decides which worker accepts a connection."""
    found: dict[int, tuple[str, RawClient]] = {}
    for number in range(200):
        name = f"{prefix}{number}"
        client = connect(name, will=Will(f"wills/{name}", b"gone"))
        found.setdefault(worker_of(broker, name), (name, client))
        if len(found) == 2:
            return found
    raise AssertionError("one worker accepts everything")


def test_clients_of_all_workers_are_clients_of_one_broker(broker: BrokerProcess, connect: Connect) -> None:
    (_, one), (_, other) = on_each_worker(broker, connect, "c").values()
    for client in (one, other):
        client.subscribe("t")
    for qos in range(3):
        one.publish("t", b"%d" % qos, qos)
        assert [client.take().payload for client in (one, other)] == [b"%d" % qos] * 2
    assert of_workers(broker, "up") == of_workers(broker, "starts_total") == {"1": 1.0, "2": 1.0}
    clients = of_workers(broker, "clients")
    assert min(clients.values()) >= 1 and set(clients) == {"1", "2"}
    wait_until(lambda: min(of_workers(broker, "resident_bytes").values()) > 0)
    assert "alarm=worker" not in broker.log


def title(pid: int) -> str:
    """The title of a process, as ps shows it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()


def test_titles_say_which_process_is_which(broker: BrokerProcess) -> None:
    assert title(broker.pid).startswith(f"mqttbroker: core serve --config {broker.config}")
    assert {title(pid) for pid in worker_pids(broker.pid)} == {"mqttbroker: worker 1", "mqttbroker: worker 2"}
    assert title(pid_of(broker, 2)) == "mqttbroker: worker 2"


def test_a_worker_has_one_thread(broker: BrokerProcess, connect: Connect) -> None:
    """System calls of a process with several cost more."""
    on_each_worker(broker, connect, "c")
    for pid in worker_pids(broker.pid):
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1


def test_sys_topics_of_each_worker(start: Start) -> None:
    broker = start(config={"sys_interval": "100ms"})
    found: dict[str, str] = {}
    with RawClient(broker.port) as client:
        client.connect("c")
        client.subscribe("$SYS/broker/workers/#")
        while sum(int(found.get(f"{n}/clients", 0)) for n in (1, 2)) < 1 or not all(
            int(found.get(f"{n}/resident_bytes", 0)) and float(found.get(f"{n}/cpu_seconds", 0)) for n in (1, 2)
        ):
            message = client.take()
            found[message.topic.removeprefix("$SYS/broker/workers/")] = message.payload.decode()
        here = worker_of(broker, "c")
        assert found[f"{here}/clients"] == "1" and found[f"{3 - here}/clients"] == "0"
        assert [found[f"{n}/{name}"] for n in (1, 2) for name in ("up", "starts", "link_bytes")] == ["1", "1", "0"] * 2


def test_a_takeover_by_a_client_of_another_worker(broker: BrokerProcess, connect: Connect) -> None:
    (name, first), (_, _) = on_each_worker(broker, connect, "c").values()
    mine = worker_of(broker, name)
    while worker_of(broker, name) == mine:
        second = connect(name)
    assert any(packet.reason_code == 0x8E for packet in first.expect_closed() if hasattr(packet, "reason_code"))
    second.ping()


def test_the_end_of_a_worker(broker: BrokerProcess, connect: Connect) -> None:
    """The wills of its clients are published, other clients notice nothing, and it is started again."""
    clients = on_each_worker(broker, connect, "c")
    (killed, (lost_name, lost)), (_, (name, watcher)) = clients.items()
    watcher.subscribe("wills/+")
    first = len(broker.lines)
    os.kill(pid_of(broker, killed), signal.SIGKILL)
    assert watcher.take().topic.startswith("wills/")
    lost.expect_closed()
    broker.wait_for_log(rf'event=disconnected client={lost_name} .*reason=".*worker has ended', after=first)
    broker.wait_for_log(rf'event=worker_ended worker={killed} reason="signal 9"', after=first)
    broker.wait_for_log(rf"event=worker_started worker={killed} ", after=first)
    watcher.ping()
    assert of_workers(broker, "starts_total")[str(killed)] == 2
    again = on_each_worker(broker, connect, "d")[killed][1]
    again.publish("wills/x", b"after", 1)
    while (got := watcher.take()).payload != b"after":
        assert got.payload == b"gone"


def test_a_worker_that_hangs_is_killed(start: Start) -> None:
    """Its clients lose their connections, it is started again, and others notice nothing."""
    broker = start({"worker_timeout": "5s"})
    with ExitStack() as stack:

        def connect(name: str, **fields: object) -> RawClient:
            client = stack.enter_context(RawClient(broker.port))
            assert client.connect(name, **fields).reason_code == 0
            return client

        clients = on_each_worker(broker, connect, "c")
        (hung, (_, lost)), (_, (_, watcher)) = clients.items()
        watcher.subscribe("wills/+")
        first = len(broker.lines)
        os.kill(pid_of(broker, hung), signal.SIGSTOP)
        broker.wait_for_log(rf'event=worker_killed worker={hung} reason="no answer in 5 s"', after=first)
        broker.wait_for_log(rf'event=worker_ended worker={hung} reason="signal 9"', after=first)
        assert watcher.take().topic.startswith("wills/")
        lost.expect_closed()
        broker.wait_for_log(rf"event=worker_started worker={hung} ", after=first)
        watcher.ping()
        assert hung in on_each_worker(broker, connect, "d")
        pings = of_workers(broker, "cpu_seconds_total")[str(hung)]
        wait_until(lambda: of_workers(broker, "cpu_seconds_total")[str(hung)] != pings)
        assert of_workers(broker, "starts_total")[str(hung)] == 2


def test_a_busy_worker_is_not_killed(start: Start) -> None:
    """It answers between the bytes of its clients, for longer than the time in which it has to."""
    broker = start({"worker_timeout": "2s"}, workers=1)
    packet = Publish("much", bytes(60_000), 0, False, False, 0).encode(5)
    with RawClient(broker.port) as publisher, ExitStack() as stack:
        for number in range(4):
            subscriber = stack.enter_context(RawClient(broker.port))
            subscriber.connect(f"s{number}")
            subscriber.subscribe("much")
            reader = threading.Thread(target=discard, args=(subscriber.socket,))
            reader.start()
            stack.callback(reader.join)
            stack.callback(subscriber.socket.shutdown, socket.SHUT_RDWR)
        publisher.connect("p")
        began = of_workers(broker, "cpu_seconds_total")["1"]
        while of_workers(broker, "cpu_seconds_total")["1"] < began + 3.0:
            publisher.send(packet * 100)
        publisher.ping()
    assert of_workers(broker, "starts_total") == {"1": 1.0}


def discard(line: socket.socket) -> None:
    while line.recv(MIB):
        pass


def test_a_broker_that_was_stopped_itself_kills_no_worker(start: Start) -> None:
    broker = start({"worker_timeout": "2s"})
    pids = worker_pids(broker.pid)
    os.kill(broker.pid, signal.SIGSTOP)
    time.sleep(4)  # longer than the time in which a worker has to answer
    os.kill(broker.pid, signal.SIGCONT)
    seen = of_workers(broker, "cpu_seconds_total")
    wait_until(lambda: all(value > seen[number] for number, value in of_workers(broker, "cpu_seconds_total").items()))
    assert worker_pids(broker.pid) == pids


@pytest.mark.slow("50 kills, of each worker less than 10 in a minute")
def test_clients_of_other_workers_notice_no_kill(start: Start) -> None:
    """They get each message, at QoS 0 too, and the will of each client that was lost once."""
    broker = start(workers=6)
    with ExitStack() as stack:
        clients: dict[int, tuple[str, RawClient]] = {}
        killed_at = dict.fromkeys(range(1, 7), 0.0)
        for kill in range(KILLS):
            while clients.keys() != killed_at.keys():
                name = f"c{time.monotonic_ns()}"
                client = stack.enter_context(RawClient(broker.port))
                client.connect(name, will=Will(f"wills/{name}", b"gone"))
                worker = worker_of(broker, name)
                if worker in clients:
                    client.send(Disconnect())
                else:
                    clients[worker] = name, client
                    client.subscribe("beats", "wills/+", options=0)
            victim = min(killed_at, key=lambda number: killed_at[number])
            time.sleep(max(0.0, killed_at[victim] + 7 - time.monotonic()))
            lost, _ = clients.pop(victim)
            publisher = next(iter(clients.values()))[1]
            first = len(broker.lines)
            for beat in range(20):
                publisher.publish("beats", b"%d" % beat, 0)
                if beat == 10:
                    os.kill(pid_of(broker, victim), signal.SIGKILL)
            killed_at[victim] = time.monotonic()
            broker.wait_for_log(f"event=worker_started worker={victim} ", timeout=60, after=first)
            for _, client in clients.values():
                messages = [client.take() for _ in range(21)]
                assert [one.payload for one in messages if one.topic == "beats"] == [b"%d" % beat for beat in range(20)]
                assert [one.topic for one in messages if one.topic != "beats"] == [f"wills/{lost}"]
                assert client.ping() == []
        assert kill == KILLS - 1


def test_a_worker_that_ends_again_and_again_ends_the_broker(start_broker: Start) -> None:
    program = """
import sys
from mqttbroker.net import worker_pool
worker_pool.ENDS_SECONDS = 3600.0
from mqttbroker.cli.main import main
sys.exit(main())
"""
    broker = start_broker(arguments=["--workers", "1"], program=["-c", program])
    broker.wait_for_log("event=started")
    for number in range(10):
        first = len(broker.lines)
        os.kill(pid_of(broker, 1), signal.SIGKILL)
        if number < 9:
            broker.wait_for_log("event=worker_started worker=1 ", after=first, timeout=30)
    broker.wait_for_log("mqttbroker: worker 1 ended 10 times in 3600 s, the last time with signal 9", timeout=30)
    wait_until(lambda: not broker.running)
    assert broker.terminate() == 1  # the status with which it ended by itself


def test_workers_end_with_the_broker(start: Start) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        broker = start()
        workers = worker_pids(broker.pid)
        assert len(workers) == 2
        with RawClient(broker.port) as client:
            client.connect("c")
            if number == signal.SIGKILL:
                broker.kill()
            else:
                assert broker.terminate() == 0
            client.expect_closed()
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and is_running(pid) for pid in workers))


def test_a_worker_that_hangs_ends_with_the_broker(broker: BrokerProcess) -> None:
    """It would keep the listening sockets, so that no other broker could start."""
    hung, other = worker_pids(broker.pid)
    os.kill(hung, signal.SIGSTOP)
    broker.kill()
    wait_until(lambda: not is_running(hung) and not is_running(other))


def test_a_broker_that_is_stopped_while_its_workers_start(start_broker: Start) -> None:
    for _ in range(3):
        broker = start_broker(arguments=["--workers", "2"])
        assert broker.terminate() == 0
        broker = start_broker(arguments=["--workers", "2"])
        wait_until(lambda: len(worker_pids(broker.pid)) > 0)
        assert broker.terminate() == 0


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return False


def test_workers_ignore_the_signals_that_are_for_the_broker(broker: BrokerProcess, connect: Connect) -> None:
    """A terminal and a service manager send them to all processes."""
    client = connect("c")
    for pid in worker_pids(broker.pid):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    client.ping()
    assert of_workers(broker, "starts_total") == {"1": 1.0, "2": 1.0}


def test_a_client_that_does_not_read(broker: BrokerProcess, connect: Connect) -> None:
    """It holds up nobody, and gets all when it reads."""
    clients = on_each_worker(broker, connect, "c")
    for _, (name, slow) in clients.items():
        slow.subscribe("much")
        publisher, bystander = connect(f"publisher-{name}"), connect(f"bystander-{name}")
        bystander.subscribe("little")
        payload = bytes(500_000)
        for _ in range(40):
            publisher.publish("much", payload, 1)
            publisher.publish("little", b"x", 1)
            assert bystander.take().payload == b"x"
        assert [slow.take().payload for _ in range(40)] == [payload] * 40
        slow.unsubscribe("much")
        bystander.unsubscribe("little")


def test_a_worker_that_does_not_read_its_link(broker: BrokerProcess, connect: Connect) -> None:
    """What waits for it is bounded, and holds up neither its clients' publishers nor the other worker."""
    (stopped, (_, silent)), (_, (_, publisher)) = on_each_worker(broker, connect, "c").items()
    names = (f"d{number}" for number in range(400))
    waiting = [silent]
    while len(waiting) < 24:
        client = connect(name := next(names))
        if worker_of(broker, name) == stopped:
            waiting.append(client)
    for client in waiting:
        client.subscribe("much", options=0)
    publisher.subscribe("little")
    payload = bytes(100_000)
    os.kill(pid_of(broker, stopped), signal.SIGSTOP)
    try:
        for _ in range(30):
            publisher.publish("much", payload, 1)  # so that each is a write
        publisher.publish("little", b"x", 1)
        assert publisher.take().payload == b"x"
        held = of_workers(broker, "link_bytes")
        assert LINK_BUFFER < held[str(stopped)] < LINK_BUFFER + len(waiting) * LARGE_WRITE + MIB
        assert sum(held.values()) == held[str(stopped)] < len(waiting) * SEND_WINDOW
    finally:
        os.kill(pid_of(broker, stopped), signal.SIGCONT)
    for client in waiting:
        assert client.take().payload == payload
        client.ping()
    wait_until(lambda: of_workers(broker, "link_bytes")[str(stopped)] == 0)


def test_clients_are_not_read_while_the_broker_does_not_read_the_link(start: Start) -> None:
    """A worker holds so many bytes for its link, and one read of each client; the kernel has the rest."""
    broker = start(workers=1)
    packet = Publish("much", bytes(60_000), 0, False, False, 0).encode(5)
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.port)) for _ in range(20)]
        for number, client in enumerate(clients):
            client.connect(f"p{number}")
        (worker,) = worker_pids(broker.pid)
        before = resident(worker)
        sent = dict.fromkeys((client.socket for client in clients), 0)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            while ready := select.select([], list(sent), [], 0.5)[1]:
                for line in ready:
                    sent[line] += line.send(packet[sent[line] % len(packet) :], socket.MSG_DONTWAIT)
            held = resident(worker) - before
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        assert sum(sent.values()) > 2 * worker_clients.LINK_BUFFER
        assert held < worker_clients.LINK_BUFFER + len(clients) * WINDOW + 4 * MIB
        for client in clients:
            client.send(packet[sent[client.socket] % len(packet) :])
            client.ping()


def test_a_publisher_that_leaves_after_a_flood(broker: BrokerProcess, connect: Connect) -> None:
    """The broker handles packets that a client sent before it closed the connection."""
    reader = connect("reader")
    reader.subscribe("flood")
    with RawClient(broker.port) as publisher:
        publisher.connect("flooding")
        publisher.send(b"".join(Publish("flood", b"%06d" % n + bytes(1000), 0, False, False, 0).encode(5)
                                for n in range(2000)))  # fmt: skip
    assert [int(reader.take().payload[:6]) for _ in range(2000)] == list(range(2000))


def test_limits_of_connections_hold_over_all_workers(start: Start) -> None:
    broker = start(config={"limits": {"max_connections_per_address": 10}})
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.port)) for _ in range(20)]
        codes = [client.connect(f"c{number}").reason_code for number, client in enumerate(clients)]
    assert sorted(codes) == [0] * 10 + [QUOTA_EXCEEDED] * 10


def test_half_open_connections_are_evicted_over_all_workers(start: Start) -> None:
    broker = start(config={"limits": {"max_half_open": 10}})
    with ExitStack() as stack:
        sockets = [stack.enter_context(tcp_socket(broker.port)) for _ in range(50)]
        wait_until(lambda: samples(broker.get("/metrics"))["mqttbroker_connections_evicted_total"] >= 40)
        ended = 0
        for sock in sockets:
            sock.setblocking(False)
            try:
                ended += sock.recv(1) == b""
            except ConnectionResetError:
                ended += 1
            except BlockingIOError:
                pass
        assert ended >= 35
        with RawClient(broker.port) as client:
            assert client.connect("c").reason_code == 0


def test_new_certificates_reach_the_workers(start: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    broker = start(config=files.config("tls"))
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])

    def serial() -> str:
        with files.client().wrap_socket(tcp_socket(port), server_hostname="localhost") as sock:
            assert isinstance(sock, ssl.SSLSocket) and StreamClient(sock).connect("c").reason_code == 0
            certificate = sock.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"])

    before = {serial() for _ in range(10)}
    files.new_server_certificate()
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=certificates_reloaded")
    after = {serial() for _ in range(10)}
    assert len(before) == len(after) == 1 and before != after


def test_a_failed_handshake_is_counted_and_logged(start: Start, tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    broker = start(config=files.config("tls"))
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    with tcp_socket(port) as sock:
        sock.sendall(b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x00\x00\x00")
        sock.settimeout(10)
        while sock.recv(100):
            pass
    broker.wait_for_log(r'event=refused client="" address=127.0.0.1:\d+ reason="TLS handshake: ')
    assert samples(broker.get("/metrics"))["mqttbroker_handshakes_failed_total/tls"] == 1


def test_unix_sockets(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "mqtt.sock"
    listeners = [{"host": "127.0.0.1"}, {"type": "unix", "path": str(path)}]
    start(config={"listeners": listeners})
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(str(path))
    with sock:
        client = StreamClient(sock)
        assert client.connect("c").reason_code == 0
        client.subscribe("t")
        client.publish("t", b"x", 1)
        assert client.take().payload == b"x"


@pytest.mark.parametrize(
    ("value", "reason"),
    [("-1", 'must be 0–256, or "auto", got -1'), ("257", 'must be 0–256, or "auto", got 257'),
     ("many", 'must be a whole number, or "auto", got "many"')],
)  # fmt: skip
def test_a_bad_number_of_workers_is_one_line(tmp_path: Path, value: str, reason: str) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(f"workers = {value if value != 'many' else json.dumps(value)}\n", encoding="utf-8")
    calls = {
        "--workers": run("serve", f"--workers={value}", cwd=tmp_path),
        "MQTTBROKER_WORKERS": run("serve", cwd=tmp_path, env={**os.environ, "MQTTBROKER_WORKERS": value}),
        str(file): run("check-config", str(file), cwd=tmp_path),
    }
    for source, result in calls.items():
        line = one_line(result.stderr)
        assert result.returncode == 2 and line.startswith(source) and reason in line


def test_workers_that_cannot_start_are_one_line(tmp_path: Path) -> None:
    """Here because Python is gone, as in the middle of an upgrade."""
    program = """
import sys
from mqttbroker.net import worker_pool
worker_pool.COMMAND = ["/nowhere/python"]
from mqttbroker.cli.main import main
sys.exit(main())
"""
    command = [sys.executable, "-P", "-c", program, "serve", "--workers", "2", "--port", "0", "--http-port", "off"]
    done = subprocess.run([*command, "--data-dir", str(tmp_path), "--log-level", "error"],
                          capture_output=True, text=True, timeout=60, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert one_line(done.stderr) == "mqttbroker: workers: cannot start worker 1: No such file or directory"


# --- limits -----------------------------------------------------------------------------------------------------------


def spread(broker: BrokerProcess, stack: ExitStack, count: int) -> list[RawClient]:
    """So many connected sockets or more, at least five of each worker; none has sent CONNECT."""
    clients: list[RawClient] = []
    while len(clients) < 500:
        clients += [stack.enter_context(RawClient(broker.port)) for _ in range(count)]
        wait_until(lambda: sum(of_workers(broker, "clients").values()) == len(clients))
        if min(of_workers(broker, "clients").values()) >= 5:
            break
    return clients


@pytest.mark.parametrize("limits", [
    {"limits": {"max_connections": 10}},
    {"listeners": [{"host": "127.0.0.1", "max_connections": 10}]},
])  # fmt: skip
def test_a_limit_of_clients_is_exact_over_all_workers(start: Start, limits: dict[str, object]) -> None:
    broker = start(config=limits)
    with ExitStack() as stack:
        clients = spread(broker, stack, 40)
        codes = [client.connect(f"c{number}").reason_code for number, client in enumerate(clients)]
        assert codes.count(0) == 10 and set(codes) == {0, SERVER_BUSY}


def test_half_open_connections_time_out_in_each_worker(start: Start) -> None:
    broker = start(config={"listeners": [{"host": "127.0.0.1", "connect_timeout": "5s"}]})
    with ExitStack() as stack:
        for client in spread(broker, stack, 40):
            client.expect_closed(timeout=30)
    wait_until(lambda: of_workers(broker, "clients") == {"1": 0.0, "2": 0.0})


def test_connects_of_an_address_are_limited_over_all_workers(start: Start) -> None:
    broker = start(config={"limits": {"max_connect_rate_per_address": 1}})
    with ExitStack() as stack:
        clients = spread(broker, stack, 60)
        with broker.stopped():
            for number, client in enumerate(clients):
                client.send(packets.Connect(f"c{number}", 5))
        codes = [client.expect(Connack).reason_code for client in clients]
        assert set(codes) == {0, CONNECTION_RATE_EXCEEDED} and codes.count(0) < len(codes) / 2


def test_handshakes_are_bounded_over_all_workers(start: Start, tmp_path: Path) -> None:
    """Attackers on both workers begin TLS and stay silent; a client gets in."""
    files = CertificateFiles(tmp_path)
    broker = start(config={**files.config("tls"), "limits": {"max_half_open": 10}})
    port = int(broker.wait_for_log(r"event=listening type=tls .*port=(\d+)")[1])
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(tcp_socket(port))
        wait_until(lambda: samples(broker.get("/metrics"))["mqttbroker_connections_evicted_total"] >= 50)
        with files.client().wrap_socket(tcp_socket(port), server_hostname="localhost") as sock:
            assert StreamClient(sock).connect("c").reason_code == 0
