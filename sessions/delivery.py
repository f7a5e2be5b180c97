"""The delivery: one message on its way to one client, at QoS 1 or 2.

The rule kept here: a delivery knows its owner and the outlet only by what it
asks of them, so that the session can be built on it and not around it.
"""

from __future__ import annotations

from typing import Optional, Tuple

from mypy_extensions import mypyc_attr

from sessions.backpressure import PausablePublisher
from sessions.journal import RELEASING, STORED, STORING, Entry
from sessions.message import Message


class ClientConnection(PausablePublisher):
    """Where a session's packets go: the client's connection.

    This one goes nowhere.  ``version`` is the protocol level of the client.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 4
        # False while what was sent before still waits to leave; QoS 1 and 2 wait with it.
        self.ready = True

    def send_entry(self, entry: "Delivery", duplicate: bool) -> None:
        """Send the PUBLISH of an entry that has its packet id."""

    def send_pubrel(self, packet_id: int) -> None:
        """Send the PUBREL of a QoS 2 delivery."""

    def disconnect(self, reason_code: int, detail: str) -> None:
        """End the connection, telling the client why where its version can."""


class Owner:
    """The session a delivery belongs to; this one belongs to nobody."""

    def publish_stored(self, entry: "Delivery") -> None:
        """The packet id of a QoS 2 delivery is on disk: its PUBLISH may leave."""

    def release_stored(self, entry: "Delivery") -> None:
        """The client's PUBREC is on disk: the PUBREL may leave."""

    def entry_refused(self, entry: "Delivery") -> None:
        """The store could not keep an entry."""

    def abandon(self, entry: "Delivery") -> None:
        """End a delivery that its client cannot take."""


@mypyc_attr(acyclic=True)
class Delivery(Entry):
    """An entry in the hands of its session."""

    def __init__(
        self,
        session: Owner,
        session_id: int,
        message: Message,
        qos: int,
        retain: bool,
        subscription_ids: bytes,
    ) -> None:
        super().__init__(session_id, message, qos, retain, subscription_ids)
        self.session = session
        # The shared subscription it came by, opaque here; None if it came by its own, or is
        # read back from the store.
        self.group: Optional[object] = None

    def committed(self) -> None:
        """Move on from the two phases that wait for the disk."""
        if self.disk == STORED:
            if self.phase == STORING:
                self.session.publish_stored(self)
            elif self.phase == RELEASING:
                self.session.release_stored(self)

    def refused(self) -> None:
        self.session.entry_refused(self)


def delivery_from_row(session: Owner, session_id: int, row: Tuple[object, ...]) -> Delivery:
    """A page's row (`sessions.write_set.Page`) as the delivery it was."""
    (
        seq,
        qos,
        retain,
        subscription_ids,
        packet_id,
        phase,
        message_id,
        shared,
        topic,
        payload,
        message_qos,
        message_retain,
        properties,
        publisher,
        timestamp,
        expires_at,
        _,
    ) = row
    assert isinstance(topic, str) and isinstance(payload, bytes) and isinstance(publisher, str)
    assert isinstance(properties, bytes) and isinstance(subscription_ids, bytes)
    assert isinstance(seq, int) and isinstance(packet_id, int) and isinstance(phase, int)
    assert isinstance(qos, int) and isinstance(message_qos, int) and isinstance(message_id, int)
    assert isinstance(timestamp, int) and isinstance(expires_at, int)
    message = Message(
        topic,
        payload,
        message_qos,
        bool(message_retain),
        properties,
        publisher,
        timestamp,
        expires_at,
    )
    message.id = message_id
    entry = Delivery(session, session_id, message, qos, bool(retain), subscription_ids)
    entry.seq = seq
    entry.packet_id = packet_id
    entry.phase = phase
    entry.shared = bool(shared)
    entry.disk = STORED
    return entry
