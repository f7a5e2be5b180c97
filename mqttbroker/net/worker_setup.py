"""The values that the broker and a connection worker exchange, other than clients' bytes.

Values for a worker are pickled: it trusts the broker. Values from a worker are JSON, because a worker handles the bytes
of unknown clients. A message that no honest worker sends raises LinkError.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mqttbroker.config.settings import Listener, Log
from mqttbroker.net.link_address import LinkAddress
from mqttbroker.net.link_frames import LinkError
from mqttbroker.net.verified_chain import verified_chain

T = TypeVar("T")

NUMBER, TEXT, FLAG, TEXT_OR_NONE = (int,), (str,), (bool,), (str, type(None))
MAX_CPU_SECONDS = 1e12
# The limits of clients that a worker holds.
HELD_LIMITS = {"max_half_open", "max_half_open_per_address", "max_total_incomplete_bytes", "max_total_connect_bytes"}
MAX_JSON = 65_536  # bytes from a worker, other than certificates


def from_worker(decode: Callable[[bytes], T], body: bytes) -> T:
    """The decoded body of a frame from a worker."""
    try:
        return decode(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise LinkError(f"{decode.__qualname__}: {error}") from None


def _json(body: bytes, *kinds: tuple[type, ...]) -> list[Any]:
    """A list of values in JSON, each of one of its types."""
    if len(body) > MAX_JSON:
        raise ValueError(f"{len(body)} bytes")
    return _typed(json.loads(body), kinds)


def _typed(values: Any, kinds: tuple[tuple[type, ...], ...]) -> list[Any]:
    if not isinstance(values, list) or len(values) != len(kinds):
        raise ValueError(f"not a list of {len(kinds)}")
    for value, types in zip(values, kinds):
        if type(value) not in types:
            raise ValueError(f"a value of type {type(value).__name__}")
    return values


def decode_problems(body: bytes) -> list[str]:
    """The problems that keep a worker from listening, or from a reload."""
    found = json.loads(body)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("not a list of texts")
    return found


def listener_index(body: bytes) -> int:
    """The index of the listener at which a handshake begins."""
    return int(_json(b"[%s]" % body, NUMBER)[0])


class ListenerSetup(NamedTuple):
    """A listener as a worker serves it. ``descriptors`` are those of its listening sockets; sizes are in bytes.
    ``version`` counts the reloads of its certificates. ``max_half_open`` and ``max_half_open_per_address`` (0 = none) are
    for a worker that holds clients by itself. ``prefixes`` are the bits of an IPv4 and an IPv6 address that it counts by.
    """

    listener: Listener
    descriptors: tuple[int, ...]
    version: int
    connect_timeout: float
    max_packet_size: int
    max_connect_size: int
    max_half_open: int = 0
    max_half_open_per_address: int = 0
    prefixes: tuple[int, int] = (32, 64)


class FrontSetup(NamedTuple):
    """The setup of a worker of a cluster's node, beside its listeners.

    ``hello`` are the fields of `Hello`, the first line of each link to a core, without ``kind`` and ``shard``;
    ``link_files`` cafile, certfile and keyfile of its TLS. The cores of this node listen at ``host`` from ``port`` + 1 on. A client
    waits ``patience`` seconds for the core of its client id. This worker holds no more than ``max_half_open`` clients
    without a CONNECT, ``max_incomplete_bytes`` of unfinished and ``max_connect_bytes`` of waiting CONNECTs.
    """

    hello: dict[str, Any]
    link_files: tuple[Path | None, Path | None, Path | None]
    host: str
    port: int
    patience: float
    max_half_open: int
    max_incomplete_bytes: int
    max_connect_bytes: int


class Directory(NamedTuple):
    """The number of shards of a cluster, and where workers have links to the core that owns each shard, as far as it is known."""

    shards: int
    owners: dict[int, LinkAddress]

    def encode(self) -> bytes:
        return json.dumps({"shards": self.shards, "owners": self.owners}).encode()

    @staticmethod
    def decode(data: bytes) -> Directory:
        found = json.loads(data)
        return Directory(int(found["shards"]), {int(shard): LinkAddress(*one) for shard, one in found["owners"].items()})


def listener_name(index: int, listener: Listener) -> str:
    """The name of a listener that is the same on all nodes of a cluster, whose addresses differ: "tls-2" is the second one
    of the settings."""
    return f"{listener.type}-{index + 1}"


class WorkerSetup(NamedTuple):
    """Everything that a worker needs to serve its listeners. ``front`` is None without a cluster."""

    listeners: tuple[ListenerSetup, ...]
    log: Log
    front: FrontSetup | None = None

    def encode(self) -> bytes:
        import pickle  # 0.3 MB that a broker without workers need not

        return pickle.dumps(self)

    @staticmethod
    def decode(data: bytes) -> WorkerSetup:
        import pickle

        setup: WorkerSetup = pickle.loads(data)
        return setup


class Opened(NamedTuple):
    """An accepted connection: the index of its listener, the client's address, and its `ProxiedPeer`."""

    listener: int
    address: str
    proxied: bool = False
    remote: bool = False
    common_name: str | None = None

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Opened:
        return Opened(*_json(data, NUMBER, TEXT, FLAG, FLAG, TEXT_OR_NONE))


