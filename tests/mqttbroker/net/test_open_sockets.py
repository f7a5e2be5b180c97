"""Open sockets: eviction of connections without a CONNECT, and brokers whose file descriptors run out."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack

import pytest
from support.broker_process import BrokerProcess
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.net.open_sockets import OpenSockets
from sessions.counters import Counters


class Member:
    def __init__(self, sockets: OpenSockets) -> None:
        self.sockets = sockets
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True
        self.sockets.remove(self)


def members(sockets: OpenSockets, count: int) -> list[Member]:
    return [Member(sockets) for _ in range(count)]


def test_oldest_socket_without_connect_is_evicted() -> None:
    counters = Counters()
    sockets = OpenSockets(100, 3, counters)
    first, second, third, fourth, fifth = made = members(sockets, 5)
    assert all(sockets.add(member) for member in made[:3])
    sockets.protect(first)
    assert sockets.add(fourth) and not any(member.aborted for member in made)
    assert sockets.add(fifth) and [member.aborted for member in made] == [False, True, False, False, False]
    assert (sockets.count, counters.connections_evicted, counters.connections_refused) == (4, 1, 0)


def test_full_broker_refuses_only_if_all_clients_are_connected() -> None:
    counters = Counters()
    sockets = OpenSockets(2, 100, counters)
    first, second, third, fourth = members(sockets, 4)
    assert sockets.add(first) and sockets.add(second)
    sockets.protect(first)
    assert sockets.add(third) and second.aborted  # second had sent no CONNECT
    sockets.protect(third)
    assert not sockets.add(fourth) and sockets.count == 2
    sockets.unprotect(first)  # the broker has closed its side, the client has not
    assert sockets.add(fourth) and first.aborted and sockets.count == 2
    assert (counters.connections_evicted, counters.connections_refused) == (2, 1)


CONFIG = """
limits.max_connections = 100
limits.max_half_open = 100
http.max_connections = 20
"""


@pytest.fixture
def few_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096  # of this test's own sockets
    if soft < wanted <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def test_idle_sockets_leave_room_for_clients_and_probes(few_files: None) -> None:
    with BrokerProcess(config=CONFIG) as broker, ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection((broker.host, broker.port)))
        for _ in range(100):
            stack.enter_context(socket.create_connection((broker.host, broker.http_port)))
        with RawClient(broker.port) as client:
            assert client.connect("in-time").reason_code == 0
            assert b"ok" in broker.get("/readyz")
            assert samples(broker.get("/metrics"))["mqttbroker_connections_evicted_total"] >= 500
        assert "Traceback" not in broker.log


def test_soft_limit_of_files_is_raised_or_its_effect_logged(few_files: None) -> None:
    limit = 1200
    program = ["-c", PROGRAM.format(limit=limit)]
    with BrokerProcess(config="limits.max_connections = 5000", program=program, arguments=["--workers", "0"]) as broker:
        broker.wait_for_log(rf"event=open_files_limited limit={limit} needed=\d+ client_sockets=600")


def test_a_limit_of_files_that_workers_cannot_raise_is_logged(few_files: None) -> None:
    limit = 1200
    program = ["-c", PROGRAM.format(limit=limit)]
    with BrokerProcess(config="limits.max_connections = 5000", program=program, arguments=["--workers", "2"]) as broker:
        broker.wait_for_log(rf"event=open_files_limited limit={limit} needed=\d+ client_sockets=1888 reason=\"limits.max_connections ")


PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {limit}))
from mqttbroker.cli.main import main
sys.exit(main())
"""
