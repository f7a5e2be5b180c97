"""Acknowledgements to one client: they leave in order [MQTT-4.6.0-2], each after the commit it depends on.

A packet whose acknowledgement depends on a commit gets an `AckGate`, which the journal opens. Later acknowledgements
of the same connection wait behind it in the `AckQueue`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mypy_extensions import i64

from mqttbroker.codec.packets import encode_ack
from mqttbroker.codec.reason_codes import PUBACK, PUBCOMP, PUBREC
from sessions.journal import Gate

if TYPE_CHECKING:
    from mqttbroker.core.client.connection import Connection


class AckGate(Gate):
    """One acknowledgement of one connection; pass it to `AckQueue.submit`.

    ``packet`` is the encoded packet if it is not one of the four short acknowledgements; ``on_sent`` is called after it
    was queued in the outbox.
    """

    def __init__(self, connection: Connection, packet_type: int, packet_id: int) -> None:
        super().__init__()
        self.connection = connection
        self.packet_type = packet_type
        self.packet_id = packet_id
        # Whether the client may use the packet id again after this acknowledgement.
        self.ends_exchange = packet_type == PUBACK or packet_type == PUBCOMP
        self.reason_code = 0
        self.packet: bytes | None = None
        self.on_sent: Any = None
        self.next: AckGate | None = None  # in the queue

    def opened(self) -> None:
        """Send this acknowledgement and those behind it, as far as they are open."""
        session = self.connection.session
        if self.failed and self.packet_type == PUBREC and session is not None:
            # The message was not stored. When the client sends it again, it is no duplicate, even if the client
            # reconnects without having received the refusal.
            session.forget_received(self.packet_id)
        self.connection.acks.send_open(self.connection)

    def send(self) -> None:
        connection = self.connection
        if self.failed:
            self._refuse()
            return
        if self.packet is not None:
            connection.send(self.packet)
        elif self.reason_code == 0:
            connection.send_ack(self.packet_type, self.packet_id)
        else:
            connection.send(encode_ack(self.packet_type, self.packet_id, self.reason_code, connection.version))
        if connection.outbound.sampled_ack is self:
            outbound = connection.outbound
            outbound.sampled_ack = None
            if outbound.on_ack_sample is not None:
                outbound.on_ack_sample(outbound.clock.monotonic - outbound.ack_sampled_from)
        if self.on_sent is not None:
            self.on_sent()

    def _refuse(self) -> None:
        """Never acknowledge a failed write."""
        connection = self.connection
        reason_code = connection.outbound.store_failure
        if connection.version >= 5 and (self.packet_type == PUBACK or self.packet_type == PUBREC):
            connection.send(encode_ack(self.packet_type, self.packet_id, reason_code, connection.version))
        else:
            # The operation stays in the journal and is retried; the client asks again when it reconnects.
            connection.disconnect(reason_code, "the store failed")


class AckQueue:
    """The acknowledgements of one connection that cannot be sent yet, in order."""

    def __init__(self) -> None:
        self.length: i64 = 0
        self.unfinished: i64 = 0  # PUBACKs and PUBCOMPs among them: exchanges that count towards Receive Maximum
        self.awaited = False  # a PUBLISH is not handled before one of them has left
        self._first: AckGate | None = None
        self._last: AckGate | None = None

    def submit(self, gate: AckGate) -> None:
        """Send an acknowledgement, now or when it is open and those before it were sent."""
        if gate.pending == 0 and self.length == 0:
            gate.send()
            return
        outbound = gate.connection.outbound
        if outbound.ack_sample_wanted:
            outbound.ack_sample_wanted = False
            outbound.sampled_ack = gate
            outbound.ack_sampled_from = outbound.clock.monotonic
        if self._last is None:
            self._first = gate
        else:
            self._last.next = gate
        self._last = gate
        self.length += 1
        if gate.ends_exchange:
            self.unfinished += 1

    def send_open(self, connection: Connection) -> None:
        """Send the acknowledgements that are open and have none before them that is not."""
        if self.length > connection.outbound.max_acks:
            connection.request_flush()  # the client may be read again
        while self.length and not connection.closed:
            gate = self._first
            if gate is None or gate.pending > 0:
                return
            self._first = gate.next
            if self._first is None:
                self._last = None
            gate.next = None
            self.length -= 1
            if gate.ends_exchange:
                self.unfinished -= 1
            if self.awaited:
                self.awaited = False
                connection.request_flush()  # the client may be read again
            gate.send()

    def clear(self) -> None:
        """Discard all: the connection is closed."""
        gate = self._first
        while gate is not None:
            following = gate.next
            gate.next = None
            gate = following
        self._first = self._last = None
        self.length = self.unfinished = 0
        self.awaited = False
