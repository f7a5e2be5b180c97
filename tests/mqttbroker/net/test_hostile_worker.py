"""A worker that an attacker controls: whatever it sends over its link, the broker keeps its own state in order, ends the
link, and serves the clients of other workers."""

from __future__ import annotations

import json
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.broker_process import BrokerProcess
from support.core import Core, wait_until
from support.manual_loop import Loop, Transport
from support.metric_samples import samples
from support.raw_client import RawClient

from mqttbroker.auth.security import Security
from mqttbroker.codec.packets import Connect, Publish, Subscribe, Subscription
from mqttbroker.config.settings import Listener
from mqttbroker.net.flush import FlushScheduler
from mqttbroker.net.link_frames import (
    ACCEPTED,
    BEGUN,
    CLOSED,
    DATA,
    FAILED,
    HELD,
    HOLDS,
    LARGEST_BODY,
    LEFT,
    OPENED,
    READY,
    REFUSED,
    SECURED,
    STATUS,
    TAKEN,
    WEBSOCKET_FAILED,
    data_prefix,
    number_bytes,
)
from mqttbroker.net.listener_policy import ListenerPolicy
from mqttbroker.net.listeners import OpenListener
from mqttbroker.net.open_sockets import OpenSockets
from mqttbroker.net.shared_admission import broker_admission
from mqttbroker.net.worker_clients import WorkerClients
from mqttbroker.net.worker_setup import Failed, Opened, Secured

Start = Callable[..., BrokerProcess]

TCP, WEBSOCKET, TLS = range(3)  # the listeners


def frame(kind: int, number: int, body: bytes) -> bytes:
    return data_prefix(kind, number) + number_bytes(len(body)) + body


class LinkSocket(Transport):
    """The broker's end of the link."""

    aborted = False

    def set_write_buffer_limits(self, _: int) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


class Target:
    """A broker's core with three listeners, and the link of one worker."""

    def __init__(self, core: Core, max_clients: int = 100) -> None:
        self.core = core
        self.loop = Loop()
        self.scheduler = FlushScheduler(core.broker, self.loop, lambda _: None, True)
        self.counters = core.broker.outbound.counters
        self.sockets = OpenSockets(6, 4, self.counters)
        self.listeners = [self._listener(kind) for kind in ("tcp", "ws", "tls")]
        self.messages: list[tuple[int, bytes]] = []
        self.clients = WorkerClients(
            1, self.listeners, self.scheduler, lambda *message: self.messages.append(message), lambda: None, max_clients
        )
        self.link: Any = self.clients.link
        self.socket = LinkSocket()
        self.link.connection_made(self.socket)

    def _listener(self, kind: str) -> OpenListener:
        security = Security(self.core.settings)
        policy = ListenerPolicy(security.policy, self.core.terms, None, self.counters)
        listener = OpenListener(Listener(type=kind), policy, broker_admission(self.scheduler, self.sockets), True)
        policy.refuses_certificate = None
        return listener

    def send(self, *frames: bytes) -> None:
        self.link.data_received(b"".join(frames))
        self.loop.run()

    def end(self) -> None:
        """Close the link, and check that nothing of its clients is left."""
        self.link.connection_lost(None)
        self.loop.run()
        broker = self.core.broker
        assert self.sockets.count == 0 and self.link.clients == {}
        assert broker.outbound.linked_bytes == 0
        assert [listener.listener_policy.clients for listener in self.listeners] == [0, 0, 0]
        assert broker.outbound.websocket_connections == broker.outbound.secure_connections == 0
        assert broker.outbound.incomplete.size == 0


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with Core(tmp_path, durability="off") as core:
        yield Target(core)


def opened(listener: int, address: str = "127.0.0.1:9") -> bytes:
    return Opened(listener, address).encode()


def connected(number: int) -> bytes:
    return frame(OPENED, number, opened(TCP)) + frame(DATA, number, Connect(f"hostile{number}", 5).encode(5))


