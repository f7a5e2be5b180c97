"""Links between processes of a cluster: the first line, and TLS with certificates of both sides."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from pathlib import Path
from typing import Any, Optional

import pytest
import trustme
import uvloop

from mqttbroker.cluster import link_server
from mqttbroker.cluster.link_server import (
    CORE,
    MAX_REFUSALS,
    REFUSAL_INTERVAL,
    WORKER,
    Hello,
    LinkRefused,
    LinkServer,
    RefusalLog,
    client_context,
    connect_link,
    difference,
    server_context,
)

HELLO = Hello(cluster="ab", kind=WORKER, node="n1", shard=3, version="1", listeners=("tcp-1",), digest="d")


class Collector(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: Any = None
        self.data = b""
        self.more = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.more.set()

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.more.set()

    async def has(self, data: bytes) -> None:
        async with asyncio.timeout(10):
            while self.data != data:
                self.more.clear()
                await self.more.wait()


class Accepting:
    """A server of shard 3 that collects what links bring."""

    def __init__(self, tls: Optional[ssl.SSLContext] = None) -> None:
        self.links: list[Collector] = []
        self.hellos: list[Hello] = []
        self.server = LinkServer(
            "127.0.0.1", 0, tls, lambda hello: difference(hello, "ab", 3, "d", frozenset({"tcp-1"})), {WORKER: self._accept}
        )

    def _accept(self, hello: Hello) -> Collector:
        self.hellos.append(hello)
        self.links.append(Collector())
        return self.links[-1]


def test_both_sides_have_their_protocol_behind_the_first_lines() -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        mine = Collector()
        transport = await connect_link("127.0.0.1", accepting.server.port, None, HELLO, mine)
        transport.write(b"from me")
        await accepting.links[0].has(b"from me")
        accepting.links[0].transport.write(b"from there")
        await mine.has(b"from there")
        assert accepting.hellos[0].node == "n1" and accepting.hellos[0].now > 0
        accepting.server.close()

    uvloop.run(run())


def test_bytes_in_the_same_read_as_the_first_line_are_the_link_s() -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", accepting.server.port)
        line = b'{"cluster":"ab","kind":"worker","node":"n1","shard":3,"version":"1","digest":"d","now":0}\n'
        writer.write(line + b"more")
        assert await reader.readline() == b'{"ok":true}\n'
        await accepting.links[0].has(b"more")
        writer.close()
        accepting.server.close()

    uvloop.run(run())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster": "cd"}, "is of the cluster cd, this one of ab"),
        ({"shard": 4}, "asks for shard 4, this is shard 3"),
        ({"digest": "e"}, "other settings"),
        ({"listeners": ("tls-2",)}, "tls-2"),
        ({"kind": CORE}, "no links of the kind 'core'"),
        ({"protocol": 2}, "version 2"),
    ],
)
def test_a_link_that_does_not_fit_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
        with pytest.raises(LinkRefused, match=reason):
            await connect_link("127.0.0.1", accepting.server.port, None, Hello(**{**fields, **changes}), Collector())
        assert not accepting.links and accepting.server.refused == 1
        accepting.server.close()

    uvloop.run(run())


def test_a_first_line_that_is_none_is_refused_and_its_connection_closed() -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        for data in (b"GET / HTTP/1.1\r\n", b"{}\n", b"x" * 20_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", accepting.server.port)
            writer.write(data)
            assert (await reader.read()).startswith(b'{"error":')
            writer.close()
        accepting.server.close()

    uvloop.run(run())


def test_a_refusal_is_logged_once_a_minute_for_each_address_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog()
    for number in range(600):
        refusals.refused("10.0.0.1", "shard 1 is not served yet", 5.0 + number / 10)
    refusals.refused("10.0.0.2", "shard 1 is not served yet", 6.0)
    refusals.refused("10.0.0.1", "another", 7.0)
    assert len(caplog.messages) == 3
    refusals.refused("10.0.0.1", "shard 1 is not served yet", 5.0 + REFUSAL_INTERVAL)
    assert caplog.messages[-1] == "event=link_refused address=10.0.0.1 count=600 reason=shard 1 is not served yet"


def test_refusals_for_many_reasons_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RefusalLog()
    for number in range(10 * MAX_REFUSALS):
        refusals.refused("10.0.0.1", f"reason {number}", 1.0)
    assert len(caplog.messages) == MAX_REFUSALS
    refusals.refused("10.0.0.1", "a new one", 1.0 + REFUSAL_INTERVAL)
    assert caplog.messages[-1].endswith("count=1 reason=a new one")


def test_a_connection_that_is_cancelled_while_its_answer_comes_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    answered = threading.Event()

    def answer() -> None:
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(10_000)
            accepted.sendall(b'{"ok":true}\n')
            answered.set()
            accepted.recv(1)

    async def run() -> None:
        protocol = Collector()
        link = asyncio.create_task(
            connect_link("127.0.0.1", listening.getsockname()[1], None, HELLO, protocol)
        )
        greet = link_server._Greeting.connection_made

        def connection_made(greeting: Any, transport: Any) -> None:
            greet(greeting, transport)
            assert answered.wait(10)
            link.cancel()

        monkeypatch.setattr(link_server._Greeting, "connection_made", connection_made)
        with pytest.raises(asyncio.CancelledError):
            await link
        assert protocol.transport is None

    answering = threading.Thread(target=answer)
    answering.start()
    uvloop.run(run())
    answering.join()
    listening.close()


def test_no_server_is_an_error_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(OSError):
        uvloop.run(connect_link("127.0.0.1", port, None, HELLO, Collector()))


def test_with_tls_only_members_have_links(tmp_path: Path) -> None:
    def files(name: str, authority: trustme.CA) -> tuple[Path, Path, Path]:
        leaf = authority.issue_cert(f"{name}.test")
        paths = tmp_path / f"{name}.ca", tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        authority.cert_pem.write_to_path(str(paths[0]))
        leaf.cert_chain_pems[0].write_to_path(str(paths[1]))
        leaf.private_key_pem.write_to_path(str(paths[2]))
        return paths

    members, others = trustme.CA(), trustme.CA()
    first, second, stranger = files("first", members), files("second", members), files("other", others)
    trusting = ssl.create_default_context(cafile=str(first[0]))
    trusting.check_hostname = False

    async def run() -> None:
        accepting = Accepting(server_context(*first))
        await accepting.server.start()
        port = accepting.server.port
        mine = Collector()
        transport = await connect_link("127.0.0.1", port, client_context(*second), HELLO, mine)
        transport.write(b"secret")
        await accepting.links[0].has(b"secret")
        for context in (client_context(*stranger), trusting, None):
            with pytest.raises(OSError):
                await connect_link("127.0.0.1", port, context, HELLO, Collector(), timeout=2)
        assert len(accepting.links) == 1
        accepting.server.close()

    uvloop.run(run())
