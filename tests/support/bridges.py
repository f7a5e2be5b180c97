"""Configurations with a bridge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from support.broker_process import to_toml


def bridge_config(address: int | Sequence[str], topics: Sequence[Mapping[str, Any]], broker: Mapping[str, Any] = {}, **options: Any) -> str:
    """A configuration with the bridge "there" to a port of this machine, or to addresses; it reconnects quickly."""
    addresses = [f"mqtt://127.0.0.1:{address}"] if isinstance(address, int) else list(address)
    bridge = {"name": "there", "addresses": addresses, "reconnect_first": "20ms", "reconnect_longest": "100ms", **options}
    return to_toml({**broker, "bridges": [{**bridge, "topics": list(topics)}]})
