"""A delivery: one message on its way to one client at QoS 1 or 2, and the two interfaces that it needs.

`DeliveryOwner` is implemented by `sessions.deliveries.Deliveries`, `ClientConnection` by the broker's connections.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from mypy_extensions import mypyc_attr

from sessions.backpressure import PausablePublisher
from sessions.counters import Drops
from sessions.journal import RELEASING, STORED, STORING, Entry
from sessions.message import Message
from sessions.rows import PageRow

ENTRY_BYTES: Final = 400  # memory of a message and its delivery, as measured, beside `Message.size`


@mypyc_attr(allow_interpreted_subclasses=True)
class ClientConnection(PausablePublisher):
    """The connection of a session's client. ``version`` is the protocol level of the client."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 4
        self.ready = True  # False while QoS 1 and 2 PUBLISHes must wait for the socket or a rate
        self.has_send_rate = False  # its queue is long because the operator limits it, not because the client is slow

    @abstractmethod
    def send_entry(self, entry: Delivery, duplicate: bool) -> None:
        """Send the PUBLISH of a delivery that has its packet id."""

    @abstractmethod
    def send_pubrel(self, packet_id: int) -> None:
        """Send a PUBREL."""

    @abstractmethod
    def drops(self) -> Drops:
        """The counters of the messages dropped for clients of the same listener."""

    @abstractmethod
    def disconnect(self, reason_code: int, detail: str) -> None:
        """Close the connection, after a DISCONNECT if the protocol level has one for servers."""


class DeliveryOwner:
    """The deliveries of the session to which a delivery belongs."""

    @abstractmethod
    def publish_stored(self, entry: Delivery) -> None:
        """The message is on disk, and at QoS 2 its packet id: the PUBLISH may be sent."""

    @abstractmethod
    def release_stored(self, entry: Delivery) -> None:
        """The client's PUBREC is on disk: the PUBREL may be sent."""

    @abstractmethod
    def entry_refused(self, entry: Delivery) -> None:
        """The store failed to write the entry."""

    @abstractmethod
    def abandon(self, entry: Delivery) -> None:
        """End a delivery whose PUBLISH is too large for the client [MQTT-3.1.2-25]."""


@mypyc_attr(acyclic=True)
class Delivery(Entry):
    """An entry and its owner."""

    def __init__(
        self,
        owner: DeliveryOwner,
        session_id: int,
        message: Message,
        qos: int,
        retain: bool,
        subscription_ids: bytes,
    ) -> None:
        super().__init__(session_id, message, qos, retain, subscription_ids)
        self.owner = owner
        # The shared subscription, opaque here; None without one, and for entries read from the store.
        self.group: object | None = None

    def committed(self) -> None:
        """The last change is on disk: leave the phases `STORING` and `RELEASING`."""
        if self.disk == STORED:
            if self.phase == STORING:
                self.owner.publish_stored(self)
            elif self.phase == RELEASING:
                self.owner.release_stored(self)

    def refused(self) -> None:
        self.owner.entry_refused(self)


def delivery_from_row(owner: DeliveryOwner, session_id: int, row: PageRow) -> Delivery:
    """The delivery that was stored as `row`."""
    message = Message(
        row.topic,
        row.payload,
        row.message_qos,
        row.message_retain != 0,
        row.properties,
        row.publisher,
        row.timestamp,
        row.expires_at,
    )
    message.id = row.message_id
    entry = Delivery(owner, session_id, message, row.qos, row.retain != 0, row.subscription_ids)
    entry.seq = row.seq
    entry.packet_id = row.packet_id
    entry.phase = row.state
    entry.shared = row.shared != 0
    entry.disk = STORED
    return entry
