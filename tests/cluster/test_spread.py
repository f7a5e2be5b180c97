"""The load balancer that tests put in front of a cluster."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from support.spread import Spread


def test_connections_go_to_the_ports_in_turn_and_end_on_both_sides() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        spread = Spread([server.getsockname()[1] for server in servers])
        stack.callback(spread.close)
        for server in (*servers, servers[0]):
            server.settimeout(10)
            with socket.create_connection(("127.0.0.1", spread.port), 10) as client:
                client.sendall(b"early")
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(10)
                    assert connection.recv(5) == b"early"
                    connection.sendall(b"answer")
                    assert client.recv(6) == b"answer"
                    client.shutdown(socket.SHUT_WR)
                    assert connection.recv(1) == b""
                assert client.recv(1) == b""


def test_a_connection_to_a_dead_port_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spread = Spread([port])
    try:
        with socket.create_connection(("127.0.0.1", spread.port), 10) as client:
            client.settimeout(10)
            try:
                assert client.recv(1) == b""
            except ConnectionResetError:
                pass
    finally:
        spread.close()
