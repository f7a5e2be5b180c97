"""A worker of a cluster's node, between the node and two cores."""

from __future__ import annotations

import dataclasses
import select
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.certificates import CertificateFiles
from support.core import wait_until
from support.front_node import FrontNode, client_ids
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream, tcp_socket, unix_socket
from websockets.frames import Frame, Opcode

from mqttbroker.codec.packets import Connack, Connect, Pingreq, Publish, Suback, Subscribe, Subscription
from mqttbroker.codec.reason_codes import (
    CLIENT_IDENTIFIER_NOT_VALID,
    PACKET_TOO_LARGE,
    QUOTA_EXCEEDED,
    SERVER_SHUTTING_DOWN,
    SERVER_UNAVAILABLE,
    SESSION_TAKEN_OVER,
    UNSUPPORTED_PROTOCOL_VERSION,
)
from mqttbroker.config.settings import Listener
from mqttbroker.net.link_frames import ENDS, data_prefix, number_bytes

TCP = Listener(port=0)
(A, A2), (B,) = client_ids(0, 2, 2), client_ids(1, 2)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory, certificates: CertificateFiles) -> Iterator[FrontNode]:
    """A node with a listener of each type, and two behind a proxy."""
    files = {name: getattr(certificates, name) for name in ("certfile", "keyfile", "cafile")}
    tls = {"client_certificate": "optional", **files}
    directory = tmp_path_factory.mktemp("node")
    listeners = [
        TCP,
        Listener(type="tls", port=0, **tls),
        Listener(type="ws", port=0),
        Listener(type="wss", port=0, **tls),
        Listener(type="unix", path=directory / "socket"),
        Listener(port=0, proxy_protocol=True),
        Listener(type="tls", port=0, proxy_protocol=True, **tls),
    ]
    yield from running(FrontNode(directory, listeners))


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontNode]:
    """A node with low limits."""
    yield from running(
        FrontNode(
            tmp_path_factory.mktemp("limited"), [TCP], max_half_open=3, max_total_incomplete_bytes=25_000,
            max_total_connect_bytes=10_000, max_connect_size=70_000,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontNode]:
    """A node that does not wait for long."""
    listeners = [TCP, Listener(type="ws", port=0)]
    yield from running(FrontNode(tmp_path_factory.mktemp("impatient"), listeners, patience=0.2, connect_timeout=0.3))


def running(node: FrontNode) -> Iterator[FrontNode]:
    yield node
    node.close()


@pytest.fixture
def node(listening: FrontNode) -> FrontNode:
    """One whose cores are both known, without clients."""
    listening.direct(0, 1)
    wait_until(lambda: clients(listening) == [[], []])
    return listening


def clients(node: FrontNode) -> list[list[str]]:
    """The connections of each core by client id."""
    return [node.call(lambda core=core: core.clients) for core in node.cores]


def links(node: FrontNode) -> list[int]:
    """How many links each core was asked for."""
    return [node.call(lambda core=core: len(core.hellos)) for core in node.cores]


def errors(node: FrontNode) -> int:
    return sum(core.part.core.broker.outbound.counters.protocol_errors for core in node.cores)


def test_each_client_goes_to_the_core_of_its_client_id(node: FrontNode) -> None:
    with RawClient(node.port()) as one, RawClient(node.port()) as two, RawClient(node.port(), 4) as other:
        assert one.connect(A).reason_code == two.connect(A2).reason_code == other.connect(B).reason_code == 0
        assert clients(node) == [sorted([A, A2]), [B]]
        one.subscribe("t")
        two.publish("t", b"x" * 100_000)
        assert one.take().payload == b"x" * 100_000
        one.disconnect()
        wait_until(lambda: clients(node) == [[A2], [B]])
    wait_until(lambda: clients(node) == [[], []])
    hello = node.cores[1].hellos[0]
    assert (hello.kind, hello.shard, hello.node) == ("worker", 1, "n")


def test_packets_behind_the_connect_are_not_lost(node: FrontNode) -> None:
    """However they are split, and whether the link is open or not."""
    data = Connect(A, 5).encode(5) + Subscribe(1, [Subscription("t", 0)]).encode(5)
    data += Publish("t", b"payload", 0, False, False, 0).encode(5) + Pingreq().encode(5)
    for split in range(len(data)):
        with RawClient(node.port()) as client:
            for part in (data[:split], data[split:]):
                client.socket.sendall(part)
            kinds = [type(client.receive()).__name__ for _ in range(4)]
            assert sorted(kinds) == ["Connack", "Pingresp", "Publish", "Suback"] and kinds[0] == "Connack"


def test_a_client_id_is_taken_over_on_its_core(node: FrontNode) -> None:
    with RawClient(node.port()) as old, RawClient(node.port()) as new:
        old.connect(A)
        new.connect(A)
        (disconnect,) = old.expect_closed()
        assert disconnect.reason_code == SESSION_TAKEN_OVER  # type: ignore[attr-defined]
        new.ping()


def test_a_connect_without_client_id_goes_to_a_core_of_the_node(node: FrontNode) -> None:
    """The core at the address of shard 0's listener is the node's own."""
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(RawClient(node.port()))
            assigned = client.connect("").properties.assigned_client_identifier
            assert assigned is not None and assigned.startswith("auto-")
        assert [len(found) for found in clients(node)] == [4, 0]


def test_a_connect_without_client_id_goes_to_another_node_if_this_one_has_no_core(node: FrontNode) -> None:
    node.direct(1)
    with RawClient(node.port()) as client:
        assert client.connect("").reason_code == 0
        assert [len(found) for found in clients(node)] == [0, 1]


# --- what is no CONNECT -----------------------------------------------------------------------------------------------


def test_a_malformed_connect_and_other_packets_are_answered_by_a_core(node: FrontNode) -> None:
    before = errors(node)
    with RawClient(node.port()) as client:
        client.send(b"\x10\x0d\x00\x04MQTT\x06\x02\x00\x3c\x00\x01c")
        (connack,) = client.expect_closed()
        assert connack.reason_code == UNSUPPORTED_PROTOCOL_VERSION  # type: ignore[attr-defined]
    for data in (Pingreq().encode(5), b"\x10\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", bytes(100_000)):
        with RawClient(node.port()) as client:
            client.send(data)
            assert client.expect_closed() == []
    assert errors(node) == before + 5


def test_a_connect_larger_than_allowed_is_refused_before_it_is_whole(limited: FrontNode) -> None:
    limited.direct(0, 1)
    for core in limited.cores:
        core.part.core.broker.terms.max_connect_size = 70_000
    with RawClient(limited.port()) as client:
        client.send(Connect("c" * 20, 5, username="u" * 60_000, password=b"p" * 10_000).encode(5)[:500])
        (connack,) = client.expect_closed()
        assert connack.reason_code == PACKET_TOO_LARGE  # type: ignore[attr-defined]


def test_a_client_that_sends_no_connect_is_closed_in_time(impatient: FrontNode) -> None:
    impatient.direct(1)
    with RawClient(impatient.port()) as fast, RawClient(impatient.port()) as silent, RawClient(impatient.port()) as slow:
        fast.connect(B)
        slow.socket.sendall(Connect(A, 5).encode(5)[:5])
        assert silent.expect_closed() == slow.expect_closed() == []
        assert links(impatient)[0] == 0
        fast.ping()


def test_the_oldest_client_without_a_connect_gives_way(limited: FrontNode) -> None:
    limited.direct(0, 1)
    with ExitStack() as stack:
        first, *others = (stack.enter_context(RawClient(limited.port())) for _ in range(4))
        assert first.expect_closed() == []
        for number, client in enumerate(others):
            assert client.connect(f"c{number}").reason_code == 0
        for _ in range(5):
            stack.enter_context(RawClient(limited.port()))
        for client in others:
            client.ping()
        counters = limited.node.counters
        wait_until(lambda: counters.limits_reached.get("max_half_open") == counters.connections_evicted == 3)
        assert [status.clients for status in limited.node.workers.statuses()] == [6]


def test_unfinished_connects_are_bounded_in_bytes(limited: FrontNode) -> None:
    limited.direct(0, 1)
    packet = Connect(A, 5, username="u" * 60_000).encode(5)
    with ExitStack() as stack:
        others = {stack.enter_context(RawClient(limited.port())) for _ in range(3)}
        for client in others:
            client.socket.sendall(packet[:10_000])
        ready, _, _ = select.select([client.socket for client in others], [], [], 5)
        (closed,) = (client for client in others if client.socket in ready)
        assert closed.expect_closed() == []
        for client in others - {closed}:
            client.socket.sendall(packet[10_000:])
            assert client.receive().reason_code == 0  # type: ignore[attr-defined]


# --- cores that are not there -----------------------------------------------------------------------------------------


def test_clients_wait_for_the_first_directory(tmp_path: Path) -> None:
    node = FrontNode(tmp_path, [TCP])
    with closing(node), RawClient(node.port()) as one, RawClient(node.port()) as other, RawClient(node.port()) as any_core:
        for client, client_id in ((one, A), (other, B), (any_core, "")):
            client.send(Connect(client_id, 5))
        node.direct(0, 1)
        for client in (one, other, any_core):
            assert client.receive().reason_code == 0  # type: ignore[attr-defined]
            client.ping()


def test_a_reload_puts_limits_and_certificates_in_force(tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    tls = Listener(type="tls", port=0, certfile=files.certfile, keyfile=files.keyfile)
    with closing(FrontNode(tmp_path / "node", [TCP, tls])) as node:
        settings = node.node.settings
        certificate = files.certfile.read_bytes()
        files.new_server_certificate()
        assert node.run(lambda: node.node.reload(settings)) == [] and certificate != files.certfile.read_bytes()
        with files.client().wrap_socket(tcp_socket(node.port(1)), server_hostname="localhost") as sock:
            shown = ssl.DER_cert_to_PEM_cert(sock.getpeercert(True) or b"")
            assert shown.replace("\n", "") in files.certfile.read_text().replace("\n", "")
        limits = dataclasses.replace(settings.limits, connect_timeout=0.1)
        assert node.run(lambda: node.node.reload(dataclasses.replace(settings, limits=limits))) == []
        with RawClient(node.port()) as silent:
            assert silent.expect_closed() == []


def test_a_client_waits_until_its_core_listens(node: FrontNode) -> None:
    core = node.cores[0]
    node.call(core.close)
    with RawClient(node.port()) as client, RawClient(node.port()) as other:
        client.send(Connect(A, 5), Pingreq())
        assert other.connect(B).reason_code == 0
        node.run(core.listen)
        assert client.receive().reason_code == 0  # type: ignore[attr-defined]
        client.receive()


@pytest.mark.parametrize("reset", [False, True])
def test_a_connect_that_was_given_up_disturbs_no_later_connection(node: FrontNode, reset: bool) -> None:
    node.direct(0)
    counters = node.cores[1].part.core.broker.outbound.counters
    connects = counters.connects
    with RawClient(node.port()) as before, RawClient(node.port()) as after, RawClient(node.port()) as witness:
        witness.connect(A)
        before.send(Connect(B, 5))
        witness.ping()  # the worker has the CONNECT
        if reset:
            before.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        before.close()
        after.send(Connect(B, 5))
        witness.ping()
        node.direct(0, 1)
        assert after.expect(Connack).reason_code == 0
        after.expect_nothing()
        assert clients(node) == [[A], [B]]
        assert counters.connects == connects + 1


def test_packets_behind_a_connect_count_although_the_client_has_left(node: FrontNode) -> None:
    node.direct(0)
    counters = node.cores[1].part.core.broker.outbound.counters
    before = counters.publish_received
    with RawClient(node.port()) as witness, RawClient(node.port()) as hasty:
        witness.connect(A)
        hasty.send(Connect(B, 5))
        witness.ping()
        hasty.send(Publish("left", b"", 0, False, False, 0))
        hasty.close()
        node.direct(0, 1)
        wait_until(lambda: counters.publish_received == before + 1)


def test_a_client_waits_while_its_core_refuses_links(node: FrontNode) -> None:
    core = node.cores[0]
    core.refusal = "a standby"
    with RawClient(node.port()) as client:
        client.send(Connect(A, 5))
        wait_until(lambda: len(core.hellos) > 1)
        core.refusal = ""
        assert client.receive().reason_code == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("version, code", [(5, SERVER_UNAVAILABLE), (4, 3), (3, 3)])
def test_a_client_whose_core_is_not_there_in_time_is_refused(impatient: FrontNode, version: int, code: int) -> None:
    impatient.direct(1)
    with RawClient(impatient.port(), version) as client, RawClient(impatient.port()) as other:
        assert other.connect(B).reason_code == 0
        assert client.connect(A).reason_code == code
        assert client.expect_closed() == []
        other.ping()


def test_what_is_no_connect_is_closed_if_no_core_is_there_in_time(impatient: FrontNode) -> None:
    impatient.direct()
    with RawClient(impatient.port()) as client, RawClient(impatient.port()) as nameless:
        client.send(Pingreq())
        assert nameless.connect("").reason_code == SERVER_UNAVAILABLE
        assert client.expect_closed() == []


def test_waiting_connects_are_bounded_in_bytes(limited: FrontNode) -> None:
    limited.direct()
    with ExitStack() as stack:
        waiting = [stack.enter_context(RawClient(limited.port())) for _ in range(3)]
        for number, client in enumerate(waiting):
            client.send(Connect(f"c{number}", 5, username="u" * 3000))
        ready, _, _ = select.select([client.socket for client in waiting], [], [], 5)
        assert len(ready) == 1
        limited.direct(0, 1)
        codes = [client.receive().reason_code for client in waiting]  # type: ignore[attr-defined]
        assert sorted(codes) == [0, 0, QUOTA_EXCEEDED]


def test_a_lost_link_ends_its_clients_and_no_others(node: FrontNode) -> None:
    with RawClient(node.port()) as client, RawClient(node.port()) as other:
        client.connect(A)
        other.connect(B)
        node.call(node.cores[0].close_links)
        assert client.expect_closed() == []
        other.ping()
        before = links(node)
        with RawClient(node.port()) as again:
            assert again.connect(A).reason_code == 0
        assert links(node) == [before[0] + 1, before[1]]


def test_an_open_link_stays_while_no_owner_is_known(node: FrontNode) -> None:
    with RawClient(node.port()) as client, RawClient(node.port()) as other:
        client.connect(A)
        before = links(node)
        node.call(node.node.direct, {})
        other.connect(A2)
        node.direct(0, 1)
        client.ping()
        other.ping()
        assert links(node) == before


def test_clients_go_to_the_new_owner_of_their_shard(node: FrontNode) -> None:
    """Its client ids are those of another shard here: the new owner refuses them, the old one is not asked."""
    with RawClient(node.port()) as client, RawClient(node.port()) as other:
        client.connect(A)
        other.connect(B)
        before = links(node)
        node.swap_owners()
        assert client.expect_closed() == [] and other.expect_closed() == []
        with RawClient(node.port()) as again:
            assert again.connect(A).reason_code == CLIENT_IDENTIFIER_NOT_VALID
        assert links(node) == [before[0], before[1] + 1]


def test_a_client_that_comes_while_a_shard_is_released_waits_for_the_next_owner(tmp_path: Path) -> None:
    with closing(FrontNode(tmp_path, [TCP])) as node:
        node.direct(0, 1)
        core = node.cores[0]
        with RawClient(node.port()) as client, RawClient(node.port()) as late:
            client.connect(A)
            node.call(core.release)
            client.ping()  # its core closes it by itself; the worker knows of the release now
            late.send(Connect(A2, 5))
            client.ping()
            assert clients(node)[0] == [A]
            core.accepts = True
            node.run(core.listen)
            assert late.receive().reason_code == 0  # type: ignore[attr-defined]


def test_a_core_that_releases_its_shard_answers_nobody_who_comes_late(tmp_path: Path) -> None:
    """The worker may have sent the client before it heard of the release."""
    with closing(FrontNode(tmp_path, [TCP])) as node:
        node.direct(0, 1)
        with RawClient(node.port()) as client, RawClient(node.port()) as late:
            client.connect(A)
            node.cores[0].accepts = False
            late.send(Connect(A2, 5))
            assert late.expect_closed() == []
            client.ping()


def test_clients_of_a_worker_that_ends_are_told(tmp_path: Path) -> None:
    """By their cores, which go on; a version 3.1.1 client is closed without a packet."""
    node = FrontNode(tmp_path, [TCP])
    with closing(node):
        node.direct(0, 1)
        with RawClient(node.port()) as client, RawClient(node.port()) as other, RawClient(node.port(), 4) as older:
            client.connect(A)
            other.connect(B)
            older.connect(A2)
            node.run(node.node.stop)
            for one in (client, other):
                (disconnect,) = one.expect_closed()
                assert disconnect.reason_code == SERVER_SHUTTING_DOWN  # type: ignore[attr-defined]
            assert older.expect_closed() == []
        assert clients(node) == [[], []]


def test_a_worker_that_ends_twice_is_not_honest(tmp_path: Path) -> None:
    """Each end makes the core disconnect all of its clients."""
    node = FrontNode(tmp_path, [TCP])
    with closing(node):
        node.direct(0, 1)
        with RawClient(node.port()) as client:
            client.connect(A)
            link = node.cores[0].links[0].link
            node.call(link.data_received, 2 * (data_prefix(ENDS, 0) + number_bytes(0)))
            client.expect_closed()
        assert "a second time" in link.error


# --- listeners --------------------------------------------------------------------------------------------------------


HEADER = b"PROXY TCP4 203.0.113.7 10.0.0.1 50000 1883\r\n"


def stream_of(node: FrontNode, kind: str, certificates: CertificateFiles) -> Any:
    """A connected socket of a listener."""
    if kind == "unix":
        return unix_socket(node.node.listeners[4].listener.path)
    index = {"tcp": 0, "tls": 1, "ws": 2, "wss": 3, "proxied": 5, "proxied tls": 6}[kind]
    sock = tcp_socket(node.port(index))
    if kind.startswith("proxied"):
        sock.sendall(HEADER)
    if index in (1, 3, 6):
        sock = certificates.client("device-7").wrap_socket(sock, server_hostname="localhost")
    return WebSocketStream(sock) if kind in ("ws", "wss") else sock


@pytest.mark.parametrize("kind", ["tcp", "tls", "ws", "wss", "unix", "proxied", "proxied tls"])
@pytest.mark.parametrize("parts", [1, 2, 50])
def test_clients_of_all_listeners(node: FrontNode, certificates: CertificateFiles, kind: str, parts: int) -> None:
    with StreamClient(stream_of(node, kind, certificates)) as client:
        data = Connect(B, 5).encode(5) + Subscribe(1, [Subscription("t", 0)]).encode(5)
        size = -(-len(data) // parts)
        for start in range(0, len(data), size):
            client.socket.sendall(data[start : start + size])
        assert [type(client.receive()) for _ in range(2)] == [Connack, Suback]
        client.publish("t", b"x" * 300_000)
        assert client.take().payload == b"x" * 300_000
        (connection,) = node.cores[1].part.core.broker.clients.connections
        assert connection.peer.startswith("203.0.113.7:" if "proxied" in kind else "" if kind == "unix" else "127.0.0.1:")
        certificate = connection.wire.certificate
        names = dict(one for relative in (certificate or {}).get("subject", ()) for one in relative)
        assert names.get("commonName") == ("device-7" if kind in ("tls", "wss", "proxied tls") else None)
    wait_until(lambda: clients(node) == [[], []])


@pytest.mark.parametrize("kind", ["tls", "ws", "wss"])
def test_a_client_that_leaves_before_its_connect(node: FrontNode, certificates: CertificateFiles, kind: str) -> None:
    stream = stream_of(node, kind, certificates)
    stream.sendall(Connect(A, 5).encode(5)[:5])
    stream.close()
    with StreamClient(stream_of(node, kind, certificates)) as client:
        assert client.connect(A).reason_code == 0


@pytest.mark.parametrize("kind", ["tls", "ws", "wss", "unix", "proxied"])
def test_a_waiting_client_of_each_listener_is_answered(node: FrontNode, certificates: CertificateFiles, kind: str) -> None:
    node.direct(1)
    with StreamClient(stream_of(node, kind, certificates)) as client:
        client.send(Connect(A, 5), Pingreq())
        with StreamClient(stream_of(node, kind, certificates)) as other:
            assert other.connect(B).reason_code == 0
        node.direct(0, 1)
        assert client.expect(Connack).reason_code == 0
        client.ping()


def test_a_websocket_frame_with_half_a_packet_behind_the_connect(node: FrontNode, certificates: CertificateFiles) -> None:
    """The core counts the bytes of the incomplete frame."""
    stream = stream_of(node, "ws", certificates)
    packet = Publish("t", b"x" * 50_000, 0, False, False, 0).encode(5)
    frames = Frame(Opcode.BINARY, Connect(A, 5).encode(5)).serialize(mask=True)
    frames += Frame(Opcode.BINARY, packet).serialize(mask=True)
    stream.socket.sendall(frames[:-100])
    with StreamClient(stream) as client:
        assert client.expect(Connack).reason_code == 0
        outbound = node.cores[0].part.core.broker.outbound
        wait_until(lambda: node.call(lambda: outbound.incomplete.size) > 40_000)
        stream.socket.sendall(frames[-100:])
        wait_until(lambda: node.call(lambda: outbound.incomplete.size) == 0)
        client.ping()


def test_a_text_frame_before_the_connect_ends_the_connection(node: FrontNode, certificates: CertificateFiles) -> None:
    stream = stream_of(node, "ws", certificates)
    stream.send_frame(Opcode.TEXT, b"hello")
    stream.expect_close(1003)


def test_a_refused_websocket_client_gets_its_connack_before_the_close_frame(impatient: FrontNode) -> None:
    impatient.direct()
    stream = WebSocketStream(tcp_socket(impatient.port(1)))
    with StreamClient(stream) as client:
        assert client.connect(A).reason_code == SERVER_UNAVAILABLE
        stream.expect_close(1000)