# --- anything ---------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 4)
SUBSCRIBED = Subscribe(1, [Subscription("t/#", 0)]).encode(5)
PUBLISHED = Publish("t/1", bytes(2000), 0, False, False, 0).encode(5)
BODIES: dict[int, list[bytes]] = {
    DATA: [Connect("c", 5).encode(5), Connect("d", 5).encode(5), SUBSCRIBED, PUBLISHED * 20, PUBLISHED[:1000], b"\xff"],
    TAKEN: [number_bytes(0), number_bytes(5), number_bytes(100_000), bytes(3), b"\xff" * 9],
    HOLDS: [b"[1,1,0,0,0,{}]", b"[1,1,0,0,-1,{}]", b'[1,1,0,0,0,{"x":1}]', b'[1,1,0,0,0,{"max_half_open":"1"}]', b"[1]"],
    READY: [b"[]", b'["x"]', b"{}", b"[1]", b"["],
    BEGUN: [b"0", b"1", b"2", b"3", b"-1", b"true", b"1.5", b"[]"],
    OPENED: [opened(TCP), opened(WEBSOCKET), opened(TLS), opened(9), opened(-1), opened(TCP, "\n" * 50), b"[0]",
             b'["0","x",false,false,null]', b'[0,5,false,false,null]', b"[" * 100_000, b"\xff", b""],
    SECURED: [Secured(0, False, None, (), None).encode(), Secured(-1, True, {}, (), b"x").encode(),
              b'[0,false,{"subject":5},[],null]', b'[0,false,{"subject":[[["commonName",5]]]},[],null]',
              b'[0,false,{"subject":[[["commonName","x"]]],"subjectAltName":[["DNS","y"]]},["eA=="],"eA=="]',
              b'[0,false,null,["\\u20ac"],null]', b"null"],
    FAILED: [Failed(TLS, "x:1", False, "no").encode(), Failed(TCP, "x:1", True, "no").encode(), b"[9,1,2,3]"],
    REFUSED: [b"", b"\x82", b"\x82text frame", b"\x82\xff"],
    LEFT: [b"", b"gone", b"\xff\xfe"],
    CLOSED: [b"", b"reset", b"\xff"],
    HELD: [struct.pack(">i", size) for size in (0, 1, 1000, 2**31 - 1, -1, -1000, -(2**31))] + [b"", bytes(5)],
    WEBSOCKET_FAILED: [b""],
    STATUS: [b"1.5", b"NaN", b"1e400", b"-1", b"9" * 5000, b'"a"', b"1,2", b"{}"],
    ACCEPTED: [b""],
}  # fmt: skip
PLAUSIBLE = st.sampled_from([
    (OPENED, opened(TCP)), (OPENED, opened(WEBSOCKET)), (BEGUN, b"2"), (OPENED, opened(TLS)),
    (SECURED, BODIES[SECURED][0]), (DATA, BODIES[DATA][0]), (DATA, SUBSCRIBED), (DATA, PUBLISHED * 20), (CLOSED, b""),
    (TAKEN, number_bytes(5)), (TAKEN, number_bytes(100_000)), (HELD, BODIES[HELD][2]), (HELD, BODIES[HELD][5]), (LEFT, b""), (REFUSED, b"\x82"),
])  # fmt: skip
KNOWN = st.sampled_from([(kind, body) for kind, bodies in sorted(BODIES.items()) for body in bodies])
OTHER = st.tuples(st.integers(0, 255), st.binary(max_size=30))
KINDS = st.integers(0, 19).flatmap(lambda draw: PLAUSIBLE if draw < 17 else KNOWN if draw < 19 else OTHER)
FRAMES = st.lists(st.builds(lambda of_kind, number: frame(of_kind[0], number, of_kind[1]), KINDS, NUMBERS), max_size=40)


@settings(max_examples=300)
@given(st.integers(0, 3), FRAMES, st.data())
def test_any_frames_in_any_pieces(clients: int, frames: list[bytes], choices: st.DataObject) -> None:
    """After some clients that connect, subscribe and publish."""
    with tempfile.TemporaryDirectory() as directory, Core(Path(directory), durability="off") as core:
        target = Target(core)
        for number in range(clients):
            target.send(connected(number), frame(DATA, number, SUBSCRIBED), frame(DATA, number, PUBLISHED))
        data = b"".join(frames)
        cuts = sorted(choices.draw(st.lists(st.integers(0, len(data)), max_size=4)))
        for start, end in zip([0, *cuts], [*cuts, len(data)]):
            target.send(data[start:end])
            assert core.broker.outbound.linked_bytes >= 0 and core.broker.outbound.incomplete.size >= 0
            assert len(target.link.clients) <= 5 and target.sockets.count <= 6
        assert bool(target.link.error) == target.socket.aborted
        target.end()


