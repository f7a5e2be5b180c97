"""Keep alive: one and a half times the interval (MQTT 5.0 section 3.1.2.10)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.core import Core
from support.raw_client import RawClient

from mqttbroker.codec.packets import Disconnect, Pingreq, Pingresp


@pytest.mark.parametrize("version", [4, 5])
def test_a_silent_client_is_closed_after_its_keep_alive(connect: Callable[..., RawClient], version: int) -> None:
    start = time.monotonic()
    packets = connect("silent", version, keep_alive=1).expect_closed()
    assert time.monotonic() - start >= 1.5
    codes = [packet.reason_code for packet in packets if isinstance(packet, Disconnect)]
    assert codes == ([0x8D] if version == 5 else [])


def test_any_packet_of_the_client_restarts_keep_alive(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c", keep_alive=10)
        for _ in range(5):
            core.advance(14)
            client.send(Pingreq())
            client.expect(Pingresp)
            core.advance(14)
            client.publish("t", b"")
        core.advance(15)
        assert not client.closed
        core.advance(0.5)
        assert client.expect(Disconnect).reason_code == 0x8D
        assert client.closed


def test_packets_of_the_broker_do_not_restart_keep_alive(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client, publisher = core.connect("c", keep_alive=10), core.connect("p")
        client.subscribe("t", options=0)
        for _ in range(4):
            core.advance(4)
            publisher.publish("t", b"")
        assert client.closed


def test_keep_alive_0_is_off(tmp_path: Path) -> None:
    with Core(tmp_path) as core:
        client = core.connect("c", keep_alive=0)
        core.advance(1_000_000)
        assert not client.closed


@pytest.mark.parametrize("asked, told", [(0, 60), (100, 60), (30, -1), (60, -1)])
def test_the_broker_limits_keep_alive(tmp_path: Path, asked: int, told: int) -> None:
    with Core(tmp_path, max_keep_alive=60.0) as core:
        client = core.connect("c", keep_alive=asked)
        assert client.connack.properties.server_keep_alive == told
        core.advance((told if told > 0 else asked) * 1.5)
        assert not client.closed
        core.advance(1)
        assert client.closed
