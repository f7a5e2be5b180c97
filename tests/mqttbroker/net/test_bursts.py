"""Clients of version 5 that publish all they have at once, whatever Receive Maximum says."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

from mqttbroker.codec.packets import Pingresp, Puback, Pubcomp, Publish, Pubrec, Pubrel

KINDS = ("tcp", "tls", "ws", "wss")
COUNT = 3000
MAXIMUM = 100


@pytest.fixture(scope="module", params=["0", "2"], ids=["no worker", "2 workers"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Each kind of listener twice, the second one with a Receive Maximum."""
    files = CertificateFiles(tmp_path_factory.mktemp("tls"))
    tls = {"certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    listeners = [
        {"type": kind, "port": 0, **own, **(tls if kind in ("tls", "wss") else {})}
        for own in ({}, {"receive_maximum": MAXIMUM}) for kind in KINDS
    ]  # fmt: skip
    with BrokerProcess(config={"listeners": listeners}, arguments=["--workers", request.param]) as process:
        process.wait_for_log("event=started")
        yield process


def open_client(broker: BrokerProcess, kind: str, limited: bool) -> StreamClient:
    ports = [found[1] for line in broker.lines if (found := re.search(rf"event=listening type={kind} .*\bport=(\d+)", line))]
    sock: Any = tcp_socket(int(ports[limited]))
    if kind in ("tls", "wss"):
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    return StreamClient(WebSocketStream(sock) if kind in ("ws", "wss") else sock)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qos, limited", [(1, False), (1, True), (2, False)])
def test_a_burst_of_retained_messages_is_acknowledged(broker: BrokerProcess, kind: str, qos: int, limited: bool) -> None:
    with open_client(broker, kind, limited) as client:
        assert client.connect().properties.receive_maximum == (MAXIMUM if limited else -1)
        topic = f"burst/{kind}/{qos}/{limited}"
        client.send(*(Publish(f"{topic}/{n}", b"x" * 40, qos, True, False, n) for n in range(1, COUNT + 1)))
        for number in range(1, COUNT + 1):
            assert client.expect(Puback if qos == 1 else Pubrec).packet_id == number
        if qos == 2:
            client.send(*(Pubrel(n) for n in range(1, COUNT + 1)))
            assert [client.expect(Pubcomp).packet_id for _ in range(COUNT)] == list(range(1, COUNT + 1))
        client.send(b"\xc0\x00")
        client.expect(Pingresp)
