"""A client connection that discards everything it is sent."""

from __future__ import annotations

from sessions.counters import Drops
from sessions.delivery import ClientConnection, Delivery


class NullConnection(ClientConnection):
    def send_entry(self, entry: Delivery, duplicate: bool) -> None:
        pass

    def send_pubrel(self, packet_id: int) -> None:
        pass

    def drops(self) -> Drops:
        return Drops()

    def disconnect(self, reason_code: int, detail: str) -> None:
        pass

    def resume_reading(self) -> None:
        pass
