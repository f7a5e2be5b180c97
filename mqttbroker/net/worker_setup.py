"""The values that the broker and a connection worker exchange, other than clients' bytes.

Those for a worker are pickled: it trusts the broker. Those from a worker are JSON, because a worker handles the bytes
of unknown clients.
"""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any, NamedTuple, Optional

from mqttbroker.config.settings import Listener
from mqttbroker.net.revocation import verified_chain


class ListenerSetup(NamedTuple):
    """A listener as a worker serves it. ``descriptors`` are those of its listening sockets; sizes are in bytes.
    ``version`` counts the reloads of its certificates."""

    listener: Listener
    descriptors: tuple[int, ...]
    version: int
    connect_timeout: float
    max_packet_size: int
    max_connect_size: int


class WorkerSetup(NamedTuple):
    """Everything that a worker needs to serve its listeners."""

    listeners: tuple[ListenerSetup, ...]
    log_level: str
    log_format: str

    def encode(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def decode(data: bytes) -> WorkerSetup:
        setup: WorkerSetup = pickle.loads(data)
        return setup


class Opened(NamedTuple):
    """An accepted connection: the index of its listener, the client's address, and its `ProxiedPeer`."""

    listener: int
    address: str
    proxied: bool = False
    remote: bool = False
    common_name: Optional[str] = None

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Opened:
        return Opened(*json.loads(data))


class Secured(NamedTuple):
    """A finished TLS handshake: the client's certificate as `ssl.SSLSocket.getpeercert` gives it, and in DER with those
    of its authorities."""

    version: int
    session_reused: bool
    certificate: Optional[dict[str, Any]]
    chain: tuple[bytes, ...]
    der: Optional[bytes]

    @staticmethod
    def of(ssl_object: Any, version: int) -> Secured:
        der = ssl_object.getpeercert(True)
        if der is None:
            return Secured(version, ssl_object.session_reused, None, (), None)
        chain = tuple(verified_chain(ssl_object))
        return Secured(version, ssl_object.session_reused, ssl_object.getpeercert(), chain, der)

    def encode(self) -> bytes:
        chain = [base64.b64encode(one).decode() for one in self.chain]
        der = None if self.der is None else base64.b64encode(self.der).decode()
        return json.dumps((self.version, self.session_reused, self.certificate, chain, der)).encode()

    @staticmethod
    def decode(data: bytes) -> Secured:
        version, session_reused, certificate, chain, der = json.loads(data)
        return Secured(
            version,
            session_reused,
            None if certificate is None else {key: _tuples(value) for key, value in certificate.items()},
            tuple(map(base64.b64decode, chain)),
            None if der is None else base64.b64decode(der),
        )


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
        return Failed(*json.loads(data))


class Status(NamedTuple):
    """The load of a worker: CPU time since its start in seconds, and resident memory in bytes."""

    cpu_seconds: float
    resident_bytes: int

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Status:
        return Status(*json.loads(data))
