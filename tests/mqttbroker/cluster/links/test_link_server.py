"""Links between processes of a cluster: the first line, and TLS with certificates of both sides."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
import uvloop
from support.patience import PATIENCE

from mqttbroker.cluster.formats import SPOKEN
from mqttbroker.cluster.links import server as link_server
from mqttbroker.cluster.links.keys import key_of, new_key, proof
from mqttbroker.cluster.links.server import (
    ACCEPTS,
    CONNECTS,
    CORE,
    KEEP_ALIVE_SECONDS,
    LOST_AFTER_MS,
    MAX_HALF_OPEN,
    MAX_LINE,
    MAX_REFUSALS,
    REFUSAL_INTERVAL,
    WORKER,
    Hello,
    LinkRefused,
    LinkServer,
    RefusalLog,
    StrangersLog,
    client_context,
    connect_link,
    difference,
    server_context,
)
from mqttbroker.cluster.nodes.membership import NodeInfo
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.system.file_limit import raise_file_limit

pytestmark = pytest.mark.one_build

KEY = new_key()
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

    def connection_lost(self, error: Exception | None) -> None:
        self.more.set()

    async def has(self, data: bytes) -> None:
        async with asyncio.timeout(10):
            while self.data != data:
                self.more.clear()
                await self.more.wait()


class Accepting:
    """A server of shard 3 that collects what links bring."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.links: list[Collector] = []
        self.hellos: list[Hello] = []
        self.server = LinkServer(
            "127.0.0.1", 0, tls, KEY, lambda hello: difference(hello, "ab", 3, "d", frozenset({"tcp-1"})), {WORKER: self._accept}
        )

    def address(self, key: str = KEY, kind: str = WORKER) -> LinkAddress:
        """Where it listens, for who has this key of the node."""
        return LinkAddress("127.0.0.1", self.server.port, key_of(key, kind))

    def _accept(self, hello: Hello) -> Collector:
        self.hellos.append(hello)
        self.links.append(Collector())
        return self.links[-1]


def test_both_sides_have_their_protocol_behind_the_first_lines() -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        mine = Collector()
        transport = await connect_link(accepting.address(), None, HELLO, mine)
        transport.write(b"from me")
        await accepting.links[0].has(b"from me")
        accepting.links[0].transport.write(b"from there")
        await mine.has(b"from there")
        assert accepting.hellos[0].node == "n1" and accepting.hellos[0].now > 0
        accepting.server.close()

    uvloop.run(run())


class Stranger:
    """A connection that a test speaks on by itself."""

    def __init__(self, accepting: Accepting) -> None:
        self._accepting = accepting

    async def __aenter__(self) -> Stranger:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._accepting.server.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def challenged(self, hello: Hello = HELLO) -> tuple[bytes, bytes]:
        """Send a first line; returns it and the answer."""
        line = msgspec.json.encode(hello)
        self.writer.write(line + b"\n")
        return line, (await self.reader.readline())[:-1]

    async def answer(self, text: str, more: bytes = b"") -> Any:
        """The answer of the other side to a proof; {} if it closes without an answer."""
        self.writer.write(msgspec.json.encode({"proof": text}) + b"\n" + more)
        return msgspec.json.decode(await self.reader.readline() or b"{}")


def test_bytes_in_the_same_read_as_the_last_line_are_the_link_s() -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        async with Stranger(accepting) as stranger:
            lines = await stranger.challenged()
            answer = await stranger.answer(proof(key_of(KEY, WORKER), CONNECTS, *lines), b"more")
            assert answer["ok"] and not accepting.server.half_open
            await accepting.links[0].has(b"more")
        accepting.server.close()

    uvloop.run(run())


# --- the key ----------------------------------------------------------------------------------------------------------


def test_who_does_not_know_the_key_has_no_link(caplog: pytest.LogCaptureFixture) -> None:
    """Nor who knows that of a kind of process, and says to be another one."""

    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        for address in (accepting.address(new_key()), accepting.address(kind=CORE)):
            with pytest.raises(LinkRefused, match="does not know the key"):
                await connect_link(address, None, HELLO, Collector())
        with pytest.raises(LinkRefused, match="not known"):
            await connect_link(accepting.address(""), None, HELLO, Collector())
        for wrong in ("", "\u00fc", "0" * 64, KEY, key_of(KEY, WORKER)):
            async with Stranger(accepting) as stranger:
                await stranger.challenged()
                assert "does not know the key" in (await stranger.answer(wrong))["error"]
        assert not accepting.links
        accepting.server.close()

    uvloop.run(run())
    assert len([one for one in caplog.messages if "event=link_refused" in one]) == 1


