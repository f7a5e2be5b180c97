"""The delivery of one message to the targets of a route, in parts if there are very many.

While a message is being delivered in parts, no other one is: so the queue entries of one message are in one commit, and
a commit waits for one such message at most. Clients whose next message has as many targets wait for their turn, with
that message unread.
"""

from __future__ import annotations

from collections import deque
from typing import Final, cast

from mqttbroker.core.client.connection import Connection
from mqttbroker.core.client.outgoing import Outgoing
from mqttbroker.core.delivery.turns import LongWork, Turns
from mqttbroker.core.routing.groups import Group, Target
from sessions.journal import Gate, Journal
from sessions.session import Session

TARGETS_PER_WORK: Final = 4  # deliveries in a unit of work


def deliver(
    target: Target,
    outgoing: Outgoing,
    gate: Gate | None,
    publisher: Session | None,
    group: Group | None = None,
) -> None:
    """Hand a message to one recipient; ``publisher`` is paused if its queue is above the high watermark."""
    message = outgoing.message
    session = target.session
    qos: int = message.qos
    if target.qos < qos:
        qos = target.qos
    retain: bool = message.retain and target.retain_as_published
    if qos == 0:
        connection = session.connection
        if connection is not None:
            cast(Connection, connection).send_at_most_once(outgoing, retain, target.subscription_ids)
        elif session.remote:
            session.deliveries.drops().slow_subscriber += 1
        return
    if session.ended:  # its subscriptions are being removed
        return
    deliveries = session.deliveries
    entry = deliveries.offer(message, qos, retain, target.subscription_ids, gate, group)
    if entry is not None:
        cast(Connection, session.connection).send_delivery(entry, outgoing, False)
    elif publisher is not None and deliveries.above_high_watermark:
        deliveries.pause_publisher(publisher.deliveries)


class FanOut(LongWork):
    """At most one message at a time, on its way to very many targets.

    The journal is held until its last entry is in the batch, and ``gate`` stays closed until then.
    """

    def __init__(self, journal: Journal, turns: Turns) -> None:
        self._journal = journal
        self._turns = turns
        self._outgoing: Outgoing | None = None  # None if there is no message
        self._targets: list[Target] = []
        self._next = 0  # index of the next target
        self._publisher: Session | None = None
        self._client_id = ""
        self._gate: Gate | None = None
        self._connection: Connection | None = None  # that of the publisher, which is not read
        self._waiting: deque[Connection] = deque()

    @property
    def done(self) -> bool:
        return self._outgoing is None

    def begin(self, outgoing: Outgoing, targets: list[Target], publisher: Session | None, gate: Gate | None) -> None:
        """Start to deliver a message; only if `done`. No packet of the publisher is handled until the end."""
        self._outgoing = outgoing
        self._targets = targets
        self._next = 0
        self._publisher = publisher
        self._client_id = "" if publisher is None else publisher.client_id
        self._gate = gate
        if gate is not None:
            gate.pending += 1
        self._journal.held = outgoing.message.qos > 0
        if publisher is not None and publisher.connection is not None:
            self._stop_reading(cast(Connection, publisher.connection))
        self._turns.add(self)

    def wait(self, connection: Connection) -> None:
        """Handle no packet of this client until the message that is being delivered has reached all its targets."""
        connection.wait_for_turn()
        self._waiting.append(connection)

    def accepted(self, connection: Connection) -> None:
        """A client was accepted: its next message must not overtake one of an earlier connection."""
        if self._outgoing is not None and self._client_id == connection.client_id:
            self._stop_reading(connection)

    def _stop_reading(self, connection: Connection) -> None:
        self._connection = connection
        connection.wait_for_turn()

    def step(self, budget: int) -> int:
        outgoing = self._outgoing
        if outgoing is None:
            return 0
        targets = self._targets
        publisher = self._publisher
        gate = self._gate
        start: int = self._next
        end: int = min(len(targets), start + budget * TARGETS_PER_WORK)
        index: int = start
        while index < end:
            target = targets[index]
            index += 1
            if target.no_local and target.session is publisher:  # [MQTT-3.8.3-3]
                other = target.without_no_local
                if other is None:
                    continue
                target = other
            deliver(target, outgoing, gate, publisher)
        self._next = index
        if index == len(targets):
            self._finish()
        return 1 + (index - start) // TARGETS_PER_WORK

    def _finish(self) -> None:
        gate = self._gate
        connection = self._connection
        self._outgoing = None
        self._targets = []
        self._publisher = None
        self._gate = None
        self._connection = None
        self._journal.held = False
        if gate is not None:
            gate.settle()
        if connection is not None:
            connection.take_turn()
        while self._waiting:
            following = self._waiting.popleft()
            if not following.closed:
                following.take_turn()
                return
