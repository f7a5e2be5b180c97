"""MQTT over WebSocket (section 6 of both standards): handshake, framing, invalid frames and the end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import MagicMock

import paho.mqtt.client as paho
import pytest
from support.broker_process import BrokerProcess
from support.core import wait_until
from support.metric_samples import samples
from support.raw_client import TIMEOUT, RawClient
from support.stream_client import PATH, StreamClient, WebSocketStream, tcp_socket
from websockets.exceptions import InvalidStatus
from websockets.frames import CloseCode, Frame, Opcode

from mqttbroker.codec.packets import Connack, Connect, Disconnect, Pingreq, Pingresp, Publish, Will
from mqttbroker.codec.reason_codes import PACKET_TOO_LARGE, PROTOCOL_ERROR
from mqttbroker.net.websocket import WebSocket

MAX_PACKET = 2 * 1024 * 1024
CONFIG = f"""
limits.max_packet_size = "{MAX_PACKET}B"
[[listeners]]
[[listeners]]
type = "ws"
port = 0
[[listeners]]
type = "ws"
port = 0
origins = ["https://ours.example"]
"""
REQUEST = (
    f"GET {PATH} HTTP/1.1\r\nHost: broker\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)
WITH_MQTT = (REQUEST + "Sec-WebSocket-Protocol: chat, mqtt\r\n\r\n").encode()


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(config=CONFIG) as process:
        yield process


@pytest.fixture(scope="module")
def ports(broker: BrokerProcess) -> list[int]:
    """The ports of the WebSocket listeners."""
    broker.wait_for_log("event=started")
    return [int(line.rpartition("port=")[2].split()[0]) for line in broker.lines if "type=ws " in line]


Open = Callable[..., StreamClient]


@pytest.fixture
def websocket(ports: list[int]) -> Iterator[Open]:
    """``websocket(client_id, version)``: connected; without a client id only the handshake is done."""
    with ExitStack() as stack:

        def opened(client_id: str = "", version: int = 5, **fields: Any) -> StreamClient:
            client = stack.enter_context(StreamClient(WebSocketStream(tcp_socket(ports[0])), version))
            if client_id:
                assert client.connect(client_id, **fields).reason_code == 0
            return client

        yield opened


def stream(client: StreamClient) -> WebSocketStream:
    assert isinstance(client.socket, WebSocketStream)
    return client.socket


def http(port: int, *pieces: bytes) -> tuple[bytes, bytes]:
    """Send the pieces; returns the head of the response, and the bytes after it until the broker closed."""
    with tcp_socket(port) as sock:
        for piece in pieces:
            sock.sendall(piece)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


# --- the handshake ------------------------------------------------------------------------------------------------


def test_the_subprotocol_is_confirmed(websocket: Open) -> None:
    response = stream(websocket()).response
    assert response is not None and response.headers["Sec-WebSocket-Protocol"] == "mqtt"  # [MQTT-6.0.0-4]


def test_a_client_of_mqtt_3_1_names_it(ports: list[int]) -> None:
    """As MQTT.js does."""
    with tcp_socket(ports[0]) as sock:
        sock.sendall((REQUEST + "Sec-WebSocket-Protocol: mqttv3.1\r\n\r\n").encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
    assert head.split()[1] == b"101" and b"sec-websocket-protocol: mqttv3.1\r\n" in head.lower()


REFUSED = [
    ("missing subprotocol", REQUEST + "\r\n", b"400"),
    ("other subprotocol", REQUEST + "Sec-WebSocket-Protocol: chat\r\n\r\n", b"400"),  # [MQTT-6.0.0-3]
    ("no upgrade", f"GET {PATH} HTTP/1.1\r\nHost: broker\r\n\r\n", b"426"),
    ("post", REQUEST.replace("GET", "POST") + "Sec-WebSocket-Protocol: mqtt\r\n\r\n", b"405"),
    ("bad key", REQUEST.replace("dGhl", "====") + "Sec-WebSocket-Protocol: mqtt\r\n\r\n", b"400"),
    ("malformed header", REQUEST + "Sec-WebSocket-Protocol: mqtt\r\nno colon\r\n\r\n", b"400"),
    ("long head", REQUEST + "X: " + "y" * 20_000, b"431"),
    ("long line", REQUEST + "X: " + "y" * 10_000 + "\r\n\r\n", b"431"),
]


@pytest.mark.parametrize(("request_text", "status"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_invalid_handshakes_are_refused(ports: list[int], request_text: str, status: bytes) -> None:
    head, _ = http(ports[0], request_text.encode())
    assert head.split()[1] == status
    assert b"websocket-accept" not in head.lower()


def test_a_request_that_is_not_http_is_refused(ports: list[int]) -> None:
    head, body = http(ports[0], Connect("x", 5).encode(5) + b"\r\n\r\n")
    assert (head.split()[1], body) == (b"400", b"not an HTTP request\n")


@pytest.mark.parametrize("request_text", [REFUSED[0][1], "GET /mqtt HTTP/1.1\r\nUpgr", ""], ids=["whole", "half", "none"])
def test_a_failed_handshake_is_logged_once_and_counted(broker: BrokerProcess, ports: list[int], request_text: str) -> None:
    def failed() -> float:
        text = broker.get("/metrics").decode()
        return float(text.partition('handshakes_failed_total{layer="websocket"} ')[2].split()[0])

    before = failed()
    with tcp_socket(ports[0]) as sock:
        host, port = sock.getsockname()
        sock.sendall(request_text.encode())
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    broker.wait_for_log(f"event=refused .*address={host}:{port} ")
    wait_until(lambda: failed() == before + 1)
    assert broker.log.count(f"{host}:{port} ") == 1


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_handshake_in_pieces_followed_by_packets(ports: list[int], step: int) -> None:
    frames = [Connect("eager", 5).encode(5), Pingreq().encode(5)]
    data = WITH_MQTT + b"".join(Frame(Opcode.BINARY, packet).serialize(mask=True) for packet in frames)
    with tcp_socket(ports[0]) as sock:
        for start in range(0, len(data), step):
            sock.sendall(data[start : start + step])
        answer = b""
        while not answer.endswith(b"\xd0\x00"):
            answer += sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"\r\n\r\n\x82" in answer


def test_only_pages_of_the_configured_origins_connect(ports: list[int]) -> None:
    for origin in ("https://ours.example", None):
        WebSocketStream(tcp_socket(ports[1]), origin).close()
    with pytest.raises(InvalidStatus) as refused:
        WebSocketStream(tcp_socket(ports[1]), "https://theirs.example")
    assert refused.value.response.status_code == 403
    WebSocketStream(tcp_socket(ports[0]), "https://theirs.example").close()


# --- framing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_to_and_from_tcp(broker: BrokerProcess, websocket: Open, version: int, qos: int) -> None:
    client = websocket(f"ws-{version}-{qos}", version)
    with RawClient(broker.port, version) as other:
        other.connect(f"tcp-{version}-{qos}")
        for subscriber, publisher, topic in ((client, other, "to"), (other, client, "from")):
            name = f"ws/{topic}/{version}/{qos}"
            subscriber.subscribe(name, options=qos)
            publisher.publish(name, b"payload", qos)
            message = subscriber.take()
            assert (message.topic, message.payload, message.qos) == (name, b"payload", qos)


def test_packets_in_frames_of_one_byte(websocket: Open) -> None:
    client = websocket()
    for byte in Connect("one-byte", 5).encode(5) + Pingreq().encode(5):
        stream(client).sendall(bytes((byte,)))
    client.expect(Connack)
    client.ping()


def test_a_packet_in_three_frames_and_two_packets_in_one(websocket: Open) -> None:
    client = websocket("three")
    client.subscribe("ws/three", options=0)
    packet = Publish("ws/three", b"abcdef").encode(5)
    for part in (packet[:1], packet[1:9], packet[9:] + packet + packet[:5], packet[5:]):
        stream(client).sendall(part)
    assert [client.take().payload for _ in range(3)] == [b"abcdef"] * 3


def test_a_fragmented_message_with_a_ping_between_its_fragments(websocket: Open) -> None:
    client = websocket("fragments")
    client.subscribe("ws/fragments", options=0)
    packet = Publish("ws/fragments", b"x" * 300).encode(5)
    ws = stream(client)
    ws.send_frame(Opcode.BINARY, packet[:100], fin=False)
    ws.send_frame(Opcode.PING, b"now?")
    ws.send_frame(Opcode.CONT, b"", fin=False)
    ws.send_frame(Opcode.CONT, packet[100:], fin=True)
    ws.sendall(packet)
    assert [client.take().payload for _ in range(2)] == [b"x" * 300] * 2
    assert ws.expect_frame(Opcode.PONG).data == b"now?"


@pytest.mark.parametrize("size", [110, 70_000, MAX_PACKET - 100])
def test_long_frames_in_both_directions(websocket: Open, size: int) -> None:
    client = websocket(f"long-{size}")
    client.subscribe("ws/long", options=1)
    payload = bytes(range(256)) * (size // 256 + 1)
    client.send(Publish("ws/long", payload[:size], 1, packet_id=1))
    assert client.take().payload == payload[:size]


def test_many_packets_in_one_frame(websocket: Open) -> None:
    client = websocket("many")
    client.subscribe("ws/many", options=0)
    client.send(*[Publish("ws/many", str(number).encode()) for number in range(3000)])
    assert [client.take().payload for _ in range(3000)] == [str(number).encode() for number in range(3000)]


# --- invalid frames -----------------------------------------------------------------------------------------------


def test_a_text_frame_closes_the_connection(websocket: Open) -> None:
    client = websocket("text")
    client.subscribe("ws/text", options=0)
    packet = Publish("ws/text", b"before").encode(5)
    frames = [Frame(Opcode.BINARY, packet), Frame(Opcode.TEXT, b"\xc0\x00"), Frame(Opcode.BINARY, packet)]
    stream(client).socket.sendall(b"".join(frame.serialize(mask=True) for frame in frames))
    assert client.take().payload == b"before"
    assert client.expect(Disconnect).reason_code == PROTOCOL_ERROR
    stream(client).expect_close(1003)  # [MQTT-6.0.0-1]


def test_a_text_frame_before_connect(websocket: Open) -> None:
    client = websocket()
    stream(client).send_frame(Opcode.TEXT, Connect("x", 5).encode(5))
    stream(client).expect_close(1003)


WRONG_FRAMES = [
    ("unmasked", Frame(Opcode.BINARY, b"\xc0\x00").serialize(mask=False), 1002),
    ("reserved opcode", b"\x83\x80\0\0\0\0", 1002),
    ("reserved bit", b"\xc2\x80\0\0\0\0", 1002),
    ("continuation of nothing", Frame(Opcode.CONT, b"").serialize(mask=True), 1002),
    ("whole message inside a message", b"\x02\x80\0\0\0\0\x82\x80\0\0\0\0", 1002),
    ("fragmented ping", b"\x09\x80\0\0\0\0", 1002),
    ("too long", b"\x82\xff" + (MAX_PACKET + 100_000).to_bytes(8, "big") + bytes(4), 1009),
    ("absurdly long", b"\x82\xff" + b"\xff" * 8 + bytes(4), 1009),
]


@pytest.mark.parametrize(("frame", "code"), [row[1:] for row in WRONG_FRAMES], ids=[row[0] for row in WRONG_FRAMES])
def test_invalid_frames_close_the_connection(websocket: Open, frame: bytes, code: int) -> None:
    client = websocket("wrong")
    stream(client).socket.sendall(frame)
    stream(client).expect_close(code)


@pytest.mark.parametrize(("frame", "code"), [row[1:] for row in WRONG_FRAMES], ids=[row[0] for row in WRONG_FRAMES])
def test_packets_before_an_invalid_frame_are_answered(websocket: Open, frame: bytes, code: int) -> None:
    client = websocket("answered")
    malformed = bytes((0x82, 3, 0, 1, 0))  # a SUBSCRIBE without filters
    packets = Pingreq().encode(5) + malformed if code == 1002 else Pingreq().encode(5)
    stream(client).socket.sendall(Frame(Opcode.BINARY, packets).serialize(mask=True) + frame)
    client.expect(Pingresp)
    if code == 1002:
        assert client.expect(Disconnect).reason_code == PROTOCOL_ERROR
    stream(client).expect_close(code)


# --- the end ------------------------------------------------------------------------------------------------------


def test_a_close_frame_is_answered_and_the_will_published(broker: BrokerProcess, websocket: Open) -> None:
    with RawClient(broker.port) as watcher:
        watcher.connect("ws-watcher")
        watcher.subscribe("ws/will")
        client = websocket("closing", will=Will("ws/will", b"gone"))
        stream(client).start_close(1001)
        stream(client).expect_close(1001)
        assert watcher.take().payload == b"gone"


def test_disconnect_is_answered_with_a_close_frame(websocket: Open) -> None:
    client = websocket("leaving")
    client.send(Disconnect())
    stream(client).expect_close(1000)


def test_disconnect_with_the_error_goes_before_the_close_frame(websocket: Open) -> None:
    client = websocket("malformed")
    client.send(b"\x30\xff\xff\xff\x7f")
    assert client.expect(Disconnect).reason_code == PACKET_TOO_LARGE
    stream(client).expect_close(1000)


def test_a_lost_connection_publishes_the_will(broker: BrokerProcess, websocket: Open) -> None:
    with RawClient(broker.port) as watcher:
        watcher.connect("ws-watcher-2")
        watcher.subscribe("ws/broken")
        client = websocket("breaking", will=Will("ws/broken", b"gone"))
        stream(client).socket.sendall(b"\x82")
        client.close()
        assert watcher.take().payload == b"gone"


def test_a_client_that_does_not_answer_the_close_frame_is_disconnected(websocket: Open) -> None:
    client = websocket("silent")
    ws = stream(client)
    client.send(Disconnect())
    ws.protocol.data_to_send()
    ws.socket.settimeout(3 * TIMEOUT)
    while ws.socket.recv(65536):
        pass


class _Transport:
    """A socket that records the bytes written to it."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, lines: list[bytes]) -> None:
        self.write(b"".join(lines))

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def test_pings_of_a_stalled_client_are_answered_once() -> None:
    # With an answer to each, such a client would fill the broker's memory.
    wire: Any = MagicMock()
    below = _Transport()
    websocket = WebSocket(wire, (), 1000, 1000)
    websocket.connection_made(below)
    websocket.data_received(WITH_MQTT)
    below.written = b""
    websocket.pause_writing()
    for number in range(100):
        websocket.data_received(Frame(Opcode.PING, bytes((number,))).serialize(mask=True))
    assert below.written == b""
    websocket.resume_writing()
    assert below.written == Frame(Opcode.PONG, bytes((99,))).serialize(mask=False)


