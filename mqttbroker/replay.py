"""Replays: the retained messages that new subscriptions bring, sent while everybody else is served.

The rule kept here: a client is owed each of them once, gets them as fast as it takes
them, and costs a turn of the loop no more than a bounded piece.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional

from mqttbroker.connection import Connection
from mqttbroker.outgoing import NO_BYTES, Outgoing
from mqttbroker.policy import Rules
from mqttbroker.properties import encode_varint
from sessions.message import Message
from sessions.retained import Retained, RetainedScan
from sessions.session import Session, Subscription

# Retained messages sent to one new subscriber before anybody else gets a turn.
REPLAY_MESSAGES: Final = 200


class Replays:
    """All that are under way in one broker."""

    def __init__(self, retained: Retained, rules: Rules) -> None:
        self.retained = retained
        self.rules = rules
        self._active: Dict[Connection, Replay] = {}

    def begin(self, connection: Connection) -> None:
        """Send what the session of a connection still has to see of retained messages."""
        session = connection.session
        if session is None or not session.unseen or connection in self._active:
            return
        replay = Replay(self.retained, self.rules, connection, session)
        if replay.ready:
            replay.step()
        if not replay.done:
            self._active[connection] = replay
            connection.touch()

    def step(self) -> bool:
        """Go on with those whose client takes more, a bounded piece each; true if there is more to do at once."""
        if not self._active:
            return False
        active = self._active
        self._active = {}
        busy = False
        for connection, replay in active.items():
            if replay.ready and replay.step():
                busy = True
            if not replay.done:
                self._active[connection] = replay
        return busy


class Replay:
    """The retained messages that some subscriptions of one session still have to see
    (section 3.3.1.3), sent as fast as the client takes them.

    A subscription leaves ``session.unseen`` when all its messages were sent; a client that
    comes back before that begins with it again.
    """

    def __init__(
        self,
        retained: Retained,
        rules: Rules,
        connection: Connection,
        session: Session,
    ) -> None:
        self.retained = retained
        self.rules = rules
        self.connection = connection
        self.session = session
        self._current: Optional[Subscription] = None
        self._scan: Optional[RetainedScan] = None
        self._held: List[Message] = []  # taken from the scan, and to be sent first

    @property
    def done(self) -> bool:
        return not self.session.unseen or self.session.outlet is not self.connection

    @property
    def ready(self) -> bool:
        """Whether the client keeps up with what it was sent."""
        connection = self.connection
        session = self.session
        return (
            connection.ready
            and not connection.congested
            and len(session.queue) < REPLAY_MESSAGES
            and session.stored_seq == 0
            and not session.paging
            and (session.id != 0 or session.under_way < self._share)
        )

    @property
    def _share(self) -> int:
        """How much a session that keeps nothing may have under way: the rest of its window is for what is live."""
        session = self.session
        most: int = min(session.pass_maximum, session.shelf.limits.max_queued_messages)
        return max(session.send_maximum, most // 2)

    def step(self) -> bool:
        """Send a piece; false if there was nothing to do."""
        session = self.session
        if self.done:
            return False
        subscription = session.unseen[0]
        if subscription.topic_filter not in session.subscriptions:  # not any more
            session.unseen.popleft()
            return True
        scan = self._scan
        if scan is None or subscription is not self._current:
            self._current = subscription
            self._held.clear()
            scan = self.retained.scan(subscription.topic_filter)
            self._scan = scan
        if not self._held:
            self._held = scan.take(REPLAY_MESSAGES, self.connection.outbound.clock.now)
            self._held.reverse()
        before = len(self._held)
        self._send(subscription)
        after = len(self._held)
        if scan.done and not after:
            session.unseen.popleft()
            self._scan = None
        return after < before or not before

    def _send(self, subscription: Subscription) -> None:
        """Send of what is held as much as the client takes."""
        held = self._held
        session = self.session
        connection = self.connection
        restrictive: bool = self.rules.restrictive
        granted: int = subscription.qos
        own: bytes = NO_BYTES
        if subscription.identifier:
            own = b"\x0b" + encode_varint(subscription.identifier)
        ready: bool = self.ready
        while held and ready:
            message = held[-1]
            if session.queued_messages and not session.takes(message.size, session.open):
                return
            held.pop()
            if restrictive and not self.rules.may_read(session, message.topic):
                continue
            if granted == 0 or message.qos == 0:
                connection.send_retained(message, own)
                ready = connection.ready
            else:
                self._offer(message, message.qos if message.qos < granted else granted, own)
                ready = self.ready

    def _offer(self, message: Message, qos: int, own: bytes) -> None:
        """Send a message at QoS 1 or 2, or have the session keep it until it can be sent."""
        connection = self.connection
        outgoing = Outgoing(message.topic.encode("utf-8"), message, connection.outbound.clock.now)
        if connection.send_passing(outgoing, qos, True, own):
            return
        # The store counts the queue entries of a message, so this delivery gets its own.
        copy = Message(
            message.topic,
            message.payload,
            message.qos,
            True,
            message.properties,
            message.publisher,
            message.timestamp,
            message.expires_at,
        )
        entry = self.session.offer(copy, qos, True, own, None)
        if entry is not None:
            connection.send_delivery(entry, outgoing, False)
