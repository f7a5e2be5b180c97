"""The memory of all incomplete packets.

Beyond the limit, the client whose packet began first is disconnected: it has had the most time to send the rest.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from mqttbroker.codec.reason_codes import QUOTA_EXCEEDED

if TYPE_CHECKING:
    from mqttbroker.core.client.connection import Connection

COUNTED: Final = 4096  # bytes; shorter ones are not counted


class PacketBuffer:
    """Holds an incomplete packet."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.counted: i64 = 0  # its bytes in `IncompletePackets.size`

    @abstractmethod
    def discard(self) -> None:
        """Free the packet: its client is disconnected."""


class IncompletePackets:
    """All incomplete packets of at least `COUNTED` bytes, the one that began first in front."""

    def __init__(self, maximum: int) -> None:
        self.maximum: i64 = maximum
        self.size: i64 = 0
        self._buffers: dict[Connection, PacketBuffer] = {}

    def count(self, buffer: PacketBuffer, size: i64) -> None:
        """The packet in ``buffer`` has ``size`` bytes now; 0 if there is none."""
        if size < COUNTED:
            size = 0
        connection = buffer.connection
        if size == buffer.counted:
            return
        self.size += size - buffer.counted
        buffer.counted = size
        if size == 0:
            self._buffers.pop(connection, None)
            return
        self._buffers[connection] = buffer
        while self.size > self.maximum and len(self._buffers) > 1:
            for oldest in self._buffers:
                break
            self.forget(oldest)
            connection.outbound.counters.limit_reached("max_total_incomplete_bytes")
            oldest.disconnect(QUOTA_EXCEEDED, "too many unfinished packets")

    def forget(self, connection: Connection) -> None:
        """Free the incomplete packet of a connection that is closed."""
        buffer = self._buffers.pop(connection, None)
        if buffer is not None:
            self.size -= buffer.counted
            buffer.counted = 0
            buffer.discard()
