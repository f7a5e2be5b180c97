"""Listeners that ignore what follows ? in a user name, as AWS IoT SDKs add it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.broker_process import PACKAGE, BrokerProcess
from support.raw_client import RawClient

from mqttbroker.codec.packets import Publish

SDK = "?SDK=PythonV2&Version=1.2.3"


@pytest.fixture(scope="module", params=["0", "1"], ids=["no worker", "a worker"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("names")
    passwd = [sys.executable, "-P", *PACKAGE, "passwd", str(directory / "users"), "device"]
    subprocess.run(passwd, input=b"secret\nsecret\n", check=True, capture_output=True)
    (directory / "rules").write_text("pattern readwrite %u/#\n")
    common = {"type": "tcp", "host": "127.0.0.1", "port": 0, "password_file": str(directory / "users")}
    config = {
        "listeners": [
            {**common, "username_query": "ignore", "client_id_from": "%u", "allow_anonymous": False, "acl_file": str(directory / "rules")},
            {**common, "username_query": "keep", "allow_anonymous": False},
            {**common, "username_query": "ignore", "allow_anonymous": True},
        ]
    }
    with BrokerProcess(config=config, arguments=["--workers", request.param]) as process:
        process.wait_for_log("event=started")
        yield process


def open_client(broker: BrokerProcess, listener: int, version: int) -> RawClient:
    ports = [line.rsplit("port=", 1)[1].split()[0] for line in broker.lines if "event=listening type=tcp" in line]
    return RawClient(int(ports[listener]), version)


@pytest.mark.parametrize("version", [4, 5])
def test_password_rules_client_id_and_log_see_the_name_before_the_query(broker: BrokerProcess, version: int) -> None:
    after = len(broker.lines)
    with open_client(broker, 0, version) as client:
        assert client.connect("device", username="device" + SDK, password=b"secret").reason_code == 0
        assert client.subscribe("device/#").reason_codes == [2]
        client.publish("device/1", b"x", 1)
        packet = client.take()
        assert isinstance(packet, Publish) and packet.topic == "device/1"
    assert "SDK" not in broker.wait_for_log(r"event=connected client=device .*user=(\S*)", after=after)[0]
    with open_client(broker, 0, version) as client:
        assert client.connect("device", username="device" + SDK, password=b"wrong").reason_code in (5, 0x86, 4)


@pytest.mark.parametrize("version", [4, 5])
def test_a_query_is_part_of_the_name_unless_the_listener_ignores_it(broker: BrokerProcess, version: int) -> None:
    with open_client(broker, 1, version) as client:
        assert client.connect("other", username="device" + SDK, password=b"secret").reason_code != 0


@pytest.mark.parametrize("version", [4, 5])
def test_a_name_that_is_only_a_query_is_none(broker: BrokerProcess, version: int) -> None:
    after = len(broker.lines)
    with open_client(broker, 2, version) as client:
        assert client.connect("nobody", username=SDK).reason_code == 0
        assert broker.wait_for_log(r"event=connected client=nobody .*user=(\S*) ", after=after)[1] == '""'
    with open_client(broker, 2, version) as client:
        assert client.connect("nobody", username=SDK, password=b"secret").reason_code != 0
