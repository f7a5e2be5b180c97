"""A client that reads one packet when its socket is readable gets all of them, over TLS, however many are written at once."""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.leaving_client import all_listeners, open_client
from support.patience import PATIENCE
from support.raw_client import RawClient
from support.stream_client import StreamClient, WebSocketStream

from mqttbroker.codec.packets import Puback, Publish, Pubrec, Subscribe, Subscription
from mqttbroker.net.tls_transport import SEARCHED, TlsTransport, last_frame, last_packet
from mqttbroker.net.websocket_frames import PacketFrames

PACKETS = st.lists(st.integers(0, 300).map(lambda size: Publish("t", bytes(size), 0, False, False, 0).encode(4)), max_size=8)


@pytest.fixture(scope="module", params=["0", "2"], ids=["no worker", "workers"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    config = {"listeners": all_listeners(CertificateFiles(tmp_path_factory.mktemp("tls")))}
    with BrokerProcess(config=config, arguments=["--workers", request.param]) as process:
        process.wait_for_log("event=started")
        yield process


class OnePacketPerEvent:
    """Reads as asyncio-mqtt 0.16 and aiomqtt 2.3 do: one packet when the socket is readable, by reads of a few bytes, and
    then it waits for the socket again, whatever is decrypted already."""

    def __init__(self, client: StreamClient) -> None:
        self._stream = client.socket.socket if isinstance(client.socket, WebSocketStream) else client.socket
        self._websocket = isinstance(client.socket, WebSocketStream)
        assert isinstance(self._stream, ssl.SSLSocket)
        self._stream.settimeout(0.0)
        self._part = b""

    def packet(self) -> bytes:
        """The next packet, or WebSocket frame. Raises TimeoutError if the socket does not become readable."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ready, _, _ = select.select([self._stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"nothing in the socket, {self._stream.pending()} bytes are decrypted")
            if self._read():
                packet, self._part = self._part, b""
                return packet

    def _read(self) -> bool:
        """Read to the end of a packet; false if the socket has no more for now."""
        try:
            while (missing := self._missing()) > 0:
                data = self._stream.recv(missing)
                assert data, "the broker closed the connection"
                self._part += data
        except ssl.SSLWantReadError:
            return False
        return True

    def _missing(self) -> int:
        part = self._part
        if len(part) < 2:
            return 1
        if self._websocket:
            size, start = part[1], 2
            if size >= 126:
                start = 4 if size == 126 else 10
                if len(part) < start:
                    return start - len(part)
                size = int.from_bytes(part[2:start], "big")
            return start + size - len(part)
        size, start = 0, 1
        while True:
            if start >= len(part):
                return 1
            size |= (part[start] & 127) << (7 * (start - 1))
            start += 1
            if part[start - 1] < 128:
                return start + size - len(part)


@pytest.mark.parametrize("count", [2, 30, 3000])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_a_burst_arrives_without_a_stall(broker: BrokerProcess, kind: str, version: int, qos: int, count: int) -> None:
    topic = f"burst/{kind}/{version}/{qos}/{count}"
    client = open_client(broker, kind, version)
    assert client.connect(topic).reason_code == 0
    client.subscribe(topic, options=qos)
    reader = OnePacketPerEvent(client)
    with RawClient(broker.port) as publisher:
        publisher.connect(f"p-{topic}")
        publisher.send(*(Publish(topic, b"%d!" % n, 0, False, False, 0) for n in range(count)))
        publisher.ping()
        for n in range(count):
            assert reader.packet().endswith(b"%d!" % n)
    client.close()


@pytest.mark.parametrize("kind", ["tls", "wss"])
@pytest.mark.parametrize("qos", [1, 2])
def test_acknowledgements_arrive_without_a_stall(broker: BrokerProcess, kind: str, qos: int) -> None:
    client = open_client(broker, kind)
    client.connect(f"acks-{kind}-{qos}")
    client.send(*(Publish("acks", b"", qos, False, False, n + 1) for n in range(100)))
    reader = OnePacketPerEvent(client)
    kinds = {Puback(1).encode(5)[0], Pubrec(1).encode(5)[0]}
    for _ in range(100):
        packet = reader.packet()
        assert packet[2 if kind == "wss" else 0] in kinds
    client.close()


@pytest.mark.parametrize("kind", ["tls", "wss"])
def test_retained_messages_long_and_short_arrive_without_a_stall(broker: BrokerProcess, kind: str) -> None:
    sizes = [10, 100_000, 10, 10, 20_000, 70_000, 5, 5, 5]
    with RawClient(broker.port) as publisher:
        publisher.connect(f"retains-{kind}")
        for n, size in enumerate(sizes):
            publisher.publish(f"kept/{kind}/{n}", bytes(size) + b"!", 1, True)
    client = open_client(broker, kind)
    client.connect(f"keeper-{kind}")
    client.send(Subscribe(1, [Subscription(f"kept/{kind}/#", 1)]))
    reader = OnePacketPerEvent(client)
    found = [reader.packet() for _ in range(len(sizes) + 1)]
    assert sorted(len(packet) > 1000 for packet in found) == [False] * 7 + [True] * 3
    client.close()


# --- positions ------------------------------------------------------------------------------------------------------


@given(PACKETS)
def test_the_last_packet_is_found(packets: list[bytes]) -> None:
    data = b"".join(packets)
    assert last_packet(data) == (len(data) - len(packets[-1]) if packets else 0)


@given(PACKETS, st.integers(1, 300))
def test_a_part_of_a_packet_is_none(packets: list[bytes], cut: int) -> None:
    data = b"".join(packets)
    if packets:
        assert last_packet(data[: -min(cut, len(packets[-1]) - 1)]) == 0


@given(st.lists(st.sampled_from([0, 1, 120, 123, 130, 70_000]), max_size=4))
def test_the_last_frame_is_found(sizes: list[int]) -> None:
    packets = [Publish("t", bytes(size), 0, False, False, 0).encode(4) for size in sizes]
    frames = [b"".join(PacketFrames().frame([packet])) for packet in packets]
    data = b"".join(frames)
    assert last_frame(data) == (len(data) - len(frames[-1]) if frames else 0)


@given(st.binary(max_size=40))
def test_other_bytes_are_written_as_they_are(data: bytes) -> None:
    for find in (last_packet, last_frame):
        assert 0 <= find(data) < max(1, len(data))


class Recorder:
    def __init__(self) -> None:
        self.writes: list[list[bytes]] = []

    def write(self, data: bytes) -> None:
        self.writes.append([data])

    def writelines(self, parts: list[Any]) -> None:
        self.writes.append([bytes(part) for part in parts])


def test_the_last_packet_is_written_apart_up_to_a_size() -> None:
    short, recorder = Publish("t", bytes(100), 0, False, False, 0).encode(4), Recorder()
    transport = TlsTransport(recorder, False)
    transport.write(short)
    transport.write(3 * short)
    transport.writelines([bytes(1000), 2 * short])
    transport.write(short * SEARCHED)
    transport.write(short * (SEARCHED + 1))
    sizes = [[len(part) // len(short) for part in write] for write in recorder.writes]
    assert sizes == [[1], [2, 1], [1000 // len(short), 1, 1], [SEARCHED - 1, 1], [SEARCHED + 1]]
