"""Sockets of a listener behind a proxy: the PROXY protocol header is read before TLS, WebSocket and MQTT.

Exactly the bytes of the header are read, so that the rest of the stream begins where the client's bytes do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from mqttbroker.core.access.policy import is_loopback
from mqttbroker.net.proxy_protocol import MAX_HEADER, ProxyHeader, ProxyHeaderError
from mqttbroker.net.wire import peer_text


class ProxiedPeer(NamedTuple):
    """The peer behind a proxy. ``remote``: it never counts as loopback, because its address is unknown, or because the
    proxy that sends it is on another machine. ``common_name``: that of the certificate that the proxy has verified."""

    address: str
    remote: bool
    common_name: str | None


class ProxiedSockets:
    """Reads the headers of accepted sockets. ``sources``: the networks that may send one; empty = all."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = [ipaddress.ip_network(source) for source in sources]

    async def read_header(self, sock: socket.socket, address: Any) -> ProxiedPeer:
        """The peer behind a socket that was accepted from ``address``. Raises `ProxyHeaderError` and OSError."""
        proxy = peer_text(address)
        if self._sources and not self._may_send(address):
            raise ProxyHeaderError("not from proxy_sources")
        header = ProxyHeader()
        while not header.complete:
            try:
                data = sock.recv(MAX_HEADER, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                await _readable(sock)
                continue
            if not data:
                raise ProxyHeaderError("closed by the client")
            sock.recv(header.feed(data))
        if header.source is None:
            return ProxiedPeer(proxy, True, None)
        return ProxiedPeer(header.source, not is_loopback(proxy), header.common_name if self._sources else None)

    def _may_send(self, address: Any) -> bool:
        found = ipaddress.ip_address(address[0].partition("%")[0])
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return any((mapped or found) in network for network in self._sources)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, set_ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
