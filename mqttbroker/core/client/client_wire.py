"""The wire as the core and the flush see it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mypy_extensions import mypyc_attr

from mqttbroker.core.access.policy import AuthenticationPolicy


@mypyc_attr(allow_interpreted_subclasses=True)
class ClientWire:
    """Owns the socket of one client; `mqttbroker.net.wire.Wire`."""

    def __init__(self) -> None:
        self.remote = False  # the client never counts as one of this machine

    @property
    @abstractmethod
    def worker(self) -> int:
        """The number of the connection worker that has the socket; 0 = it is in this process."""

    @property
    @abstractmethod
    def certificate(self) -> Any:
        """The client's verified certificate as from `ssl.SSLSocket.getpeercert`; None or empty if it has none."""

    @property
    @abstractmethod
    def loud(self) -> bool:
        """Whether the client is not read because it has had its share."""

    @abstractmethod
    def admit(self) -> AuthenticationPolicy:
        """The client sent CONNECT: count it at its listener, and return the policy that authenticates it.

        Raises MQTTError if the listener's limits or the lists of revoked certificates refuse it.
        """

    @abstractmethod
    def abort_if_client_left(self) -> bool:
        """Whether the client has given up its CONNECT, which waits for an answer; if so, close the connection."""

    @abstractmethod
    def resume_sending_in(self, seconds: float) -> None:
        """Have `Connection.resume_sending` called when the client's rate permits more."""

    @abstractmethod
    def flush(self) -> None:
        """Write the outbox, and have reading that was paused continue."""

    @abstractmethod
    def resume_reading(self) -> None:
        """Continue with reading that was paused, if nothing else prevents it."""

    @abstractmethod
    def failed(self) -> None:
        """End the connection: a defect of the broker was met while it was served. To be called in an ``except`` block."""
