"""The WebSocket of a bridge, with a server of the library whose socket is the test."""

from __future__ import annotations

from typing import Any

from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from mqttbroker.bridges.relay_terms import RelayError
from mqttbroker.bridges.websocket import FRAME_HEADROOM, MAX_UNREAD, WebSocketClient
from mqttbroker.config.remote_address import parse_address

LARGEST = 1000


class Remote:
    """The link and the socket of a WebSocket client, and the server at its other end."""

    def __init__(self) -> None:
        self.server = ServerProtocol(subprotocols=[Subprotocol("mqtt")])
        self.client = WebSocketClient(self, parse_address("ws://127.0.0.1:80"), LARGEST, 10.0)
        self.written = 0
        self.received = b""
        self.errors: list[str] = []
        self.client.connection_made(self)
        (request,) = [event for event in self.server.events_received() if isinstance(event, Request)]
        self.server.send_response(self.server.accept(request))
        self.deliver()

    def deliver(self) -> None:
        self.client.data_received(b"".join(self.server.data_to_send()))

    # -- the socket ---------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.server.receive_data(data)

    def close(self) -> None:
        """The test looks at the errors."""

    abort = close

    # -- the link -----------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        assert transport is self.client

    def data_received(self, data: bytes) -> None:
        self.received += data

    def fail(self, error: RelayError) -> None:
        self.errors.append(str(error))

    def pause_writing(self) -> None:
        """The client itself counts."""

    resume_writing = pause_writing


async def test_pings_are_answered_but_not_without_end() -> None:
    remote = Remote()

    def ping(count: int) -> None:
        for _ in range(count):
            remote.server.send_ping(bytes(125))
        remote.deliver()

    many = MAX_UNREAD // 139
    ping(2 * many)
    remote.client.pause_writing()
    ping(many)
    remote.client.resume_writing()
    remote.client.pause_writing()
    ping(many)
    assert remote.errors == []
    before = remote.written
    ping(2)
    assert remote.errors == ["the remote sends pings, and does not read the answers"]
    assert before > 4 * MAX_UNREAD * 125 // 139


async def test_a_frame_may_have_more_than_the_longest_packet_but_not_much() -> None:
    remote = Remote()
    remote.server.send_binary(bytes(LARGEST + FRAME_HEADROOM))
    remote.deliver()
    assert len(remote.received) == LARGEST + FRAME_HEADROOM
    remote.server.send_binary(bytes(LARGEST + FRAME_HEADROOM + 1))
    remote.deliver()
    assert len(remote.received) == LARGEST + FRAME_HEADROOM
    assert len(remote.errors) == 1 and remote.errors[0].startswith("WebSocket: ")


async def test_a_websocket_that_the_remote_closes_ends() -> None:
    remote = Remote()
    remote.server.send_close(1001)
    remote.deliver()
    assert remote.errors == ["the remote closes the WebSocket"]
