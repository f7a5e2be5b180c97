"""A plug-in decides about logins, and whatever it does concerns only those that wait for it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import samples
from support.paths import ROOT
from support.patience import growing
from support.raw_client import RawClient

from mqttbroker.codec.packets import Connack, Connect, Disconnect
from mqttbroker.codec.properties import Properties
from mqttbroker.codec.reason_codes import (
    BAD_AUTHENTICATION_METHOD,
    BAD_USER_NAME_OR_PASSWORD,
    CLIENT_IDENTIFIER_NOT_VALID,
    NOT_AUTHORIZED,
    QUOTA_EXCEEDED,
    SERVER_BUSY,
    SERVER_UNAVAILABLE,
    SUCCESS,
)
from mqttbroker.config.load import load_settings
from mqttbroker.server.config_check import check

Start = Callable[..., BrokerProcess]

PLUGIN = '''
import asyncio, os, sys, time

from mqttbroker.auth.plugin import Accepted, Ignored, Login, Rejected, Unavailable


class Scripted:
    """Does what the user name says."""

    def __init__(self, version="one"):
        self.version = version
        self.held = asyncio.Event()

    async def authenticate(self, login: Login):
        name = login.username
        if name == "ok":
            return Accepted()
        if name == "echo":
            fields = [login.client_id, login.password.hex(), login.address, login.listener.split(":")[0],
                      str(login.certificate_name), str(login.version), self.version]
            return Accepted(username="|".join(fields))
        if name == "renamed":
            return Accepted(username="alice", client_id="device-1", acl={"pub": ["a/#"], "sub": []})
        if name and name.startswith("short "):
            return Accepted(expires_at=time.time() + float(name.split()[1]))
        if name == "past":
            return Accepted(expires_at=time.time() - 1)
        if name == "wrong":
            return Rejected()
        if name == "ignored" or name is None:
            return Ignored()
        if name == "raises":
            raise ValueError("some reason")
        if name == "unavailable":
            raise Unavailable("the database is down")
        if name == "hangs":
            await asyncio.sleep(3600)
        if name == "stubborn":
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass
        if name == "blocks":
            time.sleep(3600)
        if name == "exits":
            sys.exit(3)
        if name == "dies":
            os._exit(3)
        if name == "eats":
            return Accepted(username=len(bytearray(2 << 30)))
        if name == "prints":
            print("a line of the plug-in", flush=True)
            return Accepted()
        if name == "held":
            await self.held.wait()
            return Accepted()
        if name == "release":
            self.held.set()
            return Accepted()
        answers = {"none": None, "number": Accepted(username=5), "control": Accepted(username="a\\0b"),
                   "empty": Accepted(username=""), "acl": Accepted(acl={"publish": "x"}), "object": Accepted(acl=object()),
                   "when": Accepted(expires_at="tomorrow"), "nan": Accepted(expires_at=float("nan")),
                   "huge": Accepted(username="x" * 20_000_000), "long": Accepted(username="x" * 65_536)}
        return answers[name]
'''


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "scripted.py").write_text(PLUGIN)
    return tmp_path


def config(directory: Path, **more: Any) -> dict[str, Any]:
    plugin = {"object": "scripted:Scripted", "path": str(directory), "timeout": "1m", **more}
    return {"plugin": plugin, "allow_anonymous": True, "bans": {"failures": 0, "address_failures": 0}}


def login(broker: BrokerProcess, username: str | None, client_id: str = "c", version: int = 5) -> Connack:
    fields: dict[str, Any] = {} if username is None else {"username": username, "password": b"\xffsecret"}
    with RawClient(broker.port, version) as client:
        return client.connect(client_id, **fields)


def test_answers(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory))
    for username, version, code in (
        ("ok", 5, SUCCESS),
        ("wrong", 5, BAD_USER_NAME_OR_PASSWORD),
        ("wrong", 4, 5),
        ("ignored", 5, BAD_USER_NAME_OR_PASSWORD),  # nobody else knows the user
        (None, 5, SUCCESS),  # ignored, so the client is anonymous
        ("unavailable", 5, SERVER_UNAVAILABLE),
        ("unavailable", 4, 3),
        ("past", 5, NOT_AUTHORIZED),
    ):
        assert login(broker, username, version=version).reason_code == code, username
    broker.wait_for_log('event=authenticator_failed authenticator=plugin .*reason="the database is down"')
    properties = Properties()
    properties.authentication_method = "SCRAM-SHA-256"  # is not for the plug-in
    with RawClient(broker.port) as client:
        assert client.connect("c", properties=properties).reason_code == BAD_AUTHENTICATION_METHOD
    login(broker, "echo", "device")
    broker.wait_for_log(r"user=.?device.ff736563726574.127.0.0.1.127.0.0.1.None.5.one.? ")
    metrics = broker.get("/metrics").decode()
    assert 'mqttbroker_logins_total{authenticator="plugin",outcome="accepted"} 2.0' in metrics
    assert 'mqttbroker_logins_total{authenticator="plugin",outcome="unavailable"} 2.0' in metrics


def test_what_a_login_brings(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory))
    assert login(broker, "renamed", "other").reason_code == CLIENT_IDENTIFIER_NOT_VALID
    with RawClient(broker.port) as client:
        assert client.connect("device-1", username="renamed", password=b"x").reason_code == SUCCESS
        broker.wait_for_log("event=connected client=device-1 .*user=alice ")
        assert client.subscribe("a/b").reason_codes == [NOT_AUTHORIZED]
    for seconds in growing():
        with RawClient(broker.port) as client:
            if client.connect("short", username=f"short {seconds}", password=b"x").reason_code == SUCCESS:
                assert client.expect(Disconnect).reason_code == NOT_AUTHORIZED
                break
    else:
        pytest.fail("a login that has not expired yet was refused")


@pytest.mark.one_build
def test_invalid_answers_refuse_the_login_only(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory, max_memory="1GiB"))
    process = None
    for name in ("none", "number", "control", "empty", "acl", "object", "when", "nan", "long", "raises", "exits", "eats",
                 "unknown"):  # fmt: skip
        assert login(broker, name).reason_code == SERVER_UNAVAILABLE, name
        assert login(broker, "ok").reason_code == SUCCESS
        children = plugin_processes(broker)
        assert process in (None, children)
        process = children  # the same one: none of them ended it
    assert "event=authenticator_ended" not in broker.log


def plugin_processes(broker: BrokerProcess) -> list[int]:
    """The processes of plug-ins that the broker runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes()
            except (OSError, IndexError, ValueError):
                continue
            if parent == broker.pid and b"mqttbroker.auth.plugin_main" in command:
                found.append(int(entry.name))
    return found