class Secured(NamedTuple):
    """A finished TLS handshake: the client's certificate as `ssl.SSLSocket.getpeercert` gives it, and in DER with those
    of its authorities."""

    version: int
    session_reused: bool
    certificate: dict[str, Any] | None
    chain: tuple[bytes, ...]
    der: bytes | None

    @staticmethod
    def of(ssl_object: Any, version: int) -> Secured:
        der = ssl_object.getpeercert(True)
        if der is None:
            return Secured(version, ssl_object.session_reused, None, (), None)
        chain = tuple(verified_chain(ssl_object))
        return Secured(version, ssl_object.session_reused, ssl_object.getpeercert(), chain, der)

    def encode(self) -> bytes:
        return json.dumps(self.values()).encode()

    def values(self) -> tuple[Any, ...]:
        """As values of JSON."""
        chain = [base64.b64encode(one).decode() for one in self.chain]
        der = None if self.der is None else base64.b64encode(self.der).decode()
        return self.version, self.session_reused, self.certificate, chain, der

    @staticmethod
    def decode(data: bytes) -> Secured:
        return Secured.of_values(json.loads(data))

    @staticmethod
    def of_values(values: Any) -> Secured:
        """Raises ValueError for what `values` does not return."""
        version, session_reused, certificate, chain, der = _typed(values, (NUMBER, FLAG, (dict, type(None)), (list,), TEXT_OR_NONE))
        if certificate is not None and not _is_certificate(certificate):
            raise ValueError("names of a certificate that are no names")
        return Secured(
            version,
            session_reused,
            None if certificate is None else {key: _tuples(value) for key, value in certificate.items()},
            tuple(map(base64.b64decode, chain)),
            None if der is None else base64.b64decode(der),
        )


class Joined(NamedTuple):
    """A client of a cluster whose first packet is there: the name of its listener, its address, its `ProxiedPeer`, and its
    TLS handshake if there was one. ``secured.version`` counts reloads in the worker's node."""

    listener: str
    address: str
    proxied: bool
    remote: bool
    common_name: str | None
    secured: Secured | None

    def encode(self) -> bytes:
        secured = None if self.secured is None else self.secured.values()
        return json.dumps((*self[:5], secured)).encode()

    @staticmethod
    def decode(data: bytes) -> Joined:
        listener, address, proxied, remote, common_name, secured = _typed(
            json.loads(data), (TEXT, TEXT, FLAG, FLAG, TEXT_OR_NONE, (list, type(None)))
        )
        tls = None if secured is None else Secured.of_values(secured)
        return Joined(listener, address, proxied, remote, common_name, tls)


def _is_certificate(certificate: dict[str, Any]) -> bool:
    """Whether the names of the client are as the ssl module has them."""
    subject, others = certificate.get("subject", []), certificate.get("subjectAltName", [])
    if not isinstance(subject, list) or not all(isinstance(relative, list) for relative in subject):
        return False
    pairs = [*(pair for relative in subject for pair in relative), *(others if isinstance(others, list) else [None])]
    return all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
        and (isinstance(pair[1], str) or pair[0] == "DirName" and isinstance(pair[1], list))
        for pair in pairs
    )  # fmt: skip


def _tuples(value: Any) -> Any:
    """Lists as tuples, as the ssl module has them."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Failed(NamedTuple):
    """A connection that got no client: the index of its listener, its address, and whether the PROXY header or the TLS
    handshake failed."""

    listener: int
    address: str
    header: bool
    reason: str

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Failed:
        return Failed(*_json(data, NUMBER, TEXT, FLAG, TEXT))


class Holds(NamedTuple):
    """The sockets of a cluster's worker, how many of them have no core, and what it has counted since the last time: closed
    for want of a socket, closed for newer ones, WebSocket handshakes that failed, limits that were reached by name."""

    clients: int
    waiting: int
    refused: int
    evicted: int
    websocket_failures: int
    limits: dict[str, int]

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Holds:
        *numbers, limits = _json(data, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, (dict,))
        counts = [*numbers, *limits.values()]
        if any(type(one) is not int or one < 0 for one in counts) or not set(limits) <= HELD_LIMITS:
            raise ValueError("counts that no worker has")
        clients, waiting, refused, evicted, failures = numbers
        return Holds(clients, waiting, refused, evicted, failures, limits)


def decode_status(body: bytes) -> float:
    """The CPU time of a worker since its start in seconds."""
    seconds = float(_json(b"[%s]" % body, (int, float))[0])
    if not 0 <= seconds < MAX_CPU_SECONDS:
        raise ValueError(f"{seconds} s are not possible")
    return seconds