def test_a_proof_is_good_for_its_connection_only() -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        async with Stranger(accepting) as first, Stranger(accepting) as second:
            lines = await first.challenged()
            seen = proof(key_of(KEY, WORKER), CONNECTS, *lines)
            assert (await first.answer(seen))["ok"]
            await second.challenged()
            assert "error" in await second.answer(seen)
        async with Stranger(accepting) as third:
            _, challenge = await third.challenged(msgspec.structs.replace(HELLO, node="n2"))
            assert "error" in await third.answer(proof(key_of(KEY, WORKER), CONNECTS, msgspec.json.encode(HELLO), challenge))
        accepting.server.close()

    uvloop.run(run())


def test_what_listens_at_the_port_of_a_core_learns_no_key_and_gets_no_link() -> None:
    """Another user of the machine may have taken the port while the core is away."""
    heard: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(b'{"nonce":"00"}\n')
        heard.append(await reader.readline())
        writer.write(b'{"ok":true,"proof":%s}\n' % msgspec.json.encode(msgspec.json.decode(heard[-1])["proof"]))
        await reader.read()

    async def run() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        protocol = Collector()
        address = LinkAddress("127.0.0.1", server.sockets[0].getsockname()[1], key_of(KEY, WORKER))
        with pytest.raises(LinkRefused, match="what listens there does not know the key"):
            await connect_link(address, None, HELLO, protocol)
        assert protocol.transport is None
        server.close()

    uvloop.run(run())
    assert len(heard) == 2
    for key in (KEY, key_of(KEY, WORKER)):
        assert not any(key.encode() in line for line in heard)


def test_a_key_is_in_no_text_of_an_address_or_a_node() -> None:
    assert KEY not in f"{LinkAddress('h', 1, KEY)} {LinkAddress('h', 1, KEY)!r}"
    assert KEY not in repr(NodeInfo("n", 0.0, "h", 1, "1", link_key=KEY))
    assert new_key() != new_key() and key_of("", WORKER) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster": "cd"}, "is of the cluster cd, this one of ab"),
        ({"shard": 4}, "asks for shard 4, this is shard 3"),
        ({"digest": "e"}, "other settings"),
        ({"listeners": ("tls-2",)}, "tls-2"),
        ({"kind": CORE}, "no links of the kind 'core'"),
        ({"protocol": 1, "oldest": 1}, r"node n1 \(1\) speaks version 1 of the links, this one version 2"),
        ({"protocol": 4, "oldest": 3}, "speaks versions 3 to 4 of the links"),
    ],
)
def test_a_link_that_does_not_fit_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        hello = msgspec.structs.replace(HELLO, **changes)
        with pytest.raises(LinkRefused, match=reason):
            await connect_link(accepting.address(kind=hello.kind), None, hello, Collector())
        assert not accepting.links and accepting.server.refused == 1
        accepting.server.close()

    uvloop.run(run())


def test_a_process_that_speaks_an_older_version_too_has_a_link() -> None:
    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        newer = msgspec.structs.replace(HELLO, protocol=SPOKEN.newest + 1, oldest=SPOKEN.newest)
        await connect_link(accepting.address(), None, newer, Collector())
        (hello,) = accepting.hellos
        assert (hello.oldest, hello.protocol) == (SPOKEN.newest, SPOKEN.newest + 1)
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
            hello, challenge = accepted.recv(10_000)[:-1], b'{"nonce":"00"}'
            accepted.sendall(challenge + b"\n")
            accepted.recv(10_000)
            accepted.sendall(b'{"ok":true,"proof":"%s"}\n' % proof("k", ACCEPTS, hello, challenge).encode())
            answered.set()
            with suppress(ConnectionResetError):
                accepted.recv(1)

    async def run() -> None:
        protocol = Collector()
        link = asyncio.create_task(connect_link(LinkAddress("127.0.0.1", listening.getsockname()[1], "k"), None, HELLO, protocol))
        take = link_server._Greeting.data_received

        def data_received(greeting: Any, data: bytes) -> None:
            take(greeting, data)
            assert answered.wait(10)
            link.cancel()

        monkeypatch.setattr(link_server._Greeting, "data_received", data_received)
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
        uvloop.run(connect_link(LinkAddress("127.0.0.1", port, "k"), None, HELLO, Collector()))


def issued(tmp_path: Path, name: str, authority: trustme.CA) -> tuple[Path, Path, Path]:
    """The files of an authority, and of a certificate with its key."""
    leaf = authority.issue_cert(f"{name}.test")
    paths = tmp_path / f"{name}.ca", tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
    authority.cert_pem.write_to_path(str(paths[0]))
    leaf.cert_chain_pems[0].write_to_path(str(paths[1]))
    leaf.private_key_pem.write_to_path(str(paths[2]))
    return paths


