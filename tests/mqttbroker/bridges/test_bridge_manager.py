"""Bridges between brokers that run: addresses, TLS, WebSocket, failures, states, reloads."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.bridges import bridge_config
from support.broker_process import BrokerProcess, to_toml
from support.certificates import CertificateFiles
from support.command_line import run
from support.core import wait_until
from support.cut_proxy import CutProxy
from support.metric_samples import samples
from support.mosquitto import NEEDS_MOSQUITTO, mosquitto
from support.raw_client import RawClient

from mqttbroker.auth.passwords import hash_password, set_password
from mqttbroker.codec.packets import Publish

Start = Callable[..., BrokerProcess]
BOTH = [{"filter": "t/#", "direction": "both", "qos": 1}]
QUICK = {"reconnect_first": "20ms", "reconnect_longest": "100ms"}


class Remote(NamedTuple):
    broker: BrokerProcess
    files: CertificateFiles
    tls: int  # ports
    wss: int
    private: int  # needs a password


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A broker with a listener for each way to reach it."""
    directory = tmp_path_factory.mktemp("certificates")
    files = CertificateFiles(directory)
    set_password(directory / "passwords", "bridge", hash_password("right"))
    server = {"certfile": str(files.certfile), "keyfile": str(files.keyfile), "cafile": str(files.cafile), "port": 0}
    listeners = [
        {"port": 0},
        {"type": "tls", "client_certificate": "required", **server},
        {"type": "wss", **server},
        {"type": "ws", "port": 0, "password_file": str(directory / "passwords"), "allow_anonymous": False},
    ]
    with BrokerProcess(config={"listeners": listeners}) as broker:
        yield Remote(broker, files, broker._port_of("tls", 0), broker._port_of("wss", 0), broker._port_of("ws", 0))


def bridge(name: str, *addresses: str, **options: Any) -> dict[str, Any]:
    """A bridge of topics below its name."""
    topics = [{"filter": "#", "direction": "both", "qos": 2, "local_prefix": f"{name}/", "remote_prefix": f"r/{name}/"}]
    return {"name": name, "addresses": addresses, "topics": topics, **QUICK, **options}


def listed(broker: BrokerProcess) -> dict[str, Any]:
    return {one["name"]: one for one in json.loads(broker.get("/api/v1/bridges"))["items"]}


def passes(here: int, there: int, name: str) -> None:
    """Messages pass the bridge of this name in both directions."""
    with RawClient(here, 5) as local, RawClient(there, 5) as other:
        local.connect("local")
        other.connect("other")
        local.subscribe(f"{name}/in")
        other.subscribe(f"r/{name}/out")
        local.publish(f"{name}/out", b"o", 2)
        other.publish(f"r/{name}/in", b"i", 2)
        assert (other.take().payload, local.take().payload) == (b"o", b"i")
        other.expect_nothing()
        local.expect_nothing()


def test_bridges_of_each_kind_connect_and_the_others_say_why(start_broker: Start, remote: Remote, tmp_path: Path) -> None:
    port, files = remote.broker.port, remote.files
    own = files.authority.issue_cert("bridge@example.org", common_name="bridge")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    mutual = {"certfile": str(tmp_path / "own.pem"), "keyfile": str(tmp_path / "own.pem"), "cafile": str(files.cafile)}
    (tmp_path / "secret").write_text("right\n")
    login = {"username": "bridge", "password_file": str(tmp_path / "secret")}
    good = [
        bridge("five", f"mqtt://127.0.0.1:{port}"),
        bridge("four", f"127.0.0.1:{port}", version="3.1.1"),
        bridge("tls", f"mqtts://localhost:{remote.tls}", **mutual),
        bridge("wss", f"wss://127.0.0.1:{remote.wss}/mqtt", cafile=str(files.cafile)),
        bridge("login", f"ws://127.0.0.1:{remote.private}", **login),
        bridge("unverified", f"wss://127.0.0.1:{remote.wss}", verify=False),
    ]
    reasons = {
        "wrong": (bridge("wrong", f"ws://127.0.0.1:{remote.private}", username="bridge", password="wrong"), "the remote refuses: "),
        "unknown": (bridge("unknown", "mqtt://no-such-host.invalid"), "unknown host: "),
        "refused": (bridge("refused", "mqtt://127.0.0.1:1"), "Connection refused"),
        "strange": (bridge("strange", f"mqtts://127.0.0.1:{remote.tls}"), "the certificate of the remote is refused: "),
        "file": (bridge("file", f"mqtts://127.0.0.1:{remote.tls}", cafile="/none"), "cafile /none: No such file"),
        "http": (bridge("http", f"ws://127.0.0.1:{remote.broker.http_port}"), "no WebSocket: "),
    }
    bridges = [*good, *(section for section, _ in reasons.values()), bridge("off", "mqtt://h", enabled=False)]
    broker = start_broker(config={"bridges": bridges})
    for section in good:
        broker.wait_for_log(f"event=bridge_connected bridge={section['name']} ")
        passes(broker.port, port, section["name"])
    for name, (_, reason) in reasons.items():
        broker.wait_for_log(rf'event=bridge_disconnected bridge={name} .*reason="{reason}')
    wait_until(lambda: all(listed(broker)[name]["failures"] > 2 for name in reasons))
    found = listed(broker)
    assert [one["name"] for one in bridges] == list(found)
    for name, (_, reason) in reasons.items():
        assert found[name]["reason"].startswith(reason)
        # Why is said once; then failures are counted.
        assert broker.log.count(f"event=bridge_disconnected bridge={name} ") == 1
    assert found["five"]["state"] == "connected" and found["off"]["state"] == "disabled"
    assert (found["five"]["messages_out"], found["five"]["messages_in"], found["five"]["bytes_in"]) == (1, 1, 1)
    metrics = samples(broker.get("/metrics"))
    assert metrics["mqttbroker_bridge_up/tls"] == 1.0 and metrics["mqttbroker_bridge_up/unknown"] == 0.0
    assert metrics["mqttbroker_bridge_messages_total/wss/out"] == 1.0
    assert "right" not in broker.log + broker.get("/api/v1/configuration").decode()
    shown = run("bridges", "--url", broker.url, cwd=tmp_path).stdout
    assert "five" in shown and "connected" in shown and "unknown host" in shown
    with RawClient(broker.port, 5) as client:
        client.connect("observer")
        client.subscribe("$SYS/broker/connection/+/state", options=0)
        states = {client.take().topic.split("/")[3] for _ in range(len(bridges))}
        assert states == set(found)


