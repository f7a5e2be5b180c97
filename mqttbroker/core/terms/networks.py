"""Addresses of clients, and the networks by which they are limited and banned."""

from __future__ import annotations

import ipaddress
from typing import Any


def address_of(peer: str) -> Any:
    """The address of a peer with a port, as an object of `ipaddress`; an IPv4-mapped one as IPv4. None for a Unix
    socket."""
    host = peer.rpartition(":")[0]
    try:
        address: Any = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if address.version == 6 and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def network_text(address: Any, prefix: int) -> str:
    """The network of an address: with its prefix length, unless it is the address alone."""
    if prefix == address.max_prefixlen:
        return str(address)
    return str(ipaddress.ip_network((address, prefix), strict=False))


class Networks:
    """Which addresses count as one: those with the same first ``ipv4_prefix`` or ``ipv6_prefix`` bits."""

    def __init__(self, ipv4_prefix: int = 32, ipv6_prefix: int = 64) -> None:
        self.ipv4_prefix = ipv4_prefix
        self.ipv6_prefix = ipv6_prefix

    def of(self, peer: str) -> str:
        """The network of a peer with a port; "" for a Unix socket."""
        if self.ipv4_prefix == 32:
            host = peer.rpartition(":")[0]
            if ":" not in host:  # the usual case; `ipaddress` takes a quarter of a CONNECT's time
                return host if host[:1].isdigit() else ""
        address = address_of(peer)
        if address is None:
            return ""
        return network_text(address, self.ipv4_prefix if address.version == 4 else self.ipv6_prefix)
