"""A message of a stream in flight to a client: of the message itself only its offset is in memory."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from sessions.readers.partition_offsets import PartitionOffsets

IN_FLIGHT_BYTES: Final = 150  # memory of such a message and of its offset in `PartitionOffsets`


@mypyc_attr(allow_interpreted_subclasses=True)
class InFlightOwner:
    """The reader that sent messages of a stream: each ends in one of these calls."""

    @abstractmethod
    def acknowledged(self, message: StreamInFlight) -> None:
        """PUBACK with success, or the message was too large for the client."""

    @abstractmethod
    def refused(self, message: StreamInFlight, reason_code: int) -> None:
        """PUBACK with a reason code of 0x80 or above."""

    @abstractmethod
    def detached(self, message: StreamInFlight, packet_id: int) -> None:
        """The client has disconnected, or its session has ended, before it acknowledged the message."""


@mypyc_attr(acyclic=True)
class StreamInFlight:
    """A QoS 1 message of a stream, sent and not acknowledged.

    Without an owner, an acknowledgement frees the packet id and nothing else: the message was given to another client.
    """

    def __init__(self, owner: InFlightOwner | None, offsets: PartitionOffsets, offset: int) -> None:
        self.owner = owner
        self.offsets = offsets
        self.offset = offset
