"""Clients over each kind of listener that send much, or early, and leave at once."""

from __future__ import annotations

import fcntl
import socket
import ssl
import struct
import termios
from typing import Any

from websockets.frames import CloseCode, Opcode

from support.broker_process import BrokerProcess
from support.certificates import CertificateFiles
from support.core import wait_until
from support.stream_client import StreamClient, WebSocketStream, tcp_socket

KINDS = ("tcp", "tls", "ws", "wss")
LEAVES = ("close", "goodbye", "half")


def all_listeners(files: CertificateFiles) -> list[dict[str, Any]]:
    """The configuration of a listener of each kind, on free ports."""
    tls = {"certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    return [{"type": kind, "port": 0, **(tls if kind in ("tls", "wss") else {})} for kind in KINDS]


def open_client(broker: BrokerProcess, kind: str, version: int = 5) -> StreamClient:
    """A client that has sent nothing of MQTT."""
    sock: Any = tcp_socket(int(broker.wait_for_log(rf"event=listening type={kind} .*port=(\d+)")[1]))
    if kind in ("tls", "wss"):
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    return StreamClient(WebSocketStream(sock) if kind in ("ws", "wss") else sock, version)


def raw_socket(client: StreamClient) -> Any:
    """The socket below TLS and WebSocket."""
    return client.socket.socket if isinstance(client.socket, WebSocketStream) else client.socket


def wait_until_sent(client: StreamClient) -> None:
    """Until the broker's kernel has all that was sent: a reset discards the rest at the sender."""
    sock = raw_socket(client)
    wait_until(lambda: struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0] == 0)


def reset(client: StreamClient) -> None:
    """Close the socket as one that has bytes unread."""
    wait_until_sent(client)
    raw_socket(client).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def leave(client: StreamClient, how: str) -> None:
    """``close`` the socket without a word of TLS or WebSocket, or end these before ("goodbye"); "half" closes the sending
    side only."""
    sock = client.socket
    if isinstance(sock, WebSocketStream):
        if how != "close":
            sock.send_frame(Opcode.CLOSE, int(CloseCode.NORMAL_CLOSURE).to_bytes(2, "big"))
        sock = sock.socket
    if how != "close" and isinstance(sock, ssl.SSLSocket):
        sock.settimeout(0.0)
        try:
            sock.unwrap()
        except ssl.SSLError:  # close_notify is sent, and its answer not awaited
            pass
    if how == "half":
        sock.shutdown(socket.SHUT_WR)
    else:
        client.close()