@pytest.mark.normative("3.1.1", "MQTT-7.0.0-1")
@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_a_topic_in_both_directions_does_not_loop(start_broker: Start, version: str) -> None:
    there = start_broker()
    here = start_broker(config=bridge_config(there.port, BOTH, version=version, notifications="both"))
    here.wait_for_log("event=bridge_connected")
    with RawClient(here.port, 5) as local, RawClient(there.port, 5) as remote:
        local.connect("local")
        remote.connect("remote")
        local.subscribe("t/#")
        remote.subscribe("t/#")
        local.publish("t/1", b"1", 1, retain=True)
        assert [local.take().payload, remote.take().payload] == [b"1", b"1"]
        remote.publish("t/2", b"2", 1)
        assert [local.take().payload, remote.take().payload] == [b"2", b"2"]
        local.expect_nothing()
        remote.expect_nothing()
    with RawClient(there.port, 5) as late:
        late.connect("late")
        late.subscribe("t/#", "$SYS/broker/connection/+/state")
        got = {(one.topic, one.payload, one.retain) for one in (late.take(), late.take())}
        client_id = listed(here)["there"]["client_id"]
        assert got == {("t/1", b"1", True), (f"$SYS/broker/connection/{client_id}/state", b"1", True)}


def test_two_bridges_in_a_circle_pass_a_message_once(start_broker: Start) -> None:
    """Each of two bridges would pass on what the other one brings, for ever."""
    there = start_broker()
    sections = [{"name": name, "addresses": [f"mqtt://127.0.0.1:{there.port}"], "topics": BOTH, **QUICK} for name in ("a", "b")]
    here = start_broker(config={"bridges": sections})
    for name in ("a", "b"):
        here.wait_for_log(f"event=bridge_connected bridge={name}")
    with RawClient(here.port, 5) as local:
        local.connect("local")
        local.publish("t/1", b"1", 1)
    wait_until(lambda: sum(one["dropped"]["loop"] for one in listed(here).values()) >= 1)
    counts = [(one["messages_out"], one["messages_in"]) for one in listed(here).values()]
    assert all(out <= 2 and came <= 2 for out, came in counts), counts


def test_the_second_address_is_used_while_the_first_is_away(start_broker: Start) -> None:
    first, second = start_broker(), start_broker()
    topics = [{"filter": "t/#", "qos": 2}, {"filter": "in/#", "direction": "in", "qos": 2}]
    with CutProxy(first.port) as proxy:
        addresses = [f"mqtt://127.0.0.1:{proxy.port}", f"mqtt://127.0.0.1:{second.port}"]
        here = start_broker(config=bridge_config(addresses, topics))
        here.wait_for_log(f"event=bridge_connected .*:{proxy.port} ")
        with RawClient(here.port, 5) as local, RawClient(first.port, 5) as one, RawClient(second.port, 5) as two:
            local.connect("local")
            local.subscribe("in/#")
            for client in (one, two):
                client.connect("reader")
                client.subscribe("t/#")
            local.publish("t", b"1", 2)
            one.publish("in", b"one", 2)
            assert (one.take().payload, local.take().payload) == (b"1", b"one")
            before = len(here.lines)
            proxy.up = False
            proxy.cut()
            here.wait_for_log(f"event=bridge_connected .*:{second.port} ", after=before)
            local.publish("t", b"2", 2)
            two.publish("in", b"two", 2)
            assert (take_after(two, b"1"), take_after(local, b"one")) == (b"2", b"two")
            before = len(here.lines)
            proxy.up = True
            here.wait_for_log(f"event=bridge_connected .*:{proxy.port} .*session_present=True", after=before)
            local.publish("t", b"3", 2)
            one.publish("in", b"three", 2)
            assert (take_after(one, b"1", b"2"), take_after(local, b"one", b"two")) == (b"3", b"three")


