"""Clients that send CONNECT, messages and DISCONNECT at once and close, while their login or the store takes a moment.

A client need not wait for CONNACK (section 3.1.4). One that has sent nothing behind its CONNECT has given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, worker_pids
from support.callback_server import CallbackServer
from support.certificates import CertificateFiles
from support.core import wait_until
from support.key_server import KeyServer
from support.leaving_client import KINDS, LEAVES, all_listeners, leave, open_client, reset
from support.metric_samples import samples
from support.raw_client import RawClient
from support.tokens import jwk, key_set, token

from mqttbroker.auth.passwords import hash_password
from mqttbroker.codec.packets import Connack, Connect, Disconnect, Publish, Will
from mqttbroker.net.link import WINDOW

COUNT = 10
WORKERS = pytest.mark.parametrize("workers", [0, 2], ids=["no worker", "workers"])
HELD, WATCHER = "hangs", "watcher"

Start = Callable[..., BrokerProcess]


def burst(name: str, version: int, qos: int, **fields: Any) -> list[Any]:
    messages = [Publish(f"from/{name}", b"%d" % n, qos, False, False, n + 1 if qos else 0) for n in range(COUNT)]
    connect = Connect(name, version, will=Will("wills", name.encode(), 1, False), **fields)
    return [connect, *messages, Disconnect()]


def fire(broker: BrokerProcess, kind: str, how: str, name: str, version: int, qos: int, **fields: Any) -> Any:
    """Send everything in one write, and leave. The socket that is returned is closed, or half closed."""
    client = open_client(broker, kind, version)
    client.send(*burst(name, version, qos, **fields))
    leave(client, how)
    return client


class Watcher:
    """A subscriber to what the tests take; of other messages it would be a slow subscriber."""

    def __init__(self, client: RawClient, **login: Any) -> None:
        self.client = client
        self.login = login
        self.names = 0
        assert client.connect("watcher", **login).reason_code == 0
        for topic_filter in ("from/#", "for/#", "wills"):
            client.subscribe(topic_filter, options=1)

    def expect_all_of(self, name: str) -> None:
        messages = [self.client.take() for _ in range(COUNT)]
        assert [(one.topic, one.payload) for one in messages] == [(f"from/{name}", b"%d" % n) for n in range(COUNT)]

    def expect_nothing(self) -> None:
        """Not even a will."""
        self.client.expect_nothing()


@pytest.fixture(scope="module")
def server() -> Iterator[CallbackServer]:
    server = CallbackServer()
    for name in (HELD, WATCHER):
        server.say(name, {"result": "allow"})
    yield server
    server.close()


@pytest.fixture(scope="module", params=[0, 2], ids=["no worker", "workers"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: CallbackServer) -> Iterator[BrokerProcess]:
    config = {
        "workers": request.param,
        "listeners": all_listeners(CertificateFiles(tmp_path_factory.mktemp("tls"))),
        "http_callback": {"url": server.url, "timeout": "1m"},
        "bans": {"failures": 0, "address_failures": 0},
    }
    with BrokerProcess(config=config) as process:
        process.wait_for_log("event=started")
        yield process


@pytest.fixture(scope="module")
def watcher(broker: BrokerProcess) -> Iterator[Watcher]:
    with RawClient(broker.port) as client:
        yield Watcher(client, username=WATCHER, password=b"x")


@contextmanager
def login_held(server: CallbackServer, broker: BrokerProcess, username: str = HELD) -> Iterator[None]:
    """In the block a CONNECT is sent; behind it the server has been asked, and the broker has seen later clients."""
    server.release.clear()
    asked = len(server.requests)
    try:
        yield
        wait_until(lambda: any(one["username"] == username for one in server.requests[asked:]))
        for number in range(4):  # over each worker
            with RawClient(broker.port) as later:
                assert later.connect(f"later-{number}", username=WATCHER, password=b"x").reason_code == 0
    finally:
        server.release.set()


# Neither version nor QoS of a packet that waits for a login depends on the other, so half of their pairs has each of them.
PAIRS = ((4, 0), (5, 1), (4, 2))
OTHER_PAIRS = pytest.mark.slow("each version with each QoS")
CASES = [
    pytest.param(kind, how, version, qos, marks=[] if (version, qos) in PAIRS else [OTHER_PAIRS])
    for kind, how, version, qos in itertools.product(KINDS, LEAVES, (4, 5), (0, 1, 2))
]


@pytest.mark.parametrize(("kind", "how", "version", "qos"), CASES)
def test_messages_wait_for_a_slow_login(
    broker: BrokerProcess, server: CallbackServer, watcher: Watcher, kind: str, how: str, version: int, qos: int
) -> None:
    name = f"{kind}-{how}-{version}-{qos}"
    with login_held(server, broker):
        client = fire(broker, kind, how, name, version, qos, username=HELD, password=b"x")
        watcher.expect_nothing()
    watcher.expect_all_of(name)
    broker.wait_for_log(f"event=disconnected client={name} .*reason=DISCONNECT ")
    watcher.expect_nothing()
    client.close()


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_delivered_if_the_login_is_refused(
    broker: BrokerProcess, server: CallbackServer, watcher: Watcher, kind: str, how: str
) -> None:
    name = f"refused-{kind}-{how}"
    server.say(HELD, {"result": "deny"})
    try:
        with login_held(server, broker):
            client = fire(broker, kind, how, name, 5, 1, username=HELD, password=b"x")
        broker.wait_for_log(f"event=refused client={name} ")
    finally:
        server.say(HELD, {"result": "allow"})
    watcher.expect_nothing()
    client.close()


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_with_nothing_behind_its_connect_has_given_up(
    broker: BrokerProcess, server: CallbackServer, watcher: Watcher, kind: str, how: str
) -> None:
    name = f"given-up-{kind}-{how}"
    with login_held(server, broker):
        client = open_client(broker, kind)
        client.send(Connect(name, 5, username=HELD, password=b"x", will=Will("wills", name.encode(), 1, False)))
        leave(client, how)
    broker.wait_for_log(f"event=refused client={name} ")
    assert f"event=connected client={name} " not in broker.log
    watcher.expect_nothing()
    client.close()


def test_the_connack_reaches_a_client_that_closed_its_sending_side_only(
    broker: BrokerProcess, server: CallbackServer, watcher: Watcher
) -> None:
    with login_held(server, broker):
        client = fire(broker, "tcp", "half", "half", 5, 1, username=HELD, password=b"x")
    watcher.expect_all_of("half")
    if worker_pids(broker.pid) == []:  # a worker reads the end of a client, and closes the socket, at once
        assert isinstance(client.expect_closed()[0], Connack)
    client.close()


def test_packets_in_two_reads_and_a_part_of_a_packet(broker: BrokerProcess, server: CallbackServer, watcher: Watcher) -> None:
    for kind in KINDS:
        name = f"parts-{kind}"
        with login_held(server, broker):
            client = open_client(broker, kind)
            connect, *rest = burst(name, 5, 1, username=HELD, password=b"x")
            asked = len(server.requests)
            client.send(connect)
            wait_until(lambda: len(server.requests) > asked)
            client.send(*rest[:-1], Publish("from", b"incomplete", 1, False, False, 99).encode(5)[:-1])
            leave(client, "goodbye")
        watcher.expect_all_of(name)
        will = watcher.client.take()
        assert (will.topic, will.payload) == ("wills", name.encode())


@pytest.mark.parametrize(("kind", "version", "qos"), list(itertools.product(KINDS, (4, 5), (0, 1))))
def test_what_the_kernel_has_of_a_client_that_reset_its_connection(
    broker: BrokerProcess, server: CallbackServer, kind: str, version: int, qos: int
) -> None:
    # Beside what is read, as much as fits into the socket of a client that is not read.
    size = WINDOW + 30_000 if worker_pids(broker.pid) else 50_000
    message = Publish("reset", bytes(200), qos, False, False, 1 if qos else 0).encode(version)
    count = size // len(message)
    name = f"reset-{kind}-{version}-{qos}"
    before = samples(broker.get("/metrics"))["mqttbroker_publish_received_total"]
    with login_held(server, broker):
        client = open_client(broker, kind, version)
        asked = len(server.requests)
        client.send(Connect(name, version, username=HELD, password=b"x", will=Will("wills", b"", 1, False)))
        wait_until(lambda: len(server.requests) > asked)
        for _ in range(count):
            client.send(message)
        client.send(Disconnect())
        reset(client)
    broker.wait_for_log(f"event=disconnected client={name} .*reason=DISCONNECT ")
    assert samples(broker.get("/metrics"))["mqttbroker_publish_received_total"] - before == count


# --- other reasons to wait ------------------------------------------------------------------------------------------


@WORKERS
def test_the_first_login_of_each_user_with_a_password(start_broker: Start, tmp_path: Path, workers: int) -> None:
    line = hash_password(b"secret")
    names = [f"{kind}-{how}-{version}" for kind in KINDS for how in LEAVES for version in (4, 5)]
    (tmp_path / "users").write_text("".join(f"{name}:{line}\n" for name in [*names, WATCHER]))
    broker = start_broker(config={
        "workers": workers, "listeners": all_listeners(CertificateFiles(tmp_path)),
        "password_file": str(tmp_path / "users"), "allow_anonymous": False,
    })  # fmt: skip
    with RawClient(broker.port) as client:
        watcher = Watcher(client, username=WATCHER, password=b"secret")
        for name in names:
            kind, how, version = name.split("-")
            fired = fire(broker, kind, how, name, int(version), 1, username=name, password=b"secret")
            watcher.expect_all_of(name)
            fired.close()
        watcher.expect_nothing()


@WORKERS
def test_tokens_whose_keys_are_not_there_yet(start_broker: Start, tmp_path: Path, workers: int) -> None:
    with KeyServer(key_set(jwk("RS256", "a", "a"))) as keys, ExitStack() as stack:
        keys.mode = "held"
        broker = start_broker(config={
            "workers": workers, "listeners": all_listeners(CertificateFiles(tmp_path)),
            "jwt": {"jwks_url": keys.url, "algorithms": ["RS256"], "jwks_timeout": "30s"},
        })  # fmt: skip
        password = token(name="a", kid="a").encode()
        names = [f"{kind}-{how}" for kind in KINDS for how in LEAVES]
        for name in names:
            kind, how = name.split("-")
            stack.callback(fire(broker, kind, how, name, 5, 1, username="any", password=password).close)
        client = stack.enter_context(RawClient(broker.port))
        client.send(Connect("watcher", 5, username="any", password=password))
        keys.release.set()
        for name in names:
            broker.wait_for_log(f"event=disconnected client={name} .*reason=DISCONNECT ")
        assert samples(broker.get("/metrics"))["mqttbroker_publish_received_total"] == COUNT * len(names)


PLUGIN = """
import asyncio
from pathlib import Path