# --- what ends the link -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([data_prefix(DATA, 1) + number_bytes(LARGEST_BODY + 1)], "a frame of 1048577 bytes"),
        ([data_prefix(DATA, 1) + b"\xff" * 4], "a frame of 4294967295 bytes"),
        ([frame(OPENED, 1, b"[" * 50_000)], "Opened.decode: "),
        ([frame(OPENED, 1, opened(TCP, "x" * 70_000))], "Opened.decode: 70"),
        ([frame(OPENED, 1, opened(3))], "there is no listener 3"),
        ([frame(OPENED, 1, opened(-1))], "there is no listener -1"),
        ([connected(1), frame(OPENED, 1, opened(TCP))], "there is a client 1"),
        ([frame(BEGUN, 1, b"2"), frame(BEGUN, 1, b"2")], "there is a client 1"),
        ([frame(BEGUN, 1, b"2"), frame(OPENED, 1, opened(TLS)), frame(OPENED, 1, opened(TLS))], "was opened before"),
        ([connected(1), frame(TAKEN, 1, b"\x7f" + bytes(3))], "bytes were taken of"),
        ([connected(1), frame(HELD, 1, b"\xff" * 4)], "-1 bytes of an incomplete frame"),
        ([connected(1), frame(99, 1, b"")], "a frame of kind 99"),
        ([connected(number) for number in range(1, 102)], "more than 100 clients"),
    ],
)
def test_frames_that_no_worker_sends_end_the_link(target: Target, frames: list[bytes], reason: str) -> None:
    target.send(*frames)
    assert reason in target.link.error and target.socket.aborted
    target.send(connected(200))  # is not handled any more
    assert 200 not in target.link.clients
    target.end()


def test_a_handshake_that_was_not_admitted_is_no_client(target: Target) -> None:
    target.send(frame(BEGUN, 1, b"2"), frame(SECURED, 1, Secured(0, False, None, (), None).encode()))
    assert target.link.clients == {} and not target.link.error
    target.end()


# --- a process --------------------------------------------------------------------------------------------------------

# Takes the place of worker 1, from its second process on: it answers that it listens, sends bytes, and stays.
ROGUE = """
import os, socket, sys, time
if "mqttbroker.worker" in sys.orig_argv and sys.orig_argv[-2] == "1":
    attacks = os.environ["ATTACKS"].split(",")
    with open(os.environ["STARTS"], "a+") as file:
        start = file.tell()
        file.write("x")
    if 0 < start <= len(attacks):
        link = socket.socket(fileno=int(sys.orig_argv[-1]))
        link.recv(65536)
        link.sendall(bytes.fromhex(attacks[start - 1]))
        time.sleep(600)
"""


def test_a_worker_that_attacks_is_killed_and_started_again(tmp_path: Path, start_broker: Start) -> None:
    listens = frame(READY, 0, b"[]")
    attacks = [
        listens + data_prefix(DATA, 1) + b"\xff" * 4,
        listens + connected(1) + frame(TAKEN, 1, b"\x7f" + bytes(3)),
        listens + frame(STATUS, 0, b"NaN"),
        frame(READY, 0, b"{}"),
    ]
    (tmp_path / "sitecustomize.py").write_text(ROGUE, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    broker = start_broker(
        arguments=["--workers", "2"],
        env={"PYTHONPATH": path, "STARTS": str(tmp_path / "starts"), "ATTACKS": ",".join(one.hex() for one in attacks)},
    )
    broker.wait_for_log("event=started", timeout=60)
    clients: dict[int, RawClient] = {}
    for number in range(200):
        client = RawClient(broker.port)
        client.connect(f"c{number}")
        worker = json.loads(broker.get(f"/api/v1/clients/c{number}"))["worker"]
        if clients.setdefault(worker, client) is not client:
            client.socket.close()
        if len(clients) == 2:
            break
    first = len(broker.lines)
    os.kill(int(broker.wait_for_log(r"event=worker_started worker=1 pid=(\d+)")[1]), signal.SIGKILL)
    for reason in ("a frame of 4294967295 bytes", "bytes were taken of", "decode_status: ", "decode_problems: "):
        broker.wait_for_log(f'event=worker_killed worker=1 reason=".*{reason}', timeout=60, after=first)
        clients[2].ping()
    wait_until(lambda: samples(broker.get("/metrics"))["mqttbroker_worker_up/1"] == 1)
    assert samples(broker.get("/metrics"))["mqttbroker_worker_starts_total/1"] == 2 + len(attacks)
    clients[2].subscribe("t")
    clients[2].publish("t", b"x", 1)
    assert clients[2].take().payload == b"x"
    for client in clients.values():
        client.socket.close()
