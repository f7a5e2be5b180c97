"""A CONNECT that has no CONNACK yet."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mqttbroker.codec.packets import Connect
from mqttbroker.core.access.policy import Identity
from mqttbroker.core.client.connection import Connection
from sessions.journal import Gate
from sessions.session import Session


class ConnectFlow:
    """The steps of a CONNECT that has waited."""

    @abstractmethod
    def authenticated(self, pending: PendingConnect, identity: Identity) -> None:
        """The authenticator has accepted the client."""

    @abstractmethod
    def loaded(self, pending: PendingConnect) -> None:
        """The store has done all that the CONNECT waits for, or a commit has failed."""

    @abstractmethod
    def refuse(self, connection: Connection, reason_code: int, detail: str, username: str | None = None) -> None:
        """Answer a CONNECT with an error and close the connection [MQTT-3.2.2-7].

        ``username`` is what the client claims to be, for the log.
        """


class PendingConnect(Gate):
    """A CONNECT that waits for the authenticator or the store.

    As a gate it waits for the session's first page, for the commit that deletes the discarded session of its client id, and in
    a cluster for the commit that stores its will.
    """

    def __init__(self, flow: ConnectFlow, connection: Connection, packet: Connect) -> None:
        super().__init__()
        self.flow = flow
        self.connection = connection
        self.packet = packet
        self.session: Session | None = None
        self.session_present = False
        self.size = 0  # memory of the packet in bytes
        self.keep_alive = packet.keep_alive  # seconds, as granted
        self.authentication_data: bytes | None = None  # for the CONNACK
        self.certificate: Any = None  # the client's, if its client id must be a name in it

    def opened(self) -> None:
        self.flow.loaded(self)
