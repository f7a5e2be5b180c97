"""A broker of one's own making: each connection is answered by a function of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from mqttbroker.codec.packets import Connack, Connect, Packet, decode
from mqttbroker.codec.properties import Properties


class Peer:
    """One connection of a client, with MQTT 5.0."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.socket = sock
        self.number = number  # of this connection, from 0

    def send(self, *packets: Packet) -> None:
        self.socket.sendall(b"".join(packet.encode(5) for packet in packets))

    def packets(self) -> Iterator[Packet]:
        """The client's packets until it closes the connection."""
        data = b""
        while True:
            packet, used = decode(data, 5)
            if packet is not None:
                data = data[used:]
                yield packet
                continue
            more = self.socket.recv(1 << 16)
            if not more:
                return
            data += more

    def welcome(self, reason_code: int = 0, properties: Properties | None = None) -> Iterator[Packet]:
        """Answer CONNECT with CONNACK; the packets after it."""
        packets = self.packets()
        assert isinstance(next(packets), Connect)
        self.send(Connack(False, reason_code, properties))
        return packets


class ScriptedBroker:
    """Listens on ``port`` and runs ``script(peer)`` for each connection, one after the other, then closes it."""

    def __init__(self, script: Callable[[Peer], None]) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedBroker:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert self.error is None, self.error

    def _run(self) -> None:
        number = 0
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                try:
                    self._script(Peer(sock, number))
                except (ConnectionError, StopIteration):  # the client is gone, also where the script waits for a packet
                    pass
                except BaseException as error:
                    self.error = error
                    return
            number += 1