def test_with_tls_only_members_have_links(tmp_path: Path) -> None:
    members, others = trustme.CA(), trustme.CA()
    first, second, stranger = (issued(tmp_path, name, one) for name, one in (("first", members), ("second", members), ("other", others)))
    trusting = ssl.create_default_context(cafile=str(first[0]))
    trusting.check_hostname = False

    async def run() -> None:
        accepting = Accepting(server_context(*first))
        await accepting.server.start()
        mine = Collector()
        transport = await connect_link(accepting.address(), client_context(*second), HELLO, mine)
        transport.write(b"secret")
        await accepting.links[0].has(b"secret")
        for context in (client_context(*stranger), trusting, None):
            with pytest.raises(OSError):
                await connect_link(accepting.address(), context, HELLO, Collector(), timeout=2)
        assert len(accepting.links) == 1
        accepting.server.close()

    uvloop.run(run())


# --- half-open links --------------------------------------------------------------------------------------------------


HALF_OPEN = 3000


def client_hello() -> bytes:
    """The first bytes of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("sent", ["nothing", "half a handshake", "its first message"])
def test_many_half_open_tls_links_do_not_grow_the_process(tmp_path: Path, sent: str) -> None:
    """The oldest give way, and a member's link is opened meanwhile."""
    raise_file_limit()
    files = issued(tmp_path, "member", trustme.CA())
    hello = client_hello()
    data = {"nothing": b"", "half a handshake": hello[: len(hello) // 2], "its first message": hello}[sent]
    strangers: list[socket.socket] = []

    async def run() -> None:
        accepting = Accepting(server_context(*files))
        await accepting.server.start()
        most = 0
        before = resident()
        for number in range(HALF_OPEN):
            stranger = socket.socket()
            strangers.append(stranger)
            stranger.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stranger, ("127.0.0.1", accepting.server.port))
            stranger.send(data)
            if number % 100 == 0:
                most = max(most, accepting.server.half_open)
        assert 0 < most <= MAX_HALF_OPEN
        await connect_link(accepting.address(), client_context(*files), HELLO, Collector())
        assert accepting.server.half_open <= MAX_HALF_OPEN
        assert resident() - before < 96 << 20
        accepting.server.close()

    try:
        uvloop.run(run())
    finally:
        for stranger in strangers:
            stranger.close()


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("tls", [False, True])
def test_a_link_that_does_not_begin_in_time_is_closed(tmp_path: Path, tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it sends nothing, half a first line, or no proof."""
    monkeypatch.setattr(link_server, "GREETING_TIMEOUT", 0.2)
    context = server_context(*issued(tmp_path, "member", trustme.CA())) if tls else None

    async def run() -> None:
        accepting = Accepting(context)
        await accepting.server.start()
        async with Stranger(accepting) as silent, Stranger(accepting) as slow, Stranger(accepting) as unproved:
            slow.writer.write(client_hello()[:50] if tls else b'{"cluster":')
            unproved.writer.write(client_hello() if tls else msgspec.json.encode(HELLO) + b"\n")
            for one in (silent, slow, unproved):
                async with asyncio.timeout(PATIENCE):
                    with suppress(ConnectionResetError):
                        await one.reader.read()
        assert not accepting.server.half_open and not accepting.links
        accepting.server.close()

    uvloop.run(run())


def test_who_is_refused_and_does_not_read_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "GREETING_TIMEOUT", 0.2)

    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        async with Stranger(accepting) as stranger:
            stranger.writer.write(b"x" * (MAX_LINE + 1) + b"y" * 1_000_000)
            async with asyncio.timeout(PATIENCE):
                with suppress(ConnectionResetError):
                    await stranger.reader.read()
        assert not accepting.server.half_open
        accepting.server.close()

    uvloop.run(run())


def test_strangers_have_one_line_of_the_log_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """However many addresses they have and whatever they send."""
    strangers = StrangersLog()
    for number in range(1000):
        strangers.refused(f"127.0.0.{number}", f"reason {number}", 5.0 + number / 1000)
    assert len(caplog.messages) == 1
    strangers.refused("127.1.1.1", "another", 6.0)
    assert caplog.messages[1:] == ["event=link_refused address=127.1.1.1 count=1000 reason=another"]


def test_a_machine_that_is_cut_off_is_noticed_by_tcp() -> None:
    """Both ends ask after `KEEP_ALIVE_SECONDS` without traffic, and close `LOST_AFTER_MS` later."""

    async def run() -> None:
        accepting = Accepting()
        await accepting.server.start()
        mine = Collector()
        await connect_link(accepting.address(), None, HELLO, mine)
        for end in (mine, accepting.links[0]):
            sock = end.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEP_ALIVE_SECONDS
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_AFTER_MS
        accepting.server.close()

    uvloop.run(run())
