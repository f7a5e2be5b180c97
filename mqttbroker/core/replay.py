"""Replays: the retained messages that new subscriptions bring, sent while everybody else is served.

The rule kept here: a client is owed each of them once and gets them as fast as it takes
them; a SUBSCRIBE brings a little at once, and what all replays that go on take of a turn of
the loop is little while anybody else is heard.
"""

from __future__ import annotations

from typing import Dict, Final, List, Optional

from mqttbroker.codec.properties import encode_varint
from mqttbroker.core.connection import Connection
from mqttbroker.core.outgoing import NO_BYTES, Outgoing
from mqttbroker.core.policy import Rules
from sessions.counters import Counters
from sessions.message import Message
from sessions.retained import Retained, RetainedScan
from sessions.session import Session, Subscription

# What replays take of a turn of the loop, in retained topics visited and KiB sent: little while a client was heard in
# one of the last turns, else so much that the turn itself hardly counts.
LITTLE: Final = 100
MUCH: Final = 800
LAST_TURNS: Final = 64

# Messages that wait in a session's queue, from which on a replay waits, too.
MAX_QUEUED: Final = 200


class Replays:
    """All that are under way in one broker."""

    def __init__(self, retained: Retained, rules: Rules, counters: Counters) -> None:
        self.retained = retained
        self.rules = rules
        self.counters = counters
        self._active: Dict[Connection, Replay] = {}
        self._heard = 0  # packets that had come when the last turn began
        self._silent = 0  # turns since then in which none came

    def begin(self, connection: Connection) -> None:
        """Send a little of what the session of a connection still has to see, and have `step` send the rest."""
        session = connection.session
        if session is None or not session.pending_retained or connection in self._active:
            return
        replay = Replay(self.retained, self.rules, connection, session)
        if replay.ready:
            replay.step(LITTLE)
        if not replay.done:
            self._active[connection] = replay
            connection.touch()

    def step(self) -> bool:
        """Go on with those whose client takes more, one after the other; true if there is more to do at once."""
        if not self._active:
            return False
        heard: int = self.counters.messages_received
        self._silent = self._silent + 1 if heard == self._heard else 0
        self._heard = heard
        most: int = MUCH if self._silent > LAST_TURNS else LITTLE
        room: int = most
        for connection in list(self._active):
            replay = self._active[connection]
            if replay.ready:
                used = replay.step(room)
                room -= used
                if used:  # the others come first in the next turn
                    del self._active[connection]
                    self._active[connection] = replay
            if replay.done:
                del self._active[connection]
            if room <= 0:
                break
        return room < most


class Replay:
    """The retained messages that some subscriptions of one session still have to see
    (section 3.3.1.3), sent as fast as the client takes them.

    A subscription leaves ``session.pending_retained`` when all its messages were sent; a client that
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
        return not self.session.pending_retained or self.session.connection is not self.connection

    @property
    def ready(self) -> bool:
        """Whether the client keeps up with what it was sent."""
        connection = self.connection
        session = self.session
        return (
            connection.ready
            and not connection.congested
            and len(session.queue) < MAX_QUEUED
            and session.stored_seq == 0
            and not session.paging
            and (session.id != 0 or session.packet_ids_in_use < self._share)
        )

    @property
    def _share(self) -> int:
        """How much a session that keeps nothing may have under way: the rest of its window is for what is live."""
        session = self.session
        most: int = min(session.pass_maximum, session.context.limits.max_queued_messages)
        return max(session.send_maximum, most // 2)

    def step(self, room: int) -> int:
        """Send a piece; gives how much of ``room`` it took, 0 if there was nothing to do."""
        session = self.session
        if self.done:
            return 0
        subscription = session.pending_retained[0]
        if subscription.topic_filter not in session.subscriptions:  # not any more
            session.pending_retained.popleft()
            return 1
        scan = self._scan
        if scan is None or subscription is not self._current:
            self._current = subscription
            self._held.clear()
            scan = self.retained.scan(subscription.topic_filter)
            self._scan = scan
        visited: int = 0
        fresh: bool = not self._held
        if fresh:
            self._held = scan.take(room, self.connection.outbound.clock.now)
            self._held.reverse()
            visited = max(1, scan.visited)
        sent = self._send(subscription, room, fresh)
        if scan.done and not self._held:
            session.pending_retained.popleft()
            self._scan = None
        return max(visited, sent)

    def _send(self, subscription: Subscription, room: int, fresh: bool) -> int:
        """Send of what is held as much as the client takes and ``room`` allows; gives what that took of it.

        What is not ``fresh`` may have been replaced or have expired since it was found; what replaced it came live.
        """
        held = self._held
        session = self.session
        connection = self.connection
        restrictive: bool = self.rules.restrictive
        granted: int = subscription.qos
        own: bytes = NO_BYTES
        if subscription.identifier:
            own = b"\x0b" + encode_varint(subscription.identifier)
        ready: bool = self.ready
        used: int = 0
        while held and ready and used < room:
            message = held[-1]
            if session.queued_messages and not session.takes(message.size, session.open):
                break
            held.pop()
            used += 1 + (message.size >> 10)
            if not fresh and not self.retained.holds(message, connection.outbound.clock.now):
                continue
            if restrictive and not self.rules.may_read(session, message.topic):
                continue
            if granted == 0 or message.qos == 0:
                connection.send_retained(message, own)
                ready = connection.ready
            else:
                self._offer(message, message.qos if message.qos < granted else granted, own)
                ready = self.ready
        return used

    def _offer(self, message: Message, qos: int, own: bytes) -> None:
        """Send a message at QoS 1 or 2, or have the session keep it until it can be sent."""
        connection = self.connection
        outgoing = Outgoing(message.topic.encode("utf-8"), message, connection.outbound.clock.now)
        if connection.send_unpersisted(outgoing, qos, True, own):
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
