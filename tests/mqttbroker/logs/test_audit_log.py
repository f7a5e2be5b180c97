"""The audit log: acts of operators and refusals, with their names, in the log and in a file of its own."""

from __future__ import annotations

import os
import signal
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess, to_toml
from support.command_line import run
from support.core import wait_until
from support.raw_client import RawClient

from mqttbroker.codec.packets import Will
from mqttbroker.core.terms.line_limit import MAX_LINES

Start = Callable[..., BrokerProcess]


def lines(file: Path, wanted: str) -> list[str]:
    return [line for line in file.read_text().splitlines() if wanted in line]


def wait_for(file: Path, wanted: str) -> str:
    """The first line of a file that has the text; waits until there is one."""
    wait_until(lambda: lines(file, wanted))
    return lines(file, wanted)[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


def config(file: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    (tmp_path / "rules").write_text("topic read in/#\ntopic write out/#\ntopic deny secret/#\n")
    return {"acl_file": str(tmp_path / "rules"), "log": {"audit_file": str(file)}, **more}


def test_denials_of_clients_name_what_and_who(start_broker: Start, file: Path, tmp_path: Path) -> None:
    broker = start_broker(config=config(file, tmp_path))
    with RawClient(broker.port) as client:
        client.connect("dev", will=Will("in/will", b"gone"))
        assert client.publish("in/1", b"x", qos=1) == 0x87
        assert client.subscribe("secret/#").reason_codes == [0x87]
        address = "%s:%d" % client.socket.getsockname()
    common = 'client=dev address={} reason="not allowed by the access rules" user="" listener={}'
    listener = f"127.0.0.1:{broker.port}"
    for action, target, where in (
        ("publish", "in/1", (address, listener)), ("subscribe", "secret/#", (address, listener)),
        ("will", "in/will", ('""', '""')),
    ):  # fmt: skip
        line = wait_for(file, f"event=denied action={action} ")
        assert f"target={target} " + common.format(where[0], line.rpartition("listener=")[2]) in line
    broker.wait_for_log("event=denied action=publish target=in/1 client=dev")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_refused_login_is_in_the_file_also_at_level_error(start_broker: Start, file: Path, tmp_path: Path) -> None:
    broker = start_broker(config=config(file, tmp_path))
    changed = config(file, tmp_path, allow_anonymous=False)
    changed["log"]["level"] = "error"
    broker.config.write_text(to_toml(changed))
    os.kill(broker.pid, signal.SIGHUP)
    wait_for(file, "event=setting_changed key=allow_anonymous from=loopback to=False")
    assert wait_for(file, "event=admin action=reload user=SIGHUP")
    wait_for(file, "event=setting_changed key=log.level from=info to=error")
    while True:  # the level changes after that line
        with RawClient(broker.port) as client:
            if client.connect("dev").reason_code == 0x87:
                break
    wait_for(file, "event=refused client=dev ")
    assert not [line for line in broker.lines if "event=refused" in line]


def test_flood_of_denials_is_counted(start_broker: Start, file: Path, tmp_path: Path) -> None:
    broker = start_broker(config=config(file, tmp_path))
    with RawClient(broker.port) as client:
        client.connect("dev")
        for number in range(10 * MAX_LINES):
            client.publish(f"in/{number}")
        client.ping()
        while not lines(file, "event=denials_not_logged"):
            client.publish("in/last", qos=1)
    assert len(lines(file, "event=denied ")) <= 3 * MAX_LINES


def test_acts_over_http_name_the_sender(start_broker: Start, file: Path, tmp_path: Path) -> None:
    access = [{"name": "ann", "role": "admin", "token": "t1"}, {"name": "bob", "role": "viewer", "token": "t2"}]
    streams = {"s": {"filters": ["s/#"]}}
    broker = start_broker(config=config(file, tmp_path, http={"access": access}, streams=streams))

    def ask(method: str, token: str, body: bytes = b"", api: str = "") -> int:
        url = f"{broker.url}{api}/streams/s/consumers/c"
        request = urllib.request.Request(url, body or None, {"Authorization": f"Bearer {token}"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert ask("PUT", "t1", b'{"offsets": {"0": 1}}') == 204
    assert (ask("DELETE", "t2"), ask("DELETE", "t1"), ask("DELETE", "wrong")) == (403, 204, 401)
    done = wait_for(file, "event=admin action=forget_consumer ")
    assert "target=/streams/s/consumers/c user=ann role=admin address=127.0.0.1:" in done
    assert "reason=\"bob may not read stream 's'\" user=bob" in wait_for(file, "event=denied action=DELETE")
    assert ask("PUT", "t1", b'{"offsets": {"0": 1}}') == 204
    assert [ask("DELETE", token, api="/api/v1") for token in ("t2", "t1", "t1", "wrong")] == [403, 204, 404, 401]
    wait_for(file, 'event=admin action=forget_consumer target="name=s consumer=c" user=ann')
    assert 'user="" listener=http' in wait_for(file, 'reason="a bearer token is needed')
    text = file.read_text()
    assert not [token for token in ("t1", "t2", "wrong") if f"{token} " in text]


def test_file_is_opened_again_on_sighup(start_broker: Start, file: Path, tmp_path: Path) -> None:
    broker = start_broker(config=config(file, tmp_path))
    file.rename(tmp_path / "audit.log.1")
    os.kill(broker.pid, signal.SIGHUP)
    wait_until(file.exists)
    with RawClient(broker.port) as client:
        client.connect("dev")
        client.publish("in/1", qos=1)
    wait_for(file, "event=denied")


def test_commands_that_change_data_are_added(file: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "broker.toml").write_text(f'data_dir = "{tmp_path}/data"\nlog.audit_file = "{file}"\n')
    assert run("repair-store", "--config", "broker.toml", cwd=tmp_path).returncode == 0
    assert f"event=admin action=repair_store target={tmp_path}/data user=" in file.read_text()
    assert run("check-store", "--config", "broker.toml", cwd=tmp_path).returncode == 0
    assert len(file.read_text().splitlines()) == 1
    file.unlink()
    file.mkdir()
    done = run("repair-store", "--config", "broker.toml", cwd=tmp_path)
    assert done.returncode == 1 and "log.audit_file" in done.stderr


def test_file_that_cannot_be_opened(start_broker: Start, tmp_path: Path) -> None:
    broker = BrokerProcess(config={"log": {"audit_file": str(tmp_path / "none" / "audit.log")}})
    broker.launch()
    broker.wait_for_log(r"broker\.toml:\d+: log\.audit_file: .*/none/audit\.log: No such file or directory$")
    broker.terminate()
    broker.close()