def wait_for_logins(broker: BrokerProcess, waiting: int, in_progress: int) -> None:
    """Wait until the metrics have these numbers of logins."""
    expected = [waiting, in_progress]
    wait_until(lambda: [plugin_metric(broker, name) for name in ("waiting", "in_progress")] == expected)


def plugin_metric(broker: BrokerProcess, name: str) -> float:
    return samples(broker.get("/metrics"))[f"mqttbroker_authenticator_{name}/plugin"]


@pytest.mark.one_build
@pytest.mark.parametrize("name", ["dies", "blocks", "huge", "stubborn"])
def test_a_plugin_that_blocks_or_dies_is_started_again(start_broker: Start, directory: Path, name: str) -> None:
    broker = start_broker(config=config(directory, timeout="3s"))
    with RawClient(broker.port) as bystander:
        assert bystander.connect("bystander", username="ok", password=b"x").reason_code == SUCCESS
        before = plugin_processes(broker)
        assert login(broker, name).reason_code == SERVER_UNAVAILABLE
        bystander.ping()
        assert login(broker, "ok", "next").reason_code == SUCCESS  # it waited for the new process
        assert len(plugin_processes(broker)) == 1 and plugin_processes(broker) != before
        names = ["up", "failures_total", "restarts_total", "waiting", "in_progress"]
        assert [plugin_metric(broker, name) for name in names] == [1, 1, 1, 0, 0]
        bystander.subscribe("$SYS/broker/authenticators/plugin/+")
        topics = {message.topic.rpartition("/")[2] for message in (bystander.take() for _ in range(5))}
        assert topics == {"up", "failures", "restarts", "waiting", "in_progress"}