FLOODS = {
    "pongs": Frame(Opcode.PONG, b"").serialize(mask=True),
    "pings": Frame(Opcode.PING, b"x").serialize(mask=True),
    "empty continuations": Frame(Opcode.CONT, b"", False).serialize(mask=True),
    "empty messages": Frame(Opcode.BINARY, b"").serialize(mask=True),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_frames_without_content_are_read_in_parts(websocket: Open, kind: str) -> None:
    client = websocket("flood")
    sock = stream(client).socket
    if kind == "empty continuations":
        sock.sendall(Frame(Opcode.BINARY, b"", False).serialize(mask=True))
    sock.sendall(FLOODS[kind] * 20_000)
    if kind == "empty continuations":
        sock.sendall(Frame(Opcode.CONT, b"", True).serialize(mask=True))
    client.ping()  # the connection is alive, and nothing behind the flood was lost


def test_a_long_frame_before_connect_is_refused(ports: list[int]) -> None:
    # Larger frames are accepted only after CONNECT.
    head = b"\x82\xff" + (1024 * 1024).to_bytes(8, "big") + b"\0\0\0\0"
    with tcp_socket(ports[0]) as sock:
        sock.sendall(WITH_MQTT)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(4096)
        sock.sendall(head)
        frame = answer.partition(b"\r\n\r\n")[2]
        while len(frame) < 4:
            frame += sock.recv(4096)
        assert frame[0] == 0x88 and int.from_bytes(frame[2:4], "big") == 1009


# --- third-party clients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [paho.MQTTv311, paho.MQTTv5])
def test_paho(ports: list[int], version: Any) -> None:
    received: list[bytes] = []
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, f"paho-{version}", protocol=version, transport="websockets")

    def on_connect(*_: Any) -> None:
        client.subscribe(f"paho/{version}", 2)

    def on_subscribe(*_: Any) -> None:
        for qos in range(3):
            client.publish(f"paho/{version}", bytes((qos,)) * 1000, qos)

    def on_message(_client: Any, _userdata: Any, message: Any) -> None:
        received.append(message.payload)
        if len(received) == 3:
            client.disconnect()

    client.on_connect, client.on_subscribe, client.on_message = on_connect, on_subscribe, on_message
    client.connect("127.0.0.1", ports[0])
    client.loop_forever()
    assert sorted(received) == [bytes((qos,)) * 1000 for qos in range(3)]