def take_after(client: RawClient, *former: bytes) -> bytes:
    """The payload after those of ``former``, which may come again: the link was cut before their handshake had ended, and
    the two addresses share no sessions."""
    payload = client.take().payload
    while payload in former:
        payload = client.take().payload
    return payload


def test_sighup_adds_changes_and_removes_bridges(start_broker: Start) -> None:
    there = start_broker()
    address = f"mqtt://127.0.0.1:{there.port}"

    def reload(*bridges: Mapping[str, Any]) -> None:
        here.config.write_text(to_toml({"bridges": list(bridges)}))
        os.kill(here.pid, signal.SIGHUP)

    here = start_broker(config={"bridges": [bridge("keep", address), bridge("gone", address)]})
    for name in ("keep", "gone"):
        here.wait_for_log(f"event=bridge_connected bridge={name}")
    changed = bridge("keep", address)
    changed["topics"] = [{"filter": "x/#", "direction": "both", "qos": 1}]
    reload(changed, bridge("new", address))
    here.wait_for_log("event=bridge_removed bridge=gone")
    here.wait_for_log("event=bridge_changed bridge=keep")
    here.wait_for_log("event=bridge_connected bridge=new")
    wait_until(lambda: [each["state"] for each in listed(here).values()] == ["connected", "connected"])
    assert list(listed(here)) == ["keep", "new"]
    passes(here.port, there.port, "new")
    with RawClient(here.port, 5) as local, RawClient(there.port, 5) as other:
        local.connect("local")
        other.connect("other")
        local.subscribe("keep/#", "x/#")
        other.publish("r/keep/in", b"old", 1)
        other.publish("x/1", b"new", 1)
        assert local.take().payload == b"new"  # the remote has no subscription to the old filter
        clients = {one["client_id"] for one in json.loads(here.get("/api/v1/clients"))["items"]}
    assert {"$bridge/keep", "$bridge/new"} <= clients and "$bridge/gone" not in clients
    assert not (here.data_dir / "bridges" / "gone.json").exists()


def test_a_bridge_that_is_down_is_an_alarm_and_its_client_id_is_its_own(start_broker: Start) -> None:
    config = bridge_config(["mqtt://127.0.0.1:1"], BOTH, {"alarms": {"bridge_down": "100ms"}})
    broker = start_broker(config=config)
    broker.wait_for_log("event=alarm_raised alarm=bridge/there")
    with RawClient(broker.port, 5) as thief:
        assert thief.connect("$bridge/there").reason_code == 0x85
    with RawClient(broker.port, 5) as client:
        client.connect("client")
        client.publish("t/1", b"1", 1)
    wait_until(lambda: listed(broker)["there"]["queued_messages"] == 1)


def test_a_bridge_whose_file_cannot_be_written_connects_when_it_can(start_broker: Start, tmp_path: Path) -> None:
    there = start_broker()
    file = tmp_path / "data" / "bridges" / "there.json"
    file.mkdir(parents=True)
    here = start_broker(config=bridge_config(there.port, BOTH), data_dir=tmp_path / "data")
    here.wait_for_log("event=bridge_disconnected bridge=there .*there.json: Is a directory")
    file.rmdir()
    here.wait_for_log("event=bridge_connected bridge=there ")


def test_a_loop_that_the_remote_cannot_prevent_is_one_line(start_broker: Start, tmp_path: Path) -> None:
    config = bridge_config(1, BOTH, version="3.1.1", try_private=False)
    path = tmp_path / "broker.toml"
    path.write_text(config)
    checked = run("check-config", str(path), cwd=tmp_path)
    assert checked.returncode == 2 and checked.stderr.count("\n") == 1
    assert "would come back by t/#" in checked.stderr


@NEEDS_MOSQUITTO
@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_retained_messages_and_qos_pass_to_and_from_mosquitto(start_broker: Start, tmp_path: Path, version: str) -> None:
    with mosquitto(tmp_path) as there:
        here = start_broker()
        for port, topic in ((here.port, "t/here"), (there.port, "t/there")):
            with RawClient(port, 4) as client:
                client.connect("retainer")
                client.publish(topic, b"kept", 1, retain=True)
        here.config.write_text(bridge_config(there.port, [{"filter": "t/#", "direction": "both", "qos": 2}], version=version))
        os.kill(here.pid, signal.SIGHUP)
        here.wait_for_log("event=bridge_connected")
        wait_until(lambda: all(retained(port) == {"t/here", "t/there"} for port in (here.port, there.port)))


def retained(port: int) -> set[str]:
    """The topics of retained messages below "t"."""
    with RawClient(port, 4) as client:
        client.connect("looker")
        client.subscribe("t/#", options=0)
        return {packet.topic for packet in client.ping() if isinstance(packet, Publish) and packet.retain}
