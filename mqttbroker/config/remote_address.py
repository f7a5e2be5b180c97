"""Addresses of other brokers, as URLs."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import urlsplit

# By scheme of an address: its default port, whether it uses TLS, and whether it uses WebSocket.
_SCHEMES: Final[dict[str, tuple[int, bool, bool]]] = {
    "mqtt": (1883, False, False),
    "mqtts": (8883, True, False),
    "ws": (80, False, True),
    "wss": (443, True, True),
}


class Address(NamedTuple):
    """One address of a remote broker; ``path`` is that of a WebSocket."""

    host: str
    port: int
    tls: bool
    websocket: bool
    path: str

    def __str__(self) -> str:
        scheme = next(each for each, (_, *flags) in _SCHEMES.items() if flags == [self.tls, self.websocket])
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.path}"


def parse_address(text: str) -> Address:
    """The address of a URL; without a scheme it is ``mqtt``. Raises ValueError with the reason."""
    parts = urlsplit(text if "://" in text else f"mqtt://{text}")
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"must begin with mqtt://, mqtts://, ws:// or wss://, got {parts.scheme}://")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not have a user name or password")
    default, tls, websocket = _SCHEMES[parts.scheme]
    try:
        port = default if parts.port is None else parts.port
    except ValueError:
        raise ValueError("the port must be 1–65535") from None
    if not parts.hostname or not 0 < port < 65536:
        raise ValueError("must have a host, and a port of 1–65535")
    if not websocket and (parts.path not in ("", "/") or parts.query) or parts.fragment:
        raise ValueError("must have no path")
    path = parts.path or "/"
    if parts.query:
        path += "?" + parts.query
    return Address(parts.hostname, port, tls, websocket, path if websocket else "")