from mqttbroker.auth.plugin import Accepted, Login


class Patient:
    async def authenticate(self, login: Login):
        while login.username == "hangs" and not Path(login.password.decode()).exists():
            await asyncio.sleep(0.01)
        return Accepted()
"""


@WORKERS
def test_a_plug_in_that_takes_its_time(start_broker: Start, tmp_path: Path, workers: int) -> None:
    (tmp_path / "patient.py").write_text(PLUGIN)
    broker = start_broker(config={
        "workers": workers, "listeners": all_listeners(CertificateFiles(tmp_path)),
        "plugin": {"object": "patient:Patient", "path": str(tmp_path), "timeout": "1m"},
    })  # fmt: skip
    with RawClient(broker.port) as client:
        watcher = Watcher(client, username=WATCHER, password=b"x")
        for kind in KINDS:
            name, go_on = f"plugin-{kind}", tmp_path / f"go-{kind}"
            fire(broker, kind, "goodbye", name, 5, 1, username=HELD, password=str(go_on).encode())
            watcher.expect_nothing()
            go_on.touch()
            watcher.expect_all_of(name)


@WORKERS
@pytest.mark.parametrize("clean_start", [True, False], ids=["the session is discarded", "its queue is read"])
def test_anonymous_clients_whose_connect_waits_for_the_store(start_broker: Start, tmp_path: Path, workers: int, clean_start: bool) -> None:
    broker = start_broker(config={"workers": workers, "listeners": all_listeners(CertificateFiles(tmp_path))})
    with RawClient(broker.port, 4) as client:
        watcher = Watcher(client, clean_start=True)
        for kind, how, version in itertools.product(KINDS, LEAVES, (4, 5)):
            name = f"stored-{kind}-{how}-{version}"
            with RawClient(broker.port, 4) as before:
                before.connect(name, clean_start=False)
                before.subscribe(f"for/{name}", options=1)
            broker.wait_for_log(f"event=disconnected client={name} ")
            client.publish(f"for/{name}", b"waits", 1)
            assert watcher.client.take().topic == f"for/{name}"
            fired = fire(broker, kind, how, name, version, 1, clean_start=clean_start)
            watcher.expect_all_of(name)
            fired.close()
        watcher.expect_nothing()


def test_what_waits_is_dropped_after_a_time(start_broker: Start, tmp_path: Path, server: CallbackServer) -> None:
    broker = start_broker(config={
        "workers": 1, "listeners": all_listeners(CertificateFiles(tmp_path)),
        "http_callback": {"url": server.url, "timeout": "1m"}, "limits": {"left_client_timeout": "100ms"},
    })  # fmt: skip
    server.release.clear()
    try:
        for kind in KINDS:
            fire(broker, kind, "goodbye", f"late-{kind}", 5, 1, username=HELD, password=b"x")
            broker.wait_for_log(f"event=refused client=late-{kind} ")
            client = open_client(broker, kind)
            client.send(Connect(f"much-{kind}", 5, username=HELD, password=b"x"))
            for _ in range(10):  # the first of them waits in the wire, the others in front of it
                client.send(Publish("late", bytes(20_000), 0, False, False, 0))
            leave(client, "goodbye")
            broker.wait_for_log(f"event=refused client=much-{kind} ")
        wait_until(lambda: samples(broker.get("/metrics"))["mqttbroker_memory_part_bytes/incomplete"] == 0)
    finally:
        server.release.set()
