"""A CONNECT that has no CONNACK yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqttbroker.codec.packets import Connect
from mqttbroker.core.client.connection import Connection
from sessions.journal import Gate
from sessions.session import Session


class PendingConnect(Gate):
    """A CONNECT that waits for the authenticator or the store.

    As a gate it waits for the commit that deletes the discarded session of its client id, and in a cluster stores its will;
    then `on_opened` is called.
    """

    def __init__(self, connection: Connection, packet: Connect, on_opened: Callable[[PendingConnect], None]) -> None:
        super().__init__()
        self.connection = connection
        self.packet = packet
        self.on_opened = on_opened
        self.session: Session | None = None
        self.session_present = False
        self.size = 0  # memory of the packet in bytes
        self.keep_alive = packet.keep_alive  # seconds, as granted
        self.authentication_data: bytes | None = None  # for the CONNACK
        self.certificate: Any = None  # the client's, if its client id must be a name in it

    def opened(self) -> None:
        self.on_opened(self)
