"""SIGHUP: changed settings are applied or named, and a configuration with a mistake changes nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.command_line import run
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.codec.packets import Connack
from mqttbroker.config.settings import Listener, Settings, Stream
from mqttbroker.server.reload import RELOADABLE, flatten, with_key

Start = Callable[..., BrokerProcess]


class Reloadable:
    """A broker, and its configuration as a dictionary of dotted keys that a test changes."""

    def __init__(self, start: Start, **keys: Any) -> None:
        self.keys: dict[str, Any] = {"log.level": "info", **keys}
        self.broker = start(config=self.toml())

    def toml(self) -> str:
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in self.keys.items())

    def reload(self, awaited: str = "event=reloaded", **keys: Any) -> None:
        self.keys |= {key.replace("__", "."): value for key, value in keys.items()}
        self.write()
        after = len(self.broker.lines)
        os.kill(self.broker.pid, signal.SIGHUP)
        self.broker.wait_for_log(awaited, after=after)
        self.broker.wait_for_log("event=reloaded", after=after)

    def write(self) -> None:
        self.broker.config.write_text(self.toml(), encoding="utf-8")

    def command(self) -> tuple[int, str, str]:
        """Exit status, output and errors of ``mqttbroker reload``."""
        done = run("reload", "--url", self.broker.url, "--token", "t", cwd=self.broker.config.parent)
        return done.returncode, done.stdout, done.stderr

    def connect(self, client_id: str = "c") -> Connack:
        with RawClient(self.broker.port) as client:
            return client.connect(client_id)


def test_anonymous_clients_can_be_refused_and_admitted_again(start_broker: Start) -> None:
    running = Reloadable(start_broker)
    assert running.connect().reason_code == 0
    running.reload(allow_anonymous=False)
    assert running.connect().reason_code == 0x87
    running.reload(allow_anonymous="loopback")
    assert running.connect().reason_code == 0


def test_limits_apply_to_new_connections(start_broker: Start) -> None:
    running = Reloadable(start_broker)
    broker = running.broker
    with RawClient(broker.port) as early:
        assert early.connect("early").properties.receive_maximum == -1
        running.reload(limits__receive_maximum=7, limits__max_packet_size="1KiB")
        properties = running.connect("late").properties
        assert (properties.receive_maximum, properties.maximum_packet_size) == (7, 1024)
        early.publish("a", bytes(2000), qos=1)  # it was told of a larger maximum
        early.ping()


def test_keys_that_need_a_restart_are_named(start_broker: Start) -> None:
    running = Reloadable(start_broker)
    running.reload("event=restart_needed key=durability", durability="off", on_corrupt_store="refuse")
    running.broker.wait_for_log("event=restart_needed key=on_corrupt_store")
    assert running.connect().reason_code == 0


def test_mistake_keeps_the_settings_in_force_and_is_reported_until_mended(start_broker: Start) -> None:
    running = Reloadable(start_broker, **{"limits.receive_maximum": 9})
    broker = running.broker
    running.reload("event=reload_failed", limits__receive_maximum="many", allow_anonymous=False)
    connack = running.connect()
    assert (connack.reason_code, connack.properties.receive_maximum) == (0, 9)
    ready = json.loads(broker.get("/readyz"))
    assert ready["status"] == "ok" and "limits.receive_maximum" in ready["warnings"][0]
    assert samples(broker.get("/metrics"))["mqttbroker_reload_problems"] == 1
    running.reload(limits__receive_maximum=10, allow_anonymous=True)
    assert running.connect().properties.receive_maximum == 10
    assert json.loads(broker.get("/readyz")) == {"status": "ok"}


def test_the_command_lists_what_changed_and_what_needs_a_restart(start_broker: Start) -> None:
    files = {"streams.s.filters": ["s/#"], "streams.t.filters": ["t/#"]}
    running = Reloadable(start_broker, **files, **{"streams.s.segment_bytes": "1MiB", "http.token": "t"})
    assert running.command() == (0, "no setting has changed\n", "")
    running.keys |= {"allow_anonymous": False, "streams.s.segment_bytes": "2MiB", "streams.s.key": "client", "durability": "off"}
    running.write()
    status, out, err = running.command()
    rows = [("changed", "allow_anonymous"), ("changed", "streams.s.segment_bytes"), ("restart needed", "durability"),
            ("restart needed", "streams.s.key")]  # fmt: skip
    assert (status, out, err) == (0, "".join(f"{what.ljust(14)}  {key}\n" for what, key in rows), "")
    running.broker.wait_for_log("event=setting_changed key=streams.s.segment_bytes from=1048576 to=2097152")
    running.broker.wait_for_log("event=restart_needed key=streams.s.key")
    del running.keys["streams.s.filters"], running.keys["streams.s.segment_bytes"], running.keys["streams.s.key"]
    running.write()
    assert running.command() == (0, "restart needed  durability\nrestart needed  streams.s\n", "")


def test_what_the_next_start_would_refuse_is_a_problem_of_the_reload(start_broker: Start) -> None:
    running = Reloadable(start_broker, **{"streams.s.filters": ["s/#"], "streams.s.partitions": 1, "http.token": "t"})
    running.keys |= {"streams.s.partitions": 2, "allow_anonymous": False}
    running.write()
    status, out, err = running.command()
    assert (status, out) == (1, "")
    assert re.fullmatch(r"\S+broker\.toml:3: streams\.s\.partitions: has 1 partitions and cannot get 2, .*\n", err)
    assert running.connect().reason_code == 0  # a mistake changes nothing
    running.broker.wait_for_log("event=reload_failed reason=.*broker.toml:3: streams.s.partitions")
    assert "streams.s.partitions" in json.loads(running.broker.get("/readyz"))["warnings"][0]


@pytest.mark.parametrize("key", flatten(Settings(streams=(Stream("s", ("a/#",)),))))
def test_each_key_can_be_replaced_by_its_name(key: str) -> None:
    settings = Settings(listeners=(Listener(), Listener(port=7)), streams=(Stream("s", ("a/#",)),))
    changed = with_key(settings, key, "changed")
    assert flatten(changed) == flatten(settings) | {key: "changed"}


def test_token_in_a_mounted_secret_is_read_again(start_broker: Start, tmp_path: Path) -> None:
    """Kubernetes replaces a link to the directory of all secrets, and the link of each secret leads through it."""
    secrets = tmp_path / "secrets"
    for number, token in enumerate(("first", "second")):
        (secrets / str(number)).mkdir(parents=True)
        (secrets / str(number) / "token").write_text(f"{token}\n")
    (secrets / "..data").symlink_to("0")
    (secrets / "token").symlink_to("..data/token")
    running = Reloadable(start_broker, **{"http.token_file": str(secrets / "token")})
    broker = running.broker
    assert broker.get("/metrics", {"Authorization": "Bearer first"})
    (secrets / "..new").symlink_to("1")
    os.replace(secrets / "..new", secrets / "..data")
    running.reload("event=setting_changed key=http.token")
    assert broker.get("/metrics", {"Authorization": "Bearer second"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        broker.get("/metrics", {"Authorization": "Bearer first"})
    (secrets / "1" / "token").write_text("")
    running.reload(r"event=reload_failed reason=.*http\.token_file: .*/token: is empty")
    assert broker.get("/metrics", {"Authorization": "Bearer second"})
    assert b"http.token_file" in broker.get("/readyz")


def test_an_included_file_is_read_again(start_broker: Start) -> None:
    running = Reloadable(start_broker, include="more/*.toml")
    more = running.broker.config.parent / "more"
    more.mkdir()
    (more / "a.toml").write_text("allow_anonymous = false\n")
    running.reload("event=setting_changed key=allow_anonymous")
    assert running.connect().reason_code == 0x87
    (more / "b.toml").write_text("\nlimits.max_sessions = 0\n")
    running.reload(r"event=reload_failed reason=.*more/b\.toml:2: limits\.max_sessions")
    (more / "b.toml").unlink()
    (more / "a.toml").unlink()
    running.reload("event=setting_changed key=allow_anonymous")
    assert running.connect().reason_code == 0


def test_reloadable_keys_exist() -> None:
    keys = flatten(Settings())
    found = [key for key in keys if RELOADABLE.fullmatch(key)]
    assert {"allow_anonymous", "limits.max_sessions", "listeners.0.max_connections", "sys_interval"} <= set(found)
    assert not {"data_dir", "durability", "listeners.0.port", "http.port", "streams.0.filters"} & set(found)
    assert len(found) > len(dataclasses.fields(Settings))