# --- memory -------------------------------------------------------------------------------------------------------


def test_incomplete_frames_of_all_clients_are_bounded_together(start_broker: Callable[..., BrokerProcess]) -> None:
    listeners = [{"port": 0}, {"type": "ws", "port": 0}]
    broker = start_broker(config={"listeners": listeners, "limits": {"max_total_incomplete_bytes": "1MiB"}})
    broker.wait_for_log("event=started")
    port = next(int(line.rpartition("port=")[2].split()[0]) for line in broker.lines if "type=ws " in line)
    frame = Frame(Opcode.BINARY, Publish("t", bytes(900_000)).encode(5)).serialize(mask=True)

    def held() -> float:
        return samples(broker.get("/metrics"))["mqttbroker_memory_part_bytes/incomplete"]

    with ExitStack() as stack:
        first, second = (stack.enter_context(StreamClient(WebSocketStream(tcp_socket(port)))) for _ in range(2))
        for client, name in ((first, "first"), (second, "second")):
            assert client.connect(name).reason_code == 0
        stream(first).socket.sendall(frame[:600_000])
        wait_until(lambda: 590_000 < held() <= 600_000)
        stream(second).socket.sendall(frame[:800_000])
        assert first.expect(Disconnect).reason_code == 0x97
        wait_until(lambda: 790_000 < held() <= 800_000)
        stream(first).socket.sendall(frame[600_000:])  # is not kept
        stream(first).expect_close(CloseCode.NORMAL_CLOSURE)
        stream(second).socket.sendall(frame[800_000:])
        second.ping()
        assert held() == 0