@pytest.mark.one_build
def test_a_hang_ends_after_the_timeout_and_delays_nobody(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory, timeout="5s"))
    with RawClient(broker.port) as hanging:
        hanging.send(Connect("hanging", username="hangs", password=b"x").encode(5))
        assert login(broker, "ok").reason_code == SUCCESS  # before the other one is answered
        assert hanging.expect(Connack).reason_code == SERVER_UNAVAILABLE
    broker.wait_for_log("event=authenticator_failed .*client=hanging .*reason=timeout")


@pytest.mark.one_build
def test_long_logins_that_wait_are_bounded_in_bytes(start_broker: Start, directory: Path) -> None:
    """One is with the plug-in and one waits. A third long one exceeds the limit; a short one does not count."""
    limits = {"max_total_connect_bytes": "50KiB", "max_connect_size": "64KiB"}
    broker = start_broker(config={**config(directory, max_concurrent=1, timeout="30s"), "limits": limits})
    with ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.port)) for _ in range(4)]
        for number, client in enumerate(clients[:2]):
            client.send(Connect(f"long-{number}", username="held", password=b"x" * 12_000).encode(5))
            wait_for_logins(broker, waiting=number, in_progress=1)
        clients[2].send(Connect("long-2", username="held", password=b"x" * 12_000).encode(5))
        assert clients[2].expect(Connack).reason_code == QUOTA_EXCEEDED
        clients[3].send(Connect("short", username="held", password=b"x").encode(5))
        wait_for_logins(broker, waiting=2, in_progress=1)


@pytest.mark.one_build
def test_a_flood_of_logins_while_the_plugin_hangs(start_broker: Start, directory: Path) -> None:
    """Four are with it, 20 wait, the others are refused at once, and a bystander is served."""
    terms = config(directory, max_concurrent=4, timeout="30s")
    broker = start_broker(config={**terms, "logins": {"max_waiting": 20}})
    with RawClient(broker.port) as bystander, ExitStack() as stack:
        assert bystander.connect("bystander", username="ok", password=b"x").reason_code == SUCCESS
        bystander.subscribe("t")
        clients = [stack.enter_context(RawClient(broker.port)) for _ in range(40)]
        for number, client in enumerate(clients):
            client.send(Connect(f"c{number}", username="held", password=b"x").encode(5))
        for payload in (b"1", b"2"):
            bystander.publish("t", payload, 1)
            assert bystander.take().payload == payload
        assert [client.expect(Connack).reason_code for client in clients[24:]] == [SERVER_BUSY] * 16
        os.kill(plugin_processes(broker)[0], signal.SIGKILL)  # the four that it has are refused
        assert [client.expect(Connack).reason_code for client in clients[:4]] == [SERVER_UNAVAILABLE] * 4
        bystander.ping()


@pytest.mark.one_build
def test_a_client_that_left_does_not_reach_the_plugin(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory, max_concurrent=2, timeout="30s"))
    with RawClient(broker.port) as held:
        held.send(Connect("held", username="held", password=b"x").encode(5))
        held2 = RawClient(broker.port)
        held2.send(Connect("held2", username="held", password=b"x").encode(5))
        wait_for_logins(broker, 0, 2)
        gone = RawClient(broker.port)
        gone.send(Connect("gone", username="prints", password=b"x").encode(5))
        wait_for_logins(broker, 1, 2)
        gone.close()
        held2.close()
        if "TEST_WORKERS" in os.environ:  # their sockets are looked at in the broker's own process, but not in a worker
            wait_until(lambda: json.loads(broker.get("/api/v1/listeners"))["items"][0]["clients"] == 1)
        os.kill(plugin_processes(broker)[0], signal.SIGKILL)
        assert held.expect(Connack).reason_code == SERVER_UNAVAILABLE
    assert login(broker, "prints").reason_code == SUCCESS
    broker.wait_for_log('event=authenticator_output authenticator=plugin text="a line of the plug-in"')
    assert broker.log.count("a line of the plug-in") == 1


@pytest.mark.one_build
def test_sighup_loads_the_plugin_again(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory, timeout="30s"))
    with RawClient(broker.port) as held:
        held.send(Connect("held", username="held", password=b"x").encode(5))
        wait_for_logins(broker, 0, 1)
        module = directory / "scripted.py"
        module.write_text(PLUGIN.replace('"one"', '"two"').replace('if name == "ok"', 'if name == "fine"'))
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=authenticator_reloaded authenticator=plugin")
        assert login(broker, "fine").reason_code == SUCCESS
        assert len(plugin_processes(broker)) == 2  # the old one still has its login
        after = len(broker.lines)
        module.write_text("import nowhere_to_be_found")
        os.kill(broker.pid, signal.SIGHUP)
        broker.wait_for_log("event=reload_failed .*plugin: ModuleNotFoundError: No module named", after=after)
        assert login(broker, "fine").reason_code == SUCCESS


