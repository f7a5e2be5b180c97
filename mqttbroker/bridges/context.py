"""Values that bridges share with the rest of the broker. A broker without bridges loads no other module of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from mqttbroker.core.broker import Broker
from mqttbroker.net.wire import Endpoint

RULES: Final = "bridges"
"""The name of the access rules of bridges, which may do everything."""

DIRECTORY: Final = "bridges"
"""The directory of their state files, in the data directory."""

LARGEST_PACKET: Final = 268_435_460
"""Bytes of a packet of a bridge, with the fixed header: as many as the protocol allows."""


class BridgeStatus(NamedTuple):
    """A bridge as lists show it. Times are Unix times in seconds, sizes in bytes."""

    name: str
    state: str
    address: str  # of the remote, or of the last one that was tried
    addresses: tuple[str, ...]
    version: str
    client_id: str  # at the remote
    since: float  # when the state began
    reason: str  # why the last link ended or could not be made; "" if none has
    failures: int  # attempts that failed and links that ended, since the bridge began
    connects: int
    messages_out: int
    messages_in: int
    bytes_out: int
    bytes_in: int
    dropped: tuple[tuple[str, int], ...]  # messages by cause
    queued_messages: int
    queued_bytes: int
    refused_filters: tuple[str, ...]  # that the remote does not let the bridge subscribe to
    down_since: float  # when the last link ended, or the bridge began; 0.0 if connected or disabled


class BridgeContext(NamedTuple):
    """The parts and functions of the broker that all its bridges use.

    ``random`` returns a number from 0 to 1; ``publish_state`` takes a topic and the payload of its retained message.
    """

    broker: Broker
    endpoint: Endpoint
    directory: Path
    random: Callable[[], float]
    new_identity: Callable[[], str]
    publish_state: Callable[[str, bytes], None]
    max_packet_size: Callable[[], int]
