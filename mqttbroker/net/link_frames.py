"""The frames of a link between the broker's process and a connection worker.

A frame is the kind (1 byte), the number of a client (4 bytes, big-endian; 0 = of the worker itself), the length of the
body (4 bytes) and the body. Frames have no version of their own: a worker and a core of two nodes of a cluster agree on one before
they begin (`mqttbroker.cluster.links.server`), and any others are of one installation.
"""

from __future__ import annotations

from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

HEADER_BYTES: Final = 9
LARGEST_DATA: Final = 262_144  # bytes of DATA that a worker sends in one frame
LARGEST_BODY: Final = 1_048_576  # bytes of any frame of a worker

# Both ways.
DATA: Final = 1  # bytes of MQTT, from the client or for it
TAKEN: Final = 2  # so many bytes of earlier DATA (4 bytes) need no room any more

# From a worker.
READY: Final = 10  # the worker listens, or has reloaded: JSON, a list of problems
BEGUN: Final = 20  # JSON, the index of the listener: a connection that begins with a PROXY header or a TLS handshake
OPENED: Final = 11  # JSON, `Opened`; a client of a listener with TLS waits for ADMITTED
JOINED: Final = 21  # JSON, `Joined`: a client of a cluster whose CONNECT follows
SECURED: Final = 12  # JSON, `Secured`: the handshake is done
FAILED: Final = 13  # JSON, `Failed`: there will be no client
REFUSED: Final = 14  # reason code (1 byte) and text: the client violated MQTT over WebSocket
LEFT: Final = 15  # text: nothing more will be received, and the socket is open
CLOSED: Final = 16  # text, empty if the client closed the connection: the socket is closed
HELD: Final = 17  # so many bytes (4 bytes) of an incomplete WebSocket frame
WEBSOCKET_FAILED: Final = 18  # there was no valid handshake
STATUS: Final = 19  # the answer to PING, JSON: the CPU time of the worker in seconds
ENDS: Final = 23  # to a core of a cluster: the worker ends, and its clients are to be disconnected with the reason
HOLDS: Final = 22  # with STATUS, of a worker of a cluster's node: JSON, `Holds`

# To a worker.
SETUP: Final = 30  # pickled `WorkerSetup`
ADMITTED: Final = 31  # the client may begin its TLS handshake
ACCEPTED: Final = 32  # a CONNECT was accepted: frames may be as long as packets
END: Final = 33  # close the sending side behind everything that was written
ABORT: Final = 34  # close the socket at once
RELOAD: Final = 35  # pickled `WorkerSetup`: read the certificates again
STOP: Final = 36  # accept no more connections
PING: Final = 37  # answer with STATUS
DIRECTORY: Final = 38  # JSON, `Directory`; to a worker of a cluster's node
RELEASING: Final = 39  # from the core of a shard: clients that come from now on are for its next owner


class LinkError(Exception):
    """The other end of a link sent what no such process sends."""


_SMALL_NUMBERS: Final[list[bytes]] = [number.to_bytes(4, "big") for number in range(1024)]


def number_bytes(number: i64) -> bytes:
    if 0 <= number < 1024:
        return _SMALL_NUMBERS[number]
    return int(number).to_bytes(4, "big")


@mypyc_attr(allow_interpreted_subclasses=True)
class FrameHandler:
    """Handles the frames of one end of a link."""

    def handle(self, kind: i64, number: i64, data: bytes, start: i64, end: i64) -> None:
        """A frame has arrived; its body is ``data[start:end]``."""


class FrameReader:
    """Cuts the bytes of a link into frames. A body may have up to ``largest`` bytes."""

    def __init__(self, handler: FrameHandler, largest: i64 = 0xFFFFFFFF) -> None:
        self._handler = handler
        self._largest = largest
        self._data: bytes = b""
        self._position: i64 = 0

    def feed(self, data: bytes) -> None:
        """Add received bytes, which `read` handles."""
        if self._position < len(self._data):
            self._data = self._data[self._position :] + data
        else:
            self._data = data
        self._position = 0

    def read(self, count: i64) -> bool:
        """Hand up to ``count`` whole frames to the handler; whether there may be more. Raises LinkError for a longer
        frame than allowed."""
        data = self._data
        size: i64 = len(data)
        position = self._position
        while count > 0 and size - position >= HEADER_BYTES:
            length: i64 = (data[position + 5] << 24) | (data[position + 6] << 16)
            length |= (data[position + 7] << 8) | data[position + 8]
            start: i64 = position + HEADER_BYTES
            if length > size - start:
                if length > self._largest:
                    raise LinkError(f"a frame of {length} bytes")
                break
            number: i64 = (data[position + 1] << 24) | (data[position + 2] << 16)
            number |= (data[position + 3] << 8) | data[position + 4]
            kind: i64 = data[position]
            position = start + length
            self._position = position
            self._handler.handle(kind, number, data, start, position)
            count -= 1
        if position >= size:
            self._data = b""
            self._position = 0
        return count == 0


class FrameWriter:
    """Gathers frames until they are written together."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size: i64 = 0  # in bytes, without headers

    def add(self, kind: int, number: int, body: bytes) -> None:
        self.add_data(data_prefix(kind, number), body)

    def add_data(self, prefix: bytes, body: bytes) -> None:
        """`add` with a `data_prefix` that was made before."""
        size: i64 = len(body)
        self.size += size
        parts = self.parts
        parts.append(prefix)
        parts.append(number_bytes(size))
        parts.append(body)

    def add_pieces(self, prefix: bytes, pieces: list[bytes], size: i64) -> None:
        """`add_data` of a body in pieces."""
        self.size += size
        parts = self.parts
        parts.append(prefix)
        parts.append(number_bytes(size))
        parts += pieces

    def take(self) -> list[bytes]:
        """Everything gathered; the parts of many small frames are joined."""
        parts = self.parts
        large = self.size > 4096 * len(parts)
        self.parts = []
        self.size = 0
        return parts if large else [b"".join(parts)]

    def write_to(self, transport: Any) -> None:
        """Write everything gathered, if there is something."""
        if self.parts:
            parts = self.take()
            if len(parts) == 1:
                transport.write(parts[0])
            else:
                transport.writelines(parts)


def data_prefix(kind: int, number: i64) -> bytes:
    """The first bytes of frames of one kind for one client."""
    return kind.to_bytes(1, "big") + number_bytes(number)
