"""The transport of a client with TLS: the last packet of each write has a record of its own.

Some clients, as those of Python's asyncio on paho, read one packet when the socket is readable, and then wait for the
socket again. Packets behind the first one of a record are decrypted then, so that nothing in the socket tells of them. While
a further record is in the socket such a client goes on reading, and the last record has nothing behind its packet.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import Any, Final

from mypy_extensions import i64

from mqttbroker.net.left_client import read_rest

SEARCHED: Final = 8192  # packets; in a write with more of them, the last one has no record of its own
SECOND_DESCRIPTORS: Final = 64  # of sockets of clients that are not read at the moment, or were not shortly before
SECOND_TIME: Final = 1.0  # seconds after which a second descriptor is closed if the client is read

_open: Final = [0]  # second descriptors


def last_packet(data: bytes) -> i64:
    """The position of the last packet in ``data``; 0 if there is one only, a part of one, or more than `SEARCHED`."""
    size: i64 = len(data)
    last: i64 = 0
    position: i64 = 0
    count: i64 = 0
    while size - position >= 2 and count < SEARCHED:
        count += 1
        remaining: i64 = data[position + 1]
        body: i64 = position + 2
        if remaining >= 128:
            remaining &= 127
            shift: i64 = 7
            byte: i64 = 128
            while byte >= 128 and shift <= 21 and body < size:
                byte = data[body]
                body += 1
                remaining |= (byte & 127) << shift
                shift += 7
            if byte >= 128:
                return 0
        last = position
        position = body + remaining
    return last if position == size else 0


def last_frame(data: bytes) -> i64:
    """`last_packet` for WebSocket frames, unmasked."""
    size: i64 = len(data)
    last: i64 = 0
    position: i64 = 0
    count: i64 = 0
    while size - position >= 2 and count < SEARCHED:
        count += 1
        length: i64 = data[position + 1]
        body: i64 = position + 2
        if length >= 126:
            body = position + 4 if length == 126 else position + 10
            if length > 127 or body > size:
                return 0
            length = 0
            for index in range(position + 2, body):
                length = (length << 8) | data[index]
            if length < 0 or length > size:
                return 0
        last = position
        position = body + length
    return last if position == size else 0


def _second(descriptor: int) -> socket.socket | None:
    try:
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # no descriptor is left
        return None
    _open[0] += 1
    return sock


def _close(second: socket.socket) -> None:
    second.close()
    _open[0] -= 1


def _give(layer: Any, data: bytes) -> None:
    """Have uvloop's TLS layer, whose connection is lost, hold bytes of the socket, for its SSLObject."""
    position = 0
    while position < len(data):
        buffer = layer.get_buffer(len(data) - position)
        size = min(len(buffer), len(data) - position)
        buffer[:size] = data[position : position + size]
        layer.buffer_updated(size)
        position += size


class TlsTransport:
    """The ``transport`` of asyncio behind a TLS handshake, as `Wire`, `WebSocket` and a worker use it.

    With ``frames`` packets are written as WebSocket frames. A client that sends much and resets its connection leaves bytes in
    its socket. asyncio closes that before `connection_lost`, so a client that is not read has a second descriptor.
    """

    def __init__(self, transport: Any, frames: bool) -> None:
        self._transport = transport
        self._frames = frames
        self._reading = True
        self._timed = False  # `_timed_out` will be called
        self._second: socket.socket | None = None  # the socket again, which asyncio closes before it tells

    def write(self, data: bytes) -> None:
        start = self._last(data)
        if start > 0:
            self._transport.writelines([data[:start], data[start:]])  # a record, or more, for each
        else:
            self._transport.write(data)

    def writelines(self, parts: list[Any]) -> None:
        if parts and isinstance(parts[-1], bytes):
            data: bytes = parts[-1]
            start = self._last(data)
            if start > 0:
                parts = [*parts[:-1], data[:start], data[start:]]
        self._transport.writelines(parts)

    def _last(self, data: bytes) -> i64:
        return last_frame(data) if self._frames else last_packet(data)

    def unread(self, limit: int) -> bytes:
        """As `left_client.unread`: what is not decrypted, and what is in the socket if this has a second descriptor."""
        second, self._second = self._second, None
        if second is not None:
            layer = self._transport.get_extra_info("uvloop.sslproto")
            if layer is not None:
                _give(layer, read_rest(second.fileno(), limit))
            _close(second)
        tls = self._transport.get_extra_info("ssl_object")
        pieces: list[bytes] = []
        size = 0
        try:
            while size < limit:
                piece = tls.read(limit - size)
                if not piece:
                    break
                pieces.append(piece)
                size += len(piece)
        except ssl.SSLError:  # there is no whole record
            pass
        return b"".join(pieces)

    def get_write_buffer_size(self) -> int:
        size: int = self._transport.get_write_buffer_size()
        return size

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self._reading = False
        self._transport.pause_reading()
        if self._second is None and _open[0] < SECOND_DESCRIPTORS:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                self._second = _second(sock.fileno())

    def resume_reading(self) -> None:
        self._reading = True
        self._transport.resume_reading()
        if self._second is not None and not self._timed:
            self._timed = True
            asyncio.get_running_loop().call_later(SECOND_TIME, self._timed_out)

    def _timed_out(self) -> None:
        self._timed = False
        if self._reading:
            self._forget()

    def _forget(self) -> None:
        second, self._second = self._second, None
        if second is not None:
            _close(second)

    def close(self) -> None:
        self._forget()
        self._transport.close()

    def abort(self) -> None:
        self._forget()
        self._transport.abort()

    def set_protocol(self, protocol: Any) -> None:
        self._transport.set_protocol(protocol)

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)


class TlsClient:
    """An asyncio protocol until the handshake is done; then ``client`` takes its place, with a `TlsTransport`."""

    def __init__(self, client: Any, websocket: bool) -> None:
        self._client = client
        self._websocket = websocket

    def connection_made(self, transport: Any) -> None:
        transport.set_protocol(self._client)
        self._client.connection_made(TlsTransport(transport, self._websocket))