@pytest.mark.one_build
def test_the_broker_ends_while_a_plugin_is_loaded(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory, start_timeout="10m"))
    (directory / "scripted.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(3600)\n")
    os.kill(broker.pid, signal.SIGHUP)
    broker.wait_for_log("event=authenticator_output .*text=loading")
    processes = plugin_processes(broker)
    assert len(processes) == 2
    assert broker.terminate() == 0
    wait_for_end(processes)


def wait_for_end(processes: list[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))


@pytest.mark.one_build
def test_the_processes_end_with_the_broker(start_broker: Start, directory: Path) -> None:
    broker = start_broker(config=config(directory, timeout="60s"))
    with RawClient(broker.port) as client:
        client.send(Connect("c", username="blocks", password=b"x").encode(5))
        processes = plugin_processes(broker)
        broker.kill()
        wait_for_end(processes)


WRONG = [
    ({"object": "nowhere:Class"}, "plugin: ModuleNotFoundError: No module named 'nowhere'"),
    ({"object": "scripted:Missing"}, "plugin: AttributeError: module 'scripted' has no attribute 'Missing'"),
    ({"object": "scripted:PLAIN"}, "plugin: TypeError: scripted:PLAIN has no method: async def authenticate(self, login)"),
    ({"options": {"color": "red"}}, "plugin: TypeError: Scripted.__init__() got an unexpected keyword argument 'color'"),
    ({"object": "scripted:slow", "start_timeout": "300ms"}, "plugin: not loaded within 0.3 s"),
    ({"object": "scripted:dead"}, "plugin: the process ended with status 7"),
]


@pytest.mark.one_build
@pytest.mark.parametrize(("keys", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_a_plugin_that_cannot_be_loaded_is_one_line(directory: Path, keys: dict[str, Any], problem: str) -> None:
    with (directory / "scripted.py").open("a") as file:
        file.write("\nPLAIN = 5\ndef slow():\n    time.sleep(60)\ndef dead():\n    os._exit(7)\n")
    plugin = {"object": "scripted:Scripted", "path": str(directory), **keys}
    options = plugin.pop("options", {})
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in plugin.items())
    text += "[plugin.options]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    path = directory / "broker.toml"
    path.write_text(f'data_dir = "{directory}"\n[plugin]\n{text}')
    assert check(load_settings(path)) == [problem]


# --- the example of the documentation -----------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Path]:
    spec = importlib.util.spec_from_file_location("devices", ROOT / "docs/examples/plugin/devices.py")
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with sqlite3.connect(tmp_path / "devices.db") as connection:
        connection.execute("CREATE TABLE devices (name TEXT PRIMARY KEY, salt BLOB, hash BLOB, blocked INTEGER)")
        for name, blocked in (("pump", 0), ("stolen", 1)):
            salt = os.urandom(16)
            row = (name, salt, example.hash_of(b"right", salt), blocked)
            connection.execute("INSERT INTO devices VALUES (?, ?, ?, ?)", row)
    yield tmp_path / "devices.db"


@pytest.mark.one_build
def test_the_example_of_the_documentation(start_broker: Start, database: Path) -> None:
    options = database.with_suffix(".json")
    options.write_text(json.dumps({"database": str(database)}))
    plugin = {"object": "devices:Devices", "path": str(ROOT / "docs/examples/plugin"), "options_file": str(options)}
    broker = start_broker(config={"plugin": plugin})

    def code(name: str, password: bytes) -> int:
        with RawClient(broker.port) as client:
            return client.connect("c", username=name, password=password).reason_code

    assert code("pump", b"right") == SUCCESS
    assert code("pump", b"wrong") == code("stolen", b"right") == code("unknown", b"x") == BAD_USER_NAME_OR_PASSWORD
    with RawClient(broker.port) as client:
        client.connect("c", username="pump", password=b"right")
        codes = client.subscribe("devices/pump/#", "devices/stolen/#").reason_codes
        assert codes == [2, NOT_AUTHORIZED]
