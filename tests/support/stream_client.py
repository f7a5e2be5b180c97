"""`RawClient` over a connected socket, TLS or WebSocket.

The `websockets` library frames and parses WebSocket, so that the broker is tested against another implementation; tests
write malformed frames as bytes.
"""

from __future__ import annotations

import socket
from typing import Any

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from support.raw_client import TIMEOUT, RawClient

PATH = "/mqtt"


class StreamClient(RawClient):
    """MQTT over ``stream``: a connected socket, or a `WebSocketStream`."""

    def __init__(self, stream: Any, version: int = 5) -> None:
        self.version = version
        self.socket = stream
        self.inbox = []
        self._bytes = b""
        self._packet_id = 0


class WebSocketStream:
    """The socket of a `RawClient` over WebSocket; every ``sendall`` is one binary frame."""

    def __init__(self, sock: Any, origin: str | None = None) -> None:
        self.socket = sock
        self.protocol = ClientProtocol(
            parse_uri(f"ws://broker{PATH}"),
            subprotocols=["mqtt"],
            origin=origin,
            max_size=None,  # type: ignore
        )
        request = self.protocol.connect()
        self.protocol.send_request(request)
        self._flush()
        self.response: Response | None = None
        self.frames: list[Frame] = []  # received ones, without those of binary messages
        self._payload = b""
        while self.response is None and self.protocol.handshake_exc is None:
            self._read()
        if self.protocol.handshake_exc is not None:
            raise self.protocol.handshake_exc

    def send_frame(self, opcode: Opcode, data: bytes = b"", fin: bool = True) -> None:
        self.socket.sendall(Frame(opcode, data, fin).serialize(mask=True))

    def sendall(self, data: bytes) -> None:
        self.send_frame(Opcode.BINARY, data)

    def recv(self, size: int) -> bytes:
        while not self._payload:
            if not self._read():
                return b""
        payload, self._payload = self._payload, b""
        return payload

    def expect_frame(self, opcode: Opcode) -> Frame:
        """The next frame that is not of a binary message; it must have this opcode."""
        while not self.frames:
            assert self._read(), "the broker closed the socket"
        frame = self.frames.pop(0)
        assert frame.opcode is opcode, frame
        return frame

    def start_close(self, code: int) -> None:
        self.protocol.send_close(code)
        self._flush()

    def expect_close(self, code: int) -> None:
        """Assert that a close frame with this code arrives, and then the end of the stream."""
        data = bytes(self.expect_frame(Opcode.CLOSE).data)
        assert int.from_bytes(data[:2], "big") == code, data
        while self._read():
            pass

    def settimeout(self, seconds: float) -> None:
        self.socket.settimeout(seconds)

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> bool:
        data = self.socket.recv(1 << 16)
        if not data:
            return False
        self.protocol.receive_data(data)
        for event in self.protocol.events_received():
            if isinstance(event, Response):
                self.response = event
            elif isinstance(event, Frame):
                if event.opcode in (Opcode.BINARY, Opcode.CONT):
                    self._payload += bytes(event.data)
                else:
                    self.frames.append(event)
        self._flush()
        return True

    def _flush(self) -> None:
        for data in self.protocol.data_to_send():
            if data:
                self.socket.sendall(data)


def tcp_socket(port: int, host: str = "127.0.0.1") -> socket.socket:
    sock = socket.create_connection((host, port), TIMEOUT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def unix_socket(path: Any) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT)
    sock.connect(str(path))
    return sock
